// SPDX-License-Identifier: Apache-2.0

// Package watch takes the CNI plugin's events in: it serves the plugin's socket, hands each request
// to a [Handler] with a deadline, and sends the handler's reply. It owns connections, deadlines,
// concurrency and the one log line per event. It refuses to decide anything about pods, and to
// check who connects: the listener it is given does that.
package watch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"ambientd/cni-plugin/podevent"
)

// ErrHangUp is the [context.Cause] of a handler's context when the plugin closed its side before it
// had its reply: the runtime has given the operation up, and what was begun is to be undone.
var ErrHangUp = errors.New("the plugin hung up")

// ErrStopping is the [context.Cause] of a handler's context when the agent stops and the handler
// has used up [Config.StopTimeout].
var ErrStopping = errors.New("the agent is stopping")

// Handler does what a request asks for.
type Handler interface {
	// Handle is called concurrently. It returns soon after ctx has ended. netns is the pod's network
	// namespace, or nil; it is closed when Handle has returned, so that whoever needs it longer
	// duplicates it.
	Handle(ctx context.Context, req podevent.Request, netns *os.File) podevent.Reply
}

// Server serves the plugin's socket.
type Server struct {
	config Config
	// withdrawals and others are semaphores: a send takes a place. See Config.MaxConcurrent.
	withdrawals, others chan struct{}
	// connections is a semaphore too.
	connections chan struct{}
}

// New returns a server for the configuration, or says what is wrong with that.
func New(config Config) (*Server, error) {
	config, err := config.withDefaults()
	if err != nil {
		return nil, err
	}
	return &Server{
		config:      config,
		withdrawals: make(chan struct{}, config.MaxConcurrent),
		others:      make(chan struct{}, config.MaxConcurrent),
		connections: make(chan struct{}, config.MaxConnections),
	}, nil
}

// Run serves until ctx ends, and then returns nil when the handlers have. Requests that had been
// read by then are finished, within [Config.StopTimeout]; connections that had not sent any are
// closed, which the plugin takes as "try again". An error is one that makes serving impossible.
func (s *Server) Run(ctx context.Context) error {
	// Handlers outlive ctx by up to StopTimeout.
	work, endWork := context.WithCancelCause(context.WithoutCancel(ctx))
	defer endWork(nil)
	closeListener := func() { _ = s.config.Listener.Close() } // closed already is fine
	defer closeListener()
	defer context.AfterFunc(ctx, closeListener)()

	var handlers sync.WaitGroup
	err := s.accept(ctx, func(conn *net.UnixConn) {
		handlers.Go(func() { s.serve(ctx, work, conn) })
	})
	if ctx.Err() != nil {
		err = nil // closing the listener is what ended accept
	}
	done := make(chan struct{})
	go func() {
		handlers.Wait()
		close(done)
	}()
	return errors.Join(err, s.drain(done, func() { endWork(ErrStopping) }))
}

// drain waits for the handlers, first without and then with their contexts ended.
func (s *Server) drain(done <-chan struct{}, endWork func()) error {
	if waitFor(done, s.config.StopTimeout) {
		return nil
	}
	endWork()
	if waitFor(done, s.config.StopTimeout) {
		return nil
	}
	return errors.New("stopping: handlers of CNI events have not returned although their contexts ended")
}

func waitFor(done <-chan struct{}, timeout time.Duration) bool {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-done:
		return true
	case <-timer.C:
		return false
	}
}

// acceptRetry is how long accept rests when the process or the machine is out of something that
// ending connections give back.
const acceptRetry = 50 * time.Millisecond

// accept hands over connections, with a place in s.connections taken for each, until it fails or
// ctx ends.
func (s *Server) accept(ctx context.Context, serve func(*net.UnixConn)) error {
	for {
		select {
		case s.connections <- struct{}{}:
		case <-ctx.Done():
			return nil
		}
		conn, err := s.config.Listener.Accept()
		if err != nil {
			<-s.connections
			if !outOfResources(err) {
				return fmt.Errorf("accepting the plugin's connections: %w", err)
			}
			s.config.Logger.Warn("cannot accept connections for the moment", "err", err)
			if waitFor(ctx.Done(), acceptRetry) {
				return nil
			}
			continue
		}
		unixConn, ok := conn.(*net.UnixConn)
		if !ok {
			<-s.connections
			return errors.Join(fmt.Errorf("the listener accepts %T, not *net.UnixConn", conn), conn.Close())
		}
		serve(unixConn)
	}
}

func outOfResources(err error) bool {
	for _, errno := range []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

// serve takes one connection from its request to its reply. It is where all of its errors end.
func (s *Server) serve(stop, work context.Context, conn *net.UnixConn) {
	defer func() { <-s.connections }()
	defer conn.Close()

	req, netns, err := s.read(stop, conn)
	if err != nil {
		s.refuse(stop, conn, err)
		return
	}
	if netns != nil {
		defer netns.Close()
	}
	var o outcome
	start := time.Now()
	o.reply, o.hungUp = s.handle(work, conn, req, netns)
	o.replyErr = s.reply(conn, o.reply)
	if errors.Is(o.replyErr, syscall.EPIPE) || errors.Is(o.replyErr, syscall.ECONNRESET) {
		o.hungUp, o.replyErr = true, nil // between the end of the watch and the reply
	}
	o.took = time.Since(start)
	s.log(work, req, o)
}

// outcome is what became of a request.
type outcome struct {
	reply    podevent.Reply
	replyErr error // of sending it, to a plugin that is still there
	hungUp   bool  // the plugin did not wait for it
	took     time.Duration
}

// read waits for the request, but not beyond the agent's stop.
func (s *Server) read(stop context.Context, conn *net.UnixConn) (podevent.Request, *os.File, error) {
	if err := conn.SetReadDeadline(time.Now().Add(s.config.ReadTimeout)); err != nil {
		return podevent.Request{}, nil, fmt.Errorf("setting the read deadline: %w", err)
	}
	undo := context.AfterFunc(stop, func() { _ = conn.SetReadDeadline(longAgo()) })
	req, netns, err := podevent.ReadRequest(conn)
	if !undo() && err == nil {
		// The request came just when the agent stopped: it counts as not read.
		if netns != nil {
			err = netns.Close()
		}
		return podevent.Request{}, nil, errors.Join(os.ErrDeadlineExceeded, err)
	}
	return req, netns, err
}

// longAgo is a deadline that wakes reads under way at once.
func longAgo() time.Time { return time.Unix(1, 0) }

// refuse ends a connection without a usable request; with a word to those who would understand.
func (s *Server) refuse(stop context.Context, conn *net.UnixConn, err error) {
	var versionErr *podevent.VersionError
	var refusal podevent.Error
	switch {
	case errors.As(err, &versionErr):
		refusal = podevent.Error{
			Code: podevent.CodeTryAgain,
			Msg: fmt.Sprintf("the plugin speaks message version %d, the agent version %d",
				versionErr.Got, versionErr.Want),
			Details: "while ambientd is being upgraded this passes by itself; otherwise install the plugin that belongs to the running agent",
		}
	case errors.Is(err, podevent.ErrOutOfDescriptors):
		refusal = podevent.Error{
			Code:    podevent.CodeTryAgain,
			Msg:     fmt.Sprintf("the agent: %v", err),
			Details: "the runtime tries again; if it lasts, raise the limit of open files of ambientd (RLIMIT_NOFILE)",
		}
	case errors.Is(err, podevent.ErrMalformed):
		refusal = podevent.Error{
			Code:    podevent.CodeInternal,
			Msg:     fmt.Sprintf("the agent cannot understand the request: %v", err),
			Details: "the program that connects is not the plugin that belongs to the agent; install that",
		}
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET), stop.Err() != nil:
		// A probe whether anybody listens, a plugin that was killed, or our own stop.
		s.config.Logger.Debug("connection without a request", "err", err)
		return
	default:
		s.config.Logger.Warn("connection dropped", "err", err)
		return
	}
	replyErr := s.reply(conn, podevent.Reply{Error: &refusal})
	s.config.Logger.Warn("request refused", "err", errors.Join(err, replyErr))
}

// handle runs the handler when its turn has come. It tells whether the plugin hung up meanwhile.
func (s *Server) handle(work context.Context, conn *net.UnixConn, req podevent.Request, netns *os.File) (podevent.Reply, bool) {
	ctx, end := context.WithCancelCause(work)
	defer end(nil)
	ctx, endTimer := context.WithTimeout(ctx, s.config.timeout(req.Command))
	defer endTimer()

	onHangUp := end
	places := s.others
	if req.Command == podevent.CommandDel {
		// A withdrawal is final once it is said: the plugin stops waiting after 900 ms and exits 0 all
		// the same, and nobody would say it again.
		onHangUp = func(error) {}
		places = s.withdrawals
	}
	stopWatching := watchHangUp(conn, onHangUp)
	reply := s.inTurn(ctx, places, req, netns)
	return reply, stopWatching()
}

// inTurn waits for a place, within ctx, and calls the handler.
func (s *Server) inTurn(ctx context.Context, places chan struct{}, req podevent.Request, netns *os.File) podevent.Reply {
	if take(ctx, places) {
		defer func() { <-places }()
		return s.config.Handler.Handle(ctx, req, netns)
	}
	return podevent.Reply{Error: &podevent.Error{
		Code: podevent.CodeTryAgain,
		Msg: fmt.Sprintf("%s of pod %s had to wait behind %d others and was given up: %v",
			req.Command, req.Pod, cap(places), context.Cause(ctx)),
		Details: "the runtime tries again; if it lasts, 'ambientd status' shows what the others wait for",
	}}
}

// take gets a place, or tells that none came free before the end of ctx. A place that is free is
// taken even after that: the handler knows best what the end of its context means.
func take(ctx context.Context, places chan struct{}) bool {
	select {
	case places <- struct{}{}:
		return true
	default:
	}
	select {
	case places <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

// watchHangUp calls onHangUp when the peer closes its side, or breaks the protocol by sending more.
// The function returned ends the watch and tells whether that was seen.
func watchHangUp(conn *net.UnixConn, onHangUp func(error)) (stop func() bool) {
	seen := make(chan bool, 1)
	// Clears the deadline that reading the request had; a failure shows in Read as well.
	_ = conn.SetReadDeadline(time.Time{})
	go func() {
		_, err := conn.Read(make([]byte, 1))
		hungUp := !errors.Is(err, os.ErrDeadlineExceeded)
		if hungUp {
			onHangUp(ErrHangUp)
		}
		seen <- hungUp
	}()
	return func() bool {
		_ = conn.SetReadDeadline(longAgo())
		return <-seen
	}
}

func (s *Server) reply(conn *net.UnixConn, reply podevent.Reply) error {
	if err := conn.SetWriteDeadline(time.Now().Add(s.config.WriteTimeout)); err != nil {
		return fmt.Errorf("setting the write deadline: %w", err)
	}
	return podevent.WriteReply(conn, reply)
}

// log writes the one line per event: at info what changed a pod, at debug what only asked, at warn
// what went wrong.
func (s *Server) log(ctx context.Context, req podevent.Request, o outcome) {
	level := slog.LevelDebug
	attrs := []slog.Attr{slog.String("command", req.Command), slog.String("network", req.Network)}
	addText := func(key, value string) {
		if value != "" { // what is not known is left out
			attrs = append(attrs, slog.String(key, value))
		}
	}
	addText("container", req.ContainerID)
	addText("pod", req.Pod.String())
	addText("uid", req.Pod.UID)
	switch req.Command {
	case podevent.CommandAdd, podevent.CommandDel, podevent.CommandGC:
		level = slog.LevelInfo
	}
	if o.reply.Reason == podevent.ReasonUnrecorded {
		level = slog.LevelDebug // a repeated DEL
	}
	if o.reply.Error != nil {
		level = slog.LevelWarn
		attrs = append(attrs, slog.Uint64("code", uint64(o.reply.Error.Code)), slog.String("err", o.reply.Error.Error()))
	} else {
		addText("result", o.reply.Result)
		addText("reason", o.reply.Reason)
	}
	if o.hungUp {
		attrs = append(attrs, slog.Bool("hung_up", true))
	}
	if o.replyErr != nil {
		level = slog.LevelWarn
		attrs = append(attrs, slog.String("reply_err", o.replyErr.Error()))
	}
	attrs = append(attrs, slog.Duration("took", o.took.Round(time.Microsecond)))
	s.config.Logger.LogAttrs(ctx, level, "cni event", attrs...)
}

// SPDX-License-Identifier: Apache-2.0

// Package zds hands the network namespaces of pods to the node proxy, over the
// ZDS protocol that ztunnel speaks: the agent listens on a SOCK_SEQPACKET
// socket, each proxy connects, gets a snapshot of every pod, and from then on
// adds and dels. Some of them, the window, are sent before they are answered.
//
// It owns the set of pods that node proxies are meant to have, and what each
// connected proxy has said about them. It refuses to decide which pods those
// are, to look into a namespace, and to judge who may connect: the listener
// that it is given has done that.
//
// How it stays truthful:
//
//   - An answer belongs to the oldest message of the window by order alone:
//     ztunnel reads a message only once it has answered the one before. After
//     an answer that did not come in time the stream is closed; the proxy comes
//     back and gets a fresh snapshot. A late answer is thus never taken for
//     another's, and one that belongs to nothing ends the stream as well.
//   - A message's time runs from when it became the oldest of the window. Were
//     it to run from the send, a proxy could be cut off that takes each pod in
//     time, for having been sent many.
//   - A pod that the proxy refuses leaves the set and is taken back with a del,
//     since the proxy keeps the descriptor and tries again by itself otherwise,
//     whatever else was sent by then.
//   - A pod whose add ends one stream after the other leaves the set as well.
//     That is the oldest of the window, once all answers that came have been
//     taken in. The others have no part in it: the next snapshot has them.
//   - A del goes out only after the snapshot's end was answered: ztunnel's
//     workload manager ends on one before that.
//   - Every stream has a queue, and a goroutine that sends and one that takes in
//     the answers, of its own, and no lock is held across I/O: a slow proxy
//     delays nobody but those who wait for it.
//
// While several proxies are connected, as during an upgrade of ztunnel, each
// has had its own snapshot, adds go to the newest one, dels to all. If the
// newest one goes, the one before it is told what it has missed.
package zds

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// DefaultAckTimeout is Config.AckTimeout's default. ztunnel opens a pod's
	// listeners within milliseconds; it has to stay below the time that an ADD
	// waits for the proxy, so that a second stream still has a chance.
	DefaultAckTimeout = 5 * time.Second

	// maxStreams bounds the connections. An upgrade needs two at a time.
	maxStreams = 16

	// maxStrikes is how many streams in a row may end while a pod's add waits
	// for its answer, before that pod is taken out of the set.
	maxStrikes = 3

	// acceptRetry is how long Run rests when the process or the machine is out of
	// something that connections, or pods, give back when they end.
	acceptRetry = 50 * time.Millisecond
)

// Config says how a Server works.
type Config struct {
	// Listener accepts the proxies; its connections must be *net.UnixConn of
	// type SOCK_SEQPACKET. Required. Run closes it.
	Listener net.Listener
	// AckTimeout is how long a proxy may take for its hello, and to accept and
	// answer one message. Zero means DefaultAckTimeout.
	AckTimeout time.Duration
	// Logger gets the streams' life and the pods that a proxy refused without
	// anybody waiting for its answer. Nil discards.
	Logger *slog.Logger
}

// Workload is what a node proxy is told about a pod. No field may be empty.
type Workload struct {
	UID            string
	Name           string
	Namespace      string
	ServiceAccount string
}

// Peer is a connected node proxy.
type Peer struct {
	// Since is when its hello was read.
	Since time.Time
	// Ready is set once it has answered the end of its snapshot.
	Ready bool
}

// Server keeps the set of pods and serves it to node proxies. Its methods may
// be called by any number of goroutines, before and while Run runs.
type Server struct {
	listener   net.Listener
	ackTimeout time.Duration
	log        *slog.Logger

	mu      sync.Mutex
	pods    map[string]*pod // the intended set, by UID
	lastSeq uint64          // of the pod added last
	streams []*stream       // those past their hello, the newest last
	open    int             // connections, those without a hello included
	stopped bool
	changed chan struct{} // closed at the next change; nil while nobody asks
}

// New returns a Server with an empty set. It serves nobody before Run.
func New(cfg Config) (*Server, error) {
	if cfg.Listener == nil {
		return nil, errors.New("zds: no listener given")
	}
	if cfg.AckTimeout < 0 {
		return nil, fmt.Errorf("zds: ack timeout %v is negative", cfg.AckTimeout)
	}
	if cfg.AckTimeout == 0 {
		cfg.AckTimeout = DefaultAckTimeout
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return &Server{
		listener:   cfg.Listener,
		ackTimeout: cfg.AckTimeout,
		log:        cfg.Logger,
		pods:       make(map[string]*pod),
	}, nil
}

// Run serves node proxies until ctx ends, and then returns nil; any other
// return is an error of the listener. When it returns, all streams are closed,
// no descriptor is held any more, and every Add fails with ErrStopped.
func (s *Server) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var streams sync.WaitGroup
	defer s.stop()
	defer streams.Wait()
	defer cancel()
	defer closeWith(ctx, s.listener)()

	for {
		conn, err := s.listener.Accept()
		switch {
		case err == nil:
			streams.Go(func() { s.serve(ctx, conn) })
		case ctx.Err() != nil:
			return nil
		case outOfResources(err):
			s.log.Warn("cannot accept node proxies for the moment", "err", err)
			rest(ctx, acceptRetry)
		default:
			return errors.Join(fmt.Errorf("accepting a node proxy: %w", err), s.listener.Close())
		}
	}
}

// outOfResources tells errors of accept(2) that pass from those that last: the
// proxy's connection stays in the kernel's queue meanwhile.
func outOfResources(err error) bool {
	return slices.ContainsFunc([]error{unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM},
		func(errno error) bool { return errors.Is(err, errno) })
}

// rest returns after d, or when ctx ends.
func rest(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// serve runs one connection to its end, and is where its fate is logged.
func (s *Server) serve(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	unixConn, ok := conn.(*net.UnixConn)
	if !ok {
		s.log.Error("connection refused", "err", fmt.Sprintf("the listener accepts %T, not *net.UnixConn", conn))
		return
	}
	if !s.reserve() {
		s.log.Warn("node proxy refused", "err", fmt.Sprintf("%d are connected already", maxStreams))
		return
	}
	defer s.release()
	defer closeWith(ctx, conn)()

	if err := readHello(unixConn, s.ackTimeout); err != nil {
		s.log.Warn("node proxy refused", "err", err)
		return
	}
	st, pods := s.join(unixConn, time.Now())
	s.log.Info("node proxy connected", "snapshot", pods)
	err := s.drive(st)
	s.leave(st)
	if ctx.Err() != nil {
		s.log.Info("node proxy disconnected", "reason", "the agent stops")
		return
	}
	s.log.Warn("node proxy disconnected", "err", err)
}

// closeWith closes c when ctx ends. The function that it returns is to be called
// before c's owner returns: afterwards c is not being closed any more.
func closeWith(ctx context.Context, c io.Closer) (wait func()) {
	closed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(closed)
		c.Close()
	})
	return func() {
		if !stop() {
			<-closed
		}
	}
}

func (s *Server) reserve() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open == maxStreams {
		return false
	}
	s.open++
	return true
}

func (s *Server) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open--
}

// stop empties the set and ends everybody's wait.
func (s *Server) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = true
	for _, p := range s.pods {
		s.remove(p, ErrStopped)
	}
}

// Peers returns the connected proxies, the newest first.
func (s *Server) Peers() []Peer {
	s.mu.Lock()
	defer s.mu.Unlock()
	peers := make([]Peer, 0, len(s.streams))
	for i := len(s.streams) - 1; i >= 0; i-- {
		peers = append(peers, Peer{Since: s.streams[i].since, Ready: s.streams[i].ready})
	}
	return peers
}

// Changed returns a channel that is closed at the next change of what Peers or
// Acked report. Ask for it before looking at them.
func (s *Server) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.changed == nil {
		s.changed = make(chan struct{})
	}
	return s.changed
}

// notify closes what Changed returned. The caller holds s.mu.
func (s *Server) notify() {
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"ambientd/cni-plugin/podevent"
)

// gate is a handler that reports each call and lets it go on only when told.
type gate struct {
	entered chan string // the command of each call that began
	open    chan struct{}

	mu           sync.Mutex
	running, top map[string]int
}

func newGate() *gate {
	return &gate{entered: make(chan string, 100), open: make(chan struct{}), running: map[string]int{}, top: map[string]int{}}
}

func (g *gate) Handle(_ context.Context, req podevent.Request, _ *os.File) podevent.Reply {
	g.count(req.Command, 1)
	defer g.count(req.Command, -1)
	g.entered <- req.Command
	<-g.open
	return podevent.Reply{Result: podevent.ResultOK}
}

func (g *gate) count(command string, by int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.running[command] += by
	g.top[command] = max(g.top[command], g.running[command])
}

// TestConcurrency: no more handlers at once than allowed, the rest waits and gets its turn.
func TestConcurrency(t *testing.T) {
	const limit, calls = 3, 12
	g := newGate()
	r := start(t, Config{Handler: g, MaxConcurrent: limit})
	var wg sync.WaitGroup
	for range calls {
		wg.Go(func() { r.call(t, podevent.CommandAdd) })
	}
	for range limit {
		<-g.entered
	}
	close(g.open)
	wg.Wait()
	if g.top[podevent.CommandAdd] > limit {
		t.Errorf("%d ran at once, at most %d may", g.top[podevent.CommandAdd], limit)
	}
}

// TestPlacesForAWholeNode: as many pods as a node can have may wait for something, and the next one,
// which may have nothing to wait for, is not kept waiting by them.
func TestPlacesForAWholeNode(t *testing.T) {
	const pods = 500
	g := newGate()
	g.entered = make(chan string, pods+1)
	r := start(t, Config{Handler: g, AddTimeout: 5 * time.Second})
	var wg sync.WaitGroup
	defer wg.Wait()
	defer close(g.open)
	for range pods + 1 {
		wg.Go(func() { r.call(t, podevent.CommandAdd) })
	}
	deadline := time.After(10 * time.Second)
	for i := range pods + 1 {
		select {
		case <-g.entered:
		case <-deadline:
			t.Fatalf("only %d of %d are at work", i, pods+1)
		}
	}
}

// TestDelPassesAdds: ADDs that wait for something hold up no withdrawal.
func TestDelPassesAdds(t *testing.T) {
	g := newGate()
	r := start(t, Config{Handler: g, MaxConcurrent: 1})
	var wg sync.WaitGroup
	wg.Go(func() { r.call(t, podevent.CommandAdd) })
	if got := <-g.entered; got != podevent.CommandAdd {
		t.Fatal(got)
	}
	wg.Go(func() { r.call(t, podevent.CommandDel) })
	if got := <-g.entered; got != podevent.CommandDel {
		t.Errorf("%s came first", got)
	}
	close(g.open)
	wg.Wait()
}

// TestTurnNeverComes: waiting is bounded by the request's own deadline.
func TestTurnNeverComes(t *testing.T) {
	g := newGate()
	r := start(t, Config{Handler: g, MaxConcurrent: 1, StatusTimeout: 20 * time.Millisecond})
	var wg sync.WaitGroup
	wg.Go(func() { r.call(t, podevent.CommandAdd) })
	<-g.entered
	reply := r.call(t, podevent.CommandStatus)
	if reply.Error == nil || reply.Error.Code != podevent.CodeTryAgain || !strings.Contains(reply.Error.Msg, "had to wait behind 1 others") {
		t.Errorf("reply: %+v", reply)
	}
	close(g.open)
	wg.Wait()
}

// TestConnections: connections above the limit wait in the kernel, and are served afterwards.
func TestConnections(t *testing.T) {
	r := start(t, Config{
		MaxConnections: 1, ReadTimeout: time.Hour,
		Handler: handlerFunc(func(context.Context, podevent.Request, *os.File) podevent.Reply {
			return podevent.Reply{Result: podevent.ResultOK}
		}),
	})
	idle := r.dial(t)
	called := make(chan error, 1)
	go func() {
		_, err := r.tryCall(t.Context(), podevent.CommandStatus)
		called <- err
	}()
	if err := idle.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-called; err != nil {
		t.Error(err)
	}
}

// TestStop: what had been asked is finished and answered; who had not asked is sent away.
func TestStop(t *testing.T) {
	g := newGate()
	listener, socket := newFaulty(t)
	r := start(t, Config{Listener: listener, Handler: g, ReadTimeout: time.Hour})
	r.socket = socket
	// The other one's answer shows that both connections have been accepted: accepting is in order.
	idle := r.dial(t)
	called := make(chan error, 1)
	go func() {
		_, err := r.tryCall(t.Context(), podevent.CommandAdd)
		called <- err
	}()
	<-g.entered
	r.stop()
	if n, err := idle.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("the idle connection: %d bytes, %v", n, err)
	}
	<-listener.closed
	if _, err := net.Dial("unix", r.socket); !errors.Is(err, syscall.ENOENT) && !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a new connection: %v", err)
	}
	select {
	case err := <-r.done:
		t.Errorf("Run returned before its handler had: %v", err)
	default:
	}
	close(g.open)
	if err := <-called; err != nil {
		t.Errorf("the call under way: %v", err)
	}
	if err := <-r.done; err != nil {
		t.Error(err)
	}
}

// TestStopIsBounded: handlers that take too long are ended, and those that cannot be are reported.
func TestStopIsBounded(t *testing.T) {
	t.Run("ended", func(t *testing.T) {
		started, ended := make(chan struct{}), make(chan error, 1)
		r := start(t, Config{
			StopTimeout: 20 * time.Millisecond,
			Handler: handlerFunc(func(ctx context.Context, _ podevent.Request, _ *os.File) podevent.Reply {
				close(started)
				<-ctx.Done()
				ended <- context.Cause(ctx)
				return podevent.Reply{Error: &podevent.Error{Code: podevent.CodeTryAgain, Msg: "stopping"}}
			}),
		})
		called := make(chan podevent.Reply, 1)
		go func() { called <- r.call(t, podevent.CommandAdd) }()
		<-started
		r.stop()
		if err := <-ended; !errors.Is(err, ErrStopping) {
			t.Errorf("the handler's context: %v", err)
		}
		if reply := <-called; reply.Error == nil || reply.Error.Msg != "stopping" {
			t.Errorf("reply: %+v", reply)
		}
	})
	t.Run("stuck", func(t *testing.T) {
		g := newGate()
		r := start(t, Config{StopTimeout: 10 * time.Millisecond, Handler: g})
		called := make(chan error, 1)
		go func() {
			_, err := r.tryCall(t.Context(), podevent.CommandAdd)
			called <- err
		}()
		<-g.entered
		r.stop()
		if err := <-r.done; err == nil || !strings.Contains(err.Error(), "have not returned") {
			t.Errorf("Run: %v", err)
		}
		close(g.open)
		if err := <-called; err != nil {
			t.Error(err)
		}
	})
}

// faultyListener fails some times before it accepts, and tells when it is closed.
type faultyListener struct {
	net.Listener
	errs    chan error
	closed  chan struct{}
	closing sync.Once
}

func (l *faultyListener) Close() error {
	err := l.Listener.Close()
	l.closing.Do(func() { close(l.closed) })
	return err
}

func (l *faultyListener) Accept() (net.Conn, error) {
	select {
	case err := <-l.errs:
		return nil, err
	default:
		return l.Listener.Accept()
	}
}

func newFaulty(t *testing.T, errs ...error) (*faultyListener, string) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "cni.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	faulty := &faultyListener{Listener: listener, errs: make(chan error, len(errs)), closed: make(chan struct{})}
	for _, err := range errs {
		faulty.errs <- err
	}
	return faulty, socket
}

// TestOutOfDescriptors: that passes, and the server goes on.
func TestOutOfDescriptors(t *testing.T) {
	emfile := &net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", syscall.EMFILE)}
	listener, socket := newFaulty(t, emfile, emfile)
	r := start(t, Config{Listener: listener, Handler: handlerFunc(func(context.Context, podevent.Request, *os.File) podevent.Reply {
		return podevent.Reply{Result: podevent.ResultOK}
	})})
	r.socket = socket
	r.call(t, podevent.CommandStatus)
	if lines := r.log.lines(t); len(lines) < 2 || lines[0]["level"] != "WARN" {
		t.Errorf("log: %v", lines)
	}
}

// TestOutOfDescriptorsForTheNetns: that passes too, and the plugin is told so.
func TestOutOfDescriptorsForTheNetns(t *testing.T) {
	listener, socket := newFaulty(t)
	t.Cleanup(func() { _ = listener.Close() })
	server, err := New(Config{Listener: listener, Handler: nobody(t), Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	ours, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	server.refuse(t.Context(), ours.(*net.UnixConn), podevent.ErrOutOfDescriptors)
	if err := ours.Close(); err != nil {
		t.Fatal(err)
	}
	if reply := readReply(t, theirs); reply.Error == nil || reply.Error.Code != podevent.CodeTryAgain {
		t.Errorf("reply: %+v, want the code to try again", reply)
	}
}

// TestBrokenListener: Run fails visibly when it cannot serve any more.
func TestBrokenListener(t *testing.T) {
	for _, c := range []struct {
		name string
		open func(*testing.T) net.Listener
		want string
	}{
		{"broken", func(t *testing.T) net.Listener {
			t.Helper()
			listener, _ := newFaulty(t, syscall.EINVAL)
			return listener
		}, "invalid argument"},
		{"of another kind", func(t *testing.T) net.Listener {
			t.Helper()
			server, client := net.Pipe()
			t.Cleanup(func() { _ = client.Close() })
			return pipeListener{server}
		}, "not *net.UnixConn"},
	} {
		t.Run(c.name, func(t *testing.T) {
			server, err := New(Config{Listener: c.open(t), Handler: nobody(t), Logger: slog.New(slog.DiscardHandler)})
			if err != nil {
				t.Fatal(err)
			}
			if err := server.Run(t.Context()); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("Run: %v, want an error with %q", err, c.want)
			}
		})
	}
}

// pipeListener accepts one connection that is no unix socket's.
type pipeListener struct{ conn net.Conn }

func (l pipeListener) Accept() (net.Conn, error) { return l.conn, nil }
func (l pipeListener) Close() error              { return nil }
func (l pipeListener) Addr() net.Addr            { return l.conn.LocalAddr() }

func TestConfig(t *testing.T) {
	listener, _ := newFaulty(t)
	defer listener.Close()
	good := Config{Listener: listener, Handler: nobody(t), Logger: slog.New(slog.DiscardHandler)}
	for _, c := range []struct {
		name   string
		change func(*Config)
		want   string
	}{
		{"good", func(*Config) {}, ""},
		{"no listener", func(c *Config) { c.Listener = nil }, "are needed"},
		{"no handler", func(c *Config) { c.Handler = nil }, "are needed"},
		{"no logger", func(c *Config) { c.Logger = nil }, "are needed"},
		{"negative timeout", func(c *Config) { c.DelTimeout = -1 }, "DelTimeout is negative"},
		{"negative limit", func(c *Config) { c.MaxConnections = -1 }, "MaxConnections is negative"},
	} {
		config := good
		c.change(&config)
		server, err := New(config)
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s: %v", c.name, err)
		case c.want == "" && (server.config.AddTimeout != 15*time.Second || cap(server.others) != 512):
			t.Errorf("%s: defaults %+v", c.name, server.config)
		case c.want == "" && server.config.DelTimeout < server.config.AddTimeout+10*time.Second:
			t.Errorf("%s: a DEL gives up after %s, before an ADD of the same pod has ended", c.name, server.config.DelTimeout)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: error: %v, want one with %q", c.name, err, c.want)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package zds_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"ambientd/nodeagent/zds"
	"ambientd/nodeagent/zds/zdstest"
	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }

const (
	patient = time.Minute            // an ack timeout that no test lives to see
	hasty   = 400 * time.Millisecond // one that a test waits for, and a peer on a busy machine keeps
)

// server is a running zds.Server on a real socket.
type server struct {
	*zds.Server
	t      *testing.T
	ctx    context.Context // bounds every wait of the test
	socket string
	netns  *os.File // some netns, for pods whose netns does not matter
	stop   func()   // ends Run and waits for it
}

func start(t *testing.T, ackTimeout time.Duration) *server {
	t.Helper()
	return startOn(t, ackTimeout, func(l net.Listener) net.Listener { return l })
}

// startOn is start with a listener that the test has changed.
func startOn(t *testing.T, ackTimeout time.Duration, change func(net.Listener) net.Listener) *server {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	socket := filepath.Join(t.TempDir(), "zds.sock")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Net: "unixpacket", Name: socket})
	if err != nil {
		t.Fatal(err)
	}
	s, err := zds.New(zds.Config{Listener: change(l), AckTimeout: ackTimeout})
	if err != nil {
		t.Fatal(err)
	}
	runCtx, cancelRun := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(runCtx) }()
	stopped := false
	stop := func() {
		if stopped {
			return
		}
		stopped = true
		cancelRun()
		if err := <-done; err != nil {
			t.Errorf("Run = %v", err)
		}
	}
	t.Cleanup(stop)
	netns, err := os.Open("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { netns.Close() })
	return &server{Server: s, t: t, ctx: ctx, socket: socket, netns: netns, stop: stop}
}

func (s *server) peer(script zdstest.Script) *zdstest.Peer {
	s.t.Helper()
	p, err := zdstest.Dial(s.ctx, s.socket, script)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { p.Close() })
	return p
}

// readyPeer returns a peer whose snapshot is complete on both sides.
func (s *server) readyPeer(script zdstest.Script) *zdstest.Peer {
	s.t.Helper()
	before := time.Now()
	p := s.peer(script)
	s.await("the new peer is ready", func() bool {
		peers := s.Peers()
		return len(peers) > 0 && peers[0].Since.After(before) && peers[0].Ready
	})
	return p
}

// await returns once cond, which looks at the server, holds.
func (s *server) await(what string, cond func() bool) {
	s.t.Helper()
	for {
		changed := s.Changed()
		if cond() {
			return
		}
		select {
		case <-changed:
		case <-s.ctx.Done():
			s.t.Fatalf("waited in vain until: %s; peers: %+v", what, s.Peers())
		}
	}
}

func (s *server) gone(p *zdstest.Peer) {
	s.t.Helper()
	select {
	case <-p.Done():
	case <-s.ctx.Done():
		s.t.Fatal("the agent keeps the stream open")
	}
}

// must fails the test on an error of a peer's Await functions.
func (s *server) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

func pod(i int) zds.Workload {
	return zds.Workload{
		UID:            fmt.Sprintf("uid-%d", i),
		Name:           fmt.Sprintf("p%d", i),
		Namespace:      "shop",
		ServiceAccount: "web",
	}
}

// add adds a pod in the test's own netns, and fails the test if that fails.
func (s *server) add(ids ...int) {
	s.t.Helper()
	for _, i := range ids {
		if err := s.Add(s.ctx, pod(i), s.netns); err != nil {
			s.t.Fatal(err)
		}
	}
}

// adding starts an Add and returns its result to come.
func (s *server) adding(ctx context.Context, i int) <-chan error {
	result := make(chan error, 1)
	go func() { result <- s.Add(ctx, pod(i), s.netns) }()
	return result
}

func (s *server) result(c <-chan error) error {
	s.t.Helper()
	select {
	case err := <-c:
		return err
	case <-s.ctx.Done():
		s.t.Fatal("the call does not return")
		return nil
	}
}

// pending reports whether the call has not returned yet.
func pending(c <-chan error) bool { return len(c) == 0 }

// onAdd is a script that treats the add of one pod specially.
func onAdd(uid string, answer zdstest.Script) zdstest.Script {
	return func(ctx context.Context, e zdstest.Event) zdstest.Answer {
		if e.Kind == zdstest.Add && e.UID == uid {
			return answer(ctx, e)
		}
		return zdstest.Ack()
	}
}

func hangup(context.Context, zdstest.Event) zdstest.Answer  { return zdstest.Hangup() }
func silence(context.Context, zdstest.Event) zdstest.Answer { return zdstest.Silence() }

// after acks once release is closed.
func after(release <-chan struct{}) zdstest.Script {
	return func(ctx context.Context, _ zdstest.Event) zdstest.Answer {
		select {
		case <-release:
		case <-ctx.Done():
		}
		return zdstest.Ack()
	}
}

func kinds(events []zdstest.Event) []string {
	var out []string
	for _, e := range events {
		out = append(out, string(e.Kind)+" "+e.UID)
	}
	return out
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

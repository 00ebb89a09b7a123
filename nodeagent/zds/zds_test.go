// SPDX-License-Identifier: Apache-2.0

package zds_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"ambientd/nodeagent/zds"
	"ambientd/nodeagent/zds/packet"
	"ambientd/nodeagent/zds/zdstest"
	"ambientd/tools/netnstest"
)

func TestAddTellsTheProxyWhichPodAndWhichNetns(t *testing.T) {
	s := start(t, patient)
	peer := s.readyPeer(nil)
	a, b := netnstest.New(t), netnstest.New(t)
	for i, ns := range []*netnstest.NS{a, b} {
		if err := s.Add(s.ctx, pod(i), ns.File()); err != nil {
			t.Fatal(err)
		}
		want, err := zdstest.Cookie(ns.File())
		if err != nil {
			t.Fatal(err)
		}
		got, err := peer.AwaitPod(s.ctx, pod(i).UID)
		s.must(err)
		if w := pod(i); got.Name != w.Name || got.Namespace != w.Namespace || got.ServiceAccount != w.ServiceAccount {
			t.Errorf("the proxy was told %+v, want %+v", got, w)
		}
		if got.CookieErr != nil || got.Cookie != want {
			t.Errorf("the proxy got the netns with cookie %d (%v), want %d", got.Cookie, got.CookieErr, want)
		}
		if !s.Acked(pod(i).UID) {
			t.Error("Acked = false after Add returned nil")
		}
	}
}

func TestSnapshotThenAddsAndDels(t *testing.T) {
	s := start(t, patient)
	first := s.readyPeer(nil)
	s.add(1, 2)
	s.must(first.Close())
	s.await("the first peer is gone", func() bool { return len(s.Peers()) == 0 })
	if s.Acked(pod(1).UID) {
		t.Error("Acked = true without a proxy")
	}

	peer := s.readyPeer(nil)
	s.add(3)
	if err := s.Del(s.ctx, pod(1).UID); err != nil {
		t.Fatal(err)
	}
	want := []string{"add uid-1", "add uid-2", "snapshot_sent ", "add uid-3", "del uid-1"}
	if got := kinds(peer.State().Events); !slices.Equal(got, want) {
		t.Errorf("the proxy was told %q, want %q", got, want)
	}
	if s.Acked(pod(1).UID) || !s.Acked(pod(2).UID) {
		t.Error("Acked disagrees with what the proxy has")
	}
}

func TestTheSnapshotOutlivesTheCallersDescriptor(t *testing.T) {
	s := start(t, patient)
	peer := s.readyPeer(nil)
	ns := netnstest.New(t)
	want, err := zdstest.Cookie(ns.File())
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	ns.Do(t, func() error {
		f.Close()
		f, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	if err := s.Add(s.ctx, pod(1), f); err != nil {
		t.Fatal(err)
	}
	f.Close()
	peer.Close()
	again := s.peer(nil)
	got, err := again.AwaitPod(s.ctx, pod(1).UID)
	s.must(err)
	if got.Cookie != want {
		t.Errorf("the snapshot carries the netns with cookie %d (%v), want %d", got.Cookie, got.CookieErr, want)
	}
}

func TestNackedAddIsUndone(t *testing.T) {
	s := start(t, patient)
	peer := s.readyPeer(zdstest.NackUIDs("no listener for you", pod(3).UID))
	s.add(1)
	before := openFiles(t)
	err := s.Add(s.ctx, pod(3), s.netns)
	var nack *zds.NackError
	if !errors.As(err, &nack) || nack.UID != pod(3).UID || nack.Reason != "no listener for you" {
		t.Fatalf("Add = %v, want a NackError with the proxy's reason", err)
	}
	s.must(peer.AwaitDel(s.ctx, pod(3).UID))
	if s.Acked(pod(3).UID) {
		t.Error("Acked = true after a NACK")
	}
	if after := openFiles(t); after != before {
		t.Errorf("%d descriptors are held after a NACK", after-before)
	}
	s.add(4) // on the same connection
	if got := len(s.Peers()); got != 1 {
		t.Errorf("%d peers after a NACK, want 1", got)
	}
}

func TestAddWithoutAProxy(t *testing.T) {
	s := start(t, patient)
	ctx, cancel := context.WithTimeout(s.ctx, 10*time.Millisecond)
	defer cancel()
	err := s.Add(ctx, pod(1), s.netns)
	if !errors.Is(err, zds.ErrNoProxy) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Add = %v, want ErrNoProxy and the context's error", err)
	}
	if err := s.Del(s.ctx, pod(1).UID); err != nil {
		t.Errorf("Del without a proxy = %v, want nil", err)
	}
	peer := s.readyPeer(nil)
	if got := kinds(peer.State().Events); !slices.Equal(got, []string{"snapshot_sent "}) {
		t.Errorf("the proxy was told %q, want an empty snapshot", got)
	}
}

func TestAddWaitsForAProxy(t *testing.T) {
	s := start(t, patient)
	added := s.adding(s.ctx, 1)
	peer := s.peer(nil)
	if err := s.result(added); err != nil {
		t.Fatal(err)
	}
	_, err := peer.AwaitPod(s.ctx, pod(1).UID)
	s.must(err)
}

func TestAddSurvivesAReconnect(t *testing.T) {
	s := start(t, patient)
	bad := s.readyPeer(onAdd(pod(1).UID, hangup))
	added := s.adding(s.ctx, 1)
	s.gone(bad)
	s.await("the stream is gone", func() bool { return len(s.Peers()) == 0 })
	if !pending(added) {
		t.Fatalf("Add = %v while the proxy reconnects, want it to wait", <-added)
	}
	s.peer(nil)
	if err := s.result(added); err != nil {
		t.Errorf("Add = %v, want nil through the new stream's snapshot", err)
	}
}

func TestAddGivenUpIsTakenBack(t *testing.T) {
	s := start(t, patient)
	release := make(chan struct{})
	peer := s.readyPeer(onAdd(pod(1).UID, after(release)))
	ctx, cancel := context.WithCancel(s.ctx)
	added := s.adding(ctx, 1)
	s.must(peer.Await(s.ctx, func(st zdstest.State) bool { return st.Seen(zdstest.Add, pod(1).UID) }))
	cancel()
	err := s.result(added)
	if !errors.Is(err, zds.ErrNoAck) || !errors.Is(err, context.Canceled) {
		t.Errorf("Add = %v, want ErrNoAck and the context's error", err)
	}
	close(release) // within the ack timeout: the answer is the add's, and the del follows
	s.must(peer.AwaitDel(s.ctx, pod(1).UID))
	if s.Acked(pod(1).UID) {
		t.Error("Acked = true for a pod that was given up")
	}
	s.add(2)
}

// TestLateAck is case 10. A ZDS peer answers one add only after the deadline: the late
// ack is never taken for the next pod's, the stream is closed, and a fresh snapshot
// follows.
func TestLateAck(t *testing.T) {
	s := start(t, hasty)
	release := make(chan struct{})
	late := s.readyPeer(onAdd(pod(1).UID, after(release)))
	first := s.adding(s.ctx, 1)
	s.must(late.Await(s.ctx, func(st zdstest.State) bool { return st.Seen(zdstest.Add, pod(1).UID) }))
	second := s.adding(s.ctx, 2)
	s.await("the agent gives the stream up", func() bool { return len(s.Peers()) == 0 })
	close(release)
	s.gone(late)
	if !pending(first) || !pending(second) || s.Acked(pod(1).UID) || s.Acked(pod(2).UID) {
		t.Fatal("a late ack was taken for an answer")
	}
	if late.State().Seen(zdstest.Add, pod(2).UID) {
		t.Error("the proxy took the next add though it could not answer the one before it")
	}

	fresh := s.readyPeer(nil)
	if err := errors.Join(s.result(first), s.result(second)); err != nil {
		t.Errorf("Adds through the fresh snapshot: %v", err)
	}
	st := fresh.State()
	if len(st.Pods) != 2 || !s.Acked(pod(1).UID) || !s.Acked(pod(2).UID) {
		t.Errorf("the fresh snapshot has %d pods, want both", len(st.Pods))
	}
}

func TestDelOvertakesAnAdd(t *testing.T) {
	s := start(t, patient)
	release := make(chan struct{})
	peer := s.readyPeer(onAdd(pod(1).UID, after(release)))
	added := s.adding(s.ctx, 1)
	s.must(peer.Await(s.ctx, func(st zdstest.State) bool { return st.Seen(zdstest.Add, pod(1).UID) }))
	ended, cancel := context.WithCancel(s.ctx)
	cancel()
	if err := s.Del(ended, pod(1).UID); !errors.Is(err, zds.ErrNoAck) {
		t.Errorf("Del with an ended context = %v, want ErrNoAck", err)
	}
	if err := s.result(added); !errors.Is(err, zds.ErrSuperseded) {
		t.Errorf("Add = %v, want ErrSuperseded", err)
	}
	close(release)
	if err := s.Del(s.ctx, pod(1).UID); err != nil {
		t.Error(err)
	}
	if st := peer.State(); len(st.Pods) != 0 || st.Count(zdstest.Del, pod(1).UID) == 0 {
		t.Errorf("the proxy has %d pods, and was sent %q", len(st.Pods), kinds(st.Events))
	}
}

func TestAddReplacesTheNetns(t *testing.T) {
	s := start(t, patient)
	old := s.readyPeer(nil)
	newest := s.readyPeer(nil)
	s.add(1)
	ns := netnstest.New(t)
	if err := s.Add(s.ctx, pod(1), ns.File()); err != nil {
		t.Fatal(err)
	}
	want, err := zdstest.Cookie(ns.File())
	if err != nil {
		t.Fatal(err)
	}
	got, err := newest.AwaitPod(s.ctx, pod(1).UID)
	s.must(err)
	if got.Cookie != want {
		t.Errorf("the proxy has cookie %d, want the new netns's %d", got.Cookie, want)
	}
	s.must(old.AwaitDel(s.ctx, pod(1).UID))
	if !s.Acked(pod(1).UID) {
		t.Error("Acked = false for the replaced pod")
	}
}

// A pod with a second interface is added once more. Whatever comes of that, the
// proxy keeps what it has.
func TestAddAgainNeverTakesThePodAway(t *testing.T) {
	s := start(t, patient)
	added := 0
	peer := s.readyPeer(onAdd(pod(1).UID, func(context.Context, zdstest.Event) zdstest.Answer {
		if added++; added > 1 {
			return zdstest.Nack("once is enough")
		}
		return zdstest.Ack()
	}))
	s.add(1, 1)
	if n := peer.State().Count(zdstest.Add, pod(1).UID); n != 1 {
		t.Errorf("the proxy was sent %d adds, want 1", n)
	}

	s.must(peer.Close())
	s.await("the proxy is gone", func() bool { return len(s.Peers()) == 0 })
	soon, cancel := context.WithTimeout(s.ctx, 50*time.Millisecond)
	defer cancel()
	if err := s.Add(soon, pod(1), s.netns); !errors.Is(err, zds.ErrNoProxy) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Add = %v, want ErrNoProxy at the context's end", err)
	}
	waiting := s.adding(s.ctx, 1)
	next := s.readyPeer(nil)
	s.must(s.result(waiting))
	if _, has := next.State().Pods[pod(1).UID]; !has {
		t.Error("the next proxy's snapshot lacks the pod")
	}
}

func TestNackOfADel(t *testing.T) {
	s := start(t, patient)
	s.readyPeer(func(_ context.Context, e zdstest.Event) zdstest.Answer {
		if e.Kind == zdstest.Del {
			return zdstest.Nack("never")
		}
		return zdstest.Ack()
	})
	s.add(1)
	var nack *zds.NackError
	if err := s.Del(s.ctx, pod(1).UID); !errors.As(err, &nack) || nack.Reason != "never" {
		t.Errorf("Del = %v, want the proxy's NACK", err)
	}
	if s.Acked(pod(1).UID) {
		t.Error("Acked = true after Del")
	}
	s.add(2)
}

func TestStop(t *testing.T) {
	before := openFiles(t)
	s := start(t, patient)
	peer := s.readyPeer(onAdd(pod(2).UID, silence))
	s.add(1)
	added := s.adding(s.ctx, 2)
	s.must(peer.Await(s.ctx, func(st zdstest.State) bool { return st.Seen(zdstest.Add, pod(2).UID) }))
	s.stop()
	if err := s.result(added); !errors.Is(err, zds.ErrStopped) {
		t.Errorf("Add = %v when Run ends, want ErrStopped", err)
	}
	if err := s.Add(s.ctx, pod(3), s.netns); !errors.Is(err, zds.ErrStopped) {
		t.Errorf("Add = %v after Run, want ErrStopped", err)
	}
	s.gone(peer)
	if err := peer.State().Err; !errors.Is(err, io.EOF) {
		t.Errorf("the peer saw %v, want the end of the stream", err)
	}
	if _, err := zdstest.DialRaw(s.ctx, s.socket); err == nil {
		t.Error("the socket still accepts connections")
	}
	s.netns.Close()
	if after := openFiles(t); after > before {
		t.Errorf("%d descriptors are held after the end", after-before)
	}
}

func TestListenerFailureEndsRun(t *testing.T) {
	l, err := net.Listen("unixpacket", t.TempDir()+"/s")
	if err != nil {
		t.Fatal(err)
	}
	s, err := zds.New(zds.Config{Listener: l})
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	if err := s.Run(t.Context()); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Run = %v, want the listener's error", err)
	}
}

// faulty is a listener that fails with errs before it accepts.
type faulty struct {
	net.Listener
	errs []error // Run's alone
}

func (l *faulty) Accept() (net.Conn, error) {
	if len(l.errs) == 0 {
		return l.Listener.Accept()
	}
	err := l.errs[0]
	l.errs = l.errs[1:]
	return nil, err
}

// An agent without a free descriptor must not end over it: it would forget every pod.
func TestRunOutlivesShortagesOfDescriptors(t *testing.T) {
	emfile := &net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", syscall.EMFILE)}
	s := startOn(t, patient, func(l net.Listener) net.Listener { return &faulty{Listener: l, errs: []error{emfile, emfile}} })
	s.readyPeer(nil)
	s.add(1)
}

func TestBadArguments(t *testing.T) {
	if _, err := zds.New(zds.Config{}); err == nil {
		t.Error("New without a listener succeeded")
	}
	s := start(t, patient)
	closed, err := os.Open("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	long := pod(1)
	long.Name = strings.Repeat("n", packet.MaxSize)
	for _, tc := range []struct {
		name  string
		w     zds.Workload
		netns *os.File
		want  error
	}{
		{"no uid", zds.Workload{Name: "p", Namespace: "n", ServiceAccount: "s"}, s.netns, nil},
		{"no service account", zds.Workload{UID: "u", Name: "p", Namespace: "n"}, s.netns, nil},
		{"no netns", pod(1), nil, nil},
		{"a closed netns", pod(1), closed, os.ErrClosed},
		{"names too long for a packet", long, s.netns, packet.ErrTooLong},
	} {
		err := s.Add(s.ctx, tc.w, tc.netns)
		if err == nil || tc.want != nil && !errors.Is(err, tc.want) {
			t.Errorf("%s: Add = %v, want an error (%v)", tc.name, err, tc.want)
		}
	}
}

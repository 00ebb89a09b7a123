// SPDX-License-Identifier: Apache-2.0

package zds_test

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"ambientd/nodeagent/zds"
	"ambientd/nodeagent/zds/packet"
	"ambientd/nodeagent/zds/zdspb"
	"ambientd/nodeagent/zds/zdstest"
)

// TestOneBadPodOfMany is case 9. A peer that rejects one of 300 pods every time: the
// others are acked, the peer becomes ready, and the pod is absent, also after its
// deletion and a reconnect.
func TestOneBadPodOfMany(t *testing.T) {
	const pods, bad = 300, 3
	s := start(t, patient)
	reject := zdstest.NackUIDs("cannot", pod(bad).UID)
	first := s.readyPeer(nil)
	var adds sync.WaitGroup
	for i := range pods {
		adds.Go(func() {
			if err := s.Add(s.ctx, pod(i), s.netns); err != nil {
				t.Error(err)
			}
		})
	}
	adds.Wait()
	s.must(first.Close())
	s.await("the first peer is gone", func() bool { return len(s.Peers()) == 0 })

	second := s.readyPeer(reject)
	s.must(second.AwaitDel(s.ctx, pod(bad).UID))
	expectAllBut(s, second, pods, bad)
	if err := s.Add(s.ctx, pod(bad), s.netns); err == nil {
		t.Error("Add of the bad pod succeeded")
	}
	if err := s.Del(s.ctx, pod(bad).UID); err != nil {
		t.Errorf("Del of the bad pod = %v", err)
	}
	if n := second.State().Count(zdstest.Add, pod(bad).UID); n != 2 {
		t.Errorf("the bad pod was sent %d times, want once for the snapshot and once for the Add", n)
	}
	s.must(second.Close())
	s.await("the second peer is gone", func() bool { return len(s.Peers()) == 0 })

	third := s.readyPeer(reject)
	expectAllBut(s, third, pods, bad)
	if third.State().Seen(zdstest.Add, pod(bad).UID) {
		t.Error("the deleted pod is in the next snapshot")
	}
	if peers := s.Peers(); len(peers) != 1 || !peers[0].Ready {
		t.Errorf("the peers are %+v, want one that is ready", peers)
	}
}

func expectAllBut(s *server, peer *zdstest.Peer, pods, bad int) {
	s.t.Helper()
	if got := len(peer.State().Pods); got != pods-1 {
		s.t.Errorf("the peer has %d pods, want %d", got, pods-1)
	}
	for i := range pods {
		if acked := s.Acked(pod(i).UID); acked == (i == bad) {
			s.t.Errorf("Acked(%s) = %t", pod(i).UID, acked)
		}
	}
}

// The same peer from the beginning: Adds at once, and only the bad one fails.
func TestOneBadPodAmongConcurrentAdds(t *testing.T) {
	const pods, bad = 100, 3
	s := start(t, patient)
	var adds sync.WaitGroup
	for i := range pods {
		adds.Go(func() {
			err := s.Add(s.ctx, pod(i), s.netns)
			var nack *zds.NackError
			if errors.As(err, &nack) != (i == bad) || (err == nil) != (i != bad) {
				t.Errorf("Add(%d) = %v", i, err)
			}
		})
	}
	peer := s.readyPeer(zdstest.NackUIDs("cannot", pod(bad).UID))
	adds.Wait()
	s.must(peer.AwaitDel(s.ctx, pod(bad).UID))
	expectAllBut(s, peer, pods, bad)
}

// ztunnel's workload manager ends on a del before the end of the snapshot;
// zdstest.Peer does too.
func TestDelDuringTheSnapshotComesAfterIt(t *testing.T) {
	s := start(t, patient)
	first := s.readyPeer(nil)
	s.add(1, 2, 3)
	first.Close()
	release := make(chan struct{})
	peer := s.peer(onAdd(pod(2).UID, after(release)))
	s.must(peer.Await(s.ctx, func(st zdstest.State) bool { return st.Seen(zdstest.Add, pod(2).UID) }))
	deleted := make(chan error, 3)
	for i := 1; i <= 3; i++ {
		go func() { deleted <- s.Del(s.ctx, pod(i).UID) }()
	}
	s.await("the set is empty", func() bool { return !s.Acked(pod(1).UID) })
	close(release)
	for range 3 {
		if err := s.result(deleted); err != nil {
			t.Error(err)
		}
	}
	st := peer.State()
	if len(st.Pods) != 0 || !st.Ready {
		t.Errorf("the proxy has %d pods, ready=%t, was told %q", len(st.Pods), st.Ready, kinds(st.Events))
	}
}

func TestTwoProxies(t *testing.T) {
	s := start(t, patient)
	old := s.readyPeer(nil)
	s.add(1)
	newest := s.readyPeer(nil)
	s.add(2)
	if st := old.State(); st.Seen(zdstest.Add, pod(2).UID) {
		t.Error("the older proxy was sent a new pod")
	}
	if st := newest.State(); len(st.Pods) != 2 {
		t.Errorf("the newest proxy has %d pods, want its snapshot's and the new one", len(st.Pods))
	}
	if err := s.Del(s.ctx, pod(1).UID); err != nil {
		t.Fatal(err)
	}
	for name, p := range map[string]*zdstest.Peer{"older": old, "newest": newest} {
		if st := p.State(); !st.Seen(zdstest.Del, pod(1).UID) {
			t.Errorf("the %s proxy was not sent the del", name)
		}
	}

	s.must(newest.Close())
	_, err := old.AwaitPod(s.ctx, pod(2).UID)
	s.must(err)
	s.await("the older proxy has caught up", func() bool { return s.Acked(pod(2).UID) })
	if n := len(s.Peers()); n != 1 {
		t.Errorf("%d peers, want 1", n)
	}
}

func TestTheOlderProxyTakesOverAWaitingAdd(t *testing.T) {
	s := start(t, hasty)
	s.readyPeer(nil)
	stuck := s.readyPeer(onAdd(pod(1).UID, silence))
	if err := s.Add(s.ctx, pod(1), s.netns); err != nil {
		t.Errorf("Add = %v, want nil through the older proxy", err)
	}
	s.gone(stuck)
}

// While a new proxy is at its snapshot, the old one's answer does not count;
// when the new one fails, it does.
func TestTheNewestProxysWordCounts(t *testing.T) {
	s := start(t, hasty)
	release := make(chan struct{})
	old := s.readyPeer(onAdd(pod(1).UID, after(release)))
	added := s.adding(s.ctx, 1)
	s.must(old.Await(s.ctx, func(st zdstest.State) bool { return st.Seen(zdstest.Add, pod(1).UID) }))
	stuck := s.peer(silence)
	s.await("both are connected", func() bool { return len(s.Peers()) == 2 })
	close(release)
	_, err := old.AwaitPod(s.ctx, pod(1).UID)
	s.must(err)
	s.gone(stuck)
	if err := s.result(added); err != nil {
		t.Errorf("Add = %v, want nil once the older proxy is the only one", err)
	}
}

func TestARefusalOfTheSuccessorLeavesTheOldProxyAlone(t *testing.T) {
	s := start(t, patient)
	old := s.readyPeer(nil)
	s.add(1, 2)
	newest := s.readyPeer(zdstest.NackUIDs("not here", pod(1).UID))
	s.must(newest.AwaitDel(s.ctx, pod(1).UID))
	if s.Acked(pod(1).UID) {
		t.Error("Acked = true though the newest proxy refused")
	}
	if st := old.State(); st.Seen(zdstest.Del, pod(1).UID) {
		t.Error("the old proxy was told to drop a pod that it serves well")
	}
	if err := s.Del(s.ctx, pod(1).UID); err != nil {
		t.Fatal(err)
	}
	if st := old.State(); !st.Seen(zdstest.Del, pod(1).UID) {
		t.Error("the old proxy was not told of the pod's end")
	}
}

// A pod at which the proxy dies must not keep it from ever being ready.
func TestAPodThatEndsEveryStream(t *testing.T) {
	s := start(t, patient)
	first := s.readyPeer(nil)
	s.add(1, 2, 3)
	first.Close()
	// The first of them ends before it has answered anything.
	for range 1 + 3 {
		p := s.peer(onAdd(pod(1).UID, hangup))
		s.gone(p)
		s.await("the stream is gone", func() bool { return len(s.Peers()) == 0 })
	}
	p := s.readyPeer(onAdd(pod(1).UID, hangup))
	if st := p.State(); len(st.Pods) != 2 || st.Seen(zdstest.Add, pod(1).UID) {
		t.Errorf("the proxy was told %q", kinds(st.Events))
	}
}

// A proxy that is silent altogether says nothing about the pods.
func TestASilentProxyCostsNoPod(t *testing.T) {
	s := start(t, hasty)
	first := s.readyPeer(nil)
	s.add(1, 2)
	first.Close()
	for range 4 { // more than a bad pod is given
		s.gone(s.peer(silence))
	}
	if st := s.readyPeer(nil).State(); len(st.Pods) != 2 {
		t.Errorf("%d pods are left, want 2", len(st.Pods))
	}
}

func TestAPeerThatNeverReadsDelaysNobodyElse(t *testing.T) {
	s := start(t, patient)
	dead, err := zdstest.DialRaw(s.ctx, s.socket)
	s.must(err)
	defer dead.Close()
	s.must(zdstest.Send(dead, &zdspb.ZdsHello{Version: zdspb.Version_V1}))
	s.await("the dead peer is connected", func() bool { return len(s.Peers()) == 1 })
	live := s.readyPeer(nil)
	for i := range 20 {
		s.add(i)
	}
	ctx, cancel := context.WithCancel(s.ctx)
	deleted := make(chan error, 1)
	go func() { deleted <- s.Del(ctx, pod(0).UID) }()
	s.must(live.AwaitDel(s.ctx, pod(0).UID))
	cancel()
	if err := s.result(deleted); !errors.Is(err, zds.ErrNoAck) {
		t.Errorf("Del = %v, want ErrNoAck at the context's end", err)
	}
}

func TestMisbehavingPeersAreCutOff(t *testing.T) {
	hello := func(c *net.UnixConn) error { return zdstest.Send(c, &zdspb.ZdsHello{Version: zdspb.Version_V1}) }
	ack := func(c *net.UnixConn) error { return zdstest.SendAnswer(c, "") }
	raw := func(b string, fds ...int) func(*net.UnixConn) error {
		return func(c *net.UnixConn) error {
			_, _, err := c.WriteMsgUnix([]byte(b), unix.UnixRights(fds...), nil)
			return err
		}
	}
	for _, tc := range []struct {
		name  string
		steps []func(*net.UnixConn) error
	}{
		{"hello of another version", []func(*net.UnixConn) error{raw("\x08\x02")}},
		{"no hello at all", nil},
		{"hello too long", []func(*net.UnixConn) error{raw("\x08\x01" + strings.Repeat("\x10\x01", packet.MaxSize/2))}},
		{"an ack for a hello", []func(*net.UnixConn) error{ack}},
		{"answer too long", []func(*net.UnixConn) error{hello, raw(strings.Repeat("\x0a\x00", packet.MaxSize))}},
		{"answer that is garbage", []func(*net.UnixConn) error{hello, raw("garbage")}},
		{"answer without an ack", []func(*net.UnixConn) error{hello, raw("\x12\x00")}},
		{"answer with a descriptor", []func(*net.UnixConn) error{hello, raw("\x0a\x00", 0)}},
		{"a second hello", []func(*net.UnixConn) error{hello, hello}},
		{"an answer that nobody asked for", []func(*net.UnixConn) error{hello, ack, ack}},
		{"snapshot refused", []func(*net.UnixConn) error{hello, func(c *net.UnixConn) error { return zdstest.SendAnswer(c, "no") }}},
		{"snapshot not answered", []func(*net.UnixConn) error{hello}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := start(t, hasty)
			good := s.readyPeer(nil)
			c, err := zdstest.DialRaw(s.ctx, s.socket)
			s.must(err)
			defer c.Close()
			for _, step := range tc.steps {
				// The agent may have cut the peer off before the last step.
				if err := step(c); err != nil && !errors.Is(err, unix.EPIPE) {
					t.Fatal(err)
				}
			}
			for {
				if _, _, err := packet.Read(c); err != nil {
					if !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
						t.Errorf("reading until the agent hangs up: %v", err)
					}
					break
				}
			}
			s.await("the good peer is alone", func() bool { return len(s.Peers()) == 1 })
			s.add(1)
			if _, err := good.AwaitPod(s.ctx, pod(1).UID); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestTooManyPeers(t *testing.T) {
	const limit = 16
	s := start(t, patient)
	for range limit {
		s.readyPeer(nil)
	}
	c, err := zdstest.DialRaw(s.ctx, s.socket)
	s.must(err)
	defer c.Close()
	if _, _, err := packet.Read(c); !errors.Is(err, io.EOF) {
		t.Errorf("one peer too many: %v, want to be hung up on", err)
	}
	s.add(1)
}

// Adds, dels and proxies that come and go at random: in the end the newest
// proxy has exactly the set, and nothing else is held.
func TestChurn(t *testing.T) {
	const workers, rounds, podsEach, streams = 8, 60, 4, 12
	s := start(t, patient)
	before := openFiles(t)
	var mu sync.Mutex
	want := make(map[string]struct{})

	var work sync.WaitGroup
	for w := range workers {
		work.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(w)))
			for range rounds {
				i := w*podsEach + rng.IntN(podsEach)
				var err error
				mu.Lock()
				if rng.IntN(3) > 0 {
					want[pod(i).UID] = struct{}{}
					mu.Unlock()
					err = s.Add(s.ctx, pod(i), s.netns)
				} else {
					delete(want, pod(i).UID)
					mu.Unlock()
					err = s.Del(s.ctx, pod(i).UID)
				}
				if err != nil {
					t.Errorf("pod %d: %v", i, err)
				}
			}
		})
	}
	working, done := context.WithCancel(s.ctx)
	go func() { work.Wait(); done() }()
	rng := rand.New(rand.NewPCG(2, 2))
	for range streams {
		enough := 1 + rng.IntN(30)
		p := s.peer(nil)
		err := p.Await(working, func(st zdstest.State) bool { return len(st.Events) >= enough })
		if err != nil && working.Err() == nil {
			t.Error(err)
		}
		if working.Err() != nil {
			break // the work is done: this peer has served the rest of it
		}
		p.Close()
	}
	for working.Err() == nil {
		p := s.peer(nil)
		<-working.Done()
		p.Close()
	}

	last := s.readyPeer(nil)
	got := last.State().Pods
	if len(got) != len(want) {
		t.Errorf("the proxy has %d pods, want %d", len(got), len(want))
	}
	for uid := range want {
		if _, ok := got[uid]; !ok || !s.Acked(uid) {
			t.Errorf("%s: with the proxy %t, acked %t", uid, ok, s.Acked(uid))
		}
		if err := s.Del(s.ctx, uid); err != nil {
			t.Error(err)
		}
	}
	last.Close()
	s.await("no peer is left", func() bool { return len(s.Peers()) == 0 })
	if n := len(last.State().Pods); n != 0 {
		t.Errorf("the proxy has %d pods in the end", n)
	}
	if after := openFiles(t); after > before {
		t.Errorf("%d descriptors are held in the end", after-before)
	}
}

// SPDX-License-Identifier: Apache-2.0

package zds_test

import (
	"context"
	"errors"
	"net"
	"os"
	"slices"
	"testing"
	"time"

	"ambientd/nodeagent/zds"
	"ambientd/nodeagent/zds/packet"
	"ambientd/nodeagent/zds/zdspb"
	"ambientd/nodeagent/zds/zdstest"
	"ambientd/tools/netnstest"
)

// inFlight is how many messages may be under way.
const inFlight = 16

// byHand is a proxy that reads and answers when the test says so: unlike any real one it
// can read messages before it has answered those before.
type byHand struct {
	*server
	conn *net.UnixConn
}

// byHand returns such a proxy, with its hello said.
func (s *server) byHand() *byHand {
	s.t.Helper()
	before := time.Now()
	conn, err := zdstest.DialRaw(s.ctx, s.socket)
	s.must(err)
	s.t.Cleanup(func() { conn.Close() })
	s.must(zdstest.Send(conn, &zdspb.ZdsHello{Version: zdspb.Version_V1}))
	s.await("the proxy is connected", func() bool {
		peers := s.Peers()
		return len(peers) > 0 && peers[0].Since.After(before)
	})
	return &byHand{server: s, conn: conn}
}

// reads returns the next so many messages.
func (p *byHand) reads(count int) []string {
	p.t.Helper()
	var got []string
	for range count {
		b, file, err := packet.Read(p.conn)
		p.must(err)
		request, err := packet.DecodeRequest(b, packet.Beside(file))
		p.must(err)
		if file != nil {
			file.Close()
		}
		switch m := request.GetPayload().(type) {
		case *zdspb.WorkloadRequest_Add:
			got = append(got, "add "+m.Add.GetUid())
		case *zdspb.WorkloadRequest_Del:
			got = append(got, "del "+m.Del.GetUid())
		default:
			got = append(got, "snapshot_sent")
		}
	}
	return got
}

func (p *byHand) expects(want ...string) {
	p.t.Helper()
	if got := p.reads(len(want)); !slices.Equal(got, want) {
		p.t.Fatalf("the proxy was told %q, want %q", got, want)
	}
}

// expectsNothing says that no message comes for a while.
func (p *byHand) expectsNothing() {
	p.t.Helper()
	p.must(p.conn.SetReadDeadline(time.Now().Add(50 * time.Millisecond)))
	if b, _, err := packet.Read(p.conn); !errors.Is(err, os.ErrDeadlineExceeded) {
		p.t.Fatalf("the proxy was told %q (%v), want nothing", b, err)
	}
	p.must(p.conn.SetReadDeadline(time.Time{}))
}

func (p *byHand) acks(count int) {
	p.t.Helper()
	for range count {
		p.must(zdstest.SendAnswer(p.conn, ""))
	}
}

func (p *byHand) nacks() {
	p.t.Helper()
	p.must(zdstest.SendAnswer(p.conn, "cannot"))
}

// leaves closes the connection, and waits until the agent has noticed.
func (p *byHand) leaves() {
	p.t.Helper()
	peers := len(p.Peers())
	p.must(p.conn.Close())
	p.await("the proxy is gone", func() bool { return len(p.Peers()) == peers-1 })
}

// readyByHand is byHand of a server without pods, past its snapshot.
func (s *server) readyByHand() *byHand {
	s.t.Helper()
	p := s.byHand()
	p.expects("snapshot_sent")
	p.acks(1)
	s.await("the proxy is ready", func() bool { return s.Peers()[0].Ready })
	return p
}

// puts puts pods into the set.
func (s *server) puts(ids ...int) {
	s.t.Helper()
	for _, i := range ids {
		s.must(s.Put(pod(i), s.netns))
	}
}

func addOf(i int) string { return "add " + pod(i).UID }
func delOf(i int) string { return "del " + pod(i).UID }

// The window, and that answers go by order: pods 5 and 11 are refused in its middle, with
// later messages sent already.
func TestAnswersGoByOrderInTheWindow(t *testing.T) {
	const pods = 40
	s := start(t, patient)
	p := s.readyByHand()
	results := make([]<-chan error, pods)
	for i := range results {
		results[i] = s.adding(s.ctx, i)
		if i < inFlight {
			p.expects(addOf(i)) // more than net.unix.max_dgram_qlen of them, not read by then, are no obstacle
		}
	}
	p.expectsNothing()

	refused := []int{5, 11}
	for i := range inFlight {
		if slices.Contains(refused, i) {
			p.nacks()
		} else {
			p.acks(1)
		}
	}
	for i := range inFlight {
		var nack *zds.NackError
		err := s.result(results[i])
		if slices.Contains(refused, i) {
			if !errors.As(err, &nack) || nack.UID != pod(i).UID {
				t.Errorf("Add of the refused pod %d = %v", i, err)
			}
		} else if err != nil {
			t.Errorf("Add of pod %d = %v", i, err)
		}
	}

	// The window is filled again when half of it is free, so not always to its end.
	var told []string
	for range pods - inFlight + len(refused) {
		told = append(told, p.reads(1)...)
		p.acks(1)
	}
	for _, i := range refused {
		if !slices.Contains(told, delOf(i)) {
			t.Errorf("the refused pod %d was not taken back", i)
		}
	}
	for i := inFlight; i < pods; i++ {
		if err := s.result(results[i]); err != nil {
			t.Errorf("Add of pod %d = %v", i, err)
		}
	}
}

// The kernel buffers the whole window while the proxy reads nothing.
func TestTheSnapshotUsesTheWindow(t *testing.T) {
	s := start(t, patient)
	for i := range inFlight + 2 {
		s.puts(i)
	}
	p := s.byHand()
	p.reads(inFlight)
	p.expectsNothing()
	p.acks(inFlight / 2)
	p.expects(addOf(inFlight), addOf(inFlight+1), "snapshot_sent")
	s.must(s.Put(pod(100), s.netns))
	p.expects(addOf(100))
	ended, cancel := context.WithCancel(s.ctx)
	cancel()
	if err := s.Del(ended, pod(0).UID); !errors.Is(err, zds.ErrNoAck) {
		t.Errorf("Del = %v", err)
	}
	p.acks(inFlight/2 + 2)
	p.expectsNothing() // no del before the snapshot's end is answered
	p.acks(1)
	p.expects(delOf(0))
}

// In a stream's end the oldest message is what the proxy ended at, and goes to the end of
// the next snapshot. What came after it keeps its place.
func TestOnlyTheOldestOfTheWindowIsStruck(t *testing.T) {
	s := start(t, patient)
	s.puts(1, 2, 3, 4, 5)
	read := s.byHand()
	read.expects(addOf(1), addOf(2), addOf(3), addOf(4), addOf(5), "snapshot_sent")
	read.acks(1)
	read.leaves() // at 2
	unread := s.byHand()
	unread.expects(addOf(1), addOf(3))
	unread.acks(1)
	unread.leaves() // at 3, with the others unread
	order := s.byHand()
	order.expects(addOf(1), addOf(4), addOf(5), addOf(2), addOf(3), "snapshot_sent")
	order.acks(6)
	s.await("the snapshot is complete", func() bool { return s.Peers()[0].Ready })
	for i := 1; i <= 5; i++ {
		if !s.Acked(pod(i).UID) {
			t.Errorf("pod %d has left", i)
		}
	}
}

// The kernel reports a proxy's end before the answers that it had sent: were they not
// taken in, others would be struck for the pod at which it ends.
func TestAnswersBeforeTheEndAreTakenIn(t *testing.T) {
	const pods, bad = 12, 6
	for range 20 {
		s := start(t, patient)
		for i := range pods {
			s.puts(i)
		}
		for range 3 {
			p := s.peer(onAdd(pod(bad).UID, hangup))
			s.gone(p)
			s.await("the stream is gone", func() bool { return len(s.Peers()) == 0 })
		}
		for i := range pods {
			if s.Holds(pod(i).UID) == (i == bad) {
				t.Fatalf("pod %d is in the set: %t", i, i == bad)
			}
		}
		s.stop()
	}
}

func TestTimeoutWithSeveralInFlight(t *testing.T) {
	s := start(t, hasty)
	s.puts(1, 2, 3)
	p := s.byHand()
	p.expects(addOf(1), addOf(2), addOf(3), "snapshot_sent")
	p.acks(1)
	s.await("the agent gives the stream up", func() bool { return len(s.Peers()) == 0 })
	p = s.byHand()
	p.expects(addOf(1), addOf(3), addOf(2), "snapshot_sent")
}

// Each message has the whole time, however many were sent with it.
func TestASlowProxyThatKeepsItsTime(t *testing.T) {
	const pods = 5
	s := start(t, hasty)
	p := s.readyPeer(func(ctx context.Context, _ zdstest.Event) zdstest.Answer {
		select {
		case <-time.After(hasty / 2):
		case <-ctx.Done():
		}
		return zdstest.Ack()
	})
	var added []<-chan error
	for i := range pods {
		added = append(added, s.adding(s.ctx, i))
	}
	for _, c := range added {
		s.must(s.result(c))
	}
	if err := p.State().Err; err != nil {
		t.Errorf("the stream has ended: %v", err)
	}
}

func TestAnAnswerTooMany(t *testing.T) {
	s := start(t, patient)
	p := s.readyByHand()
	one, two := s.adding(s.ctx, 1), s.adding(s.ctx, 2)
	p.reads(2)
	p.acks(3)
	s.must(errors.Join(s.result(one), s.result(two)))
	s.await("the stream is closed", func() bool { return len(s.Peers()) == 0 })
}

func TestDelsInFlightEndWithTheStream(t *testing.T) {
	s := start(t, patient)
	p := s.readyByHand()
	s.puts(1, 2, 3)
	p.reads(3)
	p.acks(3)
	deleted := make(chan error, 3)
	for i := 1; i <= 3; i++ {
		go func() { deleted <- s.Del(s.ctx, pod(i).UID) }()
	}
	p.reads(3)
	p.leaves()
	for range 3 {
		s.must(s.result(deleted))
	}
	s.byHand().expects("snapshot_sent")
}

func TestTheOlderProxyIsNotToldTwice(t *testing.T) {
	s := start(t, patient)
	old := s.readyByHand()
	s.puts(1, 2, 3)
	old.expects(addOf(1), addOf(2), addOf(3))
	newest := s.byHand()
	newest.expects(addOf(1), addOf(2), addOf(3), "snapshot_sent")
	newest.acks(4)
	newest.leaves()
	old.acks(3)
	s.puts(4)
	old.expects(addOf(4))
	s.await("the older proxy's answers are taken in", func() bool { return s.Acked(pod(3).UID) })
}

// A proxy tries a refused pod again by itself, and does so beside the pod that has
// replaced it: that must not be left to chance.
func TestARefusedPodIsTakenBackFromBeneathItsSuccessor(t *testing.T) {
	s := start(t, patient)
	p := s.readyByHand()
	first := s.adding(s.ctx, 1)
	p.expects(addOf(1))
	ns := netnstest.New(t)
	second := make(chan error, 1)
	go func() { second <- s.Add(s.ctx, pod(1), ns.File()) }()
	p.expects(addOf(1))
	if err := s.result(first); !errors.Is(err, zds.ErrSuperseded) {
		t.Errorf("the earlier Add = %v", err)
	}
	p.nacks()
	p.expects(delOf(1), addOf(1))
	p.acks(3)
	s.must(s.result(second))
	s.await("the successor is with the proxy", func() bool { return s.Acked(pod(1).UID) })
	p.expectsNothing()
}

// With a del under way already, the refused pod is taken back by that.
func TestDelAndAddInFlightBehindARefusal(t *testing.T) {
	s := start(t, patient)
	p := s.readyByHand()
	first := s.adding(s.ctx, 1)
	p.expects(addOf(1))
	deleted := make(chan error, 1)
	go func() { deleted <- s.Del(s.ctx, pod(1).UID) }()
	p.expects(delOf(1))
	if err := s.result(first); !errors.Is(err, zds.ErrSuperseded) {
		t.Errorf("the earlier Add = %v", err)
	}
	second := s.adding(s.ctx, 1)
	p.expects(addOf(1))
	p.nacks()
	p.acks(2)
	s.must(errors.Join(s.result(deleted), s.result(second)))
	p.expectsNothing()
	if !s.Acked(pod(1).UID) {
		t.Errorf("%s is not acked", pod(1).UID)
	}
}

// TestAddDoesNotEndBeforeADelOfThePod: an add that was sent behind a refused one of the same
// pod is accepted, and then taken back with it. The Add ends with the answer to the add that
// follows.
func TestAddDoesNotEndBeforeADelOfThePod(t *testing.T) {
	s := start(t, patient)
	p := s.readyByHand()
	_ = s.adding(s.ctx, 1)
	p.expects(addOf(1))
	ns := netnstest.New(t)
	second := make(chan error, 1)
	go func() { second <- s.Add(s.ctx, pod(1), ns.File()) }()
	p.expects(addOf(1))
	p.nacks()
	p.expects(delOf(1), addOf(1))
	p.acks(2) // the successor's first add, and the del
	p.nacks() // its second add
	var nack *zds.NackError
	if err := <-second; !errors.As(err, &nack) {
		t.Errorf("Add = %v, want the refusal of the pod's last add", err)
	}
	if s.Acked(pod(1).UID) || s.Holds(pod(1).UID) {
		t.Error("the pod is with the proxy, or in the set, after its refusal")
	}
}

// TestPromotedStreamTakesItBack: an add that is under way counts for nothing on a stream that
// becomes the newest, if a del of the pod comes after it: the pod is added once more.
func TestPromotedStreamTakesItBack(t *testing.T) {
	s := start(t, patient)
	p := s.readyByHand()
	s.adding(s.ctx, 1)
	p.expects(addOf(1))
	second := s.adding(s.ctx, 1)
	p.expects(addOf(1))
	other := s.byHand()
	p.nacks()
	p.expects(delOf(1))
	other.leaves()
	p.acks(2) // the second add, the del
	p.expects(addOf(1))
	p.acks(1)
	s.must(<-second)
	if !s.Acked(pod(1).UID) {
		t.Error("the pod is not with the proxy")
	}
}

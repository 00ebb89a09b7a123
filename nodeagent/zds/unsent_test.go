// SPDX-License-Identifier: Apache-2.0

package zds

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"ambientd/nodeagent/zds/packet"
	"ambientd/nodeagent/zds/zdspb"
)

// connection is a connection of proxies' kind, and the listener that it came by.
func connection(t *testing.T) (listener *net.UnixListener, conn, proxy *net.UnixConn) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "zds.sock")
	listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	proxy, err = net.DialUnix("unixpacket", nil, listener.Addr().(*net.UnixAddr))
	if err != nil {
		t.Fatal(err)
	}
	conn, err = listener.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = proxy.Close() // a test may have
		if err := errors.Join(conn.Close(), listener.Close()); err != nil {
			t.Error(err)
		}
	})
	return listener, conn, proxy
}

// oneAhead is a server's stream with the add of its one pod in the window, not sent.
func oneAhead(t *testing.T) (s *Server, st *stream, add *message, proxy *net.UnixConn) {
	t.Helper()
	listener, conn, proxy := connection(t)
	s, err := New(Config{Listener: listener})
	if err != nil {
		t.Fatal(err)
	}
	netns, err := os.Open("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Close()
	if err := s.Put(Workload{UID: "uid", Name: "web", Namespace: "shop", ServiceAccount: "web"}, netns); err != nil {
		t.Fatal(err)
	}
	st, _ = s.join(conn, time.Now())
	add = s.next(st)
	if add == nil || add.kind != addPod {
		t.Fatalf("the first message is %+v, want the pod's add", add)
	}
	return s, st, add, proxy
}

// acks sends an ack.
func acks(t *testing.T, proxy *net.UnixConn) {
	t.Helper()
	ack, err := packet.Encode(&zdspb.WorkloadResponse{Payload: &zdspb.WorkloadResponse_Ack{Ack: &zdspb.Ack{}}})
	if err := errors.Join(err, packet.Write(proxy, ack, nil)); err != nil {
		t.Fatal(err)
	}
}

// late makes it too late to read what is there.
func late(t *testing.T, st *stream) {
	t.Helper()
	if err := st.conn.SetReadDeadline(time.Now().Add(-time.Second)); err != nil {
		t.Fatal(err)
	}
}

// leavesUncharged ends the stream, which must not count against the pod.
func leavesUncharged(t *testing.T, s *Server, st *stream, add *message) {
	t.Helper()
	s.leave(st)
	if add.pod.endings != 0 || add.pod.strikes != 0 {
		t.Errorf("the pod is charged with %d ends of streams and %d strikes, want none", add.pod.endings, add.pod.strikes)
	}
}

// TestAnswerIsReadLate: what the proxy answered in time counts, however late the agent reads it.
func TestAnswerIsReadLate(t *testing.T) {
	s, st, m, proxy := oneAhead(t)
	acks(t, proxy)
	late(t, st)
	ended := make(chan error, 1)
	go func() { ended <- s.receiveAll(st) }()
	select {
	case <-m.pod.outcome.done:
	case err := <-ended:
		t.Fatalf("the stream ended with the answer unread: %v", err)
	}
	if err := proxy.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the stream ended with %v, want the proxy's end", err)
	}
	if !st.answered {
		t.Error("the answer was not taken in")
	}
	leavesUncharged(t, s, st, m)
}

// TestAnswerIsReadLateAfterTheEnd: neither does it matter that the proxy has ended meanwhile, with
// messages unread.
func TestAnswerIsReadLateAfterTheEnd(t *testing.T) {
	s, st, m, proxy := oneAhead(t)
	if err := errors.Join(m.send(st.conn), s.next(st).send(st.conn)); err != nil {
		t.Fatal(err)
	}
	_, netns, err := packet.Read(proxy)
	if err != nil {
		t.Fatal(err)
	}
	acks(t, proxy)
	if err := errors.Join(netns.Close(), proxy.Close()); err != nil {
		t.Fatal(err)
	}
	late(t, st)
	if err := s.receiveAll(st); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the stream ended with %v, want the proxy's end", err)
	}
	if !st.answered {
		t.Error("the answer was not taken in")
	}
	leavesUncharged(t, s, st, m)
}

// TestAPodLeavesBeforeItsSend: a pod that leaves the set between next and the send, which has
// closed its netns, is not sent, has no part in what the proxy answers, and is not struck.
func TestAPodLeavesBeforeItsSend(t *testing.T) {
	s, st, m, _ := oneAhead(t)
	s.delete("uid")
	if err := m.send(st.conn); !errors.Is(err, os.ErrClosed) {
		t.Fatalf("sending the add: %v, want %v", err, os.ErrClosed)
	}
	if !s.unsent(st, m) {
		t.Error("the add was not in the window")
	}
	if next := s.next(st); next == nil || next.kind != endSnapshot || st.window[0] != next {
		t.Errorf("the next message is %+v, want the snapshot's end, as the oldest", next)
	}
	leavesUncharged(t, s, st, m)
}

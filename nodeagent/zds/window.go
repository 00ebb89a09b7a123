// SPDX-License-Identifier: Apache-2.0

package zds

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"ambientd/nodeagent/zds/packet"
)

const (
	// maxInFlight bounds the window: the messages that are sent and not answered. It
	// has to keep a proxy busy while the agent gets round to its answers, no more. 16
	// packets of at most 1 KiB are well within the 208 KiB that the kernel buffers for a
	// socket, so that a send does not wait, and 16 descriptors under way are far from
	// the bound for those (RLIMIT_NOFILE, for a process without CAP_SYS_ADMIN).
	maxInFlight = 16
	// refillAt is how far the window empties before its sender is woken to fill it: the
	// proxy is not short of work before, and one wakeup then serves for many messages.
	refillAt = maxInFlight / 2
	// lastLookTime is enough to read an answer that is there.
	lastLookTime = 100 * time.Millisecond
)

var errUnsolicited = errors.New("the node proxy answered without having been asked")

// drive sends the stream's messages and takes in the answers, each in a goroutine of
// its own, until something goes wrong. It returns what, after both have ended.
func (s *Server) drive(st *stream) error {
	stop := make(chan struct{})
	sent := make(chan error, 1)
	go func() { sent <- s.sendAll(st, stop) }()

	err := s.receiveAll(st)
	close(stop)
	st.conn.Close() // ends a send that waits for the proxy to read
	if sendErr := <-sent; sendErr != nil && errors.Is(err, net.ErrClosed) {
		return sendErr
	}
	return err
}

// sendAll sends as many messages as the window admits, again and again, until stop is
// closed or a send fails. A send may wait for a proxy that does not read: the message is
// in the window, and the time of the oldest one there ends the stream.
func (s *Server) sendAll(st *stream, stop <-chan struct{}) error {
	for {
		m := s.next(st)
		if m == nil {
			select {
			case <-st.wake:
				continue
			case <-stop:
				return nil
			}
		}
		err := m.send(st.conn)
		if err == nil {
			continue
		}
		if !s.unsent(st, m) {
			return errors.Join(errUnsolicited, st.conn.Close())
		}
		if !errors.Is(err, os.ErrClosed) { // else the pod left the set since next
			s.finish(st)
			return fmt.Errorf("sending %s %s: %w", m.kind, m.uid, err)
		}
	}
}

// next moves the message to send from the queue to the window. It returns nil if there is
// none, or none that may be sent now. Adds of pods that are no longer meant are skipped.
func (s *Server) next(st *stream) *message {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(st.queue) > 0 && len(st.window) < maxInFlight {
		m := st.queue[0]
		if m.kind == delPod && !st.ready {
			return nil // ztunnel ends on a del before the end of its snapshot
		}
		st.queue[0] = nil // whoever holds the rest must not hold what was sent
		st.queue = st.queue[1:]
		if m.kind == addPod && s.pods[m.uid] != m.pod {
			continue
		}
		if st.window = append(st.window, m); len(st.window) == 1 {
			s.expect(st)
		}
		return m
	}
	return nil
}

// unsent puts m, which could not be sent, back to the head of the queue: it is no answer's
// and nobody is to be struck for it. It returns false if the proxy has answered it
// nevertheless.
func (s *Server) unsent(st *stream, m *message) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	last := len(st.window) - 1
	if last < 0 || st.window[last] != m {
		return false
	}
	st.queue = slices.Insert(st.queue, 0, m)
	if st.window = st.window[:last]; last == 0 {
		s.expect(st)
	}
	return true
}

// finish ends a stream on which nothing can be sent any more, once what was sent before
// is answered.
func (s *Server) finish(st *stream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	st.finishing = true
	s.closeFinished(st)
}

func (s *Server) closeFinished(st *stream) {
	if st.finishing && len(st.window) == 0 {
		st.conn.Close()
	}
}

// expect gives the oldest message of the window, which has just become it, its time. The
// proxy works on one message after the other, so that each has all of it, however many
// were sent with it. The caller holds s.mu, so that deadlines are set in the order of
// the events.
func (s *Server) expect(st *stream) {
	var deadline time.Time
	if len(st.window) > 0 {
		deadline = time.Now().Add(s.ackTimeout)
	}
	// It fails on a closed connection, which reading finds as well.
	_ = st.conn.SetReadDeadline(deadline)
}

// receiveAll takes in answers until the stream ends, and returns why it did. Those that
// had come before its end are all taken in: the oldest message that is left is then the
// one at which the proxy ended.
func (s *Server) receiveAll(st *stream) error {
	answers := packet.NewReader(st.conn)
	for {
		nack, err := s.nextAnswer(st, answers)
		if err == nil {
			err = s.answer(st, nack)
		}
		if err != nil {
			return err
		}
	}
}

// nextAnswer reads the next answer, past two errors behind which there may be one.
func (s *Server) nextAnswer(st *stream, answers *packet.Reader) (nack string, err error) {
	for reset, late := false, false; ; {
		nack, err = readAnswer(answers)
		switch {
		case errors.Is(err, unix.ECONNRESET) && !reset:
			// The kernel tells first, and once, that the proxy has left messages
			// unread, and only then what it had answered.
			reset = true
		case errors.Is(err, os.ErrDeadlineExceeded) && !late:
			late = true
			s.lastLook(st)
		case errors.Is(err, os.ErrDeadlineExceeded):
			return "", s.overdue(st)
		default:
			return nack, err
		}
	}
}

func readAnswer(answers *packet.Reader) (nack string, err error) {
	b, err := readPlain(answers)
	if err != nil {
		return "", err
	}
	return packet.DecodeResponse(b)
}

// lastLook gives the oldest message's answer the time to be read if it has come: on a node
// that is too busy the agent itself may be what was late, and no pod may be struck for that.
func (s *Server) lastLook(st *stream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(st.window) > 0 {
		_ = st.conn.SetReadDeadline(time.Now().Add(lastLookTime)) // as in expect
	}
}

// overdue is the error of a stream whose oldest message has not been answered in time.
func (s *Server) overdue(st *stream) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := fmt.Errorf("no answer within %v", s.ackTimeout)
	if len(st.window) > 0 {
		return fmt.Errorf("sending %s %s: %w", st.window[0].kind, st.window[0].uid, err)
	}
	return err
}

// answer takes in what the proxy said to the oldest message of the window. An error ends
// the stream.
func (s *Server) answer(st *stream, nack string) error {
	m, accepted, heardBy := s.settleOldest(st, nack)
	switch {
	case m == nil:
		return errUnsolicited
	case m.kind == endSnapshot && nack != "":
		return fmt.Errorf("the node proxy refused the snapshot: %q", nack)
	case m.kind == endSnapshot:
		s.log.Info("node proxy has its snapshot", "accepted", accepted)
	case heardBy == unheard:
		s.log.Warn("node proxy refused a pod that it was to take over",
			"pod", m.pod.Namespace+"/"+m.pod.Name, "uid", m.uid, "err", nackError(m.uid, nack))
	}
	return nil
}

// settleOldest takes the oldest message off the window and does what its answer says. It
// returns the message, or nil if there is none, how many pods the proxy has accepted so
// far, and whether a refusal had an audience.
func (s *Server) settleOldest(st *stream, nack string) (m *message, accepted int, heardBy audience) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(st.window) == 0 {
		return nil, 0, heard
	}
	m = st.window[0]
	st.window = slices.Delete(st.window, 0, 1)
	st.answered = true
	s.expect(st)
	s.closeFinished(st)

	heardBy = heard
	switch err := nackError(m.uid, nack); {
	case m.kind == delPod:
		delete(st.acked, m.uid)
		m.outcome.settle(err)
	case m.kind == addPod && err != nil:
		heardBy = s.refused(st, m.pod, err)
	case m.kind == addPod:
		s.accepted(st, m.pod)
	case err == nil:
		st.ready = true
	}
	s.notify()
	if len(st.queue) > 0 && len(st.window) <= refillAt {
		st.signal()
	}
	return m, len(st.acked), heardBy
}

func (m *message) send(conn *net.UnixConn) error {
	if m.kind == addPod {
		return packet.Write(conn, m.pod.add, m.pod.netns)
	}
	encode := encodeSnapshotSent
	if m.kind == delPod {
		encode = func() ([]byte, error) { return encodeDel(m.uid) }
	}
	b, err := encode()
	if err != nil {
		return err
	}
	return packet.Write(conn, b, nil)
}

// SPDX-License-Identifier: Apache-2.0

package zds

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"time"

	"ambientd/nodeagent/zds/packet"
)

// stream is one proxy's connection. Its fields below wake are guarded by
// Server.mu; conn is used by the goroutines of drive alone.
type stream struct {
	conn  *net.UnixConn
	since time.Time
	wake  chan struct{} // holds a token when queue may have grown

	queue    []*message // at most one add and one del a pod, and the snapshot's end
	inFlight *message   // sent, or about to be, and not answered
	answered bool       // whether the proxy has answered anything
	ready    bool
	acked    map[string]*pod // what the proxy has accepted, by UID
}

type kind string

const (
	addPod      kind = "add"
	delPod      kind = "del"
	endSnapshot kind = "snapshot_sent"
)

type message struct {
	kind    kind
	uid     string
	pod     *pod    // of an add
	outcome outcome // of a del
}

// reply is what the reader of a stream found: an answer, or why it ended.
type reply struct {
	nack string
	err  error
}

var errUnsolicited = errors.New("the node proxy answered without having been asked")

func readHello(conn *net.UnixConn, timeout time.Duration) error {
	if err := conn.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return fmt.Errorf("waiting for its hello: %w", err)
	}
	b, err := readPlain(conn)
	if err != nil {
		return fmt.Errorf("waiting for its hello: %w", err)
	}
	if err := packet.DecodeHello(b); err != nil {
		return err
	}
	return conn.SetReadDeadline(time.Time{})
}

// readPlain reads a packet that must not carry a descriptor.
func readPlain(conn *net.UnixConn) ([]byte, error) {
	b, file, err := packet.Read(conn)
	if err != nil {
		return nil, err
	}
	if file != nil {
		return nil, errors.Join(errors.New("the node proxy sent a descriptor"), file.Close())
	}
	return b, nil
}

// join makes the connection the newest stream and queues its snapshot, of the
// number of pods returned.
func (s *Server) join(conn *net.UnixConn, now time.Time) (st *stream, pods int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	st = &stream{
		conn:  conn,
		since: now,
		wake:  make(chan struct{}, 1),
		acked: make(map[string]*pod),
	}
	for _, p := range s.ordered() {
		st.enqueue(&message{kind: addPod, uid: p.UID, pod: p})
	}
	st.enqueue(&message{kind: endSnapshot})
	s.streams = append(s.streams, st)
	s.notify()
	return st, len(s.pods)
}

// drive sends the stream's messages one by one until something goes wrong. It
// returns what, after its reader has ended too.
func (s *Server) drive(ctx context.Context, st *stream) error {
	replies := make(chan reply)
	stop := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		readReplies(st.conn, replies, stop)
	}()
	defer func() {
		close(stop)
		st.conn.Close()
		<-ended
	}()
	for {
		m := s.next(st)
		if m == nil {
			select {
			case <-st.wake:
				continue
			case r := <-replies:
				if r.err != nil {
					return r.err
				}
				return errUnsolicited
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		r := s.exchange(st.conn, m, replies)
		if errors.Is(r.err, os.ErrClosed) {
			continue // the pod left the set since next: nothing was sent
		}
		if r.err != nil {
			return fmt.Errorf("sending %s %s: %w", m.kind, m.uid, r.err)
		}
		if err := s.answer(st, m, r.nack); err != nil {
			return err
		}
	}
}

func readReplies(conn *net.UnixConn, replies chan<- reply, stop <-chan struct{}) {
	for {
		var r reply
		var b []byte
		if b, r.err = readPlain(conn); r.err == nil {
			r.nack, r.err = packet.DecodeResponse(b)
		}
		select {
		case replies <- r:
		case <-stop:
			return
		}
		if r.err != nil {
			return
		}
	}
}

// next takes the message to send off the queue, or returns nil. Adds of pods
// that are no longer meant are skipped.
func (s *Server) next(st *stream) *message {
	s.mu.Lock()
	defer s.mu.Unlock()
	st.inFlight = nil
	for len(st.queue) > 0 {
		m := st.queue[0]
		st.queue = st.queue[1:]
		if m.kind == addPod && s.pods[m.uid] != m.pod {
			continue
		}
		st.inFlight = m
		return m
	}
	st.queue = nil
	return nil
}

// exchange sends m and waits for its answer, for the ack timeout in total. The
// error is os.ErrClosed if the pod's netns was closed before it was sent.
func (s *Server) exchange(conn *net.UnixConn, m *message, replies <-chan reply) reply {
	b, netns, err := m.encode()
	if err != nil {
		return reply{err: err}
	}
	timeout := time.NewTimer(s.ackTimeout)
	defer timeout.Stop()
	if err := conn.SetWriteDeadline(time.Now().Add(s.ackTimeout)); err != nil {
		return reply{err: err}
	}
	if err := packet.Write(conn, b, netns); err != nil {
		return reply{err: err}
	}
	select {
	case r := <-replies:
		return r
	case <-timeout.C:
		return reply{err: fmt.Errorf("no answer within %v", s.ackTimeout)}
	}
}

func (m *message) encode() (b []byte, netns *os.File, err error) {
	switch m.kind {
	case addPod:
		return m.pod.add, m.pod.netns, nil
	case delPod:
		b, err = encodeDel(m.uid)
	case endSnapshot:
		b, err = encodeSnapshotSent()
	}
	return b, nil, err
}

// answer takes in what the proxy said to m. An error ends the stream.
func (s *Server) answer(st *stream, m *message, nack string) error {
	switch m.kind {
	case endSnapshot:
		if nack != "" {
			return fmt.Errorf("the node proxy refused the snapshot: %q", nack)
		}
		s.log.Info("node proxy has its snapshot", "accepted", s.completed(st))
	case delPod:
		s.deleted(st, m, nackError(m.uid, nack))
	case addPod:
		if nack == "" {
			s.accepted(st, m.pod)
			return nil
		}
		why := &NackError{UID: m.uid, Reason: nack}
		if s.refused(st, m.pod, why) == unheard {
			s.log.Warn("node proxy refused a pod that it was to take over",
				"pod", m.pod.Namespace+"/"+m.pod.Name, "uid", m.uid, "err", why)
		}
	}
	return nil
}

func nackError(uid, nack string) error {
	if nack == "" {
		return nil
	}
	return &NackError{UID: uid, Reason: nack}
}

// completed marks the end of a snapshot of which the proxy accepted so many.
func (s *Server) completed(st *stream) (accepted int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	st.answered, st.ready = true, true
	s.notify()
	return len(st.acked)
}

func (s *Server) deleted(st *stream, m *message, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	st.answered = true
	delete(st.acked, m.uid)
	m.outcome.settle(err)
	s.notify()
}

func (s *Server) accepted(st *stream, p *pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	st.answered = true
	p.endings, p.strikes = 0, 0
	st.acked[p.UID] = p
	s.notify()
	if st == s.newest() && s.pods[p.UID] == p {
		p.outcome.settle(nil)
	}
}

// audience says whether anybody was waiting for a proxy's answer.
type audience string

const (
	heard   audience = "heard"
	unheard audience = "unheard"
)

// refused takes a pod back from the proxy that refused it. Only the newest
// proxy's word decides about the set: an old one may refuse what its successor
// has taken over, and goes on serving what its successor refuses.
func (s *Server) refused(st *stream, p *pod, why *NackError) audience {
	s.mu.Lock()
	defer s.mu.Unlock()
	st.answered = true
	delete(st.acked, p.UID)
	switch now := s.pods[p.UID]; {
	case now == nil:
		st.enqueueDel(p.UID)
		return heard // by whoever took it out
	case now != p:
		return heard // what replaced it is queued
	}
	if st == s.newest() {
		waits := !p.outcome.settled
		s.remove(p, why)
		if waits {
			s.enqueueDels(p.UID)
			return heard
		}
	}
	st.enqueueDel(p.UID)
	return unheard
}

// leave forgets a stream that has ended, and brings the one before it up to
// date if it was the newest.
func (s *Server) leave(st *stream) {
	if p := s.forget(st); p != nil {
		s.log.Warn("pod taken from the node proxy: one stream after the other ended at it",
			"pod", p.Namespace+"/"+p.Name, "uid", p.UID, "streams", maxStrikes)
	}
}

// forget does so, and returns the pod that was taken out of the set for having
// ended one stream too many, or nil.
func (s *Server) forget(st *stream) (removed *pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	wasNewest := st == s.newest()
	s.streams = slices.DeleteFunc(s.streams, func(o *stream) bool { return o == st })
	pending := st.queue
	if m := st.inFlight; m != nil {
		pending = append(pending, m)
		if m.kind == addPod {
			removed = s.strike(st, m.pod)
		}
	}
	for _, m := range pending {
		if m.kind == delPod {
			m.outcome.settle(nil) // the proxy's next snapshot lacks the pod
		}
	}
	if newest := s.newest(); wasNewest && newest != nil {
		s.promote(newest)
	}
	s.notify()
	return removed
}

// strike counts a stream that ended while p's add was unanswered, and returns p
// if it has left the set for it: it must not keep a proxy from ever completing
// its snapshot. A proxy that answered nothing at all says nothing about p, but
// p comes last in the next snapshot, which will tell.
func (s *Server) strike(st *stream, p *pod) *pod {
	p.endings++
	if !st.answered {
		return nil
	}
	p.strikes++
	if p.strikes < maxStrikes || s.pods[p.UID] != p || !p.outcome.settled {
		return nil // while an Add waits, its own deadline bounds the attempts
	}
	s.remove(p, ErrNoAck)
	return p
}

// promote tells a stream that has become the newest what it has missed. What
// it serves although its successor refused it, it keeps until a Del.
func (s *Server) promote(st *stream) {
	queued := make(map[*pod]struct{}, len(st.queue)+1)
	for _, m := range append(st.queue[:len(st.queue):len(st.queue)], st.inFlight) {
		if m != nil && m.kind == addPod {
			queued[m.pod] = struct{}{}
		}
	}
	for _, p := range s.ordered() {
		if st.acked[p.UID] == p {
			p.outcome.settle(nil)
		} else if _, ok := queued[p]; !ok {
			st.enqueue(&message{kind: addPod, uid: p.UID, pod: p})
		}
	}
}

// enqueueAdd queues p's add, in the place of an earlier pod of that UID.
func (st *stream) enqueueAdd(p *pod) {
	st.dropAdd(p.UID)
	st.enqueue(&message{kind: addPod, uid: p.UID, pod: p})
}

// enqueueDel queues a del, unless one is queued, and drops a queued add.
func (st *stream) enqueueDel(uid string) *outcome {
	st.dropAdd(uid)
	for _, m := range st.queue {
		if m.kind == delPod && m.uid == uid {
			return &m.outcome
		}
	}
	m := &message{kind: delPod, uid: uid, outcome: newOutcome()}
	st.enqueue(m)
	return &m.outcome
}

func (st *stream) dropAdd(uid string) {
	st.queue = slices.DeleteFunc(st.queue, func(m *message) bool { return m.kind == addPod && m.uid == uid })
}

func (st *stream) enqueue(m *message) {
	st.queue = append(st.queue, m)
	select {
	case st.wake <- struct{}{}:
	default:
	}
}

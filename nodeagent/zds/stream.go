// SPDX-License-Identifier: Apache-2.0

package zds

import (
	"errors"
	"fmt"
	"iter"
	"net"
	"slices"
	"time"

	"ambientd/nodeagent/zds/packet"
)

// stream is one proxy's connection. Its fields below wake are guarded by
// Server.mu; what conn reads and writes is the business of drive's goroutines.
type stream struct {
	conn  *net.UnixConn
	since time.Time
	wake  chan struct{} // holds a token when there may be something to send

	queue     []*message // to be sent: at most one add and one del a pod that is meant, and the snapshot's end
	window    []*message // sent, or about to be, and not answered; the oldest first
	finishing bool       // nothing can be sent any more
	answered  bool       // whether the proxy has answered anything
	ready     bool
	acked     map[string]*pod // what the proxy has accepted, by UID
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

func readHello(conn *net.UnixConn, timeout time.Duration) error {
	if err := conn.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return fmt.Errorf("waiting for its hello: %w", err)
	}
	b, err := readPlain(packet.NewReader(conn))
	if err != nil {
		return fmt.Errorf("waiting for its hello: %w", err)
	}
	if err := packet.DecodeHello(b); err != nil {
		return err
	}
	return conn.SetReadDeadline(time.Time{})
}

// readPlain reads a packet that must not carry a descriptor.
func readPlain(packets *packet.Reader) ([]byte, error) {
	b, file, err := packets.Next()
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
		conn:   conn,
		since:  now,
		wake:   make(chan struct{}, 1),
		window: make([]*message, 0, maxInFlight),
		acked:  make(map[string]*pod),
	}
	for _, p := range s.ordered() {
		st.enqueue(&message{kind: addPod, uid: p.UID, pod: p})
	}
	st.enqueue(&message{kind: endSnapshot})
	s.streams = append(s.streams, st)
	s.notify()
	return st, len(s.pods)
}

func nackError(uid, nack string) error {
	if nack == "" {
		return nil
	}
	return &NackError{UID: uid, Reason: nack}
}

func (s *Server) accepted(st *stream, p *pod) {
	p.endings, p.strikes = 0, 0
	if st.takesBack(p.UID) {
		return // a del is under way; the add behind it is what counts
	}
	st.acked[p.UID] = p
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
func (s *Server) refused(st *stream, p *pod, why error) audience {
	delete(st.acked, p.UID)
	if now := s.pods[p.UID]; now != p {
		if st.hasSentDel(p.UID) {
			return heard
		}
		// The proxy would try p again also beside the pod that has replaced it.
		st.enqueueDel(p.UID)
		if now != nil && st == s.newest() {
			st.enqueueAdd(now)
		}
		return heard // by whoever took it out
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
	// The proxy works on one message after the other: what came after the oldest
	// has nothing to do with the end.
	if len(st.window) > 0 && st.window[0].kind == addPod {
		removed = s.strike(st, st.window[0].pod)
	}
	for m := range st.unanswered() {
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
	coming := make(map[string]*pod) // by UID, once all is answered
	for m := range st.unanswered() {
		switch m.kind {
		case addPod:
			coming[m.uid] = m.pod
		case delPod:
			delete(coming, m.uid) // also what the proxy has accepted, or will have, before it
		}
	}
	for _, p := range s.ordered() {
		if st.acked[p.UID] == p && !st.takesBack(p.UID) {
			p.outcome.settle(nil)
		} else if coming[p.UID] != p {
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

// hasSentDel says whether a del of the pod is under way.
func (st *stream) hasSentDel(uid string) bool {
	return slices.ContainsFunc(st.window, func(m *message) bool { return m.kind == delPod && m.uid == uid })
}

// takesBack says whether a del of the pod is yet to be answered.
func (st *stream) takesBack(uid string) bool {
	for m := range st.unanswered() {
		if m.kind == delPod && m.uid == uid {
			return true
		}
	}
	return false
}

// unanswered returns the messages that are under way or queued, in their order.
func (st *stream) unanswered() iter.Seq[*message] {
	return func(yield func(*message) bool) {
		for _, messages := range [][]*message{st.window, st.queue} {
			for _, m := range messages {
				if !yield(m) {
					return
				}
			}
		}
	}
}

// enqueue wakes the sender unless the window is full: it is woken then as that empties.
func (st *stream) enqueue(m *message) {
	st.queue = append(st.queue, m)
	if len(st.window) < maxInFlight {
		st.signal()
	}
}

func (st *stream) signal() {
	select {
	case st.wake <- struct{}{}:
	default:
	}
}

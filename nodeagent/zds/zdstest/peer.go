// SPDX-License-Identifier: Apache-2.0

// Package zdstest is a node proxy for tests: it speaks ZDS on a real socket,
// answers as its script says, and records what it was told. It opens no
// listener in any pod, and has no opinion about the order of messages beyond
// that of the protocol: what ztunnel ends on, it ends on.
package zdstest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"sync"

	"google.golang.org/protobuf/proto"

	"ambientd/nodeagent/zds/packet"
	"ambientd/nodeagent/zds/zdspb"
)

// Kind is the kind of message that an agent sends.
type Kind string

// The kinds of messages.
const (
	Add          Kind = "add"
	Keep         Kind = "keep"
	Del          Kind = "del"
	SnapshotSent Kind = "snapshot_sent"
)

// Event is a message that the peer received.
type Event struct {
	Kind Kind
	// UID is empty for SnapshotSent only, the next three for all but Add.
	UID            string
	Name           string
	Namespace      string
	ServiceAccount string
	// Cookie is the netns cookie of the descriptor that came with an Add, as
	// SO_NETNS_COOKIE gives it. It is 0, with CookieErr saying why, when the
	// test may not enter the netns or what was passed is none.
	Cookie    uint64
	CookieErr error
}

// Answer is what the peer does with a message.
type Answer struct {
	nack   string
	silent bool
	hangup bool
}

// Ack accepts.
func Ack() Answer { return Answer{} }

// Nack refuses with a reason, which must not be empty: that would be an ack.
func Nack(reason string) Answer { return Answer{nack: reason} }

// Silence never answers, and reads on.
func Silence() Answer { return Answer{silent: true} }

// Hangup closes the connection instead of answering.
func Hangup() Answer { return Answer{hangup: true} }

// Script decides about one message. It may block: the peer answers late then,
// and like any proxy reads on only afterwards. ctx ends when the peer is closed.
type Script func(ctx context.Context, e Event) Answer

// AckAll accepts everything.
func AckAll(context.Context, Event) Answer { return Ack() }

// NackUIDs refuses the adds of these pods and accepts everything else.
func NackUIDs(reason string, uids ...string) Script {
	return func(_ context.Context, e Event) Answer {
		if e.Kind == Add && slices.Contains(uids, e.UID) {
			return Nack(reason)
		}
		return Ack()
	}
}

// Peer is one connection of a node proxy.
type Peer struct {
	conn   *net.UnixConn
	script Script
	cancel context.CancelFunc
	done   chan struct{}

	mu      sync.Mutex
	events  []Event
	pods    map[string]Event // accepted and not deleted
	refused map[string]Event // refused and not deleted
	ready   bool
	err     error         // why the connection ended
	changed chan struct{} // closed and replaced at every change of the above
}

// Dial connects to an agent's ZDS socket, says hello, and answers by script,
// nil being AckAll, until Close or until the agent closes the connection.
func Dial(ctx context.Context, socket string, script Script) (*Peer, error) {
	conn, err := DialRaw(ctx, socket)
	if err != nil {
		return nil, err
	}
	if err := Send(conn, &zdspb.ZdsHello{Version: zdspb.Version_V1}); err != nil {
		return nil, errors.Join(fmt.Errorf("sending hello: %w", err), conn.Close())
	}
	if script == nil {
		script = AckAll
	}
	runCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	p := &Peer{
		conn:    conn,
		script:  script,
		cancel:  cancel,
		done:    make(chan struct{}),
		pods:    make(map[string]Event),
		refused: make(map[string]Event),
		changed: make(chan struct{}),
	}
	go p.run(runCtx)
	return p, nil
}

// DialRaw connects and says nothing: for tests of what a peer must not do.
func DialRaw(ctx context.Context, socket string) (*net.UnixConn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "unixpacket", socket)
	if err != nil {
		return nil, fmt.Errorf("connecting to the ZDS socket: %w", err)
	}
	return conn.(*net.UnixConn), nil
}

// Send writes m as one packet.
func Send(conn *net.UnixConn, m proto.Message) error {
	b, err := packet.Encode(m)
	if err != nil {
		return err
	}
	return packet.Write(conn, b, nil)
}

// SendAnswer writes an ack, or with a reason a NACK, asked for or not.
func SendAnswer(conn *net.UnixConn, reason string) error {
	return Send(conn, &zdspb.WorkloadResponse{Payload: &zdspb.WorkloadResponse_Ack{Ack: &zdspb.Ack{Error: reason}}})
}

func (p *Peer) run(ctx context.Context) {
	defer close(p.done)
	defer p.conn.Close()
	for {
		e, err := p.receive()
		if err == nil {
			err = p.answer(ctx, e)
		}
		if err != nil {
			p.update(func() { p.err = err })
			return
		}
	}
}

// receive reads and records the next message.
func (p *Peer) receive() (Event, error) {
	b, file, err := packet.Read(p.conn)
	if err != nil {
		return Event{}, fmt.Errorf("reading from the agent: %w", err)
	}
	if file != nil {
		defer file.Close()
	}
	request, err := packet.DecodeRequest(b, packet.Beside(file))
	if err != nil {
		return Event{}, err
	}
	e := event(request, file)
	p.mu.Lock()
	ready := p.ready
	p.mu.Unlock()
	if ready && (e.Kind == Keep || e.Kind == SnapshotSent) || !ready && e.Kind == Del {
		return Event{}, fmt.Errorf("protocol error: %s, with the snapshot complete: %t", e.Kind, ready)
	}
	p.update(func() { p.events = append(p.events, e) })
	return e, nil
}

func event(request *zdspb.WorkloadRequest, file *os.File) Event {
	switch m := request.GetPayload().(type) {
	case *zdspb.WorkloadRequest_Add:
		info := m.Add.GetWorkloadInfo()
		e := Event{
			Kind:           Add,
			UID:            m.Add.GetUid(),
			Name:           info.GetName(),
			Namespace:      info.GetNamespace(),
			ServiceAccount: info.GetServiceAccount(),
		}
		e.Cookie, e.CookieErr = Cookie(file)
		return e
	case *zdspb.WorkloadRequest_Keep:
		return Event{Kind: Keep, UID: m.Keep.GetUid()}
	case *zdspb.WorkloadRequest_Del:
		return Event{Kind: Del, UID: m.Del.GetUid()}
	default: // DecodeRequest lets no other through
		return Event{Kind: SnapshotSent}
	}
}

func (p *Peer) answer(ctx context.Context, e Event) error {
	a := p.script(ctx, e)
	if ctx.Err() != nil {
		return net.ErrClosed
	}
	if a.hangup {
		return errors.New("hung up by script")
	}
	if a.silent {
		return nil
	}
	// Recorded first: whoever sees the agent act on the answer sees it here too.
	p.update(func() {
		if a.nack == "" {
			p.accept(e)
		} else if e.Kind == Add {
			delete(p.pods, e.UID)
			p.refused[e.UID] = e
		}
	})
	return SendAnswer(p.conn, a.nack)
}

func (p *Peer) accept(e Event) {
	switch e.Kind {
	case Add:
		p.pods[e.UID] = e
	case Del:
		delete(p.pods, e.UID)
		delete(p.refused, e.UID)
	case SnapshotSent:
		p.ready = true
	}
}

func (p *Peer) update(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
	close(p.changed)
	p.changed = make(chan struct{})
}

// State is what a Peer knows at one moment.
type State struct {
	Events []Event          // everything received so far
	Pods   map[string]Event // adds accepted and not deleted, by UID
	// Refused has adds refused and not deleted, by UID. Like ztunnel, which tries them
	// again by itself, the peer forgets none of them for a later add that it accepts.
	Refused map[string]Event
	Ready   bool  // SnapshotSent was accepted
	Err     error // why the connection ended; nil while it lasts
}

// Seen says whether an event of that kind and UID was received.
func (s State) Seen(k Kind, uid string) bool { return s.Count(k, uid) > 0 }

// Count returns how many events of that kind and UID were received.
func (s State) Count(k Kind, uid string) int {
	n := 0
	for _, e := range s.Events {
		if e.Kind == k && e.UID == uid {
			n++
		}
	}
	return n
}

// State returns a copy of the present state.
func (p *Peer) State() State {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.state()
	s.Events, s.Pods, s.Refused = slices.Clone(s.Events), maps.Clone(s.Pods), maps.Clone(s.Refused)
	return s
}

func (p *Peer) state() State {
	return State{Events: p.events, Pods: p.pods, Refused: p.refused, Ready: p.ready, Err: p.err}
}

// Await returns once cond holds. Its error is the context's, or the one that
// ended the connection before cond held. cond gets the live state, which it
// must neither keep nor change, and must not call the peer.
func (p *Peer) Await(ctx context.Context, cond func(State) bool) error {
	for {
		met, changed, ended := p.check(cond)
		if met {
			return nil
		}
		if ended != nil {
			return fmt.Errorf("awaiting a state of the ZDS peer: connection ended: %w", ended)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			s := p.State()
			return fmt.Errorf("awaiting a state of the ZDS peer: %w; %d events, %d pods, ready=%t",
				ctx.Err(), len(s.Events), len(s.Pods), s.Ready)
		}
	}
}

func (p *Peer) check(cond func(State) bool) (met bool, changed <-chan struct{}, ended error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return cond(p.state()), p.changed, p.err
}

// AwaitReady returns once the snapshot is complete and accepted.
func (p *Peer) AwaitReady(ctx context.Context) error {
	return p.Await(ctx, func(s State) bool { return s.Ready })
}

// AwaitPod returns the add of a pod once the peer has accepted it.
func (p *Peer) AwaitPod(ctx context.Context, uid string) (Event, error) {
	var e Event
	err := p.Await(ctx, func(s State) bool {
		var ok bool
		e, ok = s.Pods[uid]
		return ok
	})
	return e, err
}

// AwaitDel returns once the peer has been sent a del of the pod.
func (p *Peer) AwaitDel(ctx context.Context, uid string) error {
	return p.Await(ctx, func(s State) bool { return s.Seen(Del, uid) })
}

// Done is closed when the connection has ended; State then says why.
func (p *Peer) Done() <-chan struct{} { return p.done }

// Close ends the connection and waits for the script to return.
func (p *Peer) Close() error {
	p.cancel()
	err := p.conn.Close()
	<-p.done
	if errors.Is(err, net.ErrClosed) {
		return nil // it had ended already
	}
	return err
}

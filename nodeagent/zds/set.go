// SPDX-License-Identifier: Apache-2.0

package zds

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"ambientd/nodeagent/zds/packet"
	"ambientd/nodeagent/zds/zdspb"
)

// pod is a member of the intended set. A later Add of the same UID makes a new
// one, so that "still meant" is: s.pods[uid] is this very pod.
type pod struct {
	Workload
	seq     uint64   // order of the Adds
	add     []byte   // the encoded AddWorkload
	netns   *os.File // our own duplicate, closed when the pod leaves the set
	endings int      // streams in a row that ended while this add was unanswered
	strikes int      // those of them whose proxy had answered something before
	outcome outcome  // of the Add that brought it
}

// outcome is settled once, under Server.mu; err may be read after done.
type outcome struct {
	done    chan struct{}
	err     error
	settled bool
}

func newOutcome() outcome { return outcome{done: make(chan struct{})} }

// settle records err unless the outcome is known already.
func (o *outcome) settle(err error) {
	if !o.settled {
		o.err, o.settled = err, true
		close(o.done)
	}
}

// Add puts a pod into the set and waits until the newest node proxy has
// accepted it. While none is connected, or one is reconnecting, it waits on:
// the pod is part of the next proxy's snapshot.
//
// The descriptor of netns is duplicated and stays open until the pod leaves
// the set. An Add of a UID that is in the set already replaces that pod, unless
// it is the same in the same netns and has been accepted before: then nothing
// is sent, Add waits until the newest proxy has it, and leaves it in the set
// whatever comes of that.
//
// It returns nil, a *NackError when the proxy refused, ErrNoProxy or ErrNoAck
// with the context's error, ErrSuperseded, or ErrStopped. After any error of a
// pod that was not accepted before it is out of the set, and proxies that may
// have heard of it are sent a del, which Add does not wait for.
func (s *Server) Add(ctx context.Context, w Workload, netns *os.File) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("adding pod %s to the node proxy: %w", w.UID, err)
	}
	if p := s.member(w, netns); p != nil {
		return s.awaitAcked(ctx, p)
	}
	p, err := newPod(w, netns)
	if err != nil {
		return err
	}
	s.insert(p)

	select {
	case <-p.outcome.done:
	case <-ctx.Done():
		s.giveUp(p, ended(ctx))
	}
	return p.outcome.err // its text names proxy and cause
}

// Put puts a pod into the set and does not wait: for pods that an agent finds
// enrolled when it starts, before any proxy is connected. The proxies get it with
// their snapshot, or with an add. What they say to it shows in Acked; one that
// refuses it takes it out of the set as in Add.
func (s *Server) Put(w Workload, netns *os.File) error {
	p, err := newPod(w, netns)
	if err != nil {
		return err
	}
	p.outcome.settle(nil)
	s.insert(p)
	return nil
}

// member returns what is in the set as w in this netns and has been accepted by a
// proxy, or nil.
func (s *Server) member(w Workload, netns *os.File) *pod {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pods[w.UID]
	if p == nil || p.Workload != w || !p.outcome.settled {
		return nil
	}
	// Both are open, so that no other netns has the inode.
	ours, ourErr := p.netns.Stat()
	theirs, theirErr := netns.Stat()
	if ourErr != nil || theirErr != nil || !os.SameFile(ours, theirs) {
		return nil
	}
	return p
}

// awaitAcked waits until the newest proxy has p.
func (s *Server) awaitAcked(ctx context.Context, p *pod) error {
	for {
		changed := s.Changed()
		missing := s.missing(p)
		if !errors.Is(missing, ErrNoProxy) && !errors.Is(missing, ErrNoAck) {
			return missing
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", missing, ended(ctx))
		}
	}
}

// missing says what keeps p from being with the newest proxy; nil if nothing does.
func (s *Server) missing(p *pod) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	newest := s.newest()
	switch {
	case s.stopped:
		return ErrStopped
	case s.pods[p.UID] != p:
		return ErrSuperseded
	case newest == nil:
		return ErrNoProxy
	case newest.acked[p.UID] != p:
		return ErrNoAck
	}
	return nil
}

// Del takes a pod out of the set at once, ends an Add of it that waits, and
// tells every connected proxy. It waits for their answers until ctx ends; a
// proxy that disconnects meanwhile needs none, as its next snapshot lacks the
// pod. Nil too when nobody is connected or the pod is not in the set. Errors:
// ErrNoAck with the context's error, and *NackError.
func (s *Server) Del(ctx context.Context, uid string) error {
	for _, told := range s.delete(uid) {
		select {
		case <-told.done:
		case <-ctx.Done():
			return fmt.Errorf("removing pod %s from the node proxy: %w: %w", uid, ErrNoAck, ctx.Err())
		}
		if told.err != nil {
			return fmt.Errorf("removing pod %s from the node proxy: %w", uid, told.err)
		}
	}
	return nil
}

// Acked says whether the pod is in the set and the newest proxy has accepted
// it on its present connection.
func (s *Server) Acked(uid string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	newest := s.newest()
	return newest != nil && s.pods[uid] != nil && newest.acked[uid] == s.pods[uid]
}

// Holds says whether the pod is in the set: meant to be with every proxy, whatever
// they have said to it so far.
func (s *Server) Holds(uid string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pods[uid] != nil
}

// newPod makes a member of the set, with a descriptor of its own.
func newPod(w Workload, netns *os.File) (*pod, error) {
	if w.UID == "" || w.Name == "" || w.Namespace == "" || w.ServiceAccount == "" {
		return nil, fmt.Errorf("adding pod %+v to the node proxy: a field is empty", w)
	}
	if netns == nil {
		return nil, fmt.Errorf("adding pod %s to the node proxy: no netns given", w.UID)
	}
	add, err := encodeAdd(w)
	if err != nil {
		return nil, fmt.Errorf("adding pod %s to the node proxy: %w", w.UID, err)
	}
	own, err := duplicate(netns)
	if err != nil {
		return nil, fmt.Errorf("adding pod %s to the node proxy: duplicating its netns: %w", w.UID, err)
	}
	return &pod{Workload: w, add: add, netns: own, outcome: newOutcome()}, nil
}

func (s *Server) insert(p *pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		s.settleAndClose(p, ErrStopped)
		return
	}
	if old := s.pods[p.UID]; old != nil {
		s.settleAndClose(old, ErrSuperseded)
		// The newest proxy is sent an add and replaces the old netns by it.
		// The others would go on serving the old one.
		for _, st := range s.streams {
			if st != s.newest() {
				st.enqueueDel(p.UID)
			}
		}
	}
	s.lastSeq++
	p.seq = s.lastSeq
	s.pods[p.UID] = p
	if newest := s.newest(); newest != nil {
		newest.enqueueAdd(p)
	}
}

// ended is why ctx has ended: of a time that is over, in the words of whoever has set it.
func ended(ctx context.Context) error {
	if cause := context.Cause(ctx); errors.Is(cause, context.DeadlineExceeded) {
		return cause
	}
	return ctx.Err()
}

// giveUp undoes an Add whose context has ended, unless its outcome came first.
func (s *Server) giveUp(p *pod, cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.outcome.settled {
		return
	}
	reason := ErrNoAck
	if s.newest() == nil {
		reason = ErrNoProxy
	}
	s.remove(p, fmt.Errorf("%w: %w", reason, cause))
	s.enqueueDels(p.UID)
}

func (s *Server) delete(uid string) []*outcome {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.pods[uid]; p != nil {
		s.remove(p, ErrSuperseded)
	}
	return s.enqueueDels(uid)
}

// enqueueDels sends a del to every stream. The outcomes are settled when the
// stream's proxy has answered or the stream has ended.
func (s *Server) enqueueDels(uid string) []*outcome {
	outcomes := make([]*outcome, 0, len(s.streams))
	for _, st := range s.streams {
		outcomes = append(outcomes, st.enqueueDel(uid))
	}
	return outcomes
}

// remove takes p, which is a member, out of the set.
func (s *Server) remove(p *pod, why error) {
	delete(s.pods, p.UID)
	s.notify()
	s.settleAndClose(p, why)
}

func (s *Server) settleAndClose(p *pod, why error) {
	if err := p.netns.Close(); err != nil {
		s.log.Error("closing a netns", "uid", p.UID, "err", err)
	}
	p.outcome.settle(why)
}

// newest returns the stream that adds go to, or nil.
func (s *Server) newest() *stream {
	if len(s.streams) == 0 {
		return nil
	}
	return s.streams[len(s.streams)-1]
}

// ordered returns the set in the order in which a snapshot sends it: pods that
// have ended a stream come last, so that the others get past them; pods whose
// Add waits come first.
func (s *Server) ordered() []*pod {
	pods := make([]*pod, 0, len(s.pods))
	for _, p := range s.pods {
		pods = append(pods, p)
	}
	slices.SortFunc(pods, func(a, b *pod) int {
		waits := 0
		if a.outcome.settled != b.outcome.settled {
			waits = 1
			if b.outcome.settled {
				waits = -1
			}
		}
		return cmp.Or(cmp.Compare(a.endings, b.endings), waits, cmp.Compare(a.seq, b.seq))
	})
	return pods
}

func encodeAdd(w Workload) ([]byte, error) {
	return packet.Encode(&zdspb.WorkloadRequest{Payload: &zdspb.WorkloadRequest_Add{Add: &zdspb.AddWorkload{
		Uid: w.UID,
		WorkloadInfo: &zdspb.WorkloadInfo{
			Name:           w.Name,
			Namespace:      w.Namespace,
			ServiceAccount: w.ServiceAccount,
		},
	}}})
}

func encodeDel(uid string) ([]byte, error) {
	return packet.Encode(&zdspb.WorkloadRequest{Payload: &zdspb.WorkloadRequest_Del{Del: &zdspb.DelWorkload{Uid: uid}}})
}

func encodeSnapshotSent() ([]byte, error) {
	return packet.Encode(&zdspb.WorkloadRequest{Payload: &zdspb.WorkloadRequest_SnapshotSent{SnapshotSent: &zdspb.SnapshotSent{}}})
}

func duplicate(f *os.File) (*os.File, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	var dup int
	var dupErr error
	if err := raw.Control(func(fd uintptr) { dup, dupErr = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) }); err != nil {
		return nil, errors.Join(os.ErrClosed, err)
	}
	if dupErr != nil {
		return nil, os.NewSyscallError("fcntl", dupErr)
	}
	return os.NewFile(uintptr(dup), f.Name()), nil
}

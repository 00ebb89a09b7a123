// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"ambientd/iptables/netnswatch"
	"ambientd/nodeagent/podnetns"
)

const (
	// settleTime is between the notice of a change and the audit that it prompts. Most changes
	// come in several, a table and then a policy rule, and are to be one repair.
	settleTime = 100 * time.Millisecond

	// hostSettleTime is the same for the host, whose set changes with every pod that comes
	// or goes: looking at all of it takes the longer the more pods there are.
	hostSettleTime = 400 * time.Millisecond

	// burst is how many audits of one subject notifications can prompt in an interval.
	burst = 10

	// firstRetry is the pause after a failed audit; it doubles up to the interval.
	firstRetry = time.Second

	// hostUID stands for the host among subjects. No pod has it: a UID is not empty.
	hostUID = ""
)

// subject is what is audited: a pod, or the host.
type subject struct {
	uid      string
	key      podnetns.Key
	id       netnswatch.ID
	watched  *podnetns.Netns // by id; nil while it is not watched
	due      time.Time       // of the next regular audit
	prompted time.Time       // of an audit that a notification asks for; zero for none
	running  bool
	failures int // in a row
	budget   budget

	// By queue.
	next   time.Time // at, when it was put in
	index  int
	queued bool
}

// at is when the subject is to be audited next.
func (s *subject) at() time.Time {
	if !s.prompted.IsZero() && s.prompted.Before(s.due) {
		return s.prompted
	}
	return s.due
}

// budget bounds how often a subject is audited beyond the schedule.
type budget struct {
	left float64
	at   time.Time // when left was so
}

// spend returns how long the next prompted audit has to wait, settle at least, and counts
// it.
func (b *budget) spend(now time.Time, interval, settle time.Duration) time.Duration {
	rate := burst / interval.Seconds()
	b.left = min(burst, b.left+now.Sub(b.at).Seconds()*rate)
	b.at = now
	b.left--
	if b.left >= 0 {
		return settle
	}
	return max(settle, time.Duration(-b.left/rate*float64(time.Second)))
}

// schedule is the state of Run, which alone uses it.
type schedule struct {
	*Auditor
	subjects map[string]*subject // by UID
	byID     map[netnswatch.ID]*subject
	waiting  queue // those that no audit is at work on
	done     chan finished
	running  sync.WaitGroup
}

// finished is an audit that has ended.
type finished struct {
	uid    string
	failed bool
}

// Run audits by schedule and on notifications until ctx ends, and returns nil when no
// audit is at work any more.
func (a *Auditor) Run(ctx context.Context) error {
	s := &schedule{
		Auditor: a, subjects: map[string]*subject{}, byID: map[netnswatch.ID]*subject{}, done: make(chan finished),
	}
	defer s.running.Wait()
	var events <-chan netnswatch.ID
	if a.cfg.Watcher != nil {
		events = a.cfg.Watcher.Events()
	}
	s.byID[netnswatch.Own] = s.add(hostUID, podnetns.Key{})
	s.follow(ctx, nil, a.cfg.Pods.Enrolled())
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		timer.Reset(s.start(ctx))
		select {
		case <-ctx.Done():
			return nil
		case <-a.cfg.Changes.Changed():
			gone, enrolled := a.cfg.Changes.Changes()
			s.follow(ctx, gone, enrolled)
		case id := <-events:
			s.prompt(id)
		case f := <-s.done:
			s.finish(ctx, f)
		case <-timer.C:
		}
	}
}

// start starts what is due, and returns the time until the next is.
func (s *schedule) start(ctx context.Context) time.Duration {
	now := time.Now()
	for {
		subject, pause := s.waiting.due(now, s.cfg.Interval)
		if subject == nil {
			return pause
		}
		s.audit(ctx, subject)
	}
}

// audit audits in the background; those that find no place wait for one.
func (s *schedule) audit(ctx context.Context, subject *subject) {
	subject.running, subject.prompted = true, time.Time{}
	uid := subject.uid
	s.running.Go(func() {
		f := finished{uid: uid}
		if uid == hostUID {
			_, err := s.auditHost(ctx)
			f.failed = err != nil
		} else {
			// A pod that could not be looked at is ending, as a rule; if it does not go, what is
			// wrong with it is told soon.
			found, ok := s.auditPod(ctx, uid)
			f.failed = !ok || found.Err != nil
		}
		select {
		case s.done <- f:
		case <-ctx.Done():
		}
	})
}

// finish sets when the subject is audited next. A notification that came meanwhile has
// its own time.
func (s *schedule) finish(ctx context.Context, f finished) {
	subject, ok := s.subjects[f.uid]
	if !ok {
		s.results.forget(f.uid) // the pod went while it was audited
		return
	}
	subject.running = false
	pause := s.cfg.Interval
	if !f.failed {
		subject.failures = 0
	} else {
		pause = min(pause, firstRetry<<min(subject.failures, 30))
		subject.failures++
	}
	// Spread by a tenth either way, so that subjects that fell into step part again.
	subject.due = time.Now().Add(pause*9/10 + rand.N(pause/5+1))
	s.waiting.put(subject)
	if subject.uid != hostUID {
		s.watch(ctx, subject)
	}
}

// prompt asks for an audit of what has changed.
func (s *schedule) prompt(id netnswatch.ID) {
	if id != netnswatch.All {
		if subject, ok := s.byID[id]; ok {
			s.hurry(subject)
		}
		return
	}
	for _, subject := range s.byID {
		s.hurry(subject)
	}
}

// hurry counts one notification. Further ones, until the audit that it asks for has
// begun, are answered by that.
func (s *schedule) hurry(subject *subject) {
	if subject.prompted.IsZero() {
		now, settle := time.Now(), settleTime
		if subject.uid == hostUID {
			settle = hostSettleTime
		}
		subject.prompted = now.Add(subject.budget.spend(now, s.cfg.Interval, settle))
		if !subject.running {
			s.waiting.put(subject)
		}
	}
}

// add makes something a subject, somewhere in the next interval.
func (s *schedule) add(uid string, key podnetns.Key) *subject {
	now := time.Now()
	added := &subject{uid: uid, key: key, due: now.Add(rand.N(s.cfg.Interval)), budget: budget{left: burst, at: now}}
	s.subjects[uid] = added
	s.waiting.put(added)
	return added
}

// follow takes up pods that have been enrolled, or have moved to another netns, and lets
// go of those that have gone.
func (s *schedule) follow(ctx context.Context, gone, enrolled []string) {
	// Those that have gone first: the kernel may have given their numbers to new ones. The
	// same goes for a netns that a pod has left.
	for _, uid := range gone {
		if subject, ok := s.subjects[uid]; ok {
			s.unwatch(subject)
			s.waiting.remove(subject)
			delete(s.subjects, uid)
		}
		s.results.forget(uid)
	}
	var moved []*subject
	for _, uid := range enrolled {
		ns, ok := s.cfg.Pins.Get(uid)
		if !ok {
			continue // it is leaving, which will be told
		}
		switch known := s.subjects[uid]; {
		case known == nil:
			moved = append(moved, s.add(uid, ns.Key()))
		case known.key != ns.Key():
			s.unwatch(known)
			known.key = ns.Key()
			moved = append(moved, known)
		default:
			moved = append(moved, known)
		}
	}
	for _, subject := range moved {
		s.watch(ctx, subject)
	}
}

// watch begins to watch a pod's netns, or goes on through what is pinned of it now: another
// ADD, as of a second interface, has closed what was.
func (s *schedule) watch(ctx context.Context, pod *subject) {
	if s.cfg.Watcher == nil {
		return
	}
	ns, ok := s.cfg.Pins.Get(pod.uid)
	if !ok || ns.Key() != pod.key || ns == pod.watched {
		return // another change is on its way, or there is nothing to do
	}
	id, err := s.cfg.Watcher.Watch(ctx, ns)
	if err != nil {
		// The pod is leaving, as a rule, and its netns closed; otherwise its regular audits
		// are what notices.
		s.unwatch(pod)
		s.cfg.Logger.Debug("changes in a pod are noticed late, once an interval", "uid", pod.uid, "netns", ns.Key().String(), "err", err)
		return
	}
	pod.id, pod.watched = id, ns
	s.byID[id] = pod
}

// unwatch ends watching, unless the number is another subject's already: the kernel gave it
// to a new netns before the end of this one was told.
func (s *schedule) unwatch(subject *subject) {
	if subject.watched != nil && s.byID[subject.id] == subject {
		s.cfg.Watcher.Unwatch(subject.id)
		delete(s.byID, subject.id)
	}
	subject.watched = nil
}

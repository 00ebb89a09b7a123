// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"context"
	"errors"
	"time"

	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/workload"
)

// A pod outside the mesh with rules of ours in its netns is cut off: they lead to a node proxy that
// does not know it. Nothing tells of them where an agent was killed before it wrote the pod's record,
// and the pod's label went off before the next one came. So each running pod outside the mesh is
// looked at once after the start, and those that are known to hold some until they do not.

// holding is what is known of our rules in the netns of a pod.
type holding int

const (
	holdsUnknown holding = iota // an earlier agent may have left some
	holdsOurs                   // some were written there
	holdsNone
)

// rounds says when pods outside the mesh are looked at next. They have it in common, because one
// search costs the same for all.
type rounds struct {
	at    time.Time // zero while there is none to look at
	pause time.Duration
}

// due tells whether it is time, with so many pods to look at. The first round waits too: the start
// of an agent, when most of them are there, has other things to do.
func (r *rounds) due(pods int, now time.Time) bool {
	switch {
	case pods == 0:
		*r = rounds{}
	case r.at.IsZero():
		*r = rounds{at: now.Add(firstRetry), pause: firstRetry}
	default:
		return !now.Before(r.at)
	}
	return false
}

// end ends a round after which so many pods are left.
func (r *rounds) end(left int, now time.Time) {
	if left == 0 {
		*r = rounds{}
		return
	}
	r.pause = min(2*r.pause, lastRetry)
	r.at = now.Add(r.pause)
}

// wait is the time until the next round, an hour where there is none.
func (r *rounds) wait(now time.Time) time.Duration {
	if r.at.IsZero() {
		return time.Hour
	}
	return max(r.at.Sub(now), 0)
}

func (e *Enroller) noteHolding(uid string, what holding) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.holds[uid] = what
}

func (e *Enroller) holding(uid string) holding {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.holds[uid]
}

// remove takes our rules out of the pod's netns.
func (e *Enroller) remove(ctx context.Context, uid string, ns *podnetns.Netns) error {
	if err := e.cfg.Redirection.Remove(ctx, ns); err != nil {
		return err
	}
	e.noteHolding(uid, holdsNone)
	return nil
}

// hasRules tells whether the pod's netns holds rules of ours. It is true on an error: what is not known
// is not to be removed.
func (e *Enroller) hasRules(ctx context.Context, uid string, ns *podnetns.Netns) (bool, error) {
	switch e.holding(uid) {
	case holdsOurs:
		return true, nil
	case holdsNone:
		return false, nil
	}
	there, err := e.cfg.Redirection.HasOwn(ctx, ns.Do)
	return there || err != nil, err
}

// suspects returns the running pods outside the mesh that may hold rules of ours.
func (e *Enroller) suspects(l listing) []workload.Pod {
	e.mu.Lock()
	defer e.mu.Unlock()
	var suspects []workload.Pod
	for _, i := range l.byUID {
		pod := l.pods[i]
		if e.isSuspect(pod) && (e.withheld[pod.UID] || !e.cfg.Policy.Decide(pod).InMesh) {
			suspects = append(suspects, pod)
		}
	}
	return suspects
}

// isSuspect tells whether a pod may hold rules of ours, if it is outside the mesh. The caller holds
// Enroller.mu.
func (e *Enroller) isSuspect(pod workload.Pod) bool {
	_, enrolled := e.pods[pod.UID]
	_, placed := e.places[pod.UID]
	may := e.holds[pod.UID] != holdsNone
	runs := placed || len(pod.IPs) > 0 // without either nothing leads to its netns
	return may && runs && !enrolled && !pod.HostNetwork && !pod.Ended() && !e.isOver(pod)
}

// clearSuspects removes our rules from pods outside the mesh that hold some, if it is time for that.
func (e *Enroller) clearSuspects(ctx context.Context, listed listing, next *rounds) {
	if !next.due(len(e.suspects(listed)), time.Now()) {
		return
	}
	suspects := e.suspects(e.list()) // what else there was to do has taken its time
	wanted := make([]podnetns.Wanted, 0, len(suspects))
	for _, pod := range suspects {
		wanted = append(wanted, e.wanted(pod))
	}
	found, missing := e.cfg.Finder.Find(ctx, wanted)
	work := newWork()
	for _, pod := range suspects {
		if ns, ok := found[pod.UID]; ok {
			work.do(pod.UID, func() error { return e.clearOutside(ctx, pod, ns) })
		} else {
			work.note(pod.UID, e.notFound(pod.UID, missing[pod.UID]))
		}
	}
	left := 0
	var failures []error
	for _, err := range work.wait() {
		if err != nil {
			left++
		}
		if err != nil && !errors.Is(err, podnetns.ErrNotFound) {
			failures = append(failures, err)
		}
	}
	if len(failures) > 0 && ctx.Err() == nil {
		// One of them: mostly they have the same cause.
		e.cfg.Logger.Warn("pods outside the mesh may hold rules of an earlier enrolment yet, they are looked at again",
			"pods", len(failures), "err", failures[0])
	}
	next.end(left, time.Now())
}

// notFound returns why a pod is to be looked for again, nil if it is not: one of which nothing is
// known is not worth a second search in vain.
func (e *Enroller) notFound(uid string, why error) error {
	if e.holding(uid) == holdsOurs || !errors.Is(why, podnetns.ErrNotFound) {
		return why
	}
	e.noteHolding(uid, holdsNone)
	return nil
}

// clearOutside removes our rules, if there are any, from the netns of a pod that does not belong in
// the mesh, and notes that the pod is outside. It owns ns.
func (e *Enroller) clearOutside(ctx context.Context, pod workload.Pod, ns *podnetns.Netns) error {
	release, err := e.turns.take(ctx, pod.UID)
	if err != nil {
		return errors.Join(&StepError{Step: stepTurn, Err: err}, ns.Close())
	}
	defer release()
	decision := e.decide(pod)
	if _, meanwhile := e.enrolment(pod.UID); meanwhile || decision.InMesh {
		return ns.Close()
	}
	// So that no other pod is enrolled in there meanwhile: the address that led to it may be
	// another's by now.
	if err := e.pin(pod.UID, ns); err != nil {
		return &StepError{Step: stepNetns, Err: err}
	}
	removed, err := e.clearPinned(ctx, pod.UID, ns)
	if removed {
		e.mu.Lock()
		e.attachments.setSkipped(pod.UID, ns.Key(), decision.Reason)
		e.mu.Unlock()
		e.remember(pod.UID)
		e.cfg.Logger.Info("rules of an earlier enrolment removed from a pod outside the mesh", "pod", pod.String(), "uid", pod.UID,
			"netns", ns.Key().String(), "reason", decision.Reason)
	}
	return errors.Join(err, e.pins.Unpin(pod.UID))
}

// clearPinned tells whether it has removed rules. Where some were written it does not look first: what
// is left of them need not be packet rules.
func (e *Enroller) clearPinned(ctx context.Context, uid string, ns *podnetns.Netns) (removed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	there, err := e.hasRules(ctx, uid, ns)
	if err == nil {
		var other bool
		other, err = e.cfg.Predecessors.RemoveOther(ctx, ns)
		there = there || other
	}
	switch {
	case err != nil:
	case there:
		err = e.remove(ctx, uid, ns)
	default:
		e.noteHolding(uid, holdsNone)
	}
	if err != nil {
		return false, &StepError{Step: stepRedirection, Err: err}
	}
	return there, nil
}

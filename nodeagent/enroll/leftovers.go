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

// clearSuspects removes our rules from pods outside the mesh that hold some. One search serves all that
// are due, and one that is new waits for a moment: the start of an agent, when most of them are there,
// has other things to do.
func (e *Enroller) clearSuspects(ctx context.Context, listed listing, left retries) {
	suspects, now := e.suspects(listed), time.Now()
	left.keep(suspects)
	for _, pod := range suspects {
		if _, known := left[pod.UID]; !known {
			left[pod.UID] = retry{at: now.Add(firstRetry), pause: firstRetry}
		}
	}
	if len(left.due(suspects, now)) == 0 {
		return
	}
	work := newWork()
	due := left.due(e.suspects(e.list()), now) // what else there was to do has taken its time
	wanted := make([]podnetns.Wanted, 0, len(due))
	for _, pod := range due {
		wanted = append(wanted, e.wanted(pod))
	}
	found, missing := e.cfg.Finder.Find(ctx, wanted)
	for _, pod := range due {
		if ns, ok := found[pod.UID]; ok {
			work.do(pod.UID, func() error { return e.clearOutside(ctx, pod, ns) })
		} else {
			work.note(pod.UID, e.notFound(pod.UID, missing[pod.UID]))
		}
	}
	outcomes := work.wait()
	for _, pod := range due {
		e.noteCleared(pod, outcomes[pod.UID], left)
	}
}

// noteCleared notes what became of a look at a pod. What failed is told of once.
func (e *Enroller) noteCleared(pod workload.Pod, err error, left retries) {
	if err == nil {
		delete(left, pod.UID)
		return
	}
	next := left.postponed(pod.UID, err, time.Now())
	next.told = left[pod.UID].told
	if !next.told && !errors.Is(err, podnetns.ErrNotFound) && !errors.Is(err, context.Canceled) {
		e.cfg.Logger.Warn("pod outside the mesh may hold rules of an earlier enrolment yet, it is looked at again",
			"pod", pod.String(), "uid", pod.UID, "err", err)
		next.told = true
	}
	left[pod.UID] = next
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

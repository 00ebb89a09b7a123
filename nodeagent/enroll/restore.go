// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"context"
	"errors"
	"fmt"

	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/records"
	"ambientd/nodeagent/workload"
)

// Restore takes up what an earlier agent of this boot has left: attachments and
// places from the records, and every pod that was enrolled, with its netns pinned,
// its identity registered, its rules verified (and written only where they differ)
// and its place in the proxy's set. It is called once, before proxies and plugins are
// served, so that the first snapshot is whole.
//
// A pod that cannot be taken up is left to [Enroller.Run]; what a pod has left that
// does not belong in the mesh any more is cleared. It returns the UIDs of the pods that
// were enrolled, whatever became of them.
func (e *Enroller) Restore(ctx context.Context) (earlier []string, err error) {
	known, bad, err := e.cfg.Records.All()
	if err != nil {
		return nil, fmt.Errorf("reading the records of an earlier agent: %w", err)
	}
	for _, err := range bad {
		e.cfg.Logger.Warn("a record of an earlier agent is not in use", "err", err)
	}
	for _, r := range known {
		e.recall(r)
	}
	listed := e.list()
	enrolled := map[string]records.Record{}
	var wanted []podnetns.Wanted
	for _, r := range known {
		if r.Skipped == "" {
			earlier = append(earlier, r.UID)
			enrolled[r.UID] = r
			wanted = append(wanted, podnetns.Wanted{UID: r.UID, IPs: r.IPs, NetnsPath: r.NetnsPath, Key: r.Key})
		}
	}
	if err := e.cfg.Probes.Together(ctx, func() { e.restoreFound(ctx, listed, enrolled, wanted) }); err != nil {
		e.cfg.Logger.Warn("probes of some pods may not bypass the proxy until the host is audited", "err", err)
	}
	e.forgetGone(listed)
	return earlier, nil
}

// restoreFound finds the pods' netns in one pass and takes each of them up, or
// clears it if the pod does not belong in the mesh any more. A pod whose object cannot be
// read, because the source cannot be reached, is taken up as it was recorded:
// [Enroller.Run] puts right what has changed meanwhile, once it can tell.
func (e *Enroller) restoreFound(ctx context.Context, listed listing, recorded map[string]records.Record, wanted []podnetns.Wanted) {
	if len(wanted) == 0 {
		return
	}
	found, missing := e.cfg.Finder.Find(ctx, wanted)
	work := newWork()
	for uid, err := range missing {
		if _, known := listed.pod(uid); known || !listed.complete { // or else it has ended meanwhile
			work.note(uid, err)
		}
	}
	for uid, ns := range found {
		pod, known := listed.pod(uid)
		asRecorded, hasPod := recordedPod(recorded[uid])
		switch {
		case known && e.cfg.Policy.Decide(pod).InMesh:
			work.do(uid, func() error { return e.restorePod(ctx, pod, ns) })
		case known:
			work.do(uid, func() error { return e.clearOutside(ctx, pod, ns) })
		case listed.complete:
			work.do(uid, func() error { return e.clear(ctx, ns) })
		case hasPod:
			work.do(uid, func() error { return e.restorePod(ctx, asRecorded, ns) })
		default:
			work.note(uid, errors.Join(errors.New("its object cannot be read at the moment"), ns.Close()))
		}
	}
	for uid, err := range work.wait() {
		if err != nil {
			r := recorded[uid]
			e.cfg.Logger.Warn("a pod that an earlier agent had enrolled is not taken up yet", "pod", r.Namespace+"/"+r.Name, "uid", uid, "err", err)
		}
	}
}

// restorePod takes one pod up again. It owns ns.
func (e *Enroller) restorePod(ctx context.Context, pod workload.Pod, ns *podnetns.Netns) error {
	release, err := e.turns.take(ctx, pod.UID)
	if err != nil {
		return errors.Join(&StepError{Step: stepTurn, Err: err}, ns.Close())
	}
	defer release()
	p, err := e.prepare(pod, e.restoredPlace(pod, ns.Key()))
	if err != nil {
		return errors.Join(&StepError{Step: stepIdentity, Err: err}, ns.Close())
	}
	noWait := func(context.Context, *enrolment) error { return nil }
	w := way{redirect: e.settle, announce: e.present, certify: noWait, commit: func() { e.commit(p) }}
	// Whole: a pod that is not taken up is enrolled by Run, from nothing. Its rules
	// stay meanwhile, so that it fails closed.
	if err := runOn(ctx, e.steps(p, ns, w)); err != nil {
		return errors.Join(err, e.setDown(ctx, p))
	}
	return nil
}

// restoredPlace is the place that the pod's record tells of, or if another netns turned out to
// be the pod's now, that one as a running pod's is.
func (e *Enroller) restoredPlace(pod workload.Pod, key podnetns.Key) place {
	e.mu.Lock()
	where := e.places[pod.UID]
	e.mu.Unlock()
	if where.key == key {
		return where
	}
	return e.placeOf(pod, key)
}

// setDown forgets a pod that could not be taken up, but for its rules.
func (e *Enroller) setDown(ctx context.Context, p *enrolment) error {
	uid := p.pod.UID
	e.forgetEnrolment(p)
	e.cfg.Identities.Unregister(uid)
	return errors.Join(e.cfg.Probes.Remove(ctx, uid), e.retract(ctx, uid), e.pins.Unpin(uid))
}

// clear removes our rules from a netns whose pod has left the mesh. It owns ns.
func (e *Enroller) clear(ctx context.Context, ns *podnetns.Netns) error {
	return errors.Join(e.cfg.Redirection.Remove(ctx, ns), ns.Close())
}

// forgetGone forgets recorded pods whose object is gone.
func (e *Enroller) forgetGone(listed listing) {
	if !listed.complete {
		return
	}
	e.mu.Lock()
	var gone []string
	for uid := range e.places {
		_, isListed := listed.pod(uid)
		_, isEnrolled := e.pods[uid]
		if !isListed && !isEnrolled {
			gone = append(gone, uid)
		}
	}
	e.mu.Unlock()
	for _, uid := range gone {
		e.forgetPlace(uid)
	}
}

// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/workload"
)

// Inventory lists the pods of this node. A list that is not complete says nothing
// about pods that are missing from it.
type Inventory interface {
	List() (pods []workload.Pod, complete bool)
	Changed() <-chan struct{}
}

// Finder finds the netns of running pods, all in one pass. The caller closes what
// is found; for each pod that is not there is an error.
type Finder interface {
	Find(ctx context.Context, wanted []podnetns.Wanted) (map[string]*podnetns.Netns, map[string]error)
}

// Run keeps what is enrolled in step with the inventory until ctx ends: pods that
// began to belong in the mesh while they ran are enrolled, those that ceased to are
// withdrawn, changed options are applied in place. What fails is tried again with a
// growing pause, until it succeeds or the pod is gone.
func (e *Enroller) Run(ctx context.Context) error {
	again, over, left := retries{}, retries{}, retries{}
	for {
		e.converge(ctx, again, over, left)
		now := time.Now()
		timer := time.NewTimer(min(again.pause(now), over.pause(now), left.pause(now)))
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-e.cfg.Inventory.Changed():
		case <-e.wake:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// objectGone is the reason of a withdrawal for that.
const objectGone = "its object is gone"

// plan is what separates the inventory from what is enrolled.
type plan struct {
	enrol    []workload.Pod
	reapply  []workload.Pod    // enrolled, with options that have changed
	withdraw map[string]string // UID to the reason
	forget   []string          // UIDs of pods whose object is gone, and whose end no DEL will tell
	over     []workload.Pod    // in the mesh, with a sandbox that has ended, and no other known
	stale    []workload.Pod    // out of the mesh, with an object that shows something else
}

// plan compares the inventory with what is enrolled. A pod whose ADD is at work
// is left to that.
func (e *Enroller) plan(l listing) plan {
	p := plan{withdraw: map[string]string{}}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, i := range l.byUID {
		pod := l.pods[i]
		current, known := e.pods[pod.UID]
		decision := e.cfg.Policy.Decide(pod)
		switch {
		case known && !current.done:
		case known && !decision.InMesh:
			p.withdraw[pod.UID] = decision.Reason
		case known && e.changedOptions(current, pod):
			p.reapply = append(p.reapply, pod)
		case !known && decision.InMesh && !e.withheld[pod.UID] && e.isOver(pod):
			// Its object is there for a while yet, and its address may be another pod's by now.
			p.over = append(p.over, pod)
		case !known && decision.InMesh && !e.withheld[pod.UID]:
			p.enrol = append(p.enrol, pod)
		case !known && pod.Annotations[workload.AnnotationRedirection] != "":
			p.stale = append(p.stale, pod)
		}
	}
	if !l.complete {
		return p
	}
	for uid, current := range e.pods {
		if _, ok := l.pod(uid); !ok && current.done {
			p.withdraw[uid] = objectGone
		}
	}
	for uid := range e.places {
		if _, ok := l.pod(uid); !ok && e.isLeft(uid) {
			p.forget = append(p.forget, uid)
		}
	}
	for uid := range e.withheld {
		if _, ok := l.pod(uid); !ok {
			delete(e.withheld, uid)
			e.attachments.setSkipped(uid, e.places[uid].key, objectGone)
		}
	}
	for uid := range e.ended {
		if _, ok := l.pod(uid); !ok {
			delete(e.ended, uid)
		}
	}
	for uid := range e.holds {
		if _, ok := l.pod(uid); !ok {
			delete(e.holds, uid)
		}
	}
	return p
}

// converge carries out the plan once. Pods that could not be enrolled, or were not
// found running, are noted in again, those without a sandbox in over, and in left when those
// outside the mesh are looked at.
func (e *Enroller) converge(ctx context.Context, again, over, left retries) {
	for _, uid := range e.takeReleased() {
		// It may have been looked for in vain before it ran: its operator does not wait for that.
		delete(again, uid)
	}
	listed := e.list()
	p := e.plan(listed)
	again.keep(slices.Concat(p.enrol, p.reapply))
	// As when an earlier agent ended between the withdrawal and the word of it: whoever believed
	// the annotation would talk to the pod in a way that nobody there understands.
	for _, pod := range p.stale {
		e.cfg.Reporter.State(pod, StateOut)
	}
	work := newWork()
	for uid, reason := range p.withdraw {
		work.do(uid, func() error { return e.leave(ctx, uid, reason) })
	}
	for _, uid := range p.forget {
		work.do(uid, func() error { return e.forgetLeft(ctx, uid) })
	}
	for _, pod := range again.due(p.reapply, time.Now()) {
		work.do(pod.UID, func() error { return e.reapply(ctx, pod) })
	}
	e.enrolRunning(ctx, work, again.due(p.enrol, time.Now()))
	for uid, err := range work.wait() {
		if err == nil {
			delete(again, uid)
			continue
		}
		again.note(uid, err, time.Now())
		if !errors.Is(err, podnetns.ErrNotFound) {
			e.cfg.Logger.Warn("pod does not follow its object yet, it is tried again", "uid", uid, "err", err)
		}
	}
	e.reportUnfound(again.unfound(p.enrol), again)
	e.reportOver(p.over, over, time.Now())
	e.noteOutside(p, again, over)
	e.clearSuspects(ctx, listed, left)
}

// reportUnfound tells of pods that run and are not found.
func (e *Enroller) reportUnfound(pods []workload.Pod, again retries) {
	for _, pod := range pods {
		e.cfg.Logger.Warn("running pod stays outside the mesh: its network namespace is not found; the agent has to see the host's processes "+
			"(--proc-root) and /var/run/netns", "pod", pod.String(), "uid", pod.UID, "err", again[pod.UID].why)
		e.cfg.Reporter.Event(pod, ReasonFailed, "it is outside the mesh: the agent does not find its network namespace")
	}
}

// reportOver tells of pods that go on running, as their objects say, for a while after their
// sandbox has ended. Such a pod is not looked for, only counted as if it were.
func (e *Enroller) reportOver(pods []workload.Pod, over retries, now time.Time) {
	pods = slices.DeleteFunc(pods, func(pod workload.Pod) bool { return pod.Deleting })
	over.keep(pods)
	for _, pod := range over.due(pods, now) {
		over.note(pod.UID, podnetns.ErrNotFound, now)
	}
	for _, pod := range over.unfound(pods) {
		e.cfg.Logger.Warn("running pod stays outside the mesh: the runtime has ended its sandbox and told of no other; if it runs, delete it, so that it is made anew",
			"pod", pod.String(), "uid", pod.UID)
		e.cfg.Reporter.Event(pod, ReasonFailed, "it is outside the mesh: "+sandboxOver)
	}
}

// enrolRunning finds the netns of the pods in one pass and enrols those found. A
// pod that is not found is not running here yet, as a rule: its ADD will come.
func (e *Enroller) enrolRunning(ctx context.Context, work *work, pods []workload.Pod) {
	if len(pods) == 0 {
		return
	}
	wanted := make([]podnetns.Wanted, 0, len(pods))
	for _, pod := range pods {
		wanted = append(wanted, e.wanted(pod))
	}
	found, missing := e.cfg.Finder.Find(ctx, wanted)
	notes := e.recordLater(ctx, len(found))
	work.atEnd(notes.wait)
	work.atEnd(e.expectProbes(ctx, pods, found))
	for _, pod := range pods {
		if ns, ok := found[pod.UID]; ok {
			work.do(pod.UID, func() error { return e.enrolFound(ctx, pod, ns, notes.add) })
			continue
		}
		work.note(pod.UID, missing[pod.UID])
	}
	notes.begin()
}

// expectProbes has the probe entries of the pods found written at once, and returns what is
// to be called when they are enrolled.
func (e *Enroller) expectProbes(ctx context.Context, pods []workload.Pod, found map[string]*podnetns.Netns) func() {
	if len(found) < 2 {
		return func() {}
	}
	done, err := e.cfg.Probes.Expect(ctx, func(yield func([]netip.Addr, []uint16) bool) {
		for _, pod := range pods {
			if ns, ok := found[pod.UID]; ok && !yield(e.placeOf(pod, ns.Key()).ips, pod.Probes) {
				return
			}
		}
	})
	if err != nil {
		e.cfg.Logger.Debug("probe entries of pods are written one by one", "err", err)
	}
	return func() {
		if err := done(context.WithoutCancel(ctx)); err != nil {
			e.cfg.Logger.Warn("probe entries of pods that were not enrolled could not be taken out", "err", err)
		}
	}
}

// wanted says what is known of where the pod runs.
func (e *Enroller) wanted(pod workload.Pod) podnetns.Wanted {
	e.mu.Lock()
	defer e.mu.Unlock()
	w := podnetns.Wanted{UID: pod.UID, IPs: pod.IPs}
	if place, ok := e.places[pod.UID]; ok {
		w.NetnsPath, w.Key = place.path, place.key
		if len(w.IPs) == 0 {
			w.IPs = place.ips
		}
	}
	return w
}

// enrolFound enrols a running pod in the netns found, or not at all. It owns ns.
func (e *Enroller) enrolFound(ctx context.Context, pod workload.Pod, ns *podnetns.Netns, record func(uid string)) error {
	release, err := e.turns.take(ctx, pod.UID)
	if err != nil {
		return errors.Join(&StepError{Step: stepTurn, Err: err}, ns.Close())
	}
	defer release()
	if _, meanwhile := e.enrolment(pod.UID); meanwhile || e.isWithheld(pod.UID) {
		return ns.Close()
	}
	if e.hasEnded(pod, ns.Key()) {
		return errors.Join(fmt.Errorf("its sandbox has ended: %w", podnetns.ErrNotFound), ns.Close())
	}
	return e.enrolRunningIn(ctx, pod, e.placeOf(pod, ns.Key()), ns, record)
}

// enrolRunningIn enrols a running pod in its place, which ns is, or not at all. The
// caller holds the pod's turn and hands ns over.
func (e *Enroller) enrolRunningIn(ctx context.Context, pod workload.Pod, where place, ns *podnetns.Netns, record func(uid string)) error {
	p, err := e.prepare(pod, where)
	if err != nil {
		return errors.Join(&StepError{Step: stepIdentity, Err: err}, ns.Close())
	}
	w := way{redirect: e.settle, announce: e.announce, certify: e.awaitCertificate, commit: func() { e.commit(p) }, record: record}
	if err := runWhole(ctx, e.steps(p, ns, w)); err != nil {
		e.forgetEnrolment(p)
		e.reportFailure(pod, err)
		return fmt.Errorf("enrolling running pod %s: %w", pod, err)
	}
	e.cfg.Reporter.Event(pod, ReasonEnrolled, "enrolled in the mesh while it ran")
	e.cfg.Logger.Info("running pod enrolled", "pod", pod.String(), "uid", pod.UID, "netns", p.netns.String(),
		"identity", p.identity.String(), "families", p.families.String())
	return nil
}

// placeOf is where a running pod was found. What was recorded of that netns counts.
func (e *Enroller) placeOf(pod workload.Pod, key podnetns.Key) place {
	e.mu.Lock()
	defer e.mu.Unlock()
	where, ok := e.places[pod.UID]
	if !ok || where.key != key {
		where = place{namespace: pod.Namespace, name: pod.Name, key: key, ips: where.ips} // those it was looked for by
	}
	if len(pod.IPs) > 0 {
		where.ips = pod.IPs
	}
	where.kept = e.cfg.ExistingConnections == KeepConnections
	return where
}

// leave takes a running pod out of the mesh because its object says so, or is gone.
// Where it runs is remembered as long as its object is there.
func (e *Enroller) leave(ctx context.Context, uid, reason string) error {
	release, err := e.turns.take(ctx, uid)
	if err != nil {
		return &StepError{Step: stepTurn, Err: err}
	}
	defer release()
	p, enrolled := e.enrolment(uid)
	if !enrolled {
		return nil
	}
	e.mu.Lock()
	e.attachments.setSkipped(uid, p.netns, reason)
	e.mu.Unlock()
	err = e.takeOut(ctx, p)
	if reason != objectGone || !e.forgetIfLeft(uid) {
		e.remember(uid)
	}
	e.cfg.Logger.Info("running pod withdrawn", "pod", p.pod.String(), "uid", uid, "netns", p.netns.String(), "reason", reason)
	return err
}

// changedOptions tells whether the pod's object asks for other rules than are in
// place. It is asked of all pods whenever one changes, and comparing what options lead to
// is dear. The caller holds Enroller.mu.
func (e *Enroller) changedOptions(p *enrolment, pod workload.Pod) bool {
	if workload.SameOptions(p.pod, pod) {
		return false
	}
	options, malformed := e.options(pod, p.place)
	return options.Key() != p.options.Key() || !slices.Equal(malformed, p.malformed)
}

// reapply changes the rules of an enrolled pod in place. When that fails the pod
// keeps what it has, and is tried again.
func (e *Enroller) reapply(ctx context.Context, pod workload.Pod) error {
	release, err := e.turns.take(ctx, pod.UID)
	if err != nil {
		return &StepError{Step: stepTurn, Err: err}
	}
	defer release()
	p, enrolled := e.enrolment(pod.UID)
	ns, pinned := e.pins.Get(pod.UID)
	if !enrolled || !pinned {
		return nil
	}
	options, malformed := e.options(pod, p.place)
	families := p.families
	if options.Key() != p.options.Key() {
		if families, err = e.cfg.Redirection.Apply(ctx, ns, options); err != nil {
			e.cfg.Reporter.Event(pod, ReasonFailed, "its changed options are not in force yet: "+err.Error())
			return &StepError{Step: stepRedirection, Err: err}
		}
	}
	e.mu.Lock()
	p.pod, p.options, p.malformed, p.families = pod, options, malformed, families
	e.mu.Unlock()
	e.reportMalformed(p)
	e.cfg.Logger.Info("options of a running pod applied", "pod", pod.String(), "uid", pod.UID, "netns", p.netns.String())
	return nil
}

func (e *Enroller) isWithheld(uid string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.withheld[uid]
}

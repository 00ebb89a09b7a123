// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"io/fs"
	"time"
)

const (
	// settlePause is between two looks at whether all pods are known; it doubles up to
	// settlePauseMax.
	settlePause    = 50 * time.Millisecond
	settlePauseMax = 5 * time.Second

	// takeoverWait is how long another agent's rule for probes may stay for the sake of
	// pods that belong in the mesh and are not enrolled: they may not run at all.
	takeoverWait = 30 * time.Second
)

// settleHost waits until the pods of the time before this start are known, and then
// takes out of the host's netns what nobody needs any more: entries of pods that ended
// while no agent ran, and the rule of whoever looked after probes before.
func (p *parts) settleHost(ctx context.Context) error {
	settled, takenOver := false, false
	told := "" // of what does not work yet
	began := time.Now()
	attempt := func(step string, do func(context.Context) error) bool {
		err := do(ctx)
		if err != nil && ctx.Err() == nil && err.Error() != told {
			told = err.Error()
			p.cfg.Logger.Warn("the host is not settled yet, it is tried again", "step", step, "err", err)
		}
		return err == nil
	}
	for pause := settlePause; ; pause = min(2*pause, settlePauseMax) {
		all := p.enrolledOf(func(string) bool { return true })
		if !settled && p.enrolledOf(p.isEarlier) {
			settled = attempt("taking out probe entries of pods that have gone", p.probes.Settle)
		}
		if !takenOver && settled && (all || time.Since(began) > takeoverWait) {
			takenOver = attempt("taking another agent's rule for probes out of the host", p.takeOverHost)
		}
		if settled && takenOver {
			p.cfg.Logger.Debug("the host is settled", "took", time.Since(began).Round(time.Millisecond))
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
}

// takeOverHost takes out the rule of another agent, or of our other backend. Where the
// agent's root is not the machine's, in a user namespace, the kernel may not show it what
// x_tables has in the netns that came with that: nobody else has programmed it either.
func (p *parts) takeOverHost(ctx context.Context) error {
	found, err := p.backend.Predecessors.RemoveFromHost(ctx, onHost)
	if errors.Is(err, fs.ErrPermission) {
		p.cfg.Logger.Warn("another agent's rule for probes cannot be looked for everywhere", "err", err)
		return nil
	}
	if found && err == nil {
		p.cfg.Logger.Info("another agent's or backend's rule for probes taken out of the host")
	}
	return err
}

// restHost takes the rule for probes out of the host if it is sure that no pod needs it.
func (p *parts) restHost(ctx context.Context) error {
	if len(p.enroller.Enrolled()) > 0 {
		return nil
	}
	if p.enrolledOf(p.isEarlier) { // settleHost may be waiting still
		if err := p.probes.AllAdded(ctx); err != nil {
			return err
		}
	}
	return p.probes.Rest(ctx)
}

// isEarlier tells whether an earlier agent had enrolled the pod.
func (p *parts) isEarlier(uid string) bool {
	_, earlier := p.earlier[uid]
	return earlier
}

// enrolledOf tells whether all those pods of a complete list that belong in the mesh
// are enrolled, kept out by an operator, or have ended: then only their objects are left.
func (p *parts) enrolledOf(of func(uid string) bool) bool {
	pods, complete := p.pods.List()
	if !complete {
		return false
	}
	enrolled := map[string]struct{}{}
	for _, uid := range p.enroller.Enrolled() {
		enrolled[uid] = struct{}{}
	}
	for _, pod := range pods {
		if _, ok := enrolled[pod.UID]; ok || !of(pod.UID) || !p.policy.Decide(pod).InMesh {
			continue
		}
		if !p.enroller.Withheld(pod.UID) && !p.enroller.Ended(pod.UID) {
			return false
		}
	}
	return true
}

// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"ambientd/nodeagent/workload"
)

// ErrNoSuchPod says that an operator named a pod that is not there.
var ErrNoSuchPod = errors.New("no such pod on this node; name it as NAMESPACE/NAME, or by its UID")

// withheldReason is why a withheld pod is outside the mesh.
const withheldReason = "an operator has withdrawn it"

// awaitedReason is why a pod that belongs in the mesh is still outside.
const awaitedReason = "it is enrolled as soon as its network namespace is found"

// sandboxOver is why one is not looked for.
const sandboxOver = "its sandbox has ended, as the runtime says, and the agent was told of no other"

// decide says whether a pod that starts belongs in the mesh: the policy's word, unless
// an operator has had the last one.
func (e *Enroller) decide(pod workload.Pod) workload.Decision {
	decision := e.cfg.Policy.Decide(pod)
	if decision.InMesh && e.isWithheld(pod.UID) {
		return workload.Decision{Reason: withheldReason}
	}
	return decision
}

// Withhold takes pods out of the mesh because an operator says so, and keeps them
// out until [Enroller.Release], or the agent's next start. names are "namespace/name"
// or UIDs; none means all enrolled pods. Nothing of anybody's redirection is left in
// their netns. It returns the pods that it has taken out.
func (e *Enroller) Withhold(ctx context.Context, names []string) ([]string, error) {
	pods, err := e.named(names)
	if err != nil {
		return nil, err
	}
	var out []string
	work := newWork()
	for _, pod := range pods {
		out = append(out, pod.String())
		work.do(pod.UID, func() error { return e.withhold(ctx, pod) })
	}
	slices.Sort(out)
	return out, joinByPod(work.wait())
}

func (e *Enroller) withhold(ctx context.Context, pod workload.Pod) error {
	release, err := e.turns.take(ctx, pod.UID)
	if err != nil {
		return &StepError{Step: stepTurn, Err: err}
	}
	defer release()
	e.mu.Lock()
	e.withheld[pod.UID] = true
	e.mu.Unlock()
	p, enrolled := e.enrolment(pod.UID)
	if !enrolled {
		e.cfg.Logger.Info("pod that is not enrolled is kept out by an operator", "pod", pod.String(), "uid", pod.UID)
		return nil
	}
	if ns, ok := e.pins.Get(pod.UID); ok {
		// Before ours go: nothing else would capture after that.
		if _, err := e.cfg.Predecessors.RemovePredecessors(ctx, ns); err != nil {
			return &StepError{Step: stepRedirection, Err: err}
		}
	}
	e.mu.Lock()
	e.attachments.setSkipped(pod.UID, p.netns, withheldReason)
	e.mu.Unlock()
	err = e.takeOut(ctx, p)
	e.remember(pod.UID)
	e.cfg.Logger.Info("pod withdrawn by an operator", "pod", pod.String(), "uid", pod.UID, "netns", p.netns.String())
	if err != nil {
		e.lookAgain() // for what is left
	}
	return err
}

// Release lets withheld pods back into the mesh: those that belong there are enrolled
// soon after. names are as for Withhold; none means all that are withheld.
func (e *Enroller) Release(names []string) ([]string, error) {
	inventory := e.list().known()
	var out []string
	e.mu.Lock()
	for _, pod := range inventory {
		if e.withheld[pod.UID] && (len(names) == 0 || isNamed(pod, names)) {
			delete(e.withheld, pod.UID)
			e.released = append(e.released, pod.UID)
			e.attachments.setSkipped(pod.UID, e.places[pod.UID].key, e.whyOutside(pod))
			out = append(out, pod.String())
		}
	}
	e.mu.Unlock()
	for _, name := range names {
		if !slices.ContainsFunc(inventory, func(pod workload.Pod) bool { return isNamed(pod, []string{name}) }) {
			return nil, fmt.Errorf("%s: %w", name, ErrNoSuchPod)
		}
	}
	e.lookAgain()
	slices.Sort(out)
	return out, nil
}

// lookAgain has Run do so.
func (e *Enroller) lookAgain() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// takeReleased returns the pods that have been let back in since it was called last.
func (e *Enroller) takeReleased() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	released := e.released
	e.released = nil
	return released
}

// named returns the pods that an operator means.
func (e *Enroller) named(names []string) ([]workload.Pod, error) {
	inventory := e.list().known()
	e.mu.Lock()
	defer e.mu.Unlock()
	var pods []workload.Pod
	if len(names) == 0 {
		for _, p := range e.pods {
			pods = append(pods, p.pod)
		}
		return pods, nil
	}
	for _, name := range names {
		i := slices.IndexFunc(inventory, func(pod workload.Pod) bool { return isNamed(pod, []string{name}) })
		if i < 0 {
			return nil, fmt.Errorf("%s: %w", name, ErrNoSuchPod)
		}
		pods = append(pods, inventory[i])
	}
	return pods, nil
}

func isNamed(pod workload.Pod, names []string) bool {
	return slices.Contains(names, pod.UID) || slices.Contains(names, pod.String())
}

// joinByPod makes one error of many, in a stable order.
func joinByPod(outcomes map[string]error) error {
	var errs []error
	for uid, err := range outcomes {
		if err != nil {
			errs = append(errs, fmt.Errorf("pod with UID %s: %w", uid, err))
		}
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(errs...)
}

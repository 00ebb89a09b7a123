// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"context"
	"errors"
	"fmt"
	"os"

	"ambientd/cni-plugin/podevent"
	"ambientd/nodeagent/podnetns"
)

// del serves one CNI DEL. It ends the ADD of the same attachment if that is
// still at work, then withdraws the pod if this was its last attachment in the
// netns through which it is enrolled. What cannot be taken back is an error for
// the log: the runtime hears success, or it would never let the pod go.
func (e *Enroller) del(ctx context.Context, req podevent.Request, netns *os.File) (podevent.Reply, error) {
	of := req.Attachment()
	if err := e.flights.stop(ctx, of); err != nil {
		return podevent.Reply{}, &StepError{Step: stepTurn, Err: fmt.Errorf("waiting for the attachment's ADD to end: %w", err)}
	}
	a, recorded := e.attachment(of)
	if !recorded {
		return e.delUnrecorded(ctx, netns)
	}
	return e.detach(ctx, of, a, netns)
}

// detach ends a recorded attachment. netns may be nil: the pinned one serves.
func (e *Enroller) detach(ctx context.Context, of podevent.Attachment, a attachment, netns *os.File) (podevent.Reply, error) {
	release, err := e.turns.take(ctx, a.uid)
	if err != nil {
		return podevent.Reply{}, &StepError{Step: stepTurn, Err: err}
	}
	defer release()

	e.mu.Lock()
	e.attachments.forget(of)
	p, enrolled := e.pods[a.uid]
	last := enrolled && p.netns == a.netns && !e.attachments.holds(a.uid, a.netns)
	e.mu.Unlock()

	switch {
	case a.skipped != "":
		e.forgetUnattached(a)
		return podevent.Reply{Result: podevent.ResultWithdrawn, Reason: "the pod was not in the mesh: " + a.skipped}, nil
	case last:
		return podevent.Reply{Result: podevent.ResultWithdrawn}, e.withdraw(ctx, p)
	case !enrolled && e.forgetUnattached(a):
		return podevent.Reply{Result: podevent.ResultWithdrawn, Reason: "the pod was enrolled by an earlier agent"}, e.clearSandbox(ctx, a, netns)
	case enrolled && p.netns == a.netns:
		return podevent.Reply{Result: podevent.ResultWithdrawn, Reason: "the attachment only: the pod stays enrolled through another one"}, nil
	default:
		return podevent.Reply{Result: podevent.ResultWithdrawn, Reason: "the attachment belongs to an older sandbox of the pod"}, e.clearSandbox(ctx, a, netns)
	}
}

// delUnrecorded serves a DEL whose ADD is not recorded here. Only the netns can
// tell whose it is; without one there is nothing to do.
func (e *Enroller) delUnrecorded(ctx context.Context, netns *os.File) (podevent.Reply, error) {
	unknown := podevent.Reply{Result: podevent.ResultWithdrawn, Reason: podevent.ReasonUnrecorded}
	if netns == nil {
		return unknown, nil
	}
	ns, err := e.cfg.Host.Adopt(netns)
	if errors.Is(err, podnetns.ErrNotNetns) || errors.Is(err, podnetns.ErrHostNetns) {
		return unknown, nil // nothing of ours is ever there
	}
	if err != nil {
		return unknown, &StepError{Step: stepNetns, Err: err}
	}
	uid, known := e.pins.ByKey(ns.Key())
	if err := ns.Close(); err != nil {
		return unknown, &StepError{Step: stepNetns, Err: err}
	}
	if !known {
		return unknown, nil
	}
	release, err := e.turns.take(ctx, uid)
	if err != nil {
		return unknown, &StepError{Step: stepTurn, Err: err}
	}
	defer release()

	e.mu.Lock()
	p, enrolled := e.pods[uid]
	ours := enrolled && p.netns == ns.Key() && !e.attachments.holds(uid, p.netns)
	e.mu.Unlock()
	if !ours {
		return unknown, nil
	}
	return podevent.Reply{Result: podevent.ResultWithdrawn}, e.withdraw(ctx, p)
}

// withdraw takes the pod out of the mesh, all parts, and forgets it: it is gone. The
// caller holds the pod's turn. Identity, rules and pin are gone when it returns; the
// proxy has been told and has usually acked. The caller's deadline does not stop it
// half way.
func (e *Enroller) withdraw(ctx context.Context, p *enrolment) error {
	err := e.takeOut(ctx, p)
	e.end(p.pod.UID, p.netns)
	e.cfg.Logger.Info("pod withdrawn", "pod", p.pod.String(), "uid", p.pod.UID, "netns", p.netns.String(), "identity", p.identity.String())
	return err
}

// takeOut takes all parts of the pod back.
func (e *Enroller) takeOut(ctx context.Context, p *enrolment) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	uid := p.pod.UID
	e.forgetEnrolment(p)
	e.cfg.Reporter.State(p.pod, StateOut)
	e.cfg.Identities.Unregister(uid)
	var errs []error
	keep := func(step string, err error) {
		if err != nil {
			errs = append(errs, &StepError{Step: step, Err: err})
		}
	}
	keep(stepProbes, e.cfg.Probes.Remove(ctx, uid))
	if ns, ok := e.pins.Get(uid); ok {
		keep(stepRedirection, e.remove(ctx, uid, ns))
	}
	keep(stepNetns, e.pins.Unpin(uid))
	keep(stepProxy, e.retract(ctx, uid))
	return errors.Join(errs...)
}

// leaveSandbox lets go of a pod whose runtime made it a new sandbox. The old
// netns keeps its rules: they end with it, or with its own late DEL.
func (e *Enroller) leaveSandbox(ctx context.Context, p *enrolment) error {
	uid := p.pod.UID
	e.forgetEnrolment(p)
	e.cfg.Identities.Unregister(uid)
	if err := errors.Join(e.cfg.Probes.Remove(ctx, uid), e.pins.Unpin(uid), e.retract(ctx, uid)); err != nil {
		return fmt.Errorf("leaving the pod's old sandbox: %w", err)
	}
	return nil
}

// forgetUnattached forgets a pod that is not enrolled, because it is outside the mesh or
// could not be taken up at the start, if its last attachment has ended.
func (e *Enroller) forgetUnattached(a attachment) (gone bool) {
	e.mu.Lock()
	gone = e.places[a.uid].key == a.netns && !e.attachments.holds(a.uid, a.netns)
	e.mu.Unlock()
	if gone {
		e.end(a.uid, a.netns)
	}
	return gone
}

// clearSandbox removes our rules from the netns of an attachment that the pod
// has left. The netns is touched only if it is provably that attachment's.
func (e *Enroller) clearSandbox(ctx context.Context, a attachment, netns *os.File) error {
	if netns == nil {
		return nil // its rules have ended with it
	}
	ns, err := e.cfg.Host.Adopt(netns)
	if err != nil {
		return &StepError{Step: stepNetns, Err: err}
	}
	if ns.Key() == a.netns {
		err = e.cfg.Redirection.Remove(ctx, ns)
	}
	if err := errors.Join(err, ns.Close()); err != nil {
		return &StepError{Step: stepRedirection, Err: err}
	}
	return nil
}

func (e *Enroller) attachment(of podevent.Attachment) (attachment, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	a, ok := e.attachments.records[of]
	return a, ok
}

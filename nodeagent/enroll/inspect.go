// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"ambientd/cni-plugin/podevent"
	"ambientd/iptables/redirection"
)

var (
	errNotEnrolled = errors.New("the pod belongs in the mesh and is not enrolled through this attachment")
	errOtherNetns  = errors.New("the network namespace is not the one that the attachment was made in")
	errNotAcked    = errors.New("the node proxy does not have the pod")
)

// DifferenceError lists how a netns differs from what an enrolled pod's must be.
type DifferenceError struct{ Differences []redirection.Difference }

func (e *DifferenceError) Error() string {
	first := e.Differences[0].String()
	if more := len(e.Differences) - 1; more > 0 {
		return fmt.Sprintf("%s (and %d more)", first, more)
	}
	return first
}

// check serves CNI CHECK: it asks the kernel, the proxy and the registry, never
// memory alone.
func (e *Enroller) check(ctx context.Context, req podevent.Request, netns *os.File) (podevent.Reply, error) {
	a, recorded := e.attachment(req.Attachment())
	if !recorded {
		return e.checkUnrecorded(ctx, req)
	}
	if a.skipped != "" {
		return podevent.Reply{Result: podevent.ResultSkipped, Reason: a.skipped}, nil
	}
	release, err := e.turns.take(ctx, a.uid)
	if err != nil {
		return podevent.Reply{}, &StepError{Step: stepTurn, Err: err}
	}
	defer release()

	p, enrolled := e.enrolment(a.uid)
	if !enrolled || p.netns != a.netns {
		return podevent.Reply{}, &StepError{Step: stepRecord, Err: errNotEnrolled}
	}
	if err := e.verifyNetns(ctx, p, netns); err != nil {
		return podevent.Reply{}, err
	}
	if !e.cfg.ProxySet.Acked(a.uid) {
		return podevent.Reply{}, &StepError{Step: stepProxy, Err: errNotAcked}
	}
	if err := e.awaitCertificate(ctx, p); err != nil {
		return podevent.Reply{}, &StepError{Step: stepCertificate, Err: err}
	}
	return podevent.Reply{Result: podevent.ResultOK}, nil
}

// checkUnrecorded serves a CHECK whose ADD is not recorded here: right for a
// pod outside the mesh, wrong for any other.
func (e *Enroller) checkUnrecorded(ctx context.Context, req podevent.Request) (podevent.Reply, error) {
	pod, err := e.cfg.Pods.Lookup(ctx, req.Pod.Namespace, req.Pod.Name, req.Pod.UID)
	if err != nil {
		return podevent.Reply{}, &StepError{Step: stepLookup, Err: err}
	}
	if decision := e.cfg.Policy.Decide(pod); !decision.InMesh {
		return podevent.Reply{Result: podevent.ResultSkipped, Reason: decision.Reason}, nil
	}
	return podevent.Reply{}, &StepError{Step: stepRecord, Err: errNotEnrolled}
}

// verifyNetns compares the netns that CHECK names with the one pinned, and the
// rules in it with the pod's.
func (e *Enroller) verifyNetns(ctx context.Context, p *enrolment, netns *os.File) error {
	ns, err := e.cfg.Host.Adopt(netns)
	if err != nil {
		return &StepError{Step: stepNetns, Err: err}
	}
	if ns.Key() != p.netns {
		return errors.Join(&StepError{Step: stepNetns, Err: errOtherNetns}, ns.Close())
	}
	_, differences, err := e.cfg.Redirection.Verify(ctx, ns, p.options)
	if err == nil && len(differences) > 0 {
		err = &DifferenceError{Differences: differences}
	}
	if err := errors.Join(err, ns.Close()); err != nil {
		return &StepError{Step: stepRedirection, Err: err}
	}
	return nil
}

// gc serves CNI GC: recorded attachments of the same network that the runtime
// no longer lists end as with a DEL.
func (e *Enroller) gc(ctx context.Context, req podevent.Request) (podevent.Reply, error) {
	type stale struct {
		of podevent.Attachment
		a  attachment
	}
	var gone []stale
	e.mu.Lock()
	for of, a := range e.attachments.records {
		if a.network == req.Network && !slices.Contains(req.ValidAttachments, of) {
			gone = append(gone, stale{of, a})
		}
	}
	e.mu.Unlock()
	var errs []error
	for _, s := range gone {
		if _, err := e.detach(ctx, s.of, s.a, nil); err != nil {
			errs = append(errs, fmt.Errorf("pod %s/%s: %w", s.a.namespace, s.a.name, err))
		}
	}
	return podevent.Reply{Result: podevent.ResultOK, Reason: fmt.Sprintf("%d attachments ended", len(gone))}, errors.Join(errs...)
}

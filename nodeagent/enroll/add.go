// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"context"
	"errors"
	"os"
	"slices"
	"time"

	"ambientd/certfetch/spiffeid"
	"ambientd/cni-plugin/podevent"
	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/workload"
)

// add serves one CNI ADD: it finds the pod, decides, and either records that
// the pod is skipped or enrols it wholly.
func (e *Enroller) add(ctx context.Context, req podevent.Request, netns *os.File) (podevent.Reply, error) {
	ctx, end := e.flights.begin(ctx, req.Attachment())
	defer end()

	pod, err := e.cfg.Pods.Lookup(ctx, req.Pod.Namespace, req.Pod.Name, req.Pod.UID)
	if err != nil {
		return podevent.Reply{}, &StepError{Step: stepLookup, Err: err}
	}
	decision := e.cfg.Policy.Decide(pod)
	e.endReplaced(ctx, req.Attachment(), pod, decision)
	release, err := e.turns.take(ctx, pod.UID)
	if err != nil {
		return podevent.Reply{}, &StepError{Step: stepTurn, Err: err}
	}
	defer release()

	if !decision.InMesh {
		e.recordSkipped(req, pod, decision.Reason)
		return podevent.Reply{Result: podevent.ResultSkipped, Reason: decision.Reason}, nil
	}
	started := time.Now()
	p, err := e.enrol(ctx, req, pod, netns)
	if err != nil {
		return podevent.Reply{}, err
	}
	e.cfg.Logger.Info("pod enrolled", "pod", pod.String(), "uid", pod.UID, "netns", p.netns.String(),
		"identity", p.identity.String(), "families", p.families.String(), "took", time.Since(started).Round(time.Microsecond))
	return podevent.Reply{Result: podevent.ResultEnrolled}, nil
}

// endReplaced ends what an attachment is recorded for, if the ADD at hand is about
// to record it for another pod, or as outside the mesh. The DEL of it has never
// come, and one that comes now is meant for the new one: without a record the pod
// would stay enrolled for ever.
func (e *Enroller) endReplaced(ctx context.Context, of podevent.Attachment, pod workload.Pod, decision workload.Decision) {
	a, recorded := e.attachment(of)
	if !recorded || a.uid == pod.UID && decision.InMesh {
		return
	}
	if _, err := e.detach(ctx, of, a, nil); err != nil {
		e.cfg.Logger.Warn("not everything could be taken back", "pod", a.namespace+"/"+a.name, "uid", a.uid,
			"reason", "its attachment is added anew", "err", err)
	}
}

// enrol puts the pod in the mesh through the netns of this attachment. The
// caller holds the pod's turn.
//
// A second attachment in the same netns (a second interface) puts the parts in
// place once more, and when that fails takes none away. Another netns for an
// enrolled pod means a new sandbox: the pod leaves the old one, whose rules stay
// so that nothing still running in there escapes them, and starts from nothing.
func (e *Enroller) enrol(ctx context.Context, req podevent.Request, pod workload.Pod, netns *os.File) (*enrolment, error) {
	ns, err := e.cfg.Host.Adopt(netns)
	if err != nil {
		return nil, &StepError{Step: stepNetns, Err: err}
	}
	p, enrolled := e.enrolment(pod.UID)
	if enrolled && p.netns == ns.Key() {
		return p, runOn(ctx, e.steps(p, ns, func() { e.commit(req, p) }))
	}
	if enrolled {
		err := e.free(pod.UID, ns)
		if err == nil {
			err = e.leaveSandbox(ctx, p)
		}
		if err != nil {
			return nil, errors.Join(&StepError{Step: stepNetns, Err: err}, ns.Close())
		}
	}
	p, err = e.prepare(req, pod, ns.Key())
	if err != nil {
		return nil, errors.Join(&StepError{Step: stepIdentity, Err: err}, ns.Close())
	}
	if err := runWhole(ctx, e.steps(p, ns, func() { e.commit(req, p) })); err != nil {
		e.forgetEnrolment(p)
		return nil, err
	}
	return p, nil
}

// free returns an error if another pod holds the netns. A pod is not to leave the
// one in which it is enrolled for one that it cannot have.
func (e *Enroller) free(uid string, ns *podnetns.Netns) error {
	if other, taken := e.pins.ByKey(ns.Key()); taken && other != uid {
		return &podnetns.TakenError{Key: ns.Key(), OtherUID: other}
	}
	return nil
}

// prepare notes a pod that is about to be enrolled, so that status shows it.
func (e *Enroller) prepare(req podevent.Request, pod workload.Pod, key podnetns.Key) (*enrolment, error) {
	identity, err := spiffeid.New(e.cfg.TrustDomain, pod.Namespace, pod.ServiceAccount)
	if err != nil {
		return nil, err
	}
	options, malformed := workload.Options(pod, e.cfg.Defaults)
	for _, m := range malformed {
		e.cfg.Logger.Warn("pod option is malformed and counts as absent", "pod", pod.String(), "uid", pod.UID, "option", m.String())
	}
	p := &enrolment{pod: pod, identity: identity, options: options, netns: key, ips: req.IPs}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pods[pod.UID] = p
	return p, nil
}

// commit makes the pod enrolled and records the attachment that did it.
func (e *Enroller) commit(req podevent.Request, p *enrolment) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p.done = true
	for _, ip := range req.IPs {
		if !slices.Contains(p.ips, ip) {
			p.ips = append(slices.Clip(p.ips), ip)
		}
	}
	e.attachments.record(req.Attachment(), attachment{
		network: req.Network, uid: p.pod.UID, namespace: p.pod.Namespace, name: p.pod.Name, netns: p.netns,
	})
}

func (e *Enroller) recordSkipped(req podevent.Request, pod workload.Pod, reason string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.attachments.record(req.Attachment(), attachment{
		network: req.Network, uid: pod.UID, namespace: pod.Namespace, name: pod.Name, skipped: reason,
	})
}

// enrolment returns the pod's enrolment; the caller holds the pod's turn, so
// none is half made.
func (e *Enroller) enrolment(uid string) (*enrolment, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p, ok := e.pods[uid]
	return p, ok
}

func (e *Enroller) forgetEnrolment(p *enrolment) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.pods, p.pod.UID)
}

// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"slices"
	"time"

	"ambientd/certfetch/spiffeid"
	"ambientd/cni-plugin/podevent"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/workload"
)

// add serves one CNI ADD: it finds the pod, decides, and either records that
// the pod is skipped or enrols it wholly.
func (e *Enroller) add(ctx context.Context, req podevent.Request, netns *os.File) (podevent.Reply, error) {
	ctx, end := e.flights.begin(ctx, req.Attachment())
	defer end()

	pod, err := e.lookUp(ctx, req.Pod)
	if err != nil {
		return podevent.Reply{}, &StepError{Step: stepLookup, Err: err}
	}
	decision := e.decide(pod)
	e.endReplaced(ctx, req.Attachment(), pod, decision)
	release, err := e.turns.take(ctx, pod.UID)
	if err != nil {
		return podevent.Reply{}, &StepError{Step: stepTurn, Err: err}
	}
	defer release()

	if !decision.InMesh {
		e.skip(req, pod, decision.Reason, netns)
		return podevent.Reply{Result: podevent.ResultSkipped, Reason: decision.Reason}, nil
	}
	started := time.Now()
	p, err := e.enrol(ctx, req, pod, netns)
	if err != nil {
		e.reportFailure(pod, err)
		return podevent.Reply{}, err
	}
	e.cfg.Logger.Info("pod enrolled", "pod", pod.String(), "uid", pod.UID, "netns", p.netns.String(),
		"identity", p.identity.String(), "families", p.families.String(), "took", time.Since(started).Round(time.Microsecond))
	return podevent.Reply{Result: podevent.ResultEnrolled}, nil
}

// lookUp finds the pod that is added. One that is out of the mesh by its name is not looked
// for: it must start also while the pod source cannot be asked.
func (e *Enroller) lookUp(ctx context.Context, pod podevent.Pod) (workload.Pod, error) {
	if pod.UID != "" && e.cfg.Policy.ExcludesName(pod.Namespace, pod.Name) {
		return workload.Pod{UID: pod.UID, Namespace: pod.Namespace, Name: pod.Name}, nil
	}
	return e.cfg.Pods.Lookup(ctx, pod.Namespace, pod.Name, pod.UID)
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
	w := way{redirect: e.redirectStarting, announce: e.announce, certify: e.awaitCertificate}
	p, enrolled := e.enrolment(pod.UID)
	if enrolled && p.netns == ns.Key() {
		e.addAddresses(p, req.IPs)
		w.commit = func() { e.commitAttachment(req, p) }
		return p, runOn(ctx, e.steps(p, ns, w))
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
	p, err = e.prepare(pod, place{namespace: pod.Namespace, name: pod.Name, path: req.NetnsPath, key: ns.Key(), ips: req.IPs})
	if err != nil {
		return nil, errors.Join(&StepError{Step: stepIdentity, Err: err}, ns.Close())
	}
	w.commit = func() { e.commitAttachment(req, p) }
	if err := runWhole(ctx, e.steps(p, ns, w)); err != nil {
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
func (e *Enroller) prepare(pod workload.Pod, where place) (*enrolment, error) {
	identity, err := spiffeid.New(e.cfg.TrustDomain, pod.Namespace, pod.ServiceAccount)
	if err != nil {
		return nil, err
	}
	p := &enrolment{pod: pod, identity: identity, netns: where.key, ips: where.ips, place: where}
	p.options, p.malformed = e.options(pod, where)
	e.reportMalformed(p)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pods[pod.UID] = p
	return p, nil
}

// options are the pod's, with what its place adds to them.
func (e *Enroller) options(pod workload.Pod, where place) (redirection.Options, []workload.Malformed) {
	options, malformed := workload.Options(pod, e.cfg.Defaults)
	options.KeepEstablished = where.kept
	return options, malformed
}

func (e *Enroller) reportMalformed(p *enrolment) {
	for _, m := range p.malformed {
		e.cfg.Logger.Warn("pod option is malformed and counts as absent", "pod", p.pod.String(), "uid", p.pod.UID, "option", m.String())
		e.cfg.Reporter.Event(p.pod, ReasonMalformed, m.String())
	}
}

// commitAttachment makes the pod enrolled through the attachment of an ADD.
func (e *Enroller) commitAttachment(req podevent.Request, p *enrolment) {
	e.commit(p)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.attachments.record(req.Attachment(), attachment{
		network: req.Network, uid: p.pod.UID, namespace: p.pod.Namespace, name: p.pod.Name, netns: p.netns,
	})
}

// commit makes the pod enrolled in its place. Attachments that it has there are
// those of a pod in the mesh from now on.
func (e *Enroller) commit(p *enrolment) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p.done = true
	p.place.ips, p.place.ours = p.ips, false
	e.places[p.pod.UID] = p.place
	delete(e.ended, p.pod.UID)
	e.attachments.setSkipped(p.pod.UID, p.netns, "")
	e.signalChange(p.pod.UID)
	e.reportState(p)
}

func (e *Enroller) addAddresses(p *enrolment, ips []netip.Addr) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, ip := range ips {
		if !slices.Contains(p.ips, ip) {
			p.ips = append(slices.Clip(p.ips), ip)
		}
	}
}

// skip records the attachment of a pod outside the mesh. Its netns is noted too, in
// case the pod is to be in the mesh later; one that cannot be used is no error here.
func (e *Enroller) skip(req podevent.Request, pod workload.Pod, reason string, netns *os.File) {
	var key podnetns.Key
	if ns, err := e.cfg.Host.Adopt(netns); err == nil {
		key = ns.Key()
		err = ns.Close()
		if err != nil {
			e.cfg.Logger.Debug("closing the netns of a skipped pod", "pod", pod.String(), "uid", pod.UID, "err", err)
		}
	} else {
		e.cfg.Logger.Debug("the netns of a skipped pod cannot be used", "pod", pod.String(), "uid", pod.UID, "err", err)
	}
	e.mu.Lock()
	if key != (podnetns.Key{}) {
		if e.places[pod.UID].key != key {
			e.holds[pod.UID] = holdsNone // the runtime has just made it
		}
		e.places[pod.UID] = place{namespace: pod.Namespace, name: pod.Name, path: req.NetnsPath, key: key, ips: req.IPs}
	}
	e.attachments.record(req.Attachment(), attachment{
		network: req.Network, uid: pod.UID, namespace: pod.Namespace, name: pod.Name, netns: key, skipped: reason,
	})
	e.mu.Unlock()
	e.remember(pod.UID)
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
	e.signalChange(p.pod.UID)
}

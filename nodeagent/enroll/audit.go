// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"ambientd/iptables/policyroute"
	"ambientd/nodeagent/podnetns"
)

// Finding is what an audit of one enrolled pod found.
type Finding struct {
	Pod         string // "namespace/name"
	UID         string
	Differences []string // from what was meant; none for a healthy pod
	Parts       []string // of the enrolment that differed, each once: "netns", "redirection", "identity", "node proxy"
	Err         error    // why the pod could not be looked at, or not be repaired; nil otherwise
}

// differs notes a difference in a part.
func (f *Finding) differs(part string, differences ...string) {
	f.Differences = append(f.Differences, differences...)
	if !slices.Contains(f.Parts, part) {
		f.Parts = append(f.Parts, part)
	}
}

// Changed receives after the set of enrolled pods, or the netns of one of them, has
// changed, once for any number of changes. It is meant for one receiver.
func (e *Enroller) Changed() <-chan struct{} { return e.changed }

// Changes returns the UIDs of the pods that have been enrolled, moved or withdrawn since
// the last call, each once: those that are not enrolled now, and those that are.
func (e *Enroller) Changes() (gone, enrolled []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for uid := range e.changes {
		if p, ok := e.pods[uid]; ok && p.done {
			enrolled = append(enrolled, uid)
		} else {
			gone = append(gone, uid)
		}
	}
	clear(e.changes)
	return gone, enrolled
}

// signalChange notes that a pod has been enrolled, moved or withdrawn. The caller holds
// Enroller.mu.
func (e *Enroller) signalChange(uid string) {
	e.changes[uid] = struct{}{}
	select {
	case e.changed <- struct{}{}:
	default: // one is waiting already
	}
}

// Enrolled returns the UIDs of all pods that are wholly enrolled, sorted.
func (e *Enroller) Enrolled() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var uids []string
	for uid, p := range e.pods {
		if p.done {
			uids = append(uids, uid)
		}
	}
	slices.Sort(uids)
	return uids
}

// Audit compares an enrolled pod with the kernel, the registry and the proxy's set,
// and puts right what differs. ok is false for a pod that is not enrolled, or that
// something else is done to until ctx ends, or that is ending. A healthy pod costs no write.
func (e *Enroller) Audit(ctx context.Context, uid string) (f Finding, ok bool) {
	release, err := e.turns.take(ctx, uid)
	if err != nil {
		return Finding{}, false
	}
	defer release()
	p, enrolled := e.enrolment(uid)
	ns, pinned := e.pins.Get(uid)
	if !enrolled || !p.done || !pinned {
		return Finding{}, false
	}
	f = Finding{Pod: p.pod.String(), UID: uid}
	if !e.hasMoved(ctx, p, ns, &f) {
		f.Err = errors.Join(e.auditRules(ctx, p, ns, &f), e.auditIdentity(p, &f), e.auditProxy(p, ns, &f))
		e.keepSeen(p)
	}
	if p.isEnding(f.Err, time.Now()) {
		return Finding{}, false
	}
	e.reportFinding(p, f)
	return f, true
}

// endingTime is how long a pod whose loopback device has gone down is taken to be ending. The
// runtime's loopback plugin takes it down before our plugin has its DEL, on the way of which
// are one or two more; with it go the routes, and the kernel tells of that.
const endingTime = 5 * time.Second

// isEnding tells whether an audit has failed because the runtime takes the pod's network
// down. That is no failure to tell of: its DEL is on the way. The caller holds the pod's turn.
func (p *enrolment) isEnding(failure error, now time.Time) bool {
	if !errors.Is(failure, policyroute.ErrLoopbackDown) {
		p.loopbackDown = time.Time{}
		return false
	}
	if p.loopbackDown.IsZero() {
		p.loopbackDown = now
	}
	return now.Sub(p.loopbackDown) < endingTime
}

func (e *Enroller) auditRules(ctx context.Context, p *enrolment, ns *podnetns.Netns, f *Finding) error {
	_, differences, err := e.cfg.Redirection.Verify(ctx, ns, p.options)
	if err != nil || len(differences) == 0 {
		return err
	}
	for _, d := range differences {
		f.differs(stepRedirection, d.String())
	}
	return e.redirect(ctx, p, ns)
}

// auditIdentity registers the identity again if the registry has lost it.
func (e *Enroller) auditIdentity(p *enrolment, f *Finding) error {
	if e.cfg.Registered(p.identity) {
		return nil
	}
	f.differs(stepIdentity, "identity: missing, want "+p.identity.String())
	return e.cfg.Identities.Register(p.pod.UID, p.identity)
}

// auditProxy puts the pod into the proxy's set again if it has left it, as when a
// proxy refused it in a snapshot. A proxy that is away is no difference of the pod's.
func (e *Enroller) auditProxy(p *enrolment, ns *podnetns.Netns, f *Finding) error {
	if e.cfg.ProxySet.Holds(p.pod.UID) {
		return nil
	}
	f.differs(stepProxy, "node proxy: pod missing in its set")
	return e.cfg.NodeProxy.Put(proxyWorkload(p.pod), ns.File())
}

// hasMoved tells whether the pod runs in another netns now than it is enrolled in,
// and enrols it there: the file at its path is another netns, and the finder, which
// trusts no path, has found it in one that is not the pinned one.
func (e *Enroller) hasMoved(ctx context.Context, p *enrolment, ns *podnetns.Netns, f *Finding) bool {
	if p.place.path == "" {
		return false
	}
	if there, err := ns.IsAt(p.place.path); err != nil || there {
		return false // no file there means that the runtime takes the pod down
	}
	uid := p.pod.UID
	found, _ := e.cfg.Finder.Find(ctx, []podnetns.Wanted{{UID: uid, IPs: p.ips}})
	now, ok := found[uid]
	if !ok {
		return false
	}
	if now.Key() == p.netns {
		f.Err = now.Close()
		return false
	}
	f.differs(stepNetns, fmt.Sprintf("netns: want %s, got %s", p.netns, now.Key()))
	f.Err = e.follow(ctx, p, now)
	return true
}

// follow enrols the pod in the netns that it has moved to. It owns to.
func (e *Enroller) follow(ctx context.Context, p *enrolment, to *podnetns.Netns) error {
	if err := e.leaveSandbox(ctx, p); err != nil {
		return errors.Join(err, to.Close())
	}
	where := p.place
	where.key = to.Key()
	return e.enrolRunningIn(ctx, p.pod, where, to, e.remember)
}

// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"context"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"ambientd/cni-plugin/podevent"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/records"
	"ambientd/nodeagent/workload"
)

// place is where a pod runs, as its last ADD or the finder told. It outlives the
// pod's enrolment: a pod that leaves the mesh while it runs may come back.
type place struct {
	namespace, name string
	path            string // of the netns, where the runtime keeps it; empty if unknown
	key             podnetns.Key
	ips             []netip.Addr
	kept            bool // enrolled while it ran, with its established connections kept
	ours            bool // an earlier agent has written rules there, which may be as they should be
}

// remember writes down what is known of the pod, for the agent's next start. What
// cannot be written does not keep a pod from starting: then the next agent looks for
// it among the processes. The caller holds the pod's turn.
func (e *Enroller) remember(uid string) {
	e.mu.Lock()
	record, ok := e.record(uid)
	e.mu.Unlock()
	var err error
	if ok {
		err = e.cfg.Records.Put(record)
	} else {
		err = e.cfg.Records.Delete(uid)
	}
	if p, enrolled := e.enrolment(uid); enrolled && err == nil {
		p.recorded = record.Seen
	}
	if err != nil {
		e.cfg.Logger.Warn("a pod's record is not up to date; after a restart it is looked for among the processes", "uid", uid, "err", err)
	}
}

// seen is what is known of the packet rules in a netns.
func (e *Enroller) seen(netns podnetns.Key) (redirection.Sighting, bool) {
	if e.memory == nil {
		return redirection.Sighting{}, false
	}
	return e.memory.Seen(netns.Cookie)
}

// keepSeen brings the pod's record up to date if more is known of its packet rules now
// than that says. The caller holds the pod's turn.
func (e *Enroller) keepSeen(p *enrolment) {
	if seen, known := e.seen(p.netns); known && seen != p.recorded {
		e.remember(p.pod.UID)
	}
}

// record makes a pod's record, false if nothing is known of the pod any more. The
// caller holds Enroller.mu.
func (e *Enroller) record(uid string) (records.Record, bool) {
	where, ok := e.places[uid]
	if !ok {
		return records.Record{}, false
	}
	r := records.Record{
		UID: uid, Namespace: where.namespace, Name: where.name,
		NetnsPath: where.path, Key: where.key, IPs: where.ips, KeepEstablished: where.kept,
		Skipped: "not in the mesh",
	}
	if p, enrolled := e.pods[uid]; enrolled {
		r.Skipped, r.Families, r.Backend = "", p.families.String(), e.cfg.BackendName
		r.Seen, _ = e.seen(where.key)
		r.ServiceAccount, r.Annotations, r.Probes = p.pod.ServiceAccount, recordedOptions(p.pod), p.pod.Probes
	}
	for of := range e.attachments.ofPod[uid] {
		a := e.attachments.records[of]
		if a.netns != where.key {
			continue // an older sandbox's: its DEL has nothing to find
		}
		if a.skipped != "" {
			r.Skipped = a.skipped
		}
		r.Attachments = append(r.Attachments, records.Attachment{Network: a.network, ContainerID: of.ContainerID, IfName: of.IfName})
	}
	return r, true
}

// maxRecordedOptions bounds what a record holds of a pod's annotations, which its author
// may make as long as 256 KiB.
const maxRecordedOptions = 16 << 10

// recordedOptions are the annotations that are options. If they are too long there are
// none: the pod then has the node's options for as long as its object cannot be read.
func recordedOptions(pod workload.Pod) map[string]string {
	options, size := map[string]string{}, 0
	for key, value := range pod.Annotations {
		if workload.IsOption(key) {
			options[key] = value
			size += len(value)
		}
	}
	if size > maxRecordedOptions {
		return nil
	}
	return options
}

// recordedPod is the pod as it was recorded, false if the record is of an agent that
// did not note enough.
func recordedPod(r records.Record) (workload.Pod, bool) {
	return workload.Pod{
		UID: r.UID, Namespace: r.Namespace, Name: r.Name, ServiceAccount: r.ServiceAccount,
		Annotations: r.Annotations, Probes: r.Probes, IPs: r.IPs, Phase: corev1.PodRunning,
	}, r.ServiceAccount != ""
}

// recall is the reverse of remember, at the start of the agent.
func (e *Enroller) recall(r records.Record) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.places[r.UID] = place{
		namespace: r.Namespace, name: r.Name, path: r.NetnsPath, key: r.Key, ips: r.IPs, kept: r.KeepEstablished, ours: r.Skipped == "",
	}
	if r.Skipped == "" {
		e.holds[r.UID] = holdsOurs
	}
	if e.memory != nil && r.Seen != (redirection.Sighting{}) && r.Key.BootID == e.cfg.Host.Key().BootID {
		e.memory.Recall(r.Key.Cookie, r.Seen)
	}
	for _, a := range r.Attachments {
		e.attachments.record(podevent.Attachment{ContainerID: a.ContainerID, IfName: a.IfName}, attachment{
			network: a.Network, uid: r.UID, namespace: r.Namespace, name: r.Name, netns: r.Key, skipped: r.Skipped,
		})
	}
}

// ending is a pod's sandbox that the runtime has ended.
type ending struct {
	netns podnetns.Key
	ips   []netip.Addr // that the pod had there, if known
}

// end forgets a pod whose last attachment in the netns has ended. Its processes, and its
// object, may be there for a while: it is not to be enrolled there again as a running
// pod.
func (e *Enroller) end(uid string, netns podnetns.Key) {
	e.mu.Lock()
	e.ended[uid] = ending{netns: netns, ips: e.places[uid].ips}
	e.mu.Unlock()
	e.forgetPlace(uid)
}

// isOver tells whether the runtime has ended the pod's only sandbox, and nothing has told of
// another since: no ADD, and no address that the pod has now and had not then. While no agent
// ran, an ADD may have told nobody. The caller holds Enroller.mu.
func (e *Enroller) isOver(pod workload.Pod) bool {
	last, ended := e.ended[pod.UID]
	_, runs := e.places[pod.UID]
	if !ended || runs {
		return false
	}
	hadNot := func(ip netip.Addr) bool { return !slices.Contains(last.ips, ip) }
	return len(last.ips) == 0 || !slices.ContainsFunc(pod.IPs, hadNot)
}

// Ended tells whether the runtime has ended the sandbox in which the pod was, and no other has
// been enrolled or recorded since. Its object may say for a while yet that it runs.
func (e *Enroller) Ended(uid string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	_, ended := e.ended[uid]
	_, runs := e.places[uid]
	return ended && !runs
}

// hasEnded tells whether the runtime has ended the pod's sandbox with that netns, or its only
// one.
func (e *Enroller) hasEnded(pod workload.Pod, netns podnetns.Key) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	last, ok := e.ended[pod.UID]
	return ok && last.netns == netns || e.isOver(pod)
}

// forgetPlace lets go of all that is known of a pod that does not run here any more.
func (e *Enroller) forgetPlace(uid string) {
	e.mu.Lock()
	e.attachments.forgetIn(uid, e.places[uid].key)
	delete(e.places, uid)
	e.mu.Unlock()
	e.remember(uid)
}

// isLeft tells whether a place is all that is left of a pod: it is not enrolled, and has no
// attachment, whose DEL would tell of the pod's end. The caller holds Enroller.mu.
func (e *Enroller) isLeft(uid string) bool {
	_, enrolled := e.pods[uid]
	return !enrolled && len(e.attachments.ofPod[uid]) == 0
}

// forgetIfLeft lets go of the place of a pod that has left nothing else, and tells whether it
// did. The caller holds the pod's turn.
func (e *Enroller) forgetIfLeft(uid string) bool {
	e.mu.Lock()
	_, known := e.places[uid]
	left := known && e.isLeft(uid)
	e.mu.Unlock()
	if left {
		e.forgetPlace(uid)
	}
	return left
}

// forgetLeft does so in the pod's turn: an ADD may have come meanwhile.
func (e *Enroller) forgetLeft(ctx context.Context, uid string) error {
	release, err := e.turns.take(ctx, uid)
	if err != nil {
		return &StepError{Step: stepTurn, Err: err}
	}
	defer release()
	if e.forgetIfLeft(uid) {
		e.cfg.Logger.Info("pod outside the mesh forgotten: its object is gone", "uid", uid)
	}
	return nil
}

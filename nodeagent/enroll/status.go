// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"ambientd/certfetch"
	"ambientd/certfetch/spiffeid"
	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/workload"
)

// Pods reports every pod that is enrolled or on its way in, sorted by name.
func (e *Enroller) Pods() []admin.PodStatus {
	pods, keepers := e.podsNow()
	e.countKept(pods, keepers)
	return pods
}

// Member is an enrolled pod.
type Member struct {
	UID, Namespace, Name string
	IPs                  []netip.Addr
}

// Members returns all pods that are wholly enrolled, in no order.
func (e *Enroller) Members() []Member {
	e.mu.Lock()
	defer e.mu.Unlock()
	members := make([]Member, 0, len(e.pods))
	for uid, p := range e.pods {
		if p.done {
			members = append(members, Member{UID: uid, Namespace: p.pod.Namespace, Name: p.pod.Name, IPs: p.ips})
		}
	}
	return members
}

// podsNow reports the pods, and which of them keep connections from before.
func (e *Enroller) podsNow() ([]admin.PodStatus, map[string]struct{}) {
	certificates := map[spiffeid.ID]certfetch.IdentityStatus{}
	for _, s := range e.cfg.Fetched() {
		certificates[s.ID] = s
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	pods := make([]admin.PodStatus, 0, len(e.pods))
	keepers := map[string]struct{}{}
	for uid, p := range e.pods {
		if p.done && p.options.KeepEstablished {
			keepers[uid] = struct{}{}
		}
		s := p.status(certificates[p.identity])
		s.Backend = e.cfg.BackendName
		if !e.cfg.ProxySet.Acked(uid) {
			s.Proxy = admin.ProxyPending
		}
		switch {
		case !p.done:
			s.State = admin.PodEnrolling
		case s.Proxy == admin.ProxyPending:
			s.State = admin.PodDegraded
		}
		pods = append(pods, s)
	}
	slices.SortFunc(pods, func(a, b admin.PodStatus) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name), strings.Compare(a.UID, b.UID))
	})
	return pods, keepers
}

// Skipped reports the attached pods that are not in the mesh, those that an operator keeps out, and those that run here
// and could not be enrolled, with the reason that holds now: what was so when a pod was attached may have changed since.
func (e *Enroller) Skipped() []admin.SkippedStatus {
	pods := e.list().known()
	e.mu.Lock()
	defer e.mu.Unlock()
	outside := map[string]admin.SkippedStatus{} // by UID: a pod may have several attachments
	for _, a := range e.attachments.records {
		if a.skipped != "" {
			outside[a.uid] = admin.SkippedStatus{Namespace: a.namespace, Name: a.name, Reason: a.skipped}
		}
	}
	for _, pod := range pods {
		_, attached := outside[pod.UID]
		if attached || e.withheld[pod.UID] || e.outside[pod.UID] != "" {
			outside[pod.UID] = admin.SkippedStatus{Namespace: pod.Namespace, Name: pod.Name, Reason: e.whyOutside(pod)}
		}
	}
	for uid := range e.pods {
		delete(outside, uid)
	}
	return slices.SortedFunc(maps.Values(outside), func(a, b admin.SkippedStatus) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name), strings.Compare(a.Reason, b.Reason))
	})
}

// whyOutside says why a pod that is not enrolled is not. The caller holds Enroller.mu.
func (e *Enroller) whyOutside(pod workload.Pod) string {
	if e.withheld[pod.UID] {
		return withheldReason
	}
	if decision := e.cfg.Policy.Decide(pod); !decision.InMesh {
		return decision.Reason
	}
	return cmp.Or(e.outside[pod.UID], awaitedReason)
}

// noteOutside keeps why pods that belong in the mesh are outside, after what was planned for them. Who is not found
// may be yet to start: then nothing tells that it runs here.
func (e *Enroller) noteOutside(p plan, again, over retries) {
	outside := map[string]string{}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, pod := range p.enrol {
		_, placed := e.places[pod.UID]
		why := again[pod.UID].why
		if why != nil && (placed || saysThatItRuns(pod) || !errors.Is(why, podnetns.ErrNotFound)) {
			outside[pod.UID] = why.Error()
		}
	}
	for _, pod := range p.over {
		if over[pod.UID].told {
			outside[pod.UID] = sandboxOver
		}
	}
	e.outside = outside
}

// Withheld tells whether an operator keeps the pod out of the mesh.
func (e *Enroller) Withheld(uid string) bool { return e.isWithheld(uid) }

// status is what the enrolment itself knows of the pod; the caller holds Enroller.mu.
func (p *enrolment) status(certificate certfetch.IdentityStatus) admin.PodStatus {
	s := admin.PodStatus{
		Namespace:   p.pod.Namespace,
		Name:        p.pod.Name,
		UID:         p.pod.UID,
		Netns:       p.netns.String(),
		State:       admin.PodEnrolled,
		Families:    p.families.List(),
		IPs:         slices.Clone(p.ips),
		Proxy:       admin.ProxyAcked,
		Identity:    p.identity.String(),
		Certificate: admin.CertificateStatus{State: string(certificate.State), NotAfter: certificate.NotAfter},
	}
	for _, m := range p.malformed {
		s.MalformedOptions = append(s.MalformedOptions, admin.MalformedOption{
			Annotation: m.Annotation, Value: fmt.Sprintf("%.128s", m.Value), Problem: m.Problem,
		})
	}
	if certificate.State == "" { // registered after the fetcher was asked
		s.Certificate.State = admin.CertificatePending
	}
	return s
}

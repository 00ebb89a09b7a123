// SPDX-License-Identifier: Apache-2.0

package agent

import "ambientd/nodeagent/admin"

// status is what `ambientd status` shows.
func (p *parts) status() admin.Status {
	s := admin.Status{
		Node:        p.cfg.NodeName,
		Version:     p.cfg.Version,
		Started:     p.started,
		TrustDomain: p.cfg.TrustDomain,
		Redirection: admin.RedirectionStatus{
			Backend: p.backend.Name, Variant: p.backend.Variant, Reason: p.backend.Reason, Probed: p.backend.Probed,
			IPv6Uncaptured: p.cfg.IPv6Uncaptured,
		},
		Ready:   p.ready.check() == nil,
		Pods:    p.podStatus(),
		Skipped: p.enroller.Skipped(),
		Host:    admin.HostStatus{Audit: p.auditor.HostStatus()},

		ManifestProblems: p.pods.problems(),
	}
	for _, peer := range p.proxies.Peers() {
		s.Proxies = append(s.Proxies, admin.ProxyStatus{Since: peer.Since, Ready: peer.Ready})
	}
	for _, id := range p.fetcher.Identities() {
		s.Identities = append(s.Identities, admin.IdentityStatus{
			ID: id.ID.String(), Pods: id.Pods, State: string(id.State), NotAfter: id.NotAfter, LastError: id.LastError,
		})
	}
	return s
}

// podStatus adds to what the enroller knows what audits and checks have shown.
func (p *parts) podStatus() []admin.PodStatus {
	pods := p.enroller.Pods()
	for i := range pods {
		pod := &pods[i]
		pod.Audit = p.auditor.PodStatus(pod.UID)
		pod.Probes = p.operations.lastProbes(pod.UID)
		if pod.Audit.Error != "" && pod.State == admin.PodEnrolled {
			pod.State = admin.PodDegraded
		}
	}
	return pods
}

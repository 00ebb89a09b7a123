// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"net/netip"
	"time"
)

// States of a pod.
const (
	PodEnrolled  = "enrolled"  // all parts are in place
	PodEnrolling = "enrolling" // its ADD has not been answered yet
	PodDegraded  = "degraded"  // it was enrolled and has lost a part; its traffic fails closed
)

// States of the node proxy's part of a pod.
const (
	ProxyAcked   = "acked"
	ProxyPending = "pending"
)

// States of an identity's certificate.
const (
	CertificateReady   = "ready"
	CertificatePending = "pending" // registered, not issued yet
	CertificateDenied  = "denied"  // the CA refuses the identity
)

// Status is everything the agent tells of itself, as /v1/status serves it in
// JSON. Fields are only ever added.
type Status struct {
	Node        string            `json:"node"`
	Version     string            `json:"version"`
	Started     time.Time         `json:"started"`
	TrustDomain string            `json:"trustDomain"`
	Redirection RedirectionStatus `json:"redirection"`
	Ready       bool              `json:"ready"` // sockets listen, the pod source was read, the CA can be used
	Proxies     []ProxyStatus     `json:"proxies"`
	Pods        []PodStatus       `json:"pods"`       // sorted by namespace, name, UID
	Identities  []IdentityStatus  `json:"identities"` // exactly the registered ones, sorted
	Skipped     []SkippedStatus   `json:"skipped"`    // pods that are not in the mesh and run here, as far as is known, or are kept out; sorted
	Host        HostStatus        `json:"host,omitzero"`

	// ManifestProblems are files that pods are read from and that are not in use, or not wholly, with why.
	ManifestProblems []string `json:"manifestProblems,omitempty"`
}

// RedirectionStatus is the backend that programs packet rules, and why it was
// chosen.
type RedirectionStatus struct {
	Backend string    `json:"backend"`
	Variant string    `json:"variant,omitempty"` // of the iptables programs
	Reason  string    `json:"reason"`
	Probed  time.Time `json:"probed,omitzero"` // at the first start after the machine's boot, as a rule

	// IPv6Uncaptured is what becomes of IPv6 in pods where it is not captured: "drop"
	// or "allow".
	IPv6Uncaptured string `json:"ipv6Uncaptured,omitempty"`
}

// HostStatus is how the host's rule and set for kubelet's probes stand.
type HostStatus struct {
	Audit AuditStatus `json:"audit,omitzero"`
}

// AuditStatus is what comparing something with the kernel has shown.
type AuditStatus struct {
	LastAudit  time.Time `json:"lastAudit,omitzero"`
	Repairs    int       `json:"repairs,omitempty"` // since the agent's start
	LastRepair time.Time `json:"lastRepair,omitzero"`
	Repaired   []string  `json:"repaired,omitempty"` // what differed at the last repair
	Error      string    `json:"error,omitempty"`    // what keeps it from being looked at or put right, at the moment
}

// ProxyStatus is a node proxy that is connected. While it is upgraded there are
// two.
type ProxyStatus struct {
	Since time.Time `json:"since"`
	Ready bool      `json:"ready"` // it has acked its snapshot
}

// PodStatus is a pod that is in the mesh, or on its way in.
type PodStatus struct {
	Namespace   string            `json:"namespace"`
	Name        string            `json:"name"`
	UID         string            `json:"uid"`
	Netns       string            `json:"netns"` // the cookie, in decimal
	State       string            `json:"state"`
	Backend     string            `json:"backend"`
	Families    []string          `json:"families"` // "ipv4", "ipv6"
	IPs         []netip.Addr      `json:"ips"`
	Proxy       string            `json:"proxy"`
	Identity    string            `json:"identity"` // a SPIFFE ID
	Certificate CertificateStatus `json:"certificate"`

	// KeptConnections is how many established TCP connections from before its enrolment
	// the pod still has, which are not captured; absent for a pod that was enrolled at its
	// start, and where the kernel does not tell.
	KeptConnections *int `json:"keptConnections,omitempty"`

	MalformedOptions []MalformedOption `json:"malformedOptions,omitempty"`
	Audit            AuditStatus       `json:"audit,omitzero"`
	Probes           []ProbeFinding    `json:"probes,omitempty"` // of the last `ambientd verify --probes`
}

// MalformedOption is an annotation of the pod that counts as absent.
type MalformedOption struct {
	Annotation string `json:"annotation"`
	Value      string `json:"value"` // its beginning, if it is long
	Problem    string `json:"problem"`
}

// CertificateStatus is where the certificate of a pod's identity stands.
type CertificateStatus struct {
	State    string    `json:"state"`
	NotAfter time.Time `json:"notAfter,omitzero"`
}

// IdentityStatus is a registered identity.
type IdentityStatus struct {
	ID        string    `json:"id"`   // a SPIFFE ID
	Pods      int       `json:"pods"` // that it is registered for
	State     string    `json:"state"`
	NotAfter  time.Time `json:"notAfter,omitzero"`
	LastError string    `json:"lastError,omitempty"` // of the last attempt to get a certificate, if it failed
}

// SkippedStatus is a pod that is not in the mesh, and why.
type SkippedStatus struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Reason    string `json:"reason"`
}

// withLists returns s with [] where JSON would show null.
func (s Status) withLists() Status {
	s.Proxies = list(s.Proxies)
	s.Identities = list(s.Identities)
	s.Skipped = list(s.Skipped)
	pods := make([]PodStatus, 0, len(s.Pods))
	for _, pod := range s.Pods {
		pod.Families, pod.IPs = list(pod.Families), list(pod.IPs)
		pods = append(pods, pod)
	}
	s.Pods = pods
	return s
}

func list[T any](items []T) []T {
	if items == nil {
		return []T{}
	}
	return items
}

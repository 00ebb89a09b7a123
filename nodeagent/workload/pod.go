// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// Annotations that kubelet sets on the mirror of a static pod. The first is the
// UID by which the runtime, and so CNI and the cgroups, know the pod: the mirror
// object's own UID is another one.
const (
	annotationConfigHash   = "kubernetes.io/config.hash"
	annotationConfigMirror = "kubernetes.io/config.mirror"
)

// AnnotationRedirection shows others in the mesh how the pod stands: "enabled", or
// "pending" until the node proxy has acked it. The agent writes it and believes nothing
// of it.
const AnnotationRedirection = "ambient.istio.io/redirection"

// IsNeeded tells whether the agent reads the annotation, and what of it: a source may
// leave out all others, and the value of one that only has to be there.
func IsNeeded(annotation string) (key, value bool) {
	switch annotation {
	case annotationConfigHash, AnnotationRedirection:
		return true, true
	case annotationConfigMirror, annotationSidecarStatus:
		return true, false
	}
	option := IsOption(annotation) || misspelt(annotation) != ""
	return option, option
}

// Pod is a pod as the agent knows it. It holds what decisions need and nothing
// of its spec beyond that.
type Pod struct {
	UID            string // as the container runtime knows it; keys all state
	Namespace      string
	Name           string
	ServiceAccount string // empty for static pods

	Labels          map[string]string
	Annotations     map[string]string
	NamespaceLabels map[string]string

	// IPs are the addresses that the API server shows, the pod's first one first.
	// None, or a part of them, says nothing: kubelet writes them late, and takes
	// them away before the pod has ended.
	IPs []netip.Addr

	// Probes are the TCP ports to which kubelet connects from the host, sorted,
	// each once.
	Probes []uint16

	HostNetwork bool
	Phase       corev1.PodPhase
	Deleting    bool // it has a deletionTimestamp: draining, and still in need of traffic and certificate
	Static      bool // kubelet runs it from a file, the API server only shows a mirror
}

// FromPod returns what the agent needs of pod. The maps are shared with pod,
// which must not be changed afterwards.
//
// The UID of a static pod is its annotation kubernetes.io/config.hash. The
// annotation counts only on a pod that has no service account or is marked as a
// mirror: the API server gives every other pod a service account and refuses one
// on a mirror, so nobody can write another pod's UID there and be in the mesh. A
// tenant may still write it: where two pods have one UID, a Static one is not that pod.
func FromPod(pod *corev1.Pod, namespaceLabels map[string]string) Pod {
	p := Pod{
		UID:             string(pod.UID),
		Namespace:       pod.Namespace,
		Name:            pod.Name,
		ServiceAccount:  pod.Spec.ServiceAccountName,
		Labels:          pod.Labels,
		Annotations:     pod.Annotations,
		NamespaceLabels: namespaceLabels,
		IPs:             podIPs(pod.Status),
		Probes:          probePorts(pod.Spec),
		HostNetwork:     pod.Spec.HostNetwork,
		Phase:           pod.Status.Phase,
		Deleting:        pod.DeletionTimestamp != nil,
	}
	hash := pod.Annotations[annotationConfigHash]
	_, mirror := pod.Annotations[annotationConfigMirror]
	if hash != "" && (mirror || p.ServiceAccount == "") {
		p.Static = true
		p.UID = hash
	}
	return p
}

// podIPs returns the addresses of status. One that cannot be read is left out: the
// API server lets none through, and nothing relies on the list being whole.
func podIPs(status corev1.PodStatus) (ips []netip.Addr) {
	texts := []string{status.PodIP} // a manifest, or an old mirror, may have this one alone
	for _, ip := range status.PodIPs {
		texts = append(texts, ip.IP)
	}
	for _, text := range texts {
		ip, err := netip.ParseAddr(text)
		if ip = ip.Unmap(); err == nil && ip.Zone() == "" && !slices.Contains(ips, ip) {
			ips = append(ips, ip)
		}
	}
	return ips
}

// Ended says whether the pod's containers have stopped for good. Its netns may
// be gone by then.
func (p Pod) Ended() bool {
	return p.Phase == corev1.PodSucceeded || p.Phase == corev1.PodFailed
}

// String returns "namespace/name", as logs show it.
func (p Pod) String() string { return p.Namespace + "/" + p.Name }

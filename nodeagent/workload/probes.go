// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"net/netip"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// probePorts returns the TCP ports of the pod to which kubelet connects: those of
// the probes of its containers, and of the HTTP hooks of their lifecycle, which
// kubelet asks from the host just as it asks probes. Of the init containers only
// those count that keep running beside the others (restartPolicy Always): the rest
// can have neither.
//
// It names more ports than are ever dialled rather than fewer: a probe that cannot
// reach its pod gets a healthy container killed.
func probePorts(spec corev1.PodSpec) (ports []uint16) {
	for i := range spec.InitContainers {
		c := &spec.InitContainers[i]
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			ports = appendContainer(ports, c)
		}
	}
	for i := range spec.Containers {
		ports = appendContainer(ports, &spec.Containers[i])
	}
	slices.Sort(ports)
	return slices.Compact(ports)
}

func appendContainer(ports []uint16, c *corev1.Container) []uint16 {
	for _, probe := range []*corev1.Probe{c.LivenessProbe, c.ReadinessProbe, c.StartupProbe} {
		switch {
		case probe == nil:
		case probe.HTTPGet != nil:
			ports = appendPort(ports, c, probe.HTTPGet.Host, probe.HTTPGet.Port)
		case probe.TCPSocket != nil:
			ports = appendPort(ports, c, probe.TCPSocket.Host, probe.TCPSocket.Port)
		case probe.GRPC != nil:
			ports = appendPort(ports, c, "", intstr.FromInt32(probe.GRPC.Port))
		}
	}
	if c.Lifecycle == nil {
		return ports
	}
	for _, hook := range []*corev1.LifecycleHandler{c.Lifecycle.PostStart, c.Lifecycle.PreStop} {
		if hook != nil && hook.HTTPGet != nil {
			ports = appendPort(ports, c, hook.HTTPGet.Host, hook.HTTPGet.Port)
		}
	}
	return ports
}

// appendPort appends the port that kubelet would connect to, unless it does not
// connect to the pod: a host that is not empty replaces the pod's address. Only one
// that surely means a process on the node is left out, as a name may be the pod's.
func appendPort(ports []uint16, c *corev1.Container, host string, port intstr.IntOrString) []uint16 {
	if addr, err := netip.ParseAddr(host); host == "localhost" || err == nil && addr.Unmap().IsLoopback() {
		return ports
	}
	if number := resolvePort(c, port); number > 0 && number <= 0xffff {
		return append(ports, uint16(number))
	}
	return ports
}

// resolvePort returns the number of port as kubelet finds it (ResolveContainerPort in
// k8s.io/kubernetes/pkg/probe): a name is one of the same container's ports, and failing
// that a number that was written as text. It returns 0 if it is neither; kubelet
// fails such a probe without connecting anywhere.
func resolvePort(c *corev1.Container, port intstr.IntOrString) int {
	if port.Type == intstr.Int {
		return port.IntValue()
	}
	for _, p := range c.Ports {
		if p.Name == port.StrVal {
			return int(p.ContainerPort)
		}
	}
	number, err := strconv.Atoi(port.StrVal)
	if err != nil {
		return 0
	}
	return number
}

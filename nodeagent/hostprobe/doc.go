// SPDX-License-Identifier: Apache-2.0

// Package hostprobe owns which connections from the node to its pods count as
// probes: kubelet's have to reach an enrolled pod past the node proxy, since kubelet
// has no certificate. One rule in the host's netns gives them a source address that
// the pod's own rules let pass; it matches destinations in a set, and this package
// says what is in that set.
//
// # Entries belong to pods
//
// An entry is an address, or an address with a port ([redirection.ProbeScope]), and
// belongs to pod UIDs, to several for a moment: the runtime gives an address to the next
// pod before it has told that the last one is gone. The kernel's element comes with
// the first owner and goes with the last, so the late removal of a pod never takes
// away what another pod lives by.
//
// # Nothing is pruned from an incomplete list
//
// After a start the kernel's set holds entries of pods that this process has not met
// yet; the API may show pods without addresses. So nothing is taken out of the kernel
// before the caller says that every pod has been added ([Set.Settle]), nor while a
// pod's addresses are unknown. From then on kernel and memory are to agree exactly,
// and [Set.Verify] and [Set.Repair] see to it. [Set.Rest] takes out rule and sets, an
// earlier process' too, where no pod is left.
//
// # Whether it works
//
// [Set.CheckSource] opens a real connection from the host to a pod and looks whose it
// seems to be there, which no comparison of rules can replace: another rule before
// ours, or a kernel without the feature, shows only in packets.
//
// The package refuses to program the kernel by itself (a backend does), to enter a
// netns (a runner is injected), and to log: what went wrong is returned.
package hostprobe

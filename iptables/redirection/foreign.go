// SPDX-License-Identifier: Apache-2.0

package redirection

import (
	"slices"
	"strings"
)

// Names of other ambient agents: what a pod's namespace, or a host's, may hold that one of them has left there, and that
// has to go once our rules are in place. Istio's CNI node agent made all of them (cni/pkg/iptables, cni/pkg/nftables).
const (
	foreignPrerouting  = "ISTIO_PRERT"  // jumped to from PREROUTING in iptables' raw, mangle and nat
	foreignOutput      = "ISTIO_OUTPUT" // jumped to from OUTPUT in iptables' raw, mangle and nat
	foreignPostrouting = "ISTIO_POSTRT" // jumped to from POSTROUTING in nat, in the host's namespace
	foreignTablePrefix = "istio-ambient-"
)

// ForeignChains returns the names of the iptables chains that other ambient agents use, whatever table they are in.
func ForeignChains() []string { return []string{foreignPrerouting, foreignOutput, foreignPostrouting} }

// IsForeignChain reports whether an iptables chain belongs to another ambient agent.
func IsForeignChain(name string) bool { return slices.Contains(ForeignChains(), name) }

// IsSidecarChain reports whether an iptables chain is one that only the injected sidecar proxy's redirection has. It uses
// the name ISTIO_OUTPUT too: where a table holds such a chain, that one is the sidecar's, and no ambient agent's.
func IsSidecarChain(name string) bool {
	return name == "ISTIO_REDIRECT" || name == "ISTIO_IN_REDIRECT" || name == "ISTIO_INBOUND"
}

// IsForeignTable reports whether a native nftables table belongs to another ambient agent: istio-ambient-nat,
// istio-ambient-mangle, istio-ambient-raw and alike, of any family.
func IsForeignTable(name string) bool {
	return strings.HasPrefix(name, foreignTablePrefix) && len(name) > len(foreignTablePrefix)
}

// IsOurChain reports whether an iptables chain is one of ours.
func IsOurChain(name string) bool {
	switch name {
	case IPTablesPrerouting, IPTablesOutput, IPTablesPostrouting, IPTablesGuardInput, IPTablesGuardOutput:
		return true
	default:
		return false
	}
}

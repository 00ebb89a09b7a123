// SPDX-License-Identifier: Apache-2.0

package redirection

import (
	"cmp"
	"fmt"
	"net/netip"
)

// Names of what the host's network namespace holds of ours.
const (
	// HostTable is the nftables table, of family inet.
	HostTable = "ambientd-host"
	// IPTablesPostrouting is our chain in iptables' nat table that is jumped to from POSTROUTING.
	IPTablesPostrouting = "AMBIENTD_POSTRT"
	// ProbeSetIPv4 and ProbeSetIPv6 are the sets of probed addresses: named sets of [HostTable], or ipsets.
	ProbeSetIPv4 = "ambientd-probes-v4"
	ProbeSetIPv6 = "ambientd-probes-v6"
)

// ProbeScope says which connections from the host to an enrolled pod count as probes.
type ProbeScope string

// The scopes.
const (
	// ProbeScopePod takes every TCP connection that a process of the host opens to the pod.
	ProbeScopePod ProbeScope = "pod"
	// ProbeScopeDeclared takes those to ports that the pod declares probes for: entries carry a port.
	ProbeScopeDeclared ProbeScope = "declared"
)

// HostOptions say how probes are told from other traffic in the host's namespace. They are comparable. The zero value
// does not validate.
//
// What they make is one rule for each family, in nat postrouting: TCP that a socket of this namespace sends, to a
// destination in the set, gets the probe source as its source address. Forwarded packets have no such socket, so
// kube-proxy's traffic that happens to carry the node's address is not taken for a probe.
type HostOptions struct {
	ProbeSourceIPv4, ProbeSourceIPv6 netip.Addr
	// IPv6 makes the rule and the set for IPv6 too.
	IPv6 bool
	// Scope decides whether the sets hold addresses, or addresses with ports.
	Scope ProbeScope
}

// Validate returns an error that names the option which cannot be rendered, and nil if there is none.
func (o HostOptions) Validate() error {
	if o.Scope != ProbeScopePod && o.Scope != ProbeScopeDeclared {
		return fmt.Errorf("probe scope %q is neither %q nor %q", o.Scope, ProbeScopePod, ProbeScopeDeclared)
	}
	if err := validateProbeSource(o.ProbeSourceIPv4, IPv4); err != nil {
		return err
	}
	if !o.IPv6 && !o.ProbeSourceIPv6.IsValid() {
		return nil
	}
	return validateProbeSource(o.ProbeSourceIPv6, IPv6)
}

// Families returns the families that there is a rule and a set for.
func (o HostOptions) Families() Families {
	if o.IPv6 {
		return DualStack
	}
	return IPv4
}

// HostEntry is an element of the sets: where probes of one pod go to. It is comparable.
type HostEntry struct {
	Addr netip.Addr
	Port uint16 // of TCP; 0 with ProbeScopePod, never with ProbeScopeDeclared
}

// ValidateEntry returns an error unless the sets that the options make can hold the entry.
func (o HostOptions) ValidateEntry(e HostEntry) error {
	switch {
	case !e.Addr.IsValid() || e.Addr.Zone() != "" || e.Addr.Is4In6() || e.Addr.IsUnspecified():
		return fmt.Errorf("probe entry %s: no address of a pod", e)
	case !o.Families().Has(FamilyOf(e.Addr)):
		return fmt.Errorf("probe entry %s: there is no set for its family", e)
	case o.Scope == ProbeScopePod && e.Port != 0:
		return fmt.Errorf("probe entry %s: no port is expected with probe scope %s", e, o.Scope)
	case o.Scope == ProbeScopeDeclared && e.Port == 0:
		return fmt.Errorf("probe entry %s: a port is expected with probe scope %s", e, o.Scope)
	}
	return nil
}

// Compare orders entries by address, IPv4 first, then by port.
func (e HostEntry) Compare(other HostEntry) int {
	return cmp.Or(e.Addr.Compare(other.Addr), cmp.Compare(e.Port, other.Port))
}

// String returns the entry as "10.0.0.2" or "10.0.0.2:8080".
func (e HostEntry) String() string {
	if e.Port == 0 {
		return e.Addr.String()
	}
	return netip.AddrPortFrom(e.Addr, e.Port).String()
}

// HostRule is the rule of one family, ready to be rendered: locally generated TCP, to a destination in Set, is
// translated to come from Source.
type HostRule struct {
	Family Families
	Set    string
	Scope  ProbeScope
	Source netip.Addr
	Why    string
}

// HostRules returns the rules that the options call for. The options must be valid.
func HostRules(o HostOptions) []HostRule {
	rules := []HostRule{{Family: IPv4, Set: ProbeSetIPv4, Scope: o.Scope, Source: o.ProbeSourceIPv4}}
	if o.IPv6 {
		rules = append(rules, HostRule{Family: IPv6, Set: ProbeSetIPv6, Scope: o.Scope, Source: o.ProbeSourceIPv6})
	}
	for i := range rules {
		rules[i].Why = "probes from this host carry the source that lets them bypass the proxy"
	}
	return rules
}

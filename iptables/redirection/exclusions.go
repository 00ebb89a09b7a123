// SPDX-License-Identifier: Apache-2.0

package redirection

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// MaxExclusions bounds each list of exclusions, for the reason that [MaxRerouteInterfaces] bounds its own.
const MaxExclusions = 64

// PortRange is the ports from First to Last, both included. It is comparable; the zero value is no range.
type PortRange struct {
	First, Last uint16
}

// SinglePort returns the range that holds one port.
func SinglePort(port uint16) PortRange { return PortRange{First: port, Last: port} }

// Contains reports whether the range holds the port.
func (r PortRange) Contains(port uint16) bool { return r.First <= port && port <= r.Last }

// String returns the range as "8000-8010", a single port as "8000".
func (r PortRange) String() string {
	if r.First == r.Last {
		return strconv.Itoa(int(r.First))
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

// validate returns an error unless the range holds a port that a connection can have.
func (r PortRange) validate() error {
	if r.First == 0 || r.First > r.Last {
		return fmt.Errorf("port range %d-%d is empty or holds port 0", r.First, r.Last)
	}
	return nil
}

func (o Options) validateExclusions() error {
	for _, list := range []struct {
		what  string
		ports []PortRange
	}{
		{"excluded inbound port", o.ExcludeInboundPorts},
		{"excluded outbound port", o.ExcludeOutboundPorts},
	} {
		if len(list.ports) > MaxExclusions {
			return fmt.Errorf("%ss: %d given, at most %d are allowed", list.what, len(list.ports), MaxExclusions)
		}
		for _, ports := range list.ports {
			if err := ports.validate(); err != nil {
				return fmt.Errorf("%s: %w", list.what, err)
			}
		}
	}
	if len(o.ExcludeOutboundCIDRs) > MaxExclusions {
		return fmt.Errorf("excluded outbound CIDRs: %d given, at most %d are allowed", len(o.ExcludeOutboundCIDRs), MaxExclusions)
	}
	for _, prefix := range o.ExcludeOutboundCIDRs {
		if !prefix.IsValid() || prefix.Addr().Is4In6() {
			return fmt.Errorf("excluded outbound CIDR: %s is no prefix of IPv4 or IPv6", prefix)
		}
	}
	return validateInterfaces("excluded interface", o.ExcludeInterfaces, MaxExclusions)
}

// mergePorts returns the same ports in as few ranges as can be, in order.
func mergePorts(ranges []PortRange) []PortRange {
	sorted := slices.SortedFunc(slices.Values(ranges), func(a, b PortRange) int { return cmp.Compare(a.First, b.First) })
	var merged []PortRange
	for _, r := range sorted {
		if last := len(merged) - 1; last >= 0 && int(r.First) <= int(merged[last].Last)+1 {
			merged[last].Last = max(merged[last].Last, r.Last)
			continue
		}
		merged = append(merged, r)
	}
	return merged
}

// mergePrefixes returns the same addresses without prefixes that others contain, IPv4 first, in order.
func mergePrefixes(prefixes []netip.Prefix) []netip.Prefix {
	sorted := make([]netip.Prefix, 0, len(prefixes))
	for _, prefix := range prefixes {
		sorted = append(sorted, prefix.Masked())
	}
	slices.SortFunc(sorted, netip.Prefix.Compare)
	var merged []netip.Prefix
	for _, prefix := range sorted {
		// One that contains it has the same or an earlier address, and fewer bits: it came before.
		if last := len(merged) - 1; last < 0 || !merged[last].Contains(prefix.Addr()) {
			merged = append(merged, prefix)
		}
	}
	return merged
}

// sortedOnce returns the names sorted, each once.
func sortedOnce(names []string) []string { return slices.Compact(slices.Sorted(slices.Values(names))) }

func join[T fmt.Stringer](list []T) string {
	words := make([]string, len(list))
	for i, element := range list {
		words[i] = element.String()
	}
	return strings.Join(words, ",")
}

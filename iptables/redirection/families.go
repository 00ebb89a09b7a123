// SPDX-License-Identifier: Apache-2.0

package redirection

import (
	"net/netip"
	"strings"
)

// Families is a set of IP families. The zero value is the empty set.
type Families uint8

// The families, and the set of both.
const (
	IPv4      Families = 1 << 0
	IPv6      Families = 1 << 1
	DualStack          = IPv4 | IPv6
)

// FamilyOf returns the family of an address; an IPv4 address in IPv6 notation counts as IPv6.
func FamilyOf(addr netip.Addr) Families {
	if addr.Is4() {
		return IPv4
	}
	return IPv6
}

// Has reports whether every family of other is in the set.
func (f Families) Has(other Families) bool { return f&other == other }

// Each returns the families of the set one by one, IPv4 first.
func (f Families) Each() []Families {
	var single []Families
	for _, family := range []Families{IPv4, IPv6} {
		if f.Has(family) {
			single = append(single, family)
		}
	}
	return single
}

// List returns the names of the families, "ipv4" first; it is empty, not nil, for the empty set, so that it encodes
// as a JSON array.
func (f Families) List() []string {
	names := []string{}
	for _, family := range f.Each() {
		if family == IPv4 {
			names = append(names, "ipv4")
		} else {
			names = append(names, "ipv6")
		}
	}
	return names
}

// String returns the names joined by commas, "none" for the empty set.
func (f Families) String() string {
	if f&DualStack == 0 {
		return "none"
	}
	return strings.Join(f.List(), ",")
}

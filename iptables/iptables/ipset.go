// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
)

// The functions of this file work on the netns of the calling thread: the library
// opens a socket for every request.

// maxEntries is how many entries a set can take, many times what a node has pods
// for. It is a limit, not a size.
const maxEntries = 1 << 16

// setKind is the type of an ipset (ipset(8)): what its entries are.
type setKind string

const (
	addresses         setKind = "hash:ip"
	addressesAndPorts setKind = "hash:ip,port"
)

// kindOf returns the type of the sets that a scope needs, and the "dst" of the rule
// for each part of an entry.
func kindOf(scope redirection.ProbeScope) (kind setKind, match string) {
	if scope == redirection.ProbeScopeDeclared {
		return addressesAndPorts, "dst,dst"
	}
	return addresses, "dst"
}

// probeSet is an ipset as it should be.
type probeSet struct {
	name   string
	kind   setKind
	family redirection.Families
}

func probeSetOf(rule redirection.HostRule) probeSet {
	kind, _ := kindOf(rule.Scope)
	return probeSet{name: rule.Set, kind: kind, family: rule.Family}
}

// String describes the set as ipset(8) would.
func (s probeSet) String() string { return fmt.Sprintf("%s family %s", s.kind, s.family) }

// read returns the kernel's set of that name, and false if there is none.
func (s probeSet) read() (probeSet, []redirection.HostEntry, bool, error) {
	list, err := netlink.IpsetList(s.name)
	if errors.Is(err, unix.ENOENT) {
		return probeSet{}, nil, false, nil
	}
	if err != nil {
		return probeSet{}, nil, false, fmt.Errorf("reading ipset %s: %w", s.name, err)
	}
	got := probeSet{name: s.name, kind: setKind(list.TypeName), family: redirection.IPv4}
	if list.Family == unix.AF_INET6 {
		got.family = redirection.IPv6
	}
	var entries []redirection.HostEntry
	for _, e := range list.Entries {
		addr, ok := netip.AddrFromSlice(e.IP)
		if !ok {
			continue // of a kind that is not ours, which comparing the sets tells
		}
		entry := redirection.HostEntry{Addr: addr}
		if e.Port != nil {
			entry.Port = *e.Port
		}
		entries = append(entries, entry)
	}
	return got, entries, true, nil
}

func (s probeSet) create() error {
	family := uint8(unix.AF_INET)
	if s.family == redirection.IPv6 {
		family = unix.AF_INET6
	}
	err := netlink.IpsetCreate(s.name, string(s.kind), netlink.IpsetCreateOptions{Family: family, MaxElements: maxEntries})
	if err != nil {
		return fmt.Errorf("creating ipset %s (%s): %w", s.name, s, err)
	}
	return nil
}

// destroy deletes the set of that name, whatever it is. One that is not there is
// fine.
func (s probeSet) destroy() error {
	err := netlink.IpsetDestroy(s.name)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		if errors.Is(err, nl.IPSetError(nl.IPSET_ERR_BUSY)) {
			return fmt.Errorf("destroying ipset %s: some rule that is not ours uses it: %w", s.name, err)
		}
		return fmt.Errorf("destroying ipset %s: %w", s.name, err)
	}
	return nil
}

// element returns the entry as the library has it. Replace makes it fine that an
// entry is there already, or gone already.
func element(e redirection.HostEntry) *netlink.IPSetEntry {
	entry := &netlink.IPSetEntry{IP: e.Addr.AsSlice(), Replace: true}
	if e.Port != 0 {
		protocol := uint8(unix.IPPROTO_TCP)
		entry.Port, entry.Protocol = &e.Port, &protocol
	}
	return entry
}

func (s probeSet) add(e redirection.HostEntry) error {
	if err := netlink.IpsetAdd(s.name, element(e)); err != nil {
		return fmt.Errorf("adding %s to ipset %s: %w", e, s.name, err)
	}
	return nil
}

func (s probeSet) del(e redirection.HostEntry) error {
	if err := netlink.IpsetDel(s.name, element(e)); err != nil {
		return fmt.Errorf("taking %s out of ipset %s: %w", e, s.name, err)
	}
	return nil
}

// fill makes the set hold exactly the entries. Those that stay are there
// throughout.
func (s probeSet) fill(entries []redirection.HostEntry) error {
	_, got, exists, err := s.read()
	if err != nil {
		return err
	}
	if !exists {
		return fmt.Errorf("filling ipset %s: %w", s.name, unix.ENOENT)
	}
	for _, e := range missing(entries, got) {
		if err := s.add(e); err != nil {
			return err
		}
	}
	for _, e := range missing(got, entries) {
		if err := s.del(e); err != nil {
			return err
		}
	}
	return nil
}

// missing returns the entries of a that b lacks, in order, each once.
func missing(a, b []redirection.HostEntry) []redirection.HostEntry {
	rest := map[redirection.HostEntry]bool{}
	for _, e := range a {
		rest[e] = true
	}
	for _, e := range b {
		delete(rest, e)
	}
	return slices.SortedFunc(maps.Keys(rest), redirection.HostEntry.Compare)
}

// differences compares the kernel's set with this one and the entries. It names as
// many as [maxDifferences] of those.
func (s probeSet) differences(entries []redirection.HostEntry) ([]redirection.Difference, error) {
	got, gotEntries, exists, err := s.read()
	if err != nil {
		return nil, err
	}
	if !exists {
		return []redirection.Difference{{Family: s.family, What: "ipset " + s.name,
			Want: fmt.Sprintf("%s with %d entries", s.kind, len(entries))}}, nil
	}
	if got != s {
		return []redirection.Difference{{Family: s.family, What: "ipset " + s.name, Want: s.String(), Got: got.String()}}, nil
	}
	var found []redirection.Difference
	for _, e := range missing(entries, gotEntries) {
		found = append(found, redirection.Difference{Family: s.family, What: "entry of ipset " + s.name, Want: e.String()})
	}
	for _, e := range missing(gotEntries, entries) {
		found = append(found, redirection.Difference{Family: s.family, What: "entry of ipset " + s.name, Got: e.String()})
	}
	return bound(found), nil
}

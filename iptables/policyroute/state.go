// SPDX-License-Identifier: Apache-2.0

package policyroute

import (
	"encoding/binary"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
)

// State is what a network namespace holds of policy routing, as one Read saw it. It aliases the socket's buffer, so it
// is good until the socket is closed.
type State struct {
	loopbackUp bool
	ipv6       bool    // lo takes IPv6
	rules      []entry // at our priority
	routes     []entry // in our table
	moreRules  int     // so many were read, of all priorities, and there are more; 0 if those are all
	moreRoutes int     // likewise, of our table
	untold     bool    // one of the routes could not be read, nor those behind it
}

// entry is a rule or a route.
type entry struct {
	family redirection.Families
	ours   bool   // it is exactly what Apply adds
	body   []byte // the message's payload; with another message type it deletes the entry
}

// Families returns those of the families given that the namespace has. It has IPv6 unless the kernel came without it or
// it is switched off for lo, be it through net.ipv6.conf.all.disable_ipv6 or for lo alone: the route to lo that
// redirection needs cannot be made then.
func (s *State) Families(allowed redirection.Families) redirection.Families {
	if s.ipv6 {
		return allowed
	}
	return allowed & redirection.IPv4
}

// CheckLoopback returns [ErrLoopbackDown] if lo is down.
func (s *State) CheckLoopback() error {
	if !s.loopbackUp {
		return ErrLoopbackDown
	}
	return nil
}

// readLoopback takes lo's flags and its IPv6 state from the answer to linkRequest.
func (s *State) readLoopback(payload []byte) error {
	if len(payload) < linkHeader {
		return fmt.Errorf("link message of %d bytes", len(payload))
	}
	s.loopbackUp = binary.NativeEndian.Uint32(payload[8:])&unix.IFF_UP != 0
	conf, err := find(payload[linkHeader:], unix.IFLA_AF_SPEC, unix.AF_INET6, unix.IFLA_INET6_CONF)
	if err != nil {
		return err
	}
	// Without IPv6 in the kernel, or on the device, there is no such attribute.
	if offset := disableIPv6Index * 4; len(conf) >= offset+4 {
		s.ipv6 = binary.NativeEndian.Uint32(conf[offset:]) == 0
	}
	return nil
}

// disableIPv6Index is DEVCONF_DISABLE_IPV6 of linux/ipv6.h: where the array of a device's settings has disable_ipv6.
const disableIPv6Index = 26

// find follows a path of nested attribute types and returns the data at its end, nil if it is not there.
func find(b []byte, path ...uint16) ([]byte, error) {
	for _, step := range path {
		var inner []byte
		for len(b) > 0 && inner == nil {
			var a rawnetlink.Attribute
			var err error
			if a, b, err = rawnetlink.NextAttribute(b); err != nil {
				return nil, err
			}
			if a.Type == step {
				inner = a.Data
			}
		}
		b = inner
	}
	return b, nil
}

// addRule takes up a rule of the rule dump if it is at our priority.
func (s *State) addRule(payload []byte) error {
	if len(payload) < ruleHeader {
		return fmt.Errorf("rule message of %d bytes", len(payload))
	}
	family := familyOf(payload[0])
	if family == 0 {
		return nil
	}
	priority, err := find(payload[ruleHeader:], unix.FRA_PRIORITY)
	if err != nil {
		return err
	}
	if len(priority) < 4 || binary.NativeEndian.Uint32(priority) != redirection.RulePriority {
		return nil
	}
	ours, err := isOurRule(payload)
	if err != nil {
		return err
	}
	s.rules = append(s.rules, entry{family: family, ours: ours, body: payload})
	return nil
}

// isOurRule reports whether a rule selects by our mark alone and looks up our table.
func isOurRule(payload []byte) (bool, error) {
	// struct fib_rule_hdr: family, dst_len, src_len, tos, table, two reserved, action, flags (32 bits).
	if payload[1] != 0 || payload[2] != 0 || payload[3] != 0 || payload[7] != unix.FR_ACT_TO_TBL ||
		binary.NativeEndian.Uint32(payload[8:]) != 0 {
		return false, nil
	}
	return hasExactly(payload[ruleHeader:], []expectation{
		{kind: unix.FRA_PRIORITY, value: redirection.RulePriority},
		{kind: unix.FRA_FWMARK, value: redirection.ConnMark},
		{kind: unix.FRA_FWMASK, value: redirection.MarkMask},
		{kind: unix.FRA_TABLE, value: redirection.RouteTable},
		// The kernel always reports it. Unused it is all ones, while 0 would hide our route, which is a default one.
		{kind: unix.FRA_SUPPRESS_PREFIXLEN, value: 0xffffffff},
	}, []uint16{
		unix.FRA_PROTOCOL, // who added it
	}, unix.FRA_DPORT_RANGE)
}

// addRoute takes up a route of the route dump.
func (s *State) addRoute(payload []byte) error {
	if len(payload) < routeHeader {
		return fmt.Errorf("route message of %d bytes", len(payload))
	}
	family := familyOf(payload[0])
	if family == 0 {
		return nil
	}
	ours, err := isOurRoute(payload)
	if err != nil {
		return err
	}
	s.routes = append(s.routes, entry{family: family, ours: ours, body: payload})
	return nil
}

// isOurRoute reports whether a route of our table makes every destination local.
func isOurRoute(payload []byte) (bool, error) {
	// struct rtmsg: family, dst_len, src_len, tos, table, protocol, scope, type, flags (32 bits).
	if payload[1] != 0 || payload[2] != 0 || payload[3] != 0 || payload[7] != unix.RTN_LOCAL {
		return false, nil
	}
	return hasExactly(payload[routeHeader:], []expectation{
		{kind: unix.RTA_TABLE, value: redirection.RouteTable},
		{kind: unix.RTA_OIF, value: loopbackIndex},
	}, []uint16{
		unix.RTA_PRIORITY, unix.RTA_PREF, // order among routes to the same destination; there is no other
		unix.RTA_CACHEINFO, // statistics
	}, rtaNextHopID)
}

// rtaNextHopID is RTA_NH_ID of linux/rtnetlink.h, which package unix does not have.
const rtaNextHopID = 30

// expectation is a 32-bit attribute that must be there.
type expectation struct {
	kind  uint16
	value uint32
}

// hasExactly reports whether the attributes hold every expectation and, besides those to ignore, nothing else that is
// set. Of types above newest, which this code does not know, zeros count as unset: a newer kernel may report them always.
func hasExactly(attributes []byte, expected []expectation, ignored []uint16, newest uint16) (bool, error) {
	met := 0
	for len(attributes) > 0 {
		var a rawnetlink.Attribute
		var err error
		if a, attributes, err = rawnetlink.NextAttribute(attributes); err != nil {
			return false, err
		}
		i := slices.IndexFunc(expected, func(e expectation) bool { return e.kind == a.Type })
		switch {
		case i >= 0:
			if len(a.Data) != 4 || binary.NativeEndian.Uint32(a.Data) != expected[i].value {
				return false, nil
			}
			met++
		case slices.Contains(ignored, a.Type):
		case a.Type > newest && !slices.ContainsFunc(a.Data, func(b byte) bool { return b != 0 }):
		default:
			return false, nil
		}
	}
	return met == len(expected), nil
}

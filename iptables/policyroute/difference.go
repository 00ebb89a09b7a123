// SPDX-License-Identifier: Apache-2.0

package policyroute

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
)

// ruleText and routeText are what Apply adds, in the notation of ip(8).
func ruleText() string {
	return fmt.Sprintf("fwmark %#x/%#x lookup %d priority %d",
		redirection.ConnMark, redirection.MarkMask, redirection.RouteTable, redirection.RulePriority)
}

func routeText() string {
	return fmt.Sprintf("local default dev %s table %d", redirection.Loopback, redirection.RouteTable)
}

// Differences compares the state with what Apply makes of it for the families given. It is empty, and Apply has nothing
// to do, if they agree.
func (s *State) Differences(families redirection.Families) []redirection.Difference {
	var differences []redirection.Difference
	if !s.loopbackUp {
		differences = append(differences, redirection.Difference{What: "loopback device", Want: "up", Got: "down"})
	}
	for _, family := range families.Each() {
		if !hasOurs(s.rules, family) {
			differences = append(differences, redirection.Difference{Family: family, What: "policy rule", Want: ruleText()})
		}
		if !hasOurs(s.routes, family) {
			differences = append(differences, redirection.Difference{Family: family, What: "route", Want: routeText()})
		}
	}
	surplus := s.surplus(families)
	for i, r := range surplus {
		if i == maxListed {
			differences = append(differences, redirection.Difference{
				What: "policy routing", Got: fmt.Sprintf("%d more rules and routes of others", len(surplus)-i),
			})
			break
		}
		d := redirection.Difference{Family: r.family, What: "policy rule", Got: describeRule(r.payload)}
		if r.kind == unix.RTM_DELROUTE {
			d.What, d.Got = "route", describeRoute(r.payload)
		}
		differences = append(differences, d)
	}
	return append(differences, s.unread()...)
}

// maxListed bounds how many rules and routes of others are named one by one.
const maxListed = 16

// unread tells what there is more of than was read.
func (s *State) unread() []redirection.Difference {
	var differences []redirection.Difference
	if s.moreRules > 0 {
		differences = append(differences, redirection.Difference{What: "policy rules", Got: fmt.Sprintf("more than %d, of all priorities", s.moreRules)})
	}
	if s.moreRoutes > 0 {
		differences = append(differences, redirection.Difference{What: fmt.Sprintf("routes of table %d", redirection.RouteTable), Got: fmt.Sprintf("more than %d", s.moreRoutes)})
	}
	if s.untold {
		differences = append(differences, redirection.Difference{What: fmt.Sprintf("routes of table %d", redirection.RouteTable), Got: "one that the kernel cannot list"})
	}
	return differences
}

// missing returns the requests that add what is not there of what should be.
func (s *State) missing(families redirection.Families) []request {
	var requests []request
	for _, family := range families.Each() {
		// The route first: a rule that leads to an empty table sends answers on to the default route.
		if !hasOurs(s.routes, family) {
			requests = append(requests, addRoute(family))
		}
		if !hasOurs(s.rules, family) {
			requests = append(requests, addRule(family))
		}
	}
	return requests
}

// surplus returns the requests that delete what should not be there: in a family that is covered, everything at our
// priority and in our table but one of ours; in others, ours.
func (s *State) surplus(families redirection.Families) []request {
	var requests []request
	seek := func(kind uint16, entries []entry) {
		var kept redirection.Families
		for _, e := range entries {
			covered := families.Has(e.family)
			switch {
			case covered && e.ours && !kept.Has(e.family):
				kept |= e.family
			case covered || e.ours:
				requests = append(requests, request{kind: kind, family: e.family, payload: e.body})
			}
		}
	}
	// The rule first, for the reason that Apply adds it last.
	seek(unix.RTM_DELRULE, s.rules)
	seek(unix.RTM_DELROUTE, s.routes)
	return requests
}

func hasOurs(entries []entry, family redirection.Families) bool {
	for _, e := range entries {
		if e.ours && e.family == family {
			return true
		}
	}
	return false
}

// describeRule returns a foreign rule in the notation of ip(8) as far as an operator needs it to find the rule there.
func describeRule(payload []byte) string {
	var words []string
	if binary.NativeEndian.Uint32(payload[8:])&unix.FIB_RULE_INVERT != 0 {
		words = append(words, "not")
	}
	fields := attributesOf(payload[ruleHeader:])
	words = append(words, "from "+prefix(fields[unix.FRA_SRC], payload[2], "all"))
	if dst := prefix(fields[unix.FRA_DST], payload[1], ""); dst != "" {
		words = append(words, "to "+dst)
	}
	if mark, ok := number(fields[unix.FRA_FWMARK]); ok {
		mask, _ := number(fields[unix.FRA_FWMASK])
		words = append(words, fmt.Sprintf("fwmark %#x/%#x", mark, mask))
	}
	if payload[7] == unix.FR_ACT_TO_TBL {
		table, _ := number(fields[unix.FRA_TABLE])
		words = append(words, fmt.Sprintf("lookup %d", table))
	} else {
		words = append(words, fmt.Sprintf("action %d", payload[7]))
	}
	priority, _ := number(fields[unix.FRA_PRIORITY])
	return strings.Join(append(words, fmt.Sprintf("priority %d", priority)), " ")
}

// describeRoute returns a foreign route in the notation of ip(8), likewise.
func describeRoute(payload []byte) string {
	fields := attributesOf(payload[routeHeader:])
	words := []string{routeType(payload[7]), prefix(fields[unix.RTA_DST], payload[1], "default")}
	if via, ok := netip.AddrFromSlice(fields[unix.RTA_GATEWAY]); ok {
		words = append(words, "via "+via.String())
	}
	if index, ok := number(fields[unix.RTA_OIF]); ok {
		words = append(words, fmt.Sprintf("dev index %d", index))
	}
	table, _ := number(fields[unix.RTA_TABLE])
	words = append(words, fmt.Sprintf("table %d", table))
	if metric, ok := number(fields[unix.RTA_PRIORITY]); ok {
		words = append(words, fmt.Sprintf("metric %d", metric))
	}
	return strings.Join(words, " ")
}

func routeType(kind byte) string {
	switch kind {
	case unix.RTN_UNICAST:
		return "unicast"
	case unix.RTN_LOCAL:
		return "local"
	case unix.RTN_BLACKHOLE:
		return "blackhole"
	case unix.RTN_UNREACHABLE:
		return "unreachable"
	case unix.RTN_PROHIBIT:
		return "prohibit"
	case unix.RTN_THROW:
		return "throw"
	default:
		return fmt.Sprintf("type %d", kind)
	}
}

// attributesOf returns the attributes by type, as far as they are well-formed.
func attributesOf(b []byte) map[uint16][]byte {
	fields := map[uint16][]byte{}
	for len(b) > 0 {
		a, rest, err := rawnetlink.NextAttribute(b)
		if err != nil {
			return fields
		}
		fields[a.Type], b = a.Data, rest
	}
	return fields
}

func number(data []byte) (uint32, bool) {
	if len(data) != 4 {
		return 0, false
	}
	return binary.NativeEndian.Uint32(data), true
}

func prefix(address []byte, bits byte, otherwise string) string {
	addr, ok := netip.AddrFromSlice(address)
	if !ok {
		return otherwise
	}
	return netip.PrefixFrom(addr, int(bits)).String()
}

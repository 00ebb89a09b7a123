// SPDX-License-Identifier: Apache-2.0

package policyroute

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
)

// loopbackIndex is lo's interface index in every network namespace (LOOPBACK_IFINDEX, net/flow.h in the kernel).
const loopbackIndex = 1

// Lengths in bytes of the headers that the payloads begin with.
const (
	ruleHeader  = 12 // struct fib_rule_hdr, linux/fib_rules.h
	routeHeader = unix.SizeofRtMsg
	linkHeader  = unix.SizeofIfInfomsg
)

// request is a message that changes something, and for what.
type request struct {
	kind    uint16 // RTM_NEWRULE and the like
	family  redirection.Families
	payload []byte
}

// creates reports whether the request adds something, which can be taken back.
func (r request) creates() bool { return r.kind == unix.RTM_NEWRULE || r.kind == unix.RTM_NEWROUTE }

// inverse returns the request that takes back what r adds.
func (r request) inverse() request {
	if r.kind == unix.RTM_NEWRULE {
		r.kind = unix.RTM_DELRULE
	} else {
		r.kind = unix.RTM_DELROUTE
	}
	return r
}

// String names what the request does, for errors: "adding the ipv6 route".
func (r request) String() string {
	switch r.kind {
	case unix.RTM_NEWRULE:
		return "adding the " + r.family.String() + " policy rule"
	case unix.RTM_NEWROUTE:
		return "adding the " + r.family.String() + " route"
	case unix.RTM_DELRULE:
		return "deleting a " + r.family.String() + " policy rule"
	default:
		return "deleting a " + r.family.String() + " route"
	}
}

// encode makes one datagram of the requests, numbered from 1, of which the last asks for an acknowledgement. The kernel
// reports a refusal whether it was asked to acknowledge or not.
func encode(requests []request) []byte {
	var b []byte
	for i, r := range requests {
		m := rawnetlink.Message{Type: r.kind, Flags: unix.NLM_F_REQUEST, Sequence: uint32(i + 1), Payload: r.payload}
		if r.creates() {
			m.Flags |= unix.NLM_F_CREATE | unix.NLM_F_EXCL
		}
		if i == len(requests)-1 {
			m.Flags |= unix.NLM_F_ACK
		}
		b = rawnetlink.AppendMessage(b, m)
	}
	return b
}

// addRule is "ip rule add fwmark 0x111/0xfff lookup 100 priority 32764".
func addRule(family redirection.Families) request {
	b := make([]byte, ruleHeader, 64)
	b[0] = addressFamily(family)
	b[4] = byte(redirection.RouteTable)
	b[7] = unix.FR_ACT_TO_TBL
	b = appendUint32(b, unix.FRA_PRIORITY, redirection.RulePriority)
	b = appendUint32(b, unix.FRA_FWMARK, redirection.ConnMark)
	b = appendUint32(b, unix.FRA_FWMASK, redirection.MarkMask)
	b = appendUint32(b, unix.FRA_TABLE, redirection.RouteTable)
	return request{kind: unix.RTM_NEWRULE, family: family, payload: b}
}

// addRoute is "ip route add local default dev lo table 100 proto static". Routing daemons and network managers remove
// what has the protocol boot, which is what ip gives by default.
func addRoute(family redirection.Families) request {
	b := make([]byte, routeHeader, 32)
	b[0] = addressFamily(family)
	b[4] = byte(redirection.RouteTable)
	b[5] = unix.RTPROT_STATIC
	b[6] = unix.RT_SCOPE_HOST
	b[7] = unix.RTN_LOCAL
	b = appendUint32(b, unix.RTA_TABLE, redirection.RouteTable)
	b = appendUint32(b, unix.RTA_OIF, loopbackIndex)
	return request{kind: unix.RTM_NEWROUTE, family: family, payload: b}
}

// linkRequest asks for lo. It is no dump, so it goes out in front of one.
func linkRequest() rawnetlink.Message {
	b := make([]byte, linkHeader, linkHeader+8)
	binary.NativeEndian.PutUint32(b[4:], loopbackIndex)
	// The counters would be most of the answer.
	b = appendUint32(b, unix.IFLA_EXT_MASK, rtextFilterSkipStats)
	return rawnetlink.Message{Type: unix.RTM_GETLINK, Flags: unix.NLM_F_REQUEST, Payload: b}
}

// rtextFilterSkipStats is RTEXT_FILTER_SKIP_STATS of linux/rtnetlink.h, which package unix does not have.
const rtextFilterSkipStats = 1 << 3

// ruleDumpRequest asks for the policy rules of all families; the kernel has no filter for them.
func ruleDumpRequest() rawnetlink.Message {
	return rawnetlink.Message{
		Type: unix.RTM_GETRULE, Flags: unix.NLM_F_REQUEST | unix.NLM_F_DUMP, Payload: make([]byte, ruleHeader),
	}
}

// routeDumpRequest asks for the routes in our table, of all families.
func routeDumpRequest() rawnetlink.Message {
	b := make([]byte, routeHeader, routeHeader+8)
	b[4] = byte(redirection.RouteTable)
	b = appendUint32(b, unix.RTA_TABLE, redirection.RouteTable)
	return rawnetlink.Message{Type: unix.RTM_GETROUTE, Flags: unix.NLM_F_REQUEST | unix.NLM_F_DUMP, Payload: b}
}

func appendUint32(b []byte, kind uint16, value uint32) []byte {
	var data [4]byte
	binary.NativeEndian.PutUint32(data[:], value)
	return rawnetlink.AppendAttribute(b, rawnetlink.Attribute{Type: kind, Data: data[:]})
}

func addressFamily(family redirection.Families) byte {
	if family == redirection.IPv4 {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// familyOf returns the empty set for families that have nothing to do with redirection, such as multicast routing's.
func familyOf(addressFamily byte) redirection.Families {
	switch addressFamily {
	case unix.AF_INET:
		return redirection.IPv4
	case unix.AF_INET6:
		return redirection.IPv6
	default:
		return 0
	}
}

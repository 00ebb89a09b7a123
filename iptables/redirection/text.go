// SPDX-License-Identifier: Apache-2.0

package redirection

import (
	"fmt"
	"strings"
)

// String returns the mark as "0x539/0xfff".
func (m Mark) String() string { return fmt.Sprintf("%#x/%#x", m.Value, m.Mask) }

// String returns the conditions joined by blanks, the empty string for a match that any packet meets.
func (m Match) String() string {
	var words []string
	add := func(set, not bool, what string, value any) {
		switch {
		case set && not:
			words = append(words, fmt.Sprintf("%s != %v", what, value))
		case set:
			words = append(words, fmt.Sprintf("%s %v", what, value))
		}
	}
	add(m.In.Name != "", m.In.Not, "in", m.In.Name)
	add(m.Out.Name != "", m.Out.Not, "out", m.Out.Name)
	add(m.Source.Prefix.IsValid(), m.Source.Not, "source", m.Source.Prefix)
	add(m.Destination.Prefix.IsValid(), m.Destination.Not, "destination", m.Destination.Prefix)
	if m.Protocol != AnyProtocol {
		words = append(words, m.Protocol.String())
	}
	add(m.SourcePort.Ports != PortRange{}, m.SourcePort.Not, "sport", m.SourcePort.Ports)
	add(m.DestinationPort.Ports != PortRange{}, m.DestinationPort.Not, "dport", m.DestinationPort.Ports)
	if m.WithoutSYN {
		words = append(words, "without syn")
	}
	if m.ICMPType.First != 0 {
		words = append(words, "type "+PortRange{First: uint16(m.ICMPType.First), Last: uint16(m.ICMPType.Last)}.String())
	}
	add(m.PacketMark.Mark.Mask != 0, m.PacketMark.Not, "mark", m.PacketMark.Mark)
	add(m.ConnMark.Mark.Mask != 0, m.ConnMark.Not, "connmark", m.ConnMark.Mark)
	return strings.Join(words, " ")
}

// String returns the verdict as it reads in the model's table.
func (v Verdict) String() string {
	switch v.Action {
	case Accept:
		return "accept"
	case Redirect:
		return fmt.Sprintf("redirect to :%d", v.Port)
	case SetConnMark:
		return fmt.Sprintf("set connmark %s", v.Mark)
	case RestoreMark:
		return "restore mark from connmark"
	case SetZone:
		return fmt.Sprintf("set conntrack zone %d", v.Zone)
	case Drop:
		return "drop"
	default:
		return fmt.Sprintf("action %d", v.Action)
	}
}

// String returns the rule as one line without its reason: "row 11, ipv4,ipv6, nat output: tcp mark 0x111/0xfff -> accept".
func (r Rule) String() string {
	return fmt.Sprintf("row %d, %s, %s: %s -> %s", r.Row, r.Families, r.Chain, r.Match, r.Verdict)
}

// String returns the rule as one line without its reason.
func (r HostRule) String() string {
	to := "address in " + r.Set
	if r.Scope == ProbeScopeDeclared {
		to = "address and port in " + r.Set
	}
	return fmt.Sprintf("%s, nat postrouting: from a socket of the host, tcp, %s -> source %s", r.Family, to, r.Source)
}

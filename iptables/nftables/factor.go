// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"fmt"
	"slices"
	"strconv"

	"ambientd/iptables/redirection"
)

// line is a rule of our table and the comment that it carries there.
type line struct {
	redirection.Rule
	comment string
}

// String returns the line without its comment.
func (l line) String() string { return fmt.Sprintf("%s: %s -> %s", l.Families, l.Match, l.Verdict) }

// chainLines is one chain of our table.
type chainLines struct {
	chain redirection.Chain
	lines []line
}

// arrange turns the model's rules into the chains of our table. A chain without rules is left out.
func arrange(rules []redirection.Rule) []chainLines {
	byChain := map[redirection.Chain][]line{}
	for _, r := range rules {
		byChain[r.Chain] = append(byChain[r.Chain], line{Rule: r, comment: "row " + strconv.Itoa(r.Row)})
	}
	var chains []chainLines
	for _, c := range redirection.Chains() {
		lines := byChain[c]
		if c.Table == redirection.NAT {
			lines = shorten(lines)
		}
		if len(lines) > 0 {
			chains = append(chains, chainLines{chain: c, lines: lines})
		}
	}
	return chains
}

// shorten returns lines of a NAT chain that decide the same about every packet and take the kernel less time to install.
//
// What that takes goes by the number of expressions: the kernel looks each one up by name, in a list of some sixty types
// that it reads to its end. In a NAT chain the first line that a packet meets decides, and it is either redirected or
// left alone, as it is if it meets none. So an order among lines that no packet can meet both of does not matter; what
// accepts may as well accept packets that no line after it redirects; and a condition that all redirections from some
// line on have can be one line there, which accepts what does not meet it.
func shorten(lines []line) []line {
	lines = relaxed(advanced(trimmed(possible(lines))))
	for _, c := range []exemption{loopbackExemption(), proxyExemption()} {
		if factored := c.factor(lines); factored != nil && (cost(factored) < cost(lines) || c.stays(lines)) {
			lines = factored
		}
	}
	return lines
}

// possible returns the lines without the condition that what comes in is not for IPv6's loopback address. The kernel drops
// such packets before any hook unless they come in by loopback (ip6_rcv_core, net/ipv6/ip6_input.c), and of those, NAT was
// decided when they were sent. IPv4's it drops after.
func possible(lines []line) []line {
	loose := append([]line(nil), lines...)
	for i := range loose {
		l := &loose[i]
		if l.Chain.Hook == redirection.Prerouting && l.Families == redirection.IPv6 && l.Match.Destination.Not {
			l.Match.Destination = redirection.AddressMatch{}
		}
	}
	return loose
}

// trimmed returns the lines up to the last that redirects: what is left alone after it would be anyway.
func trimmed(lines []line) []line {
	for i := len(lines) - 1; i >= 0; i-- {
		if lines[i].Verdict.Action == redirection.Redirect {
			return lines[:i+1]
		}
	}
	return nil
}

// advanced returns the lines with those of UDP before those of TCP that they follow, so that more of what comes after is
// about TCP alone.
func advanced(lines []line) []line {
	moved := append([]line(nil), lines...)
	for i := range moved {
		for j := i; j > 0 && moved[j].Match.Protocol == redirection.UDP && moved[j-1].Match.Protocol == redirection.TCP; j-- {
			moved[j], moved[j-1] = moved[j-1], moved[j]
		}
	}
	return moved
}

// relaxed returns the lines without the conditions of accepting ones that all redirections after them have too.
func relaxed(lines []line) []line {
	loose := append([]line(nil), lines...)
	var families redirection.Families // of the redirections after
	protocols := map[redirection.Protocol]bool{}
	for i := len(loose) - 1; i >= 0; i-- {
		l := &loose[i]
		if l.Verdict.Action == redirection.Redirect {
			families |= l.Families
			protocols[l.Match.Protocol] = true
			continue
		}
		// Ports and flags stay with their protocol: an operator would take them for those of any.
		m := &l.Match
		ported := m.WithoutSYN || m.SourcePort != redirection.PortMatch{} || m.DestinationPort != redirection.PortMatch{}
		if len(protocols) == 1 && protocols[m.Protocol] && !ported {
			m.Protocol = redirection.AnyProtocol
		}
		// An address says which family it is of by itself.
		if l.Families.Has(families) && !m.Source.Prefix.IsValid() && !m.Destination.Prefix.IsValid() {
			l.Families = redirection.DualStack
		}
	}
	return loose
}

// exemption is a condition that keeps packets from being redirected.
type exemption struct {
	what   string                                            // it exempts, for comments
	in     func(m redirection.Match) bool                    // m has it
	clear  func(m *redirection.Match)                        // takes it out
	exempt func(m redirection.Match) (met redirection.Match) // matches the packets that it exempts in m
}

func loopbackExemption() exemption {
	return exemption{
		what:  "loopback is",
		in:    func(m redirection.Match) bool { return m.Destination.Not },
		clear: func(m *redirection.Match) { m.Destination = redirection.AddressMatch{} },
		exempt: func(m redirection.Match) redirection.Match {
			return redirection.Match{Destination: redirection.AddressMatch{Prefix: m.Destination.Prefix}}
		},
	}
}

func proxyExemption() exemption {
	return exemption{
		what:  "the proxy is",
		in:    func(m redirection.Match) bool { return m.PacketMark.Not },
		clear: func(m *redirection.Match) { m.PacketMark = redirection.MarkMatch{} },
		exempt: func(m redirection.Match) redirection.Match {
			return redirection.Match{PacketMark: redirection.MarkMatch{Mark: m.PacketMark.Mark}}
		},
	}
}

// stays reports whether the lines are to have the exemption by itself though that costs a little more: egress has it so
// with DNS capture, and a pod whose capture is switched over then keeps the line and that of its other egress.
func (c exemption) stays(lines []line) bool {
	last := lines[len(lines)-1]
	return last.Chain.Hook == redirection.Output && c.in(last.Match)
}

// factor returns the lines with the exemption as lines of its own before those that have it, nil where that would mean
// something else: where one after the first of them redirects packets that are exempt from it.
func (c exemption) factor(lines []line) []line {
	first := slices.IndexFunc(lines, func(l line) bool { return c.in(l.Match) })
	if first < 0 {
		return nil
	}
	var families redirection.Families // that have it
	for _, l := range lines[first:] {
		if c.in(l.Match) {
			families |= l.Families
		}
	}
	for _, l := range lines[first:] {
		if !c.in(l.Match) && l.Verdict.Action != redirection.Accept && l.Families&families != 0 {
			return nil
		}
	}
	// What is accepted, and by which line, is all the same: right after the last redirection before, it is at the same place
	// whatever follows.
	for first > 0 && lines[first-1].Verdict.Action == redirection.Accept && lines[first-1].Row != 0 {
		first--
	}
	factored := append([]line(nil), lines[:first]...)
	factored = append(factored, c.lines(lines[first:])...)
	for _, l := range lines[first:] {
		if c.in(l.Match) {
			c.clear(&l.Match)
		}
		last := &factored[len(factored)-1]
		if last.Row == l.Row && last.Match == l.Match && last.Verdict == l.Verdict {
			last.Families |= l.Families
			continue
		}
		factored = append(factored, l)
	}
	return relaxed(factored)
}

// lines returns what accepts the packets that are exempt from the lines given. Its comment names no rows: it would be
// another one with other options, and a rule that is changed for nothing else.
func (c exemption) lines(from []line) []line {
	var accepting []line
	for _, l := range from {
		if !c.in(l.Match) {
			continue
		}
		met := c.exempt(l.Match)
		if i := slices.IndexFunc(accepting, func(a line) bool { return a.Match == met }); i >= 0 {
			accepting[i].Families |= l.Families
			continue
		}
		rule := redirection.Rule{Families: l.Families, Chain: l.Chain, Match: met, Verdict: redirection.Verdict{Action: redirection.Accept}}
		accepting = append(accepting, line{Rule: rule, comment: c.what + " exempt from here on"})
	}
	return accepting
}

// cost returns what it takes the kernel to install the lines, in halves of what an expression takes: a rule by itself
// takes one and a half (measured).
func cost(lines []line) int {
	const perRule, perExpression = 3, 2
	sum := 0
	for _, l := range lines {
		sum += perRule + perExpression*len(renderMatch(l.Rule)) // verdicts take the same number in all forms
	}
	return sum
}

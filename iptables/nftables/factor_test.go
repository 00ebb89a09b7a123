// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"ambientd/iptables/redirection"
)

// packet is what the model's matches look at.
type packet struct {
	in, out             string
	source, destination netip.Addr
	protocol            redirection.Protocol
	sport, dport        uint16
	syn                 bool
	icmpType            uint8
	mark, connMark      uint32
}

// matches is the model's meaning, spelled out: all conditions must hold.
func (p packet) matches(r redirection.Rule) bool {
	family := redirection.IPv6
	if p.destination.Is4() {
		family = redirection.IPv4
	}
	m := r.Match
	return r.Families.Has(family) &&
		(m.In.Name == "" || (p.in == m.In.Name) != m.In.Not) &&
		(m.Out.Name == "" || (p.out == m.Out.Name) != m.Out.Not) &&
		(!m.Source.Prefix.IsValid() || m.Source.Prefix.Contains(p.source) != m.Source.Not) &&
		(!m.Destination.Prefix.IsValid() || m.Destination.Prefix.Contains(p.destination) != m.Destination.Not) &&
		(m.Protocol == redirection.AnyProtocol || p.protocol == m.Protocol) &&
		(m.SourcePort.Ports == redirection.PortRange{} || m.SourcePort.Ports.Contains(p.sport) != m.SourcePort.Not) &&
		(m.DestinationPort.Ports == redirection.PortRange{} || m.DestinationPort.Ports.Contains(p.dport) != m.DestinationPort.Not) &&
		(!m.WithoutSYN || !p.syn) &&
		(m.ICMPType.First == 0 || m.ICMPType.First <= p.icmpType && p.icmpType <= m.ICMPType.Last) &&
		(m.PacketMark.Mark.Mask == 0 || (p.mark&m.PacketMark.Mark.Mask == m.PacketMark.Mark.Value) != m.PacketMark.Not) &&
		(m.ConnMark.Mark.Mask == 0 || (p.connMark&m.ConnMark.Mark.Mask == m.ConnMark.Mark.Value) != m.ConnMark.Not)
}

// fate returns what a chain does with the packet; leaving it at the end is like accepting.
func fate(p packet, rules []redirection.Rule) string {
	done := ""
	for _, r := range rules {
		if !p.matches(r) {
			continue
		}
		if r.Verdict.Action == redirection.Accept {
			return done
		}
		done += fmt.Sprintf("%s;", r.Verdict)
		if r.Verdict.Action == redirection.Redirect || r.Verdict.Action == redirection.Drop {
			return done
		}
	}
	return done
}

// randomPacket prefers values that rules distinguish.
func randomPacket(r *rand.Rand) packet {
	pick := func(values ...string) string { return values[r.IntN(len(values))] }
	number := func(values ...uint32) uint32 { return values[r.IntN(len(values))] }
	addresses := []string{"10.0.0.2", "169.254.7.127", "127.0.0.1", "127.9.9.9", "8.8.8.8"}
	if r.IntN(2) == 0 {
		addresses = []string{"2001:db8::2", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff", "::1", "::2"}
	}
	return packet{
		in: pick("eth0", "tap0", "lo"), out: pick("eth0", "lo", "lo2"),
		source: netip.MustParseAddr(pick(addresses...)), destination: netip.MustParseAddr(pick(addresses...)),
		protocol: redirection.Protocol(number(6, 17, 1, 58)),
		sport:    uint16(number(53, 40000)), dport: uint16(number(53, 80, 8000, 8005, 8010, 8011, 15008, 15001)),
		syn: r.IntN(2) == 0, icmpType: uint8(number(128, 129, 130, 135, 137, 138, 143)),
		mark: number(0, 0x539, 0x1539, 0x111, 0xf111, 0x538), connMark: number(0, 0x111, 0x40111),
	}
}

// TestFactoringKeepsTheMeaning sends random packets through the rows as they are and as they are rendered.
func TestFactoringKeepsTheMeaning(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for name, v := range variants() {
		byChain := map[redirection.Chain][]redirection.Rule{}
		for _, rule := range redirection.Rules(v.options, v.families) {
			byChain[rule.Chain] = append(byChain[rule.Chain], rule)
		}
		for chain, rules := range byChain {
			rendered := make([]redirection.Rule, 0, len(rules))
			for _, l := range lines(rules) {
				rendered = append(rendered, l.Rule)
			}
			for range 20_000 {
				p := randomPacket(random)
				if want, got := fate(p, rules), fate(p, rendered); got != want {
					t.Fatalf("%s, %s: %+v: the rows say %q, their rendering %q", name, chain, p, want, got)
				}
			}
		}
	}
}

func TestFactoringIsShorter(t *testing.T) {
	count := func(byLine func([]redirection.Rule) []line) int {
		expressions := 0
		for _, chain := range redirection.Chains() {
			var rules []redirection.Rule
			for _, rule := range redirection.Rules(redirection.DefaultOptions(), redirection.DualStack) {
				if rule.Chain == chain {
					rules = append(rules, rule)
				}
			}
			expressions += expressionCount(byLine(rules))
		}
		return expressions
	}
	plain := count(func(rules []redirection.Rule) []line {
		var all []line
		for _, r := range rules {
			all = append(all, line{Rule: r})
		}
		return all
	})
	factored := count(lines)
	if factored >= plain*4/5 {
		t.Errorf("%d expressions instead of %d: not worth the trouble", factored, plain)
	}
}

// TestFactoringRefuses has a rule that does something to loopback destinations, behind one that exempts them.
func TestFactoringRefuses(t *testing.T) {
	rules := redirection.Rules(redirection.DefaultOptions(), redirection.DualStack)
	var output []line
	for _, r := range rules {
		if r.Row == 13 {
			output = append(output, line{Rule: r})
		}
	}
	all := output[0]
	all.Match.Destination = redirection.AddressMatch{}
	if got := factorLoopback(append(output, all)); got != nil {
		t.Errorf("factored to %v", got)
	}
	if got := factorLoopback([]line{all}); got != nil {
		t.Errorf("nothing to factor, got %v", got)
	}
}

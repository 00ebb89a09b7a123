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

// linesOf returns the rules of one chain as they are.
func linesOf(rules []redirection.Rule, chain redirection.Chain) []line {
	var lines []line
	for _, r := range rules {
		if r.Chain == chain {
			lines = append(lines, line{Rule: r, comment: "row"})
		}
	}
	return lines
}

func rulesIn(lines []line) []redirection.Rule {
	rules := make([]redirection.Rule, 0, len(lines))
	for _, l := range lines {
		rules = append(rules, l.Rule)
	}
	return rules
}

// moreVariants are those that are worth no golden file.
func moreVariants() map[string]variant {
	all := variants()
	for name, v := range variants() {
		for change, apply := range map[string]func(*redirection.Options){
			"no-dns":      func(o *redirection.Options) { o.DNSCapture = false },
			"bypass":      func(o *redirection.Options) { o.InboundBypass = true },
			"established": func(o *redirection.Options) { o.KeepEstablished = true },
		} {
			changed := v
			apply(&changed.options)
			all[name+" "+change] = changed
		}
		v.families = redirection.IPv6
		all[name+" ipv6"] = v
	}
	return all
}

// TestShorteningKeepsTheMeaning sends random packets through the rows as they are and as they are rendered.
func TestShorteningKeepsTheMeaning(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for name, v := range moreVariants() {
		rules := redirection.Rules(v.options, v.families)
		for _, chain := range redirection.Chains() {
			plain := linesOf(rules, chain)
			rendered := []line(nil)
			for _, c := range arrange(rules) {
				if c.chain == chain {
					rendered = c.lines
				}
			}
			for range 5_000 {
				p := randomPacket(random)
				if chain.Hook == redirection.Prerouting && p.destination == netip.IPv6Loopback() {
					continue // the kernel drops it before
				}
				if want, got := fate(p, rulesIn(plain)), fate(p, rulesIn(rendered)); got != want {
					t.Fatalf("%s, %s: %+v: the rows say %q, their rendering %q", name, chain, p, want, got)
				}
			}
		}
	}
}

// TestShorteningIsWorthIt counts what a default pod's rules take.
func TestShorteningIsWorthIt(t *testing.T) {
	rules := redirection.Rules(redirection.DefaultOptions(), redirection.DualStack)
	plain, shortened := 0, 0
	for _, chain := range redirection.Chains() {
		plain += cost(linesOf(rules, chain))
	}
	for _, c := range arrange(rules) {
		shortened += cost(c.lines)
	}
	if shortened >= plain*7/10 {
		t.Errorf("the cost is %d instead of %d: not worth the trouble", shortened, plain)
	}
}

// TestShorteningRefuses has lines that it must not change, or not by one of its means.
func TestShorteningRefuses(t *testing.T) {
	var egress []line
	for _, l := range linesOf(redirection.Rules(redirection.DefaultOptions(), redirection.DualStack), redirection.Chain{Table: redirection.NAT, Hook: redirection.Output}) {
		if l.Row == 13 {
			egress = append(egress, l)
		}
	}
	all := egress[0]
	all.Match.Destination, all.Match.PacketMark = redirection.AddressMatch{}, redirection.MarkMatch{}
	for name, test := range map[string]struct {
		by    exemption
		lines []line
	}{
		"loopback is redirected later":  {loopbackExemption(), append(egress[:2:2], all)},
		"the proxy is redirected later": {proxyExemption(), append(egress[:2:2], all)},
		"nothing is exempt":             {loopbackExemption(), []line{all}},
	} {
		if got := test.by.factor(test.lines); got != nil {
			t.Errorf("%s: factored to %v", name, got)
		}
	}
	accepts := all
	accepts.Verdict = redirection.Verdict{Action: redirection.Accept}
	udp := all
	udp.Match.Protocol = redirection.UDP
	if got := relaxed([]line{accepts, all, udp}); got[0].Match.Protocol != redirection.TCP {
		t.Errorf("an exemption from TCP became one from what is redirected: %v", got)
	}
	accepts.Match.Protocol = redirection.UDP
	if got := relaxed([]line{accepts, all}); got[0].Match.Protocol != redirection.UDP {
		t.Errorf("an exemption from UDP became one from what is redirected: %v", got)
	}
	if got := trimmed([]line{accepts}); got != nil {
		t.Errorf("nothing is redirected, got %v", got)
	}
}

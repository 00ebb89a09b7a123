// SPDX-License-Identifier: Apache-2.0

package redirection

import "net/netip"

// place stands for an address that differs by family, so that a row is written once.
type place uint8

const (
	anywhere place = iota
	loopback
	probeSource
)

// row is a line of the model before it is resolved for a family.
type row struct {
	number      int
	absent      bool // the options switch it off
	chain       Chain
	match       Match // without addresses
	source      place
	destination place // loopback is only ever excluded, probeSource only ever required
	verdict     Verdict
	why         string
}

// Rules returns the rules that the options call for in a namespace that has the families given, chain by chain in the
// order of [Chains], and within a chain in the order in which they must be evaluated. The options must be valid.
//
// A row that compares addresses makes one rule per family, next to each other. The order within a chain is part of the
// contract: probes (3, 4) before everything that captures, DNS (7, 8) before the exemptions 11 and 12, egress (13) last.
func Rules(o Options, families Families) []Rule {
	families &= o.Allowed()
	if families == 0 {
		return nil
	}
	rows := model(o)
	var rules []Rule
	for _, chain := range Chains() {
		for _, r := range rows {
			if r.chain == chain && !r.absent {
				rules = append(rules, r.resolve(o, families)...)
			}
		}
	}
	return rules
}

// model returns the thirteen rows, row 1 once for each interface.
func model(o Options) []row {
	var (
		rawPre, rawOut       = Chain{Raw, Prerouting}, Chain{Raw, Output}
		manglePre, mangleOut = Chain{Mangle, Prerouting}, Chain{Mangle, Output}
		natPre, natOut       = Chain{NAT, Prerouting}, Chain{NAT, Output}

		proxyMark = Mark{Value: ProxyMark, Mask: MarkMask}
		connMark  = Mark{Value: ConnMark, Mask: MarkMask}

		fromProxy    = MarkMatch{Mark: proxyMark}
		notFromProxy = MarkMatch{Mark: proxyMark, Not: true}
		proxysConn   = MarkMatch{Mark: connMark}
		onLoopback   = InterfaceMatch{Name: Loopback}
		offLoopback  = InterfaceMatch{Name: Loopback, Not: true}

		noDNS     = !o.DNSCapture
		noInbound = o.InboundBypass
	)
	var rows []row
	for _, name := range o.interfaces() {
		rows = append(rows, row{number: 1, chain: natPre, match: Match{In: InterfaceMatch{Name: name}, Protocol: TCP},
			verdict: redirectTo(OutboundPort), why: "traffic of a virtual machine or nested container is egress"})
	}
	return append(rows,
		row{number: 2, chain: manglePre, match: Match{PacketMark: fromProxy},
			verdict: Verdict{Action: SetConnMark, Mark: connMark}, why: "remember connections that the proxy opened"},
		row{number: 3, absent: noInbound, chain: natPre, source: probeSource, match: Match{Protocol: TCP},
			verdict: Verdict{Action: Accept}, why: "the kubelet's probes bypass the proxy"},
		row{number: 4, chain: natOut, destination: probeSource, match: Match{Protocol: TCP},
			verdict: Verdict{Action: Accept}, why: "answers to the kubelet's probes bypass the proxy"},
		row{number: 5, absent: noInbound, chain: natPre, destination: loopback,
			match:   Match{Protocol: TCP, DestinationPort: PortMatch{Port: HBONEPort, Not: true}, PacketMark: notFromProxy},
			verdict: redirectTo(InboundPort), why: "plaintext ingress goes to the proxy, the mesh's own mTLS reaches it anyway"},
		row{number: 6, chain: mangleOut, match: Match{ConnMark: proxysConn},
			verdict: Verdict{Action: RestoreMark}, why: "answers on the proxy's connections take the route table that leads back to it"},
		row{number: 7, absent: noDNS, chain: natOut,
			match:   Match{Out: offLoopback, Protocol: UDP, DestinationPort: PortMatch{Port: DNSPort}, PacketMark: notFromProxy},
			verdict: redirectTo(ProxyDNSPort), why: "DNS over UDP goes to the proxy"},
		row{number: 8, absent: noDNS, chain: natOut, destination: loopback,
			match:   Match{Protocol: TCP, DestinationPort: PortMatch{Port: DNSPort}, PacketMark: notFromProxy},
			verdict: redirectTo(ProxyDNSPort), why: "DNS over TCP goes to the proxy"},
		row{number: 9, absent: noDNS, chain: rawOut,
			match:   Match{Protocol: UDP, DestinationPort: PortMatch{Port: DNSPort}, PacketMark: fromProxy},
			verdict: Verdict{Action: SetZone, Zone: DNSZone}, why: "the proxy's own queries must not collide with the application's"},
		row{number: 10, absent: noDNS, chain: rawPre,
			match:   Match{Protocol: UDP, SourcePort: PortMatch{Port: DNSPort}, PacketMark: notFromProxy},
			verdict: Verdict{Action: SetZone, Zone: DNSZone}, why: "answers to the proxy's own queries, found in the same zone"},
		row{number: 11, chain: natOut, match: Match{Protocol: TCP, PacketMark: proxysConn},
			verdict: Verdict{Action: Accept}, why: "answers on the proxy's connections are never captured"},
		row{number: 12, chain: natOut, destination: loopback, match: Match{Out: onLoopback},
			verdict: Verdict{Action: Accept}, why: "an application that calls its own pod address stays in the pod"},
		row{number: 13, chain: natOut, destination: loopback, match: Match{Protocol: TCP, PacketMark: notFromProxy},
			verdict: redirectTo(OutboundPort), why: "egress goes to the proxy"},
	)
}

func redirectTo(port uint16) Verdict { return Verdict{Action: Redirect, Port: port} }

// resolve makes the rules of a row: one for all families, or one for each where it compares addresses.
func (r row) resolve(o Options, families Families) []Rule {
	rule := Rule{Row: r.number, Families: families, Chain: r.chain, Match: r.match, Verdict: r.verdict, Why: r.why}
	if r.source == anywhere && r.destination == anywhere {
		return []Rule{rule}
	}
	var rules []Rule
	for _, family := range families.Each() {
		rule.Families = family
		rule.Match.Source = r.source.resolve(o, family)
		rule.Match.Destination = r.destination.resolve(o, family)
		rules = append(rules, rule)
	}
	return rules
}

func (p place) resolve(o Options, family Families) AddressMatch {
	switch {
	case p == loopback && family == IPv4:
		return AddressMatch{Not: true, Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{127}), 8)}
	case p == loopback:
		return AddressMatch{Not: true, Prefix: netip.PrefixFrom(netip.IPv6Loopback(), 128)}
	case p == probeSource && family == IPv4:
		return AddressMatch{Prefix: netip.PrefixFrom(o.ProbeSourceIPv4, 32)}
	case p == probeSource:
		return AddressMatch{Prefix: netip.PrefixFrom(o.ProbeSourceIPv6, 128)}
	default:
		return AddressMatch{}
	}
}

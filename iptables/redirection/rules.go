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
	absent      bool     // the options switch it off
	families    Families // that it is for; zero: those that are captured
	chain       Chain
	match       Match // without the addresses that source and destination stand for
	source      place
	destination place // loopback is only ever excluded, probeSource only ever required
	verdict     Verdict
	why         string
}

// Rules returns the rules that the options call for in a namespace where the families given can be captured, chain by
// chain in the order of [Chains], and within a chain in the order in which they must be evaluated. The options must be
// valid. Of the families, those that the options do not allow are not captured; what then becomes of IPv6 is in the rules
// too, so a rule may be for a family that was not given.
//
// A row that compares addresses makes one rule per family, next to each other. The order within a chain is part of the
// contract: established connections (0) before everything, probes (3, 4) before everything that captures, DNS (7, 8)
// before the exemptions 11 and 12, what is excluded (14 to 18) right before 5 and 13, egress (13) last.
func Rules(o Options, families Families) []Rule {
	families &= o.Allowed()
	rows := model(o, families)
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

// The chains of the model.
func rawPre() Chain    { return Chain{Raw, Prerouting} }
func rawOut() Chain    { return Chain{Raw, Output} }
func manglePre() Chain { return Chain{Mangle, Prerouting} }
func mangleOut() Chain { return Chain{Mangle, Output} }
func natPre() Chain    { return Chain{NAT, Prerouting} }
func natOut() Chain    { return Chain{NAT, Output} }

// The conditions that several rows have.
func fromProxy() MarkMatch    { return MarkMatch{Mark: Mark{Value: ProxyMark, Mask: MarkMask}} }
func notFromProxy() MarkMatch { return MarkMatch{Mark: fromProxy().Mark, Not: true} }
func proxysConn() MarkMatch   { return MarkMatch{Mark: Mark{Value: ConnMark, Mask: MarkMask}} }

// model returns the rows for the captured families, chain by chain in the order of evaluation. Rows for a list of the
// options are there once for each of its elements.
func model(o Options, captured Families) []row {
	rows := shutRows(o, captured)
	rows = append(rows,
		row{number: 2, chain: manglePre(), match: Match{PacketMark: fromProxy()},
			verdict: Verdict{Action: SetConnMark, Mark: proxysConn().Mark}, why: "remember connections that the proxy opened"},
		row{number: 6, chain: mangleOut(), match: Match{ConnMark: proxysConn()},
			verdict: Verdict{Action: RestoreMark}, why: "answers on the proxy's connections take the route table that leads back to it"},
		row{number: 9, absent: !o.DNSCapture, chain: rawOut(),
			match:   Match{Protocol: UDP, DestinationPort: port(DNSPort), PacketMark: fromProxy()},
			verdict: Verdict{Action: SetZone, Zone: DNSZone}, why: "the proxy's own queries must not collide with the application's"},
		row{number: 10, absent: !o.DNSCapture, chain: rawPre(),
			match:   Match{Protocol: UDP, SourcePort: port(DNSPort), PacketMark: notFromProxy()},
			verdict: Verdict{Action: SetZone, Zone: DNSZone}, why: "answers to the proxy's own queries, found in the same zone"},
	)
	rows = append(rows, ingressRows(o)...)
	return append(rows, egressRows(o, captured)...)
}

// ingressRows returns the rows of nat prerouting.
func ingressRows(o Options) []row {
	rows := []row{establishedRow(o, natPre())}
	for _, name := range sortedOnce(o.RerouteInterfaces) {
		rows = append(rows, row{number: 1, chain: natPre(), match: Match{In: InterfaceMatch{Name: name}, Protocol: TCP},
			verdict: redirectTo(OutboundPort), why: "traffic of a virtual machine or nested container is egress"})
	}
	noInbound := o.InboundBypass
	rows = append(rows, row{number: 3, absent: noInbound, chain: natPre(), source: probeSource, match: Match{Protocol: TCP},
		verdict: accept(), why: "the kubelet's probes bypass the proxy"})
	for _, name := range sortedOnce(o.ExcludeInterfaces) {
		rows = append(rows, row{number: 14, absent: noInbound, chain: natPre(),
			match:   Match{In: InterfaceMatch{Name: name}, Protocol: TCP},
			verdict: accept(), why: "an excluded interface: what comes in by it reaches the application directly"})
	}
	for _, ports := range mergePorts(o.ExcludeInboundPorts) {
		rows = append(rows, row{number: 15, absent: noInbound, chain: natPre(),
			match:   Match{Protocol: TCP, DestinationPort: PortMatch{Ports: ports}},
			verdict: accept(), why: "an excluded inbound port: connections to it reach the application directly"})
	}
	hbone := port(HBONEPort)
	hbone.Not = true
	return append(rows, row{number: 5, absent: noInbound, chain: natPre(), destination: loopback,
		match:   Match{Protocol: TCP, DestinationPort: hbone, PacketMark: notFromProxy()},
		verdict: redirectTo(InboundPort), why: "plaintext ingress goes to the proxy, the mesh's own mTLS reaches it anyway"})
}

// egressRows returns the rows of nat output.
func egressRows(o Options, captured Families) []row {
	noDNS := !o.DNSCapture
	rows := []row{
		establishedRow(o, natOut()),
		{number: 4, chain: natOut(), destination: probeSource, match: Match{Protocol: TCP},
			verdict: accept(), why: "answers to the kubelet's probes bypass the proxy"},
		{number: 7, absent: noDNS, chain: natOut(),
			match:   Match{Out: offLoopback(), Protocol: UDP, DestinationPort: port(DNSPort), PacketMark: notFromProxy()},
			verdict: redirectTo(ProxyDNSPort), why: "DNS over UDP goes to the proxy"},
		{number: 8, absent: noDNS, chain: natOut(), destination: loopback,
			match:   Match{Protocol: TCP, DestinationPort: port(DNSPort), PacketMark: notFromProxy()},
			verdict: redirectTo(ProxyDNSPort), why: "DNS over TCP goes to the proxy"},
		{number: 11, chain: natOut(), match: Match{Protocol: TCP, PacketMark: proxysConn()},
			verdict: accept(), why: "answers on the proxy's connections are never captured"},
		{number: 12, chain: natOut(), destination: loopback, match: Match{Out: InterfaceMatch{Name: Loopback}},
			verdict: accept(), why: "an application that calls its own pod address stays in the pod"},
	}
	for _, name := range sortedOnce(o.ExcludeInterfaces) {
		rows = append(rows, row{number: 16, chain: natOut(), match: Match{Out: InterfaceMatch{Name: name}, Protocol: TCP},
			verdict: accept(), why: "an excluded interface: what goes out by it leaves the pod directly"})
	}
	for _, ports := range mergePorts(o.ExcludeOutboundPorts) {
		rows = append(rows, row{number: 17, chain: natOut(), match: Match{Protocol: TCP, DestinationPort: PortMatch{Ports: ports}},
			verdict: accept(), why: "an excluded outbound port: connections to it leave the pod directly"})
	}
	for _, prefix := range mergePrefixes(o.ExcludeOutboundCIDRs) {
		family := FamilyOf(prefix.Addr())
		match := Match{Protocol: TCP}
		if prefix.Bits() > 0 { // else it is every address of the family, which needs no comparison
			match.Destination.Prefix = prefix
		}
		rows = append(rows, row{number: 18, absent: !captured.Has(family), families: family, chain: natOut(), match: match,
			verdict: accept(), why: "an excluded destination: connections to it leave the pod directly"})
	}
	return append(rows, row{number: 13, chain: natOut(), destination: loopback,
		match:   Match{Protocol: TCP, PacketMark: notFromProxy()},
		verdict: redirectTo(OutboundPort), why: "egress goes to the proxy"})
}

// establishedRow returns row 0 of a NAT chain. Conntrack sees a connection that is older than itself as a new one, and so
// NAT would decide about a packet in its middle. A packet without SYN cannot open a connection: nothing gets past the
// proxy by this row that was not there before it.
func establishedRow(o Options, chain Chain) row {
	return row{number: 0, absent: !o.KeepEstablished, chain: chain, match: Match{Protocol: TCP, WithoutSYN: true},
		verdict: accept(), why: "connections from before the pod was enrolled live on until they end"}
}

// ICMPv6 types without which IPv6 does not work on a link: they are never routed. 130 to 132 are multicast listener
// discovery and 133 to 137 neighbour discovery (RFC 2710, RFC 4861); 143 is version 2 of the former (RFC 3810), without
// which switches do not deliver the latter.
func linkTypes() []ICMPTypeMatch {
	return []ICMPTypeMatch{{First: 130, Last: 137}, {First: 143, Last: 143}}
}

// shutRows returns the rows that drop IPv6 where it is not captured. They are in the mangle table, which has rows
// whatever the options: a renderer that finds none of its chains there has none anywhere.
func shutRows(o Options, captured Families) []row {
	if captured.Has(IPv6) || o.IPv6Uncaptured != UncapturedDrop {
		return nil
	}
	var rows []row
	for _, chain := range []Chain{manglePre(), mangleOut()} {
		for _, types := range linkTypes() {
			rows = append(rows, row{number: 19, families: IPv6, chain: chain, match: Match{Protocol: ICMPv6, ICMPType: types},
				verdict: accept(), why: "neighbour and multicast listener discovery, on the link only"})
		}
		match := Match{In: offLoopback()}
		if chain.Hook == Output {
			match = Match{Out: offLoopback()}
		}
		rows = append(rows, row{number: 20, families: IPv6, chain: chain, match: match,
			verdict: Verdict{Action: Drop}, why: "IPv6 is not captured here, so it does not pass"})
	}
	return rows
}

func port(number uint16) PortMatch { return PortMatch{Ports: SinglePort(number)} }

func offLoopback() InterfaceMatch { return InterfaceMatch{Name: Loopback, Not: true} }

func accept() Verdict { return Verdict{Action: Accept} }

func redirectTo(port uint16) Verdict { return Verdict{Action: Redirect, Port: port} }

// resolve makes the rules of a row: one for all families, or one for each where it compares addresses.
func (r row) resolve(o Options, families Families) []Rule {
	if r.families != 0 {
		families = r.families
	}
	if families == 0 {
		return nil
	}
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

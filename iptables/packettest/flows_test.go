// SPDX-License-Identifier: Apache-2.0

package packettest_test

import (
	"context"
	"net/netip"
	"strings"
	"testing"

	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

// outcome is where a flow ended, in the words of the table.
type outcome struct {
	at       string // the listener
	from     place  // the sender's address, as the listener saw it
	original place  // the address it was going to, by SO_ORIGINAL_DST; nowhere where the listener cannot know
}

// flow is one packet that opens a connection, or is one datagram.
type flow struct {
	name string
	rows []int // the rows that decide about it: without any of them it ends elsewhere
	opts redirection.Options

	from     place // who sends, and from which address
	protocol string
	to       place
	port     uint16
	mark     uint32

	// send is for flows that take more than one packet sent; it replaces the fields
	// above.
	send func(t *testing.T, n *network, f redirection.Families) outcome

	at   string // the listener that must get it
	bare string // the one that gets it in a pod without redirection
}

// with returns the default options, changed.
func with(changes ...func(*redirection.Options)) redirection.Options {
	o := redirection.DefaultOptions()
	for _, change := range changes {
		change(&o)
	}
	return o
}

func noDNS(o *redirection.Options)   { o.DNSCapture = false }
func bypass(o *redirection.Options)  { o.InboundBypass = true }
func reroute(o *redirection.Options) { o.RerouteInterfaces = []string{"vm0"} }
func otherProbes(o *redirection.Options) {
	o.ProbeSourceIPv4, o.ProbeSourceIPv6 = netip.MustParseAddr("169.254.7.128"), netip.MustParseAddr("fd16::128")
}

// exclude excludes a port in each direction, one of them in a range, a network of
// each family, and an interface.
func exclude(o *redirection.Options) {
	o.ExcludeInboundPorts = []redirection.PortRange{{First: tcpPort - 80, Last: tcpPort}}
	o.ExcludeOutboundPorts = []redirection.PortRange{{First: strayPort, Last: strayPort + 9}, redirection.SinglePort(redirection.DNSPort)}
	o.ExcludeOutboundCIDRs = []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("2001:db8::/64")}
	o.ExcludeInterfaces = []string{"vm0"}
}

// flows is the table. What it says is the contract with the node proxy; the rows
// are those of package redirection.
func flows() []flow {
	const (
		proxyMark = redirection.ProxyMark
		dnsPort   = redirection.DNSPort
		hbonePort = redirection.HBONEPort
	)
	standard := with()
	return []flow{
		// Egress.
		{name: "app to another machine", rows: []int{13}, opts: standard,
			from: pod, protocol: "tcp", to: peer, port: tcpPort, at: "proxy outbound", bare: "peer"},
		{name: "app beyond the next hop", rows: []int{13}, opts: standard,
			from: pod, protocol: "tcp", to: outside, port: tcpPort, at: "proxy outbound", bare: "peer"},
		{name: "app to another's HBONE port", rows: []int{13}, opts: standard,
			from: pod, protocol: "tcp", to: peer, port: hbonePort, at: "proxy outbound", bare: "peer hbone"},
		{name: "proxy to another machine", opts: standard,
			from: pod, protocol: "tcp", to: peer, port: tcpPort, mark: proxyMark, at: "peer", bare: "peer"},
		{name: "mark beyond the mask", opts: standard,
			from: pod, protocol: "tcp", to: peer, port: tcpPort, mark: 0xabc<<12 | proxyMark, at: "peer", bare: "peer"},
		{name: "another's mark", rows: []int{13}, opts: standard,
			from: pod, protocol: "tcp", to: peer, port: tcpPort, mark: 0x4000, at: "proxy outbound", bare: "peer"},
		{name: "connection mark on a packet", opts: standard,
			// The policy rule makes every address local, so that it ends in the pod.
			from: pod, protocol: "tcp", to: peer, port: strayPort, mark: redirection.ConnMark, at: "stray", bare: "peer"},
		{name: "connection mark on a packet that leaves the pod", rows: []int{11}, opts: standard,
			send: markedAway, at: "peer", bare: "peer"},
		{name: "app to its own pod address", rows: []int{12}, opts: standard,
			from: pod, protocol: "tcp", to: pod, port: tcpPort, at: "app", bare: "app"},
		{name: "app to loopback", opts: standard,
			from: loopback, protocol: "tcp", to: loopback, port: tcpPort, at: "app", bare: "app"},
		{name: "app to loopback's HBONE port", opts: standard,
			from: loopback, protocol: "tcp", to: loopback, port: hbonePort, at: "proxy hbone", bare: "proxy hbone"},

		// Ingress.
		{name: "plaintext to the pod", rows: []int{5}, opts: standard,
			from: peer, protocol: "tcp", to: pod, port: tcpPort, at: "proxy inbound", bare: "app"},
		{name: "plaintext from afar", rows: []int{5}, opts: standard,
			from: outside, protocol: "tcp", to: pod, port: tcpPort, at: "proxy inbound", bare: "app"},
		{name: "plaintext with inbound bypass", opts: with(bypass),
			from: peer, protocol: "tcp", to: pod, port: tcpPort, at: "app", bare: "app"},
		{name: "egress with inbound bypass", rows: []int{13}, opts: with(bypass),
			from: pod, protocol: "tcp", to: peer, port: tcpPort, at: "proxy outbound", bare: "peer"},
		{name: "HBONE to the pod", opts: standard,
			from: peer, protocol: "tcp", to: pod, port: hbonePort, at: "proxy hbone", bare: "proxy hbone"},
		{name: "DNS over TCP to the pod", rows: []int{5}, opts: standard,
			from: peer, protocol: "tcp", to: pod, port: dnsPort, at: "proxy inbound", bare: "stub"},
		{name: "proxy to the app from the client's address", rows: []int{2, 6}, opts: standard,
			send: spoofed, at: "app", bare: "answer astray"},

		// Probes.
		{name: "probe", rows: []int{3}, opts: standard,
			from: probe, protocol: "tcp", to: pod, port: tcpPort, at: "app", bare: "app"},
		{name: "pod to the prober", rows: []int{4}, opts: standard,
			from: pod, protocol: "tcp", to: probe, port: tcpPort, at: "peer", bare: "peer"},
		{name: "probe with inbound bypass", opts: with(bypass),
			from: probe, protocol: "tcp", to: pod, port: tcpPort, at: "app", bare: "app"},
		{name: "probe from where another source is configured", rows: []int{5}, opts: with(otherProbes),
			from: probe, protocol: "tcp", to: pod, port: tcpPort, at: "proxy inbound", bare: "app"},
		{name: "pod to the prober where another source is configured", rows: []int{13}, opts: with(otherProbes),
			from: pod, protocol: "tcp", to: probe, port: tcpPort, at: "proxy outbound", bare: "peer"},

		// Virtual machines.
		{name: "VM to another machine", rows: []int{1}, opts: with(reroute),
			from: vm, protocol: "tcp", to: outside, port: tcpPort, at: "proxy outbound", bare: "peer"},
		{name: "VM to the pod", rows: []int{1}, opts: with(reroute),
			from: vm, protocol: "tcp", to: pod, port: tcpPort, at: "proxy outbound", bare: "app"},
		{name: "VM with inbound bypass", rows: []int{1}, opts: with(reroute, bypass),
			from: vm, protocol: "tcp", to: outside, port: tcpPort, at: "proxy outbound", bare: "peer"},
		{name: "VM on an interface that is not rerouted", rows: []int{5}, opts: standard,
			from: vm, protocol: "tcp", to: outside, port: tcpPort, at: "proxy inbound", bare: "peer"},
		{name: "UDP of a VM", opts: with(reroute),
			from: vm, protocol: "udp", to: outside, port: udpPort, at: "peer", bare: "peer"},
		{name: "another machine, with a VM", rows: []int{5}, opts: with(reroute),
			from: peer, protocol: "tcp", to: pod, port: tcpPort, at: "proxy inbound", bare: "app"},

		// What a pod excludes.
		{name: "plaintext to an excluded port", rows: []int{15}, opts: with(exclude),
			from: peer, protocol: "tcp", to: pod, port: tcpPort, at: "app", bare: "app"},
		{name: "plaintext to the port beyond an excluded range", rows: []int{5}, opts: with(exclude),
			from: peer, protocol: "tcp", to: pod, port: strayPort, at: "proxy inbound", bare: "stray"},
		{name: "HBONE to a pod with exclusions", opts: with(exclude),
			from: peer, protocol: "tcp", to: pod, port: hbonePort, at: "proxy hbone", bare: "proxy hbone"},
		{name: "app to an excluded port", rows: []int{17}, opts: with(exclude),
			from: pod, protocol: "tcp", to: peer, port: strayPort, at: "peer", bare: "peer"},
		{name: "app to the port before an excluded range", rows: []int{13}, opts: with(exclude),
			from: pod, protocol: "tcp", to: peer, port: tcpPort, at: "proxy outbound", bare: "peer"},
		{name: "app to an excluded network", rows: []int{18}, opts: with(exclude),
			from: pod, protocol: "tcp", to: outside, port: tcpPort, at: "peer", bare: "peer"},
		{name: "VM on an excluded interface", rows: []int{14}, opts: with(exclude),
			from: vm, protocol: "tcp", to: pod, port: strayPort, at: "stray", bare: "stray"},
		{name: "VM on an excluded interface to another machine", rows: []int{14}, opts: with(exclude),
			from: vm, protocol: "tcp", to: peer, port: strayPort, at: "peer", bare: "peer"},
		{name: "app to a VM on an excluded interface", rows: []int{16}, opts: with(exclude),
			from: pod, protocol: "tcp", to: vm, port: tcpPort, at: "vm", bare: "vm"},
		{name: "app to a VM", rows: []int{13}, opts: standard,
			from: pod, protocol: "tcp", to: vm, port: tcpPort, at: "proxy outbound", bare: "vm"},
		{name: "VM on an interface that is excluded and rerouted", rows: []int{1}, opts: with(exclude, reroute),
			from: vm, protocol: "tcp", to: peer, port: tcpPort, at: "proxy outbound", bare: "peer"},
		{name: "app to its own address, an excluded inbound port", rows: []int{12}, opts: with(exclude),
			from: pod, protocol: "tcp", to: pod, port: tcpPort, at: "app", bare: "app"},
		{name: "probe of an excluded port", opts: with(exclude),
			from: probe, protocol: "tcp", to: pod, port: tcpPort, at: "app", bare: "app"},
		{name: "DNS over TCP, port excluded", rows: []int{8}, opts: with(exclude),
			from: pod, protocol: "tcp", to: peer, port: dnsPort, at: "proxy dns", bare: "peer dns"},
		{name: "DNS over UDP, port excluded", rows: []int{7}, opts: with(exclude),
			from: pod, protocol: "udp", to: peer, port: dnsPort, at: "proxy dns", bare: "peer dns"},
		{name: "DNS over TCP to an excluded network", rows: []int{8}, opts: with(exclude),
			from: pod, protocol: "tcp", to: outside, port: dnsPort, at: "proxy dns", bare: "peer dns"},
		{name: "DNS over TCP, port excluded, capture off", rows: []int{17}, opts: with(exclude, noDNS),
			from: pod, protocol: "tcp", to: peer, port: dnsPort, at: "peer dns", bare: "peer dns"},
		{name: "UDP of the app, with exclusions", opts: with(exclude),
			from: pod, protocol: "udp", to: peer, port: udpPort, at: "peer", bare: "peer"},

		// DNS.
		{name: "DNS over UDP", rows: []int{7}, opts: standard,
			from: pod, protocol: "udp", to: peer, port: dnsPort, at: "proxy dns", bare: "peer dns"},
		{name: "DNS over TCP", rows: []int{8}, opts: standard,
			from: pod, protocol: "tcp", to: peer, port: dnsPort, at: "proxy dns", bare: "peer dns"},
		{name: "proxy's DNS over UDP", opts: standard,
			from: pod, protocol: "udp", to: peer, port: dnsPort, mark: proxyMark, at: "peer dns", bare: "peer dns"},
		{name: "proxy's DNS over TCP", opts: standard,
			from: pod, protocol: "tcp", to: peer, port: dnsPort, mark: proxyMark, at: "peer dns", bare: "peer dns"},
		{name: "DNS over UDP to a resolver on loopback", opts: standard,
			from: loopback, protocol: "udp", to: loopback, port: dnsPort, at: "stub", bare: "stub"},
		{name: "DNS over TCP to a resolver on loopback", opts: standard,
			from: loopback, protocol: "tcp", to: loopback, port: dnsPort, at: "stub", bare: "stub"},
		{name: "DNS over UDP to the pod's own address", opts: standard,
			from: pod, protocol: "udp", to: pod, port: dnsPort, at: "stub", bare: "stub"},
		{name: "DNS over TCP to the pod's own address", rows: []int{8}, opts: standard,
			from: pod, protocol: "tcp", to: pod, port: dnsPort, at: "proxy dns", bare: "stub"},
		{name: "DNS over UDP, capture off", opts: with(noDNS),
			from: pod, protocol: "udp", to: peer, port: dnsPort, at: "peer dns", bare: "peer dns"},
		{name: "DNS over TCP, capture off", rows: []int{13}, opts: with(noDNS),
			from: pod, protocol: "tcp", to: peer, port: dnsPort, at: "proxy outbound", bare: "peer dns"},
		{name: "same port for the app's and the proxy's query", rows: []int{7, 9, 10}, opts: standard,
			send: collidingQueries, at: "proxy dns, then peer dns, then proxy dns", bare: "peer dns, then peer dns, then peer dns"},

		// Everything else.
		{name: "UDP of the app", opts: standard,
			from: pod, protocol: "udp", to: peer, port: udpPort, at: "peer", bare: "peer"},
		{name: "UDP to the pod", opts: standard,
			from: peer, protocol: "udp", to: pod, port: udpPort, at: "app", bare: "app"},
		{name: "UDP to loopback", opts: standard,
			from: loopback, protocol: "udp", to: loopback, port: udpPort, at: "app", bare: "app"},
		{name: "ping of the app", opts: standard,
			from: pod, protocol: "icmp", to: peer, port: pingPort, at: "echo", bare: "echo"},
		{name: "ping to the pod", opts: standard,
			from: peer, protocol: "icmp", to: pod, port: pingPort, at: "echo", bare: "echo"},
	}
}

// want is what the flow must come to at a listener.
func (fl flow) want(at string) outcome {
	if fl.send != nil {
		return outcome{at: at, from: pod, original: nowhere}
	}
	o := outcome{at: at, from: fl.from, original: fl.to}
	// Only TCP has SO_ORIGINAL_DST, and peer and VM have no connection tracking.
	if fl.protocol != "tcp" || strings.HasPrefix(at, "peer") || at == "vm" {
		o.original = nowhere
	}
	return o
}

// run sends the flow and returns where it ended.
func (fl flow) run(t *testing.T, n *network, f redirection.Families) outcome {
	t.Helper()
	if fl.send != nil {
		return fl.send(t, n, f)
	}
	ns := map[place]*netnstest.NS{pod: n.pod, loopback: n.pod, peer: n.peer, outside: n.peer, probe: n.peer, vm: n.vm}[fl.from]
	from := netip.AddrPortFrom(n.addr(fl.from, f), 0)
	to := netip.AddrPortFrom(n.addr(fl.to, f), fl.port)
	var opts []netnstest.Option
	if fl.mark != 0 {
		opts = append(opts, netnstest.Mark(fl.mark))
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var l landing
	var err error
	switch fl.protocol {
	case "tcp":
		l, err = sendTCP(ctx, ns, from, to, opts...)
	case "udp":
		l, _, err = sendUDP(ctx, ns, from, to, opts...)
	case "icmp":
		l, err = ping(ns, from.Addr(), to)
	}
	if err != nil {
		t.Fatalf("sending from %s to %s: %v", from, to, err)
	}
	o := outcome{at: l.At, from: n.name(l.From.Addr()), original: nowhere}
	if l.Original.IsValid() {
		o.original = n.name(l.Original.Addr())
		if l.Original.Port() != fl.port {
			t.Errorf("the original port is %d, want %d", l.Original.Port(), fl.port)
		}
	}
	return o
}

// SPDX-License-Identifier: Apache-2.0

package packettest_test

import (
	"net/netip"
	"testing"

	nft "github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

// withClient makes the peer the host of the pod: it passes on what a client beyond
// it sends, and from its own address, as kube-proxy has it for node ports.
func withClient(t *testing.T, n *network) *netnstest.NS {
	t.Helper()
	client := netnstest.New(t)
	prefixes := func(v4, v6 string) []netip.Prefix {
		return []netip.Prefix{netip.MustParsePrefix(v4), netip.MustParsePrefix(v6)}
	}
	gateways := prefixes("10.3.0.1/24", "fd00:c::1/64")
	netnstest.Connect(t,
		netnstest.Port{NS: client, Name: "eth0", Addrs: prefixes("10.3.0.9/24", "fd00:c::9/64"),
			Gateways: []netip.Addr{gateways[0].Addr(), gateways[1].Addr()}},
		netnstest.Port{NS: n.peer, Name: "client0", Addrs: gateways})
	n.peer.Do(t, func() error {
		writeSysctl(t, "net/ipv4/ip_forward", "1")
		writeSysctl(t, "net/ipv6/conf/all/forwarding", "1")
		return masquerade("eth0", "client0")
	})
	return client
}

// masquerade gives what comes in by one interface and goes out by the other the
// address of the latter, at the priority of everybody's source NAT.
func masquerade(out, in string) error {
	conn, err := nft.New()
	if err != nil {
		return err
	}
	table := conn.AddTable(&nft.Table{Family: nft.TableFamilyINet, Name: "node"})
	chain := conn.AddChain(&nft.Chain{Table: table, Name: "postrouting", Type: nft.ChainTypeNAT,
		Hooknum: nft.ChainHookPostrouting, Priority: nft.ChainPriorityNATSource})
	conn.AddRule(&nft.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: interfaceName(out)},
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: interfaceName(in)},
		&expr.Masq{},
	}})
	return conn.Flush()
}

// interfaceName pads a name as the kernel compares it.
func interfaceName(name string) []byte {
	return append([]byte(name), make([]byte, unix.IFNAMSIZ-len(name))...)
}

// TestHostProbes: what a process of the host sends to an enrolled pod carries the
// probe source and reaches the application; what the host passes on from its very
// own address, and what it sends to ports that are not probed, goes to the proxy.
func TestHostProbes(t *testing.T) {
	t.Parallel()
	for _, scope := range []redirection.ProbeScope{redirection.ProbeScopePod, redirection.ProbeScopeDeclared} {
		t.Run(string(scope), func(t *testing.T) {
			eachBackend(t, func(t *testing.T, b backend) {
				n := newNetwork(t, nil)
				client := withClient(t, n)
				apply(t, b, n, with(), redirection.DualStack)
				opts := redirection.HostOptions{ProbeSourceIPv4: with().ProbeSourceIPv4, ProbeSourceIPv6: with().ProbeSourceIPv6, IPv6: true, Scope: scope}
				host := n.peer.Runner()
				if err := b.EnsureHost(t.Context(), host, opts); err != nil {
					t.Fatal(err)
				}
				if err := b.SetEntries(t.Context(), host, opts, n.probeEntries(scope)); err != nil {
					t.Fatal(err)
				}
				for _, f := range redirection.DualStack.Each() {
					n.expectProbe(t, n.peer, f, tcpPort, landing{At: "app", From: netip.AddrPortFrom(n.addr(probe, f), 0)})
					n.expectProbe(t, client, f, tcpPort, landing{At: "proxy inbound", From: netip.AddrPortFrom(n.addr(peer, f), 0)})
					other := landing{At: "stray", From: netip.AddrPortFrom(n.addr(probe, f), 0)}
					if scope == redirection.ProbeScopeDeclared {
						other = landing{At: "proxy inbound", From: netip.AddrPortFrom(n.addr(peer, f), 0)}
					}
					n.expectProbe(t, n.peer, f, strayPort, other)
					udp := flow{from: peer, protocol: "udp", to: pod, port: udpPort}
					if got := udp.run(t, n, f); got.at != "app" || got.from != peer {
						t.Errorf("%s: a datagram of the host's ended at %+v", f, got)
					}
				}
				// Without its entry, the pod is no longer probed past the proxy.
				if err := b.SetEntries(t.Context(), host, opts, nil); err != nil {
					t.Fatal(err)
				}
				for _, f := range redirection.DualStack.Each() {
					n.expectProbe(t, n.peer, f, tcpPort, landing{At: "proxy inbound", From: netip.AddrPortFrom(n.addr(peer, f), 0)})
				}
			})
		})
	}
}

func (n *network) probeEntries(scope redirection.ProbeScope) []redirection.HostEntry {
	var entries []redirection.HostEntry
	for _, f := range redirection.DualStack.Each() {
		e := redirection.HostEntry{Addr: n.addr(pod, f)}
		if scope == redirection.ProbeScopeDeclared {
			e.Port = tcpPort
		}
		entries = append(entries, e)
	}
	return entries
}

// expectProbe connects to the pod and compares where that ended and from which
// address, as the pod sees it.
func (n *network) expectProbe(t *testing.T, from *netnstest.NS, f redirection.Families, port uint16, want landing) {
	t.Helper()
	got, err := sendTCP(within(t), from, netip.AddrPort{}, netip.AddrPortFrom(n.addr(pod, f), port))
	if err != nil {
		t.Fatal(err)
	}
	if got.At != want.At || got.From.Addr() != want.From.Addr() {
		t.Errorf("%s, port %d: it ended at %s, from %s; want %s, from %s", f, port, got.At, got.From.Addr(), want.At, want.From.Addr())
	}
}

// serviceAddr is of the Service that the pod is behind, on port servicePort.
func serviceAddr(f redirection.Families) netip.Addr {
	if f == redirection.IPv6 {
		return netip.MustParseAddr("fd00:5::a")
	}
	return netip.MustParseAddr("10.96.0.10")
}

const servicePort = 80

// translateService makes the netns of the calling thread translate the Service's
// address to the pod's, and hide who calls, as kube-proxy does for a pod that calls
// itself.
func translateService(n *network, hook *nft.ChainHook) error {
	conn, err := nft.New()
	if err != nil {
		return err
	}
	for _, f := range redirection.DualStack.Each() {
		family, number, offset, length := nft.TableFamilyIPv4, uint32(unix.NFPROTO_IPV4), uint32(16), uint32(4)
		if f == redirection.IPv6 {
			family, number, offset, length = nft.TableFamilyIPv6, unix.NFPROTO_IPV6, 24, 16
		}
		table := conn.AddTable(&nft.Table{Family: family, Name: "services"})
		before := conn.AddChain(&nft.Chain{Table: table, Name: "translate", Type: nft.ChainTypeNAT, Hooknum: hook, Priority: nft.ChainPriorityNATDest})
		conn.AddRule(&nft.Rule{Table: table, Chain: before, Exprs: []expr.Any{
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: serviceAddr(f).AsSlice()},
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
			&expr.Immediate{Register: 1, Data: n.addr(pod, f).AsSlice()},
			&expr.Immediate{Register: 2, Data: []byte{tcpPort >> 8, tcpPort & 0xff}},
			&expr.NAT{Type: expr.NATTypeDestNAT, Family: number, RegAddrMin: 1, RegProtoMin: 2},
		}})
		after := conn.AddChain(&nft.Chain{Table: table, Name: "hide", Type: nft.ChainTypeNAT, Hooknum: nft.ChainHookPostrouting, Priority: nft.ChainPriorityNATSource})
		conn.AddRule(&nft.Rule{Table: table, Chain: after, Exprs: []expr.Any{
			&expr.Ct{Register: 1, Key: expr.CtKeySTATUS},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: native(1 << 5), Xor: native(0)}, // IPS_DST_NAT
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: native(0)},
			&expr.Masq{},
		}})
	}
	return conn.Flush()
}

// TestServiceAddress: an application that calls the Service which it is behind
// itself goes to the proxy, which learns the Service's address. Where the port is
// excluded, it goes out, is translated on the host, and comes back as plaintext
// ingress. It makes no difference that somebody translates in the pod.
func TestServiceAddress(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		for _, c := range []struct {
			name   string
			in     func(n *network) *netnstest.NS
			hook   *nft.ChainHook
			opts   redirection.Options
			at     string
			callee func(n *network, f redirection.Families) netip.AddrPort // as the listener learns
		}{
			{"translated on the host", func(n *network) *netnstest.NS { return n.peer }, nft.ChainHookPrerouting, with(), "proxy outbound",
				func(_ *network, f redirection.Families) netip.AddrPort {
					return netip.AddrPortFrom(serviceAddr(f), servicePort)
				}},
			{"translated in the pod", func(n *network) *netnstest.NS { return n.pod }, nft.ChainHookOutput, with(), "proxy outbound",
				func(_ *network, f redirection.Families) netip.AddrPort {
					return netip.AddrPortFrom(serviceAddr(f), servicePort)
				}},
			{"excluded", func(n *network) *netnstest.NS { return n.peer }, nft.ChainHookPrerouting, with(excludeService), "proxy inbound",
				func(n *network, f redirection.Families) netip.AddrPort {
					return netip.AddrPortFrom(n.addr(pod, f), tcpPort)
				}},
		} {
			t.Run(c.name, func(t *testing.T) {
				n := newNetwork(t, nil)
				n.peer.Do(t, func() error {
					writeSysctl(t, "net/ipv4/ip_forward", "1")
					writeSysctl(t, "net/ipv6/conf/all/forwarding", "1")
					return nil
				})
				c.in(n).Do(t, func() error { return translateService(n, c.hook) })
				apply(t, b, n, c.opts, redirection.DualStack)
				for _, f := range redirection.DualStack.Each() {
					got, err := sendTCP(within(t), n.pod, netip.AddrPort{}, netip.AddrPortFrom(serviceAddr(f), servicePort))
					if err != nil {
						t.Fatal(err)
					}
					if want := c.callee(n, f); got.At != c.at || got.Original != want {
						t.Errorf("%s: it ended at %s, going to %s; want %s, %s", f, got.At, got.Original, c.at, want)
					}
				}
			})
		}
	})
}

func excludeService(o *redirection.Options) {
	o.ExcludeOutboundPorts = []redirection.PortRange{redirection.SinglePort(servicePort)}
}

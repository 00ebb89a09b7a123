// SPDX-License-Identifier: Apache-2.0

package packettest_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
)

func ipv6Off(o *redirection.Options)  { o.IPv6 = false }
func ipv6Open(o *redirection.Options) { o.IPv6Uncaptured = redirection.UncapturedAllow }

// withoutIPv6 and without IPv6 on lo are two of the three ways not to have it; the
// third, a kernel without, only simulation shows (package policyroute).
func withoutIPv6(t *testing.T) func() error {
	return func() error {
		writeSysctl(t, "net/ipv6/conf/all/disable_ipv6", "1")
		writeSysctl(t, "net/ipv6/conf/default/disable_ipv6", "1")
		return nil
	}
}

// TestWithoutIPv6: a pod without IPv6 is captured by IPv4 as any other.
func TestWithoutIPv6(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		n := newNetwork(t, withoutIPv6(t))
		apply(t, b, n, with(), redirection.IPv4)
		for _, fl := range flows() {
			if fl.opts.Key() == with().Key() {
				expect(t, n, fl, fl.at, redirection.IPv4)
			}
		}
	})
}

// TestIPv6Uncaptured: where IPv6 is not captured, because it is off in the options
// or because lo lacks it, it is shut or open as the options say, and IPv4 is
// captured either way. A pod that is captured again is so at once.
func TestIPv6Uncaptured(t *testing.T) {
	for _, c := range []struct {
		name    string
		prepare func(*redirection.Options)
		lo      string // disable_ipv6 of lo
	}{
		{"off in the options", ipv6Off, "0"},
		{"off on lo", func(*redirection.Options) {}, "1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, b backend) {
				n := newNetwork(t, nil)
				n.pod.Do(t, func() error {
					writeSysctl(t, "net/ipv6/conf/lo/disable_ipv6", c.lo)
					return nil
				})
				apply(t, b, n, with(c.prepare, ipv6Open), redirection.IPv4)
				n.expectIPv6Open(t)
				apply(t, b, n, with(c.prepare), redirection.IPv4)
				n.expectIPv6Shut(t, c.lo == "0")
				n.pod.Do(t, func() error {
					writeSysctl(t, "net/ipv6/conf/lo/disable_ipv6", "0")
					return nil
				})
				apply(t, b, n, with(), redirection.DualStack)
				expect(t, n, egress(), "proxy outbound", redirection.DualStack)
				apply(t, b, n, with(ipv6Off), redirection.IPv4)
				n.expectIPv6Shut(t, true)
			})
		})
	}
}

func egress() flow {
	return flow{name: "egress", from: pod, protocol: "tcp", to: peer, port: tcpPort}
}

func (n *network) expectIPv6Open(t *testing.T) {
	expect(t, n, egress(), "proxy outbound", redirection.IPv4)
	expect(t, n, egress(), "peer", redirection.IPv6)
	ingress := flow{name: "ingress", from: peer, protocol: "tcp", to: pod, port: tcpPort}
	expect(t, n, ingress, "proxy inbound", redirection.IPv4)
	if got := ingress.run(t, n, redirection.IPv6); got.at != "app" {
		t.Errorf("IPv6 ended at %+v, want the application", got)
	}
	expect(t, n, flow{name: "ping", from: pod, protocol: "icmp", to: peer, port: pingPort}, "echo", redirection.IPv6)
}

// expectIPv6Shut expects that nothing of IPv6 leaves the pod or is answered by it,
// the proxy's no more than the application's, but that the link works, and so does
// loopback where it has IPv6.
func (n *network) expectIPv6Shut(t *testing.T, loopbackHasIt bool) {
	t.Helper()
	expect(t, n, egress(), "proxy outbound", redirection.IPv4)
	podAddr, peerAddr := n.addr(pod, redirection.IPv6), n.addr(peer, redirection.IPv6)
	for _, mark := range []uint32{0, redirection.ProxyMark} {
		n.expectSilence(t, attempt{ns: n.pod, to: netip.AddrPortFrom(peerAddr, tcpPort), mark: mark}, podAddr)
	}
	// The peer asks the link for the pod's address, and gets it, or else its packets
	// would not leave: that they are seen to shows that neighbour discovery works.
	n.peer.Do(t, func() error { return forgetNeighbour(podAddr) })
	n.expectSilence(t, attempt{ns: n.peer, to: netip.AddrPortFrom(podAddr, tcpPort)}, podAddr)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, _, err := sendUDP(ctx, n.pod, netip.AddrPortFrom(podAddr, 0), netip.AddrPortFrom(peerAddr, udpPort)); !errors.Is(err, unix.EPERM) {
		t.Errorf("sending a datagram: %v, want %v", err, unix.EPERM)
	}
	if loopbackHasIt {
		for _, p := range []place{loopback, pod} {
			toItself := flow{from: p, protocol: "tcp", to: p, port: tcpPort}
			if got := toItself.run(t, n, redirection.IPv6); got.at != "app" {
				t.Errorf("from %s to itself it ended at %+v, want the application", p, got)
			}
		}
	}
}

// forgetNeighbour makes the netns of the calling thread ask for the address again.
func forgetNeighbour(addr netip.Addr) error {
	neighbours, err := netlink.NeighList(0, netlink.FAMILY_V6)
	if err != nil {
		return fmt.Errorf("listing neighbours: %w", err)
	}
	for _, n := range neighbours {
		if n.IP.Equal(addr.AsSlice()) {
			err = errors.Join(err, netlink.NeighDel(&n))
		}
	}
	return err
}

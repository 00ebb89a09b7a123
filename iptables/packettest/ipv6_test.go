// SPDX-License-Identifier: Apache-2.0

package packettest_test

import (
	"testing"

	"ambientd/iptables/redirection"
)

// TestWithoutIPv6: a pod without IPv6 is captured by IPv4 as any other.
func TestWithoutIPv6(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		n := newNetwork(t, func() error {
			writeSysctl(t, "net/ipv6/conf/all/disable_ipv6", "1")
			writeSysctl(t, "net/ipv6/conf/default/disable_ipv6", "1")
			return nil
		})
		apply(t, b, n, with(), redirection.IPv4)
		for _, fl := range flows() {
			if fl.opts.Key() == with().Key() {
				expect(t, n, fl, fl.at, redirection.IPv4)
			}
		}
	})
}

// TestLoopbackWithoutIPv6: where only lo lacks IPv6, the other interfaces still
// have it, and what goes by it is left alone, since the way back to the proxy
// cannot be made.
func TestLoopbackWithoutIPv6(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		n := newNetwork(t, nil)
		n.pod.Do(t, func() error {
			writeSysctl(t, "net/ipv6/conf/lo/disable_ipv6", "1")
			return nil
		})
		apply(t, b, n, with(), redirection.IPv4)
		egress := flow{name: "egress", from: pod, protocol: "tcp", to: peer, port: tcpPort}
		expect(t, n, egress, "proxy outbound", redirection.IPv4)
		expect(t, n, egress, "peer", redirection.IPv6)
		ingress := flow{name: "ingress", from: peer, protocol: "tcp", to: pod, port: tcpPort}
		expect(t, n, ingress, "proxy inbound", redirection.IPv4)
		for _, f := range redirection.IPv6.Each() {
			if got := ingress.run(t, n, f); got.at != "app" {
				t.Errorf("IPv6 ended at %+v, want the application", got)
			}
		}
	})
}

// TestIPv6NotAllowed: with IPv6 off in the options, a pod that has it keeps it
// uncaptured.
func TestIPv6NotAllowed(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		n := newNetwork(t, nil)
		apply(t, b, n, with(func(o *redirection.Options) { o.IPv6 = false }), redirection.IPv4)
		egress := flow{name: "egress", from: pod, protocol: "tcp", to: peer, port: tcpPort}
		expect(t, n, egress, "proxy outbound", redirection.IPv4)
		expect(t, n, egress, "peer", redirection.IPv6)
	})
}

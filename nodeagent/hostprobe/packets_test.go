// SPDX-License-Identifier: Apache-2.0

package hostprobe_test

import (
	"testing"

	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

const appPort, otherPort = 8080, 8081

// serveAll starts the applications, and a node proxy that answers by itself.
func (n *node) serveAll() {
	n.t.Helper()
	n.serve(appPort, "app")
	n.serve(otherPort, "other")
	n.serve(redirection.InboundPort, "proxy", netnstest.Mark(redirection.ProxyMark))
}

// TestProbesBypassTheProxy: what a process of the host sends to an enrolled pod reaches
// the application, what the host only forwards does not, though both come from the
// node's address.
func TestProbesBypassTheProxy(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		n := newNode(t, b)
		n.serveAll()
		n.lands(n.host, appPort, "proxy", nodeAddrs)
		n.settle()
		n.lands(n.host, appPort, "proxy", nodeAddrs)
		n.add("p1", "10.0.0.2", "fd00:a::2")
		n.lands(n.host, appPort, "app", sources)
		n.lands(n.host, otherPort, "other", sources)
		n.lands(n.elsewhere, appPort, "proxy", nodeAddrs)
		n.remove("p1")
		n.lands(n.host, appPort, "proxy", nodeAddrs)
		n.must(n.Rest(t.Context()))
		n.lands(n.host, appPort, "proxy", nodeAddrs)
	})
}

// TestDeclaredProbesBypassTheProxy: with the scope "declared" only the ports of probes
// are open to processes of the host.
func TestDeclaredProbesBypassTheProxy(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		n := newNode(t, b, declared)
		n.serveAll()
		n.settle()
		n.add("p1", "10.0.0.2", "fd00:a::2", ":8080")
		n.lands(n.host, appPort, "app", sources)
		n.lands(n.host, otherPort, "proxy", nodeAddrs)
		n.lands(n.elsewhere, appPort, "proxy", nodeAddrs)
	})
}

// TestAddressPassesOn: p2 gets the address of p1 and its ADD comes before p1's DEL.
// p1's late removal leaves p2's entry, and its probes, alone (case 7).
func TestAddressPassesOn(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		n := newNode(t, b)
		n.serveAll()
		n.settle()
		n.add("p1", "10.0.0.2", "fd00:a::2")
		n.add("p2", "10.0.0.2", "fd00:a::2")
		n.remove("p1")
		n.lands(n.host, appPort, "app", sources)
		n.holds("10.0.0.2", "fd00:a::2")
		n.remove("p1") // the runtime repeats a DEL
		n.holds("10.0.0.2", "fd00:a::2")
		n.remove("p2")
		n.lands(n.host, appPort, "proxy", nodeAddrs)
		n.holds()
	})
}

// SPDX-License-Identifier: Apache-2.0

package packettest_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

// spoofed connects to the application as the proxy does: marked, and from the
// address of the client whose request it carries. The application's answer goes
// to that address; unless something leads it back into the pod, it leaves by
// eth0, where the true owner of the address does not know of it.
func spoofed(t *testing.T, n *network, f redirection.Families) outcome {
	client, app := n.addr(peer, f), netip.AddrPortFrom(n.addr(pod, f), tcpPort)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	astray := make(chan error, 1)
	watch := openCapture(t, n.peer, "eth0")
	go func() {
		astray <- watch.await(func(p packet) bool { return p.isAnswer() && p.from == app && p.to.Addr() == client })
		cancel() // the connection attempt is as good as over
	}()
	l, err := sendTCP(ctx, n.pod, netip.AddrPortFrom(client, 0), app, netnstest.Mark(redirection.ProxyMark), netnstest.Transparent())
	if err == nil {
		watch.close(t)
		if <-astray == nil {
			t.Error("an answer left the pod though the connection came about")
		}
		if l.From.Addr() != client {
			t.Errorf("the application sees the client as %s, want %s", l.From, client)
		}
		checkConnMark(t, n, l.From, app, redirection.ConnMark)
		return outcome{at: l.At, from: pod, original: nowhere}
	}
	if ctx.Err() == nil {
		t.Fatalf("connecting as the proxy does: %v", err)
	}
	if err := <-astray; err != nil {
		t.Fatalf("neither did the connection come about nor an answer to the peer: %v", err)
	}
	return outcome{at: "answer astray", from: pod, original: nowhere}
}

// checkConnMark looks up the connection's mark, which row 2 made.
func checkConnMark(t *testing.T, n *network, from, to netip.AddrPort, want uint32) {
	t.Helper()
	for _, c := range connections(t, n.pod) {
		if c.from == from && c.to == to {
			if c.mark != want {
				t.Errorf("the connection mark is %#x, want %#x", c.mark, want)
			}
			return
		}
	}
	t.Errorf("conntrack does not know the connection from %s to %s", from, to)
}

// collidingQueries sends three queries from one port to one resolver: the app's,
// then the proxy's own, then the app's again. In one conntrack zone they would be
// one connection, and the second would go wherever the first went.
func collidingQueries(t *testing.T, n *network, f redirection.Families) outcome {
	// A child of a test that runs at the same time holds a copy of every socket
	// between fork and exec, and with it the port.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	resolver := netip.AddrPortFrom(n.addr(peer, f), redirection.DNSPort)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	first, from, err := sendUDP(ctx, n.pod, netip.AddrPortFrom(n.addr(pod, f), 0), resolver)
	if err != nil {
		t.Fatalf("the application's query: %v", err)
	}
	second, answeredBy := proxyQuery(t, n, from, resolver)
	third, _, err := sendUDP(ctx, n.pod, from, resolver)
	if err != nil {
		t.Fatalf("the application's second query: %v", err)
	}
	if first.At == "proxy dns" && second.At == "peer dns" && answeredBy == resolver {
		checkZones(t, n, from, resolver)
	}
	at := first.At + ", then " + second.At + ", then " + third.At
	if answeredBy != resolver {
		at += ", the second answered by " + answeredBy.String()
	}
	return outcome{at: at, from: pod, original: nowhere}
}

// checkZones: the app's query and the proxy's are known apart, by zone, and the
// answer belongs to the latter.
func checkZones(t *testing.T, n *network, from, resolver netip.AddrPort) {
	t.Helper()
	zones := map[uint16]int{}
	for _, c := range connections(t, n.pod) {
		if c.from == from && c.to == resolver {
			zones[c.zone]++
		}
		if c.from == resolver && c.to == from {
			t.Error("the answer counts as a connection of its own")
		}
	}
	if zones[0] != 1 || zones[redirection.DNSZone] != 1 || len(zones) != 2 {
		t.Errorf("queries by conntrack zone: %v, want one in 0 and one in %d", zones, redirection.DNSZone)
	}
}

// proxyQuery returns where the proxy's query ended, and where the answer came
// from as the proxy sees it.
func proxyQuery(t *testing.T, n *network, from, resolver netip.AddrPort) (landing, netip.AddrPort) {
	t.Helper()
	c := n.pod.ListenUDP(t, from, netnstest.Mark(redirection.ProxyMark))
	defer c.Close()
	if _, err := c.WriteToUDPAddrPort([]byte("query"), resolver); err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 1500)
	size, answeredBy, err := c.ReadFromUDPAddrPort(buf)
	if err != nil {
		t.Fatalf("the proxy's query: %v", err)
	}
	var l landing
	if err := json.Unmarshal(buf[:size], &l); err != nil {
		t.Fatal(err)
	}
	if l.From.Addr() != from.Addr() {
		t.Errorf("the resolver saw the query from %s, want %s", l.From, from)
	}
	return l, answeredBy
}

// markedAway sends what row 11 is for and row 12 does not cover: a packet with the
// connection's mark that does not go by loopback. With the policy rule in place
// only a packet whose mark changes after routing is like that.
func markedAway(t *testing.T, n *network, f redirection.Families) outcome {
	family := unix.AF_INET
	if f == redirection.IPv6 {
		family = unix.AF_INET6
	}
	var ours []netlink.Rule
	n.pod.Do(t, func() error {
		rules, err := netlink.RuleList(family)
		if err != nil {
			return fmt.Errorf("listing policy rules: %w", err)
		}
		for _, r := range rules {
			if r.Priority == int(redirection.RulePriority) {
				ours = append(ours, r)
				err = errors.Join(err, netlink.RuleDel(&r))
			}
		}
		return err
	})
	defer n.pod.Do(t, func() (err error) {
		for _, r := range ours {
			err = errors.Join(err, netlink.RuleAdd(&r))
		}
		return err
	})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	l, err := sendTCP(ctx, n.pod, netip.AddrPortFrom(n.addr(pod, f), 0), netip.AddrPortFrom(n.addr(peer, f), tcpPort), netnstest.Mark(redirection.ConnMark))
	if err != nil {
		t.Fatalf("connecting: %v", err)
	}
	return outcome{at: l.At, from: n.name(l.From.Addr()), original: nowhere}
}

// SPDX-License-Identifier: Apache-2.0

package conntrack_test

import (
	"context"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"ambientd/iptables/conntrack"
	"ambientd/iptables/nftables"
	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }

// stream is a TCP connection, both of its ends.
type stream struct{ client, server *net.TCPConn }

// talk sends something each way.
func (s stream) talk(t *testing.T) {
	t.Helper()
	for _, way := range [][2]*net.TCPConn{{s.client, s.server}, {s.server, s.client}} {
		if _, err := way[0].Write([]byte("ping")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(way[1], make([]byte, 4)); err != nil {
			t.Fatal(err)
		}
	}
}

// hangUp ends it from both ends.
func (s stream) hangUp() { s.client.Close(); s.server.Close() }

func connect(t *testing.T, from, to *netnstest.NS, addr string, via ...*net.TCPListener) stream {
	t.Helper()
	remote := netip.MustParseAddrPort(addr)
	var l *net.TCPListener
	if len(via) > 0 {
		l = via[0]
	} else {
		l = to.ListenTCP(t, remote)
		remote = l.Addr().(*net.TCPAddr).AddrPort()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	c, err := from.DialTCP(ctx, netip.AddrPort{}, remote)
	if err != nil {
		t.Fatal(err)
	}
	s, err := l.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	made := stream{client: c, server: s}
	t.Cleanup(made.hangUp)
	return made
}

// await asks until so many are kept.
func await(t *testing.T, r *conntrack.Reader, pod *netnstest.NS, want int) {
	t.Helper()
	got := -1
	for until := time.Now().Add(10 * time.Second); time.Now().Before(until); time.Sleep(10 * time.Millisecond) {
		var err error
		if got, err = r.Kept(t.Context(), pod.Runner()); err != nil {
			t.Fatal(err)
		}
		if got == want {
			return
		}
	}
	t.Fatalf("%d connections are kept, want %d", got, want)
}

// Real connections, of both families, into the pod and out of it, before its rules and after.
func TestKept(t *testing.T) {
	netnstest.Require(t)
	pod, peer := netnstest.New(t), netnstest.New(t)
	prefix := netip.MustParsePrefix
	netnstest.Connect(t,
		netnstest.Port{NS: pod, Name: "eth0", Addrs: []netip.Prefix{prefix("10.0.0.2/24"), prefix("fd00::2/64")}},
		netnstest.Port{NS: peer, Name: "eth0", Addrs: []netip.Prefix{prefix("10.0.0.3/24"), prefix("fd00::3/64")}})
	r := conntrack.New()
	await(t, r, pod, 0)
	out := connect(t, pod, peer, "10.0.0.3:0")
	in := connect(t, peer, pod, "[fd00::2]:0")
	idle := connect(t, pod, peer, "[fd00::3]:0")
	for _, s := range []stream{out, in, idle} {
		s.talk(t)
	}
	await(t, r, pod, 0)

	rules, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	opts := redirection.DefaultOptions()
	opts.KeepEstablished = true
	if _, err := rules.Apply(t.Context(), pod.Runner(), opts); err != nil {
		t.Fatal(err)
	}
	out.talk(t)
	in.talk(t)
	await(t, r, pod, 2)

	// New ones are not kept, be they redirected, or left alone as the proxy's own port is.
	outbound := pod.ListenTCP(t, netip.MustParseAddrPort("0.0.0.0:15001"))
	inbound := pod.ListenTCP(t, netip.MustParseAddrPort("[::]:15006"))
	for _, s := range []stream{
		connect(t, pod, peer, "10.0.0.3:7000", outbound),
		connect(t, peer, pod, "[fd00::2]:7000", inbound),
		connect(t, peer, pod, "10.0.0.2:15008"),
		connect(t, pod, pod, "127.0.0.1:0"),
	} {
		s.talk(t)
	}
	await(t, r, pod, 2)

	idle.talk(t) // from now on it is known
	await(t, r, pod, 3)
	out.hangUp()
	await(t, r, pod, 2)
	in.hangUp()
	idle.hangUp()
	await(t, r, pod, 0)
}

func TestKeptEndsWithItsContext(t *testing.T) {
	netnstest.Require(t)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := conntrack.New().Kept(ended, netnstest.New(t).Runner()); err == nil {
		t.Error("there is a count")
	}
}

// SPDX-License-Identifier: Apache-2.0

package packettest_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

// Ports of the listeners that are no part of the model.
const (
	tcpPort = 8080
	// strayPort is where the pod has a listener that answers from addresses which
	// are not its own.
	strayPort = 8081
	udpPort   = 9090
	// pingPort stands in for the identifier of an ICMP echo request.
	pingPort = 4711
)

// patience bounds the waiting for a packet that should arrive at once.
const patience = 20 * time.Second

// place is an address by its meaning; [network.addr] resolves it for a family.
type place string

const (
	pod      place = "pod"            // of the enrolled pod
	peer     place = "peer"           // of another machine, the pod's gateway
	outside  place = "outside"        // of that machine too, on no network of the pod's
	probe    place = "probe source"   // where the host's probes come from: that machine
	vm       place = "vm"             // of a virtual machine inside the pod, behind vm0
	loopback place = "loopback"       //
	nowhere  place = "not applicable" // of a landing that has no such address
)

// network is a pod with what is around it:
//
//	peer ── eth0 ── pod ── vm0 ── vm
//
// The pod forwards, as one does that runs a virtual machine.
type network struct {
	peer, pod, vm *netnstest.NS
	ipv6          bool
}

func (n *network) addr(p place, f redirection.Families) netip.Addr {
	four := map[place]string{pod: "10.0.0.2", peer: "10.0.0.1", outside: "203.0.113.5", probe: "169.254.7.127", vm: "10.1.0.2", loopback: "127.0.0.1"}
	six := map[place]string{pod: "fd00:a::2", peer: "fd00:a::1", outside: "2001:db8::5", probe: "fd16:9254:7127:1337:ffff:ffff:ffff:ffff", vm: "fd00:b::2", loopback: "::1"}
	if f == redirection.IPv6 {
		return netip.MustParseAddr(six[p])
	}
	return netip.MustParseAddr(four[p])
}

// name is the inverse of addr, for results.
func (n *network) name(a netip.Addr) place {
	for _, f := range redirection.DualStack.Each() {
		for _, p := range []place{pod, peer, outside, probe, vm, loopback} {
			if n.addr(p, f) == a {
				return p
			}
		}
	}
	return place(a.String())
}

func (n *network) families() []redirection.Families {
	if n.ipv6 {
		return redirection.DualStack.Each()
	}
	return redirection.IPv4.Each()
}

// newNetwork makes the namespaces and starts all listeners. Prepare, unless nil,
// is run in the pod's netns before it gets any address.
func newNetwork(t *testing.T, prepare func() error) *network {
	n := &network{peer: netnstest.New(t), pod: netnstest.New(t), vm: netnstest.New(t), ipv6: true}
	if prepare != nil {
		n.pod.Do(t, prepare)
	}
	n.pod.Do(t, func() error {
		n.ipv6 = readSysctl(t, "net/ipv6/conf/all/disable_ipv6") == "0"
		writeSysctl(t, "net/ipv4/ip_forward", "1")
		writeSysctl(t, "net/ipv6/conf/all/forwarding", "1")
		return nil
	})
	n.connect(t)
	n.startProxy(t)
	n.startPod(t)
	n.startPeer(t)
	n.startVM(t)
	return n
}

func (n *network) connect(t *testing.T) {
	prefixes := func(bits4, bits6 int, places ...place) (all []netip.Prefix) {
		for _, p := range places {
			for _, f := range n.families() {
				bits := bits4
				if f == redirection.IPv6 {
					bits = bits6
				}
				all = append(all, netip.PrefixFrom(n.addr(p, f), bits))
			}
		}
		return all
	}
	via := func(p place) (all []netip.Addr) {
		for _, f := range n.families() {
			all = append(all, n.addr(p, f))
		}
		return all
	}
	netnstest.Connect(t,
		netnstest.Port{NS: n.peer, Name: "eth0", Gateways: via(pod),
			Addrs: append(prefixes(24, 64, peer), prefixes(32, 128, outside, probe)...)},
		netnstest.Port{NS: n.pod, Name: "eth0", Gateways: via(peer), Addrs: prefixes(24, 64, pod)})
	gateways := []netip.Prefix{netip.MustParsePrefix("10.1.0.1/24"), netip.MustParsePrefix("fd00:b::1/64")}[:len(n.families())]
	var toPod []netip.Addr
	for _, g := range gateways {
		toPod = append(toPod, g.Addr())
	}
	netnstest.Connect(t,
		netnstest.Port{NS: n.vm, Name: "eth0", Gateways: toPod, Addrs: prefixes(24, 64, vm)},
		netnstest.Port{NS: n.pod, Name: "vm0", Addrs: gateways})
}

// startProxy starts the node proxy's listeners, with its mark, as ztunnel has
// them. DNS is on loopback: an answer must come from where the query was sent to.
func (n *network) startProxy(t *testing.T) {
	mark := netnstest.Mark(redirection.ProxyMark)
	for _, f := range n.families() {
		wildcard := anyAddr(f)
		n.serveTCP(t, n.pod, netip.AddrPortFrom(wildcard, redirection.OutboundPort), "proxy outbound", mark)
		n.serveTCP(t, n.pod, netip.AddrPortFrom(wildcard, redirection.InboundPort), "proxy inbound", mark)
		n.serveTCP(t, n.pod, netip.AddrPortFrom(wildcard, redirection.HBONEPort), "proxy hbone", mark)
		dns := netip.AddrPortFrom(n.addr(loopback, f), redirection.ProxyDNSPort)
		n.serveTCP(t, n.pod, dns, "proxy dns", mark)
		n.serveUDP(t, n.pod, dns, "proxy dns", mark)
	}
}

// startPod starts the applications' listeners: "app", "stub", a resolver inside
// the pod, and "stray", which gets what the policy rule keeps in the pod.
func (n *network) startPod(t *testing.T) {
	for _, f := range n.families() {
		n.serveTCP(t, n.pod, netip.AddrPortFrom(anyAddr(f), tcpPort), "app")
		n.serveTCP(t, n.pod, netip.AddrPortFrom(anyAddr(f), strayPort), "stray", netnstest.Transparent())
		n.serveTCP(t, n.pod, netip.AddrPortFrom(anyAddr(f), redirection.DNSPort), "stub")
		for _, p := range []place{pod, loopback} {
			n.serveUDP(t, n.pod, netip.AddrPortFrom(n.addr(p, f), udpPort), "app")
			n.serveUDP(t, n.pod, netip.AddrPortFrom(n.addr(p, f), redirection.DNSPort), "stub")
		}
	}
}

// startPeer starts a server and a resolver on every address of the peer's.
func (n *network) startPeer(t *testing.T) {
	for _, f := range n.families() {
		for _, p := range []place{peer, outside, probe} {
			a := n.addr(p, f)
			n.serveTCP(t, n.peer, netip.AddrPortFrom(a, tcpPort), "peer")
			n.serveTCP(t, n.peer, netip.AddrPortFrom(a, strayPort), "peer")
			n.serveTCP(t, n.peer, netip.AddrPortFrom(a, redirection.HBONEPort), "peer hbone")
			n.serveTCP(t, n.peer, netip.AddrPortFrom(a, redirection.DNSPort), "peer dns")
			n.serveUDP(t, n.peer, netip.AddrPortFrom(a, udpPort), "peer")
			n.serveUDP(t, n.peer, netip.AddrPortFrom(a, redirection.DNSPort), "peer dns")
		}
	}
}

// startVM starts a server in the virtual machine.
func (n *network) startVM(t *testing.T) {
	for _, f := range n.families() {
		n.serveTCP(t, n.vm, netip.AddrPortFrom(n.addr(vm, f), tcpPort), "vm")
	}
}

func anyAddr(f redirection.Families) netip.Addr {
	if f == redirection.IPv6 {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}

// landing says where a packet ended. A listener tells it to whoever sent the
// packet, so a test needs no other way to learn it, and answers are tested too.
type landing struct {
	At       string         // the listener's name
	From     netip.AddrPort // the sender, as the listener saw it
	Original netip.AddrPort // where it was going before redirection; zero where unknown
}

// serveTCP answers every connection with a landing, until the test ends.
func (n *network) serveTCP(t *testing.T, ns *netnstest.NS, addr netip.AddrPort, name string, opts ...netnstest.Option) {
	l := ns.ListenTCP(t, addr, opts...)
	untilClosed(t, l, func() error {
		c, err := l.AcceptTCP()
		if err != nil {
			return err
		}
		answer := landing{At: name, From: addrPort(c.RemoteAddr())}
		if original, err := netnstest.OriginalDst(c); err == nil { // ENOENT without conntrack
			answer.Original = original
		}
		text, err := json.Marshal(answer)
		if err != nil {
			return err
		}
		_, err = c.Write(text)
		// The client may be one that the test gave up.
		if err := errors.Join(err, c.Close()); err != nil && !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
			return err
		}
		return nil
	})
}

// serveUDP answers every datagram with a landing, until the test ends.
func (n *network) serveUDP(t *testing.T, ns *netnstest.NS, addr netip.AddrPort, name string, opts ...netnstest.Option) {
	c := ns.ListenUDP(t, addr, opts...)
	buf := make([]byte, 1500)
	untilClosed(t, c, func() error {
		_, from, err := c.ReadFromUDPAddrPort(buf)
		if err != nil {
			return err
		}
		text, err := json.Marshal(landing{At: name, From: from})
		if err != nil {
			return err
		}
		_, err = c.WriteToUDPAddrPort(text, from)
		return err
	})
}

// untilClosed repeats serve until the test's cleanup closes what it serves.
func untilClosed(t *testing.T, c interface{ Close() error }, serve func() error) {
	var done sync.WaitGroup
	done.Go(func() {
		for {
			if err := serve(); errors.Is(err, net.ErrClosed) {
				return
			} else if err != nil {
				t.Errorf("serving: %v", err)
				return
			}
		}
	})
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("closing a listener: %v", err)
		}
		done.Wait()
	})
}

// sendTCP connects and returns what the listener says.
func sendTCP(ctx context.Context, ns *netnstest.NS, from, to netip.AddrPort, opts ...netnstest.Option) (landing, error) {
	c, err := ns.DialTCP(ctx, from, to, opts...)
	if err != nil {
		return landing{}, err
	}
	defer c.Close()
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return landing{}, err
	}
	var l landing
	if err := json.NewDecoder(c).Decode(&l); err != nil {
		return landing{}, fmt.Errorf("reading where the connection ended: %w", err)
	}
	return l, nil
}

// sendUDP sends a datagram and returns the answer, which must come from where it
// was sent to, as a resolver library demands.
func sendUDP(ctx context.Context, ns *netnstest.NS, from, to netip.AddrPort, opts ...netnstest.Option) (landing, netip.AddrPort, error) {
	c, err := ns.DialUDP(ctx, from, to, opts...)
	if err != nil {
		return landing{}, netip.AddrPort{}, err
	}
	defer c.Close()
	if _, err := c.Write([]byte("query")); err != nil {
		return landing{}, netip.AddrPort{}, err
	}
	l, err := readLanding(c)
	return l, addrPort(c.LocalAddr()), err
}

func readLanding(c net.Conn) (landing, error) {
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return landing{}, err
	}
	buf := make([]byte, 1500)
	size, err := c.Read(buf)
	if err != nil {
		return landing{}, fmt.Errorf("reading where the datagram ended: %w", err)
	}
	var l landing
	return l, json.Unmarshal(buf[:size], &l)
}

func addrPort(a net.Addr) netip.AddrPort {
	var p netip.AddrPort
	switch a := a.(type) {
	case *net.TCPAddr:
		p = a.AddrPort()
	case *net.UDPAddr:
		p = a.AddrPort()
	}
	return netip.AddrPortFrom(p.Addr().Unmap(), p.Port())
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/tools/enclave"
	"ambientd/tools/netnstest"
)

// listen serves as a pod's server does, on a port of the kernel's choice.
func listen(t *testing.T, word string) string {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- serveListener(ctx, listener, word) }()
	t.Cleanup(func() {
		cancel()
		listener.Close()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return listener.Addr().String()
}

func TestCaptureSeesPlaintext(t *testing.T) {
	netnstest.Require(t)
	address := listen(t, "the-answer")
	port, err := netip.ParseAddrPort(address)
	if err != nil {
		t.Fatal(err)
	}
	c, err := startCapture("lo")
	if err != nil {
		t.Fatal(err)
	}
	got, err := ask(deadline(t), address, "the-question")
	if err != nil {
		t.Fatal(err)
	}
	seen, err := c.stop()
	if err != nil {
		t.Fatal(err)
	}
	if got.Reply.Word != "the-answer" || got.Reply.Heard != "the-question" || got.Reply.Peer != got.Local {
		t.Errorf("got %+v", got)
	}
	if seen.containing("the-question") == 0 || seen.containing("the-answer") == 0 || seen.containing("something else") != 0 {
		t.Errorf("of %d frames %d have the question and %d the answer", len(seen), seen.containing("the-question"), seen.containing("the-answer"))
	}
	if seen.toPort(port.Port()) == 0 || seen.toPort(9) != 0 {
		t.Errorf("of %d frames %d go to port %d", len(seen), seen.toPort(port.Port()), port.Port())
	}
}

func TestCaptureNamesAMissingInterface(t *testing.T) {
	if _, err := startCapture("nowhere0"); err == nil || !strings.Contains(err.Error(), "nowhere0") {
		t.Errorf("got %v, want an error that names it", err)
	}
}

func TestTCPDestination(t *testing.T) {
	ethernet := func(kind uint16, packet ...byte) []byte {
		return append(binary.BigEndian.AppendUint16(make([]byte, 12), kind), packet...)
	}
	v4 := make([]byte, 28)
	v4[0], v4[9], v4[26], v4[27] = 0x46, unix.IPPROTO_TCP, 0x3a, 0xa0 // a header of 24 bytes: one option
	v6 := make([]byte, 44)
	v6[6], v6[42], v6[43] = unix.IPPROTO_TCP, 0x3a, 0xa0
	udp := make([]byte, 28)
	udp[0], udp[9] = 0x45, unix.IPPROTO_UDP
	for _, c := range []struct {
		name  string
		frame []byte
		port  uint16
		ok    bool
	}{
		{"IPv4 with an option", ethernet(unix.ETH_P_IP, v4...), 15008, true},
		{"IPv6", ethernet(unix.ETH_P_IPV6, v6...), 15008, true},
		{"UDP", ethernet(unix.ETH_P_IP, udp...), 0, false},
		{"ARP", ethernet(unix.ETH_P_ARP, v4...), 0, false},
		{"cut short", ethernet(unix.ETH_P_IP, v4[:25]...), 0, false},
		{"no packet", ethernet(unix.ETH_P_IPV6), 0, false},
		{"no frame", nil, 0, false},
	} {
		if port, ok := tcpDestination(c.frame); port != c.port || ok != c.ok {
			t.Errorf("%s: got %d, %v, want %d, %v", c.name, port, ok, c.port, c.ok)
		}
	}
}

func TestAskFails(t *testing.T) {
	netnstest.Require(t)
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		if conn, err := silent.Accept(); err == nil {
			conn.Close()
		}
	}()
	if _, err := ask(deadline(t), silent.Addr().String(), "word"); err == nil {
		t.Error("a server that hangs up gives no error")
	}
	<-closed
	silent.Close()
	if _, err := ask(deadline(t), silent.Addr().String(), "word"); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("where nobody listens: got %v", err)
	}
}

func TestRunInPodNamesWhatIsWrong(t *testing.T) {
	for _, c := range []struct{ args, want string }{{"", "which program"}, {"dance", `"dance"`}, {"client --port=1", "port"}} {
		err := runInPod(t.Context(), strings.Fields(c.args), &strings.Builder{})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q gives %v, want %q in it", c.args, err, c.want)
		}
	}
}

// TestInspect puts one trace of each kind into a fresh netns.
// makeNetns makes a netns that is gone after the test.
func makeNetns(t *testing.T, name string) *enclave.Netns {
	t.Helper()
	netns, err := enclave.MakeNetns(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := netns.Remove(); err != nil {
			t.Error(err)
		}
	})
	return netns
}

func TestInspect(t *testing.T) {
	netnstest.Require(t)
	starter, err := enclave.NewStarter()
	if err != nil {
		t.Fatal(err)
	}
	netns := makeNetns(t, "inspect-test")
	clean, err := inspect(deadline(t), netns, starter)
	if err != nil {
		t.Fatal(err)
	}
	if clean.redirected() != "" || len(clean.Tables)+len(clean.Legacy)+len(clean.Listeners) > 0 {
		t.Errorf("a fresh netns has %+v", clean)
	}

	runIn := func(command string) {
		t.Helper()
		fields := strings.Fields(command)
		p, err := starter.Start(enclave.Command{Name: command, Path: fields[0], Args: fields[1:], Netns: netns})
		if err != nil {
			t.Skipf("%s is needed: %v", fields[0], err)
		}
		if err := p.Wait(deadline(t)); err != nil {
			t.Fatalf("%v: %s", err, p.Log().Tail(5))
		}
	}
	runIn("iptables-nft -t nat -N AMBIENTD_OUTPUT")
	runIn("iptables-nft -t nat -A OUTPUT -p tcp -j AMBIENTD_OUTPUT")
	runIn("iptables-legacy -t mangle -N AMBIENTD_PRERT")
	runIn("iptables-legacy -t mangle -A PREROUTING -j AMBIENTD_PRERT")
	var listener net.Listener
	err = netns.Do(func() error {
		rule := netlink.NewRule()
		rule.Family, rule.Priority, rule.Mark, rule.Table = unix.AF_INET, 32764, 0x111, 100
		if err := netlink.RuleAdd(rule); err != nil {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		if err := netlink.LinkSetUp(lo); err != nil {
			return err
		}
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: lo.Attrs().Index, Table: 100, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST,
			Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}}); err != nil {
			return err
		}
		listener, err = net.Listen("tcp6", "[::]:15008")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()

	found, err := inspect(deadline(t), netns, starter)
	if err != nil {
		t.Fatal(err)
	}
	if found.PacketRules != 2 || len(found.Chains) != 2 || len(found.PolicyRules) != 1 || len(found.Routes) != 1 ||
		len(found.Tables) != 1 || len(found.Legacy) != 1 || len(found.proxied()) != 1 || found.proxied()[0] != 15008 {
		t.Errorf("found %+v", found)
	}
	for _, part := range []string{"2 packet rules", "AMBIENTD_OUTPUT", "AMBIENTD_PRERT", "32764 mark 0x111 table 100", "routes"} {
		if !strings.Contains(found.redirected(), part) {
			t.Errorf("%q has no %q", found.redirected(), part)
		}
	}
}

// TestConntrackReplyPort: the kernel says where it has redirected a connection to.
func TestConntrackReplyPort(t *testing.T) {
	netnstest.Require(t)
	starter, err := enclave.NewStarter()
	if err != nil {
		t.Fatal(err)
	}
	netns := makeNetns(t, "conntrack-test")
	var listener net.Listener
	if err := netns.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		if err := netlink.LinkSetUp(lo); err != nil {
			return err
		}
		listener, err = net.Listen("tcp4", "127.0.0.1:15006")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	go func() {
		if conn, err := listener.Accept(); err == nil {
			_ = answer(conn, "word")
			conn.Close()
		}
	}()
	defer listener.Close()
	rule := "iptables-nft -t nat -A OUTPUT -p tcp --dport " + strconv.Itoa(serverPort) + " -j REDIRECT --to-ports 15006"
	fields := strings.Fields(rule)
	p, err := starter.Start(enclave.Command{Name: "iptables", Path: fields[0], Args: fields[1:], Netns: netns})
	if err != nil {
		t.Skipf("iptables-nft is needed: %v", err)
	}
	if err := p.Wait(deadline(t)); err != nil {
		t.Fatalf("%v: %s", err, p.Log().Tail(5))
	}
	pod := newPod(meshed, "client", "client", nil)
	pod.netns = netns
	client, err := pod.start(starter, "client", "--to=127.0.0.1:"+strconv.Itoa(serverPort), "--word=hello")
	if err != nil {
		t.Fatal(err)
	}
	if err := client.Wait(deadline(t)); err != nil {
		t.Fatalf("%v: %s", err, client.Log().Tail(5))
	}
	port, err := conntrackReplyPort(netns, unix.AF_INET, func(tuple netlink.IPTuple) bool { return tuple.DstPort == serverPort })
	if err != nil || port != 15006 {
		t.Errorf("got port %d (%v), want 15006", port, err)
	}
	if _, err := conntrackReplyPort(netns, unix.AF_INET, func(netlink.IPTuple) bool { return false }); err == nil {
		t.Error("a connection that does not exist has a port")
	}
}

// SPDX-License-Identifier: Apache-2.0

package netnstest_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }

// TestOwnNamespaces: the process is root in an empty network of its own.
func TestOwnNamespaces(t *testing.T) {
	netnstest.Require(t)
	if uid := os.Geteuid(); uid != 0 {
		t.Errorf("effective uid %d, want root to be mapped", uid)
	}
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		// A kernel with tunnel modules gives every netns their fallback devices, down.
		if l.Attrs().Flags&net.FlagUp != 0 && l.Attrs().Name != "lo" {
			t.Errorf("link %s is up in what should be a fresh netns", l.Attrs().Name)
		}
	}
	entries, err := os.ReadDir("/run")
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 0 {
		t.Errorf("/run holds %v, want it private and empty", entries)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs("/run", &fs); err != nil {
		t.Fatal(err)
	}
	if fs.Type != unix.TMPFS_MAGIC {
		t.Errorf("/run is of type %#x, want tmpfs", fs.Type)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, " shared:") || strings.Contains(line, " master:") {
			t.Errorf("mount propagates: %s", line)
		}
	}
}

// TestDoReturns: the thread is back in its netns after Do, whatever fn did.
func TestDoReturns(t *testing.T) {
	host, pod := netnstest.Self(t), netnstest.New(t)
	if inode(t, host) == inode(t, pod) {
		t.Fatal("New returned the test's own netns")
	}
	boom := errors.New("boom")
	err := pod.Runner()(func() error {
		if got := inode(t, netnstest.Self(t)); got != inode(t, pod) {
			t.Errorf("inside Do the netns is %d, want %d", got, inode(t, pod))
		}
		host.Do(t, func() error { return nil })
		if got := inode(t, netnstest.Self(t)); got != inode(t, pod) {
			t.Errorf("after a nested Do the netns is %d, want %d", got, inode(t, pod))
		}
		return boom
	})
	if !errors.Is(err, boom) {
		t.Errorf("Runner returned %v, want fn's error", err)
	}
	if got := inode(t, netnstest.Self(t)); got != inode(t, host) {
		t.Errorf("after Do the netns is %d, want %d", got, inode(t, host))
	}
}

// TestMainThreadStays: whoever looks at the process, by its pid, sees its own
// netns, also while its main thread has something to do in another.
func TestMainThreadStays(t *testing.T) {
	host, pod := netnstest.Self(t), netnstest.New(t)
	check := func() error {
		var st unix.Stat_t
		if err := unix.Stat("/proc/self/ns/net", &st); err != nil {
			return err
		}
		if st.Ino != inode(t, host) {
			t.Errorf("the process is seen in netns %d, want %d", st.Ino, inode(t, host))
		}
		return nil
	}
	// As many goroutines at once as it takes for one of them to be on the main thread.
	const goroutines = 64
	var inside, finished sync.WaitGroup
	inside.Add(goroutines)
	for range goroutines {
		finished.Go(func() {
			err := pod.Runner()(func() error {
				inside.Done()
				inside.Wait() // each keeps its thread until all have one
				return check()
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	finished.Wait()
}

// TestConnect: what is sent in one netns arrives in the other at once, with
// the mark and from the address that was asked for, over both families.
func TestConnect(t *testing.T) {
	a, b := netnstest.New(t), netnstest.New(t)
	prefixes := func(v ...string) (p []netip.Prefix) {
		for _, s := range v {
			p = append(p, netip.MustParsePrefix(s))
		}
		return p
	}
	netnstest.Connect(t,
		netnstest.Port{NS: a, Name: "eth0", Addrs: prefixes("10.0.0.1/24", "fd00::1/64")},
		netnstest.Port{NS: b, Name: "eth0", Addrs: prefixes("10.0.0.2/24", "fd00::2/64"),
			Gateways: []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")}})
	for _, c := range []struct{ name, server, spoofed string }{
		{"ipv4", "10.0.0.1", "192.0.2.7"},
		{"ipv6", "fd00::1", "2001:db8::7"},
	} {
		t.Run(c.name, func(t *testing.T) {
			server := netip.MustParseAddr(c.server)
			roundTripTCP(t, a, b, server)
			roundTripUDP(t, a, b, server, netip.MustParseAddr(c.spoofed))
		})
	}
}

// TestOwnAddresses: what a netns sends to its own address stays in it, from the first
// packet on.
func TestOwnAddresses(t *testing.T) {
	for range 20 {
		a, b := netnstest.New(t), netnstest.New(t)
		addr := netip.MustParsePrefix("fd00::1/64")
		netnstest.Connect(t,
			netnstest.Port{NS: a, Name: "eth0", Addrs: []netip.Prefix{addr}},
			netnstest.Port{NS: b, Name: "eth0"})
		a.Do(t, func() error {
			routes, err := netlink.RouteGet(addr.Addr().AsSlice())
			if err == nil && routes[0].Type != unix.RTN_LOCAL {
				t.Errorf("the route to the netns' own address is %v", routes)
			}
			return err
		})
	}
}

func roundTripTCP(t *testing.T, a, b *netnstest.NS, server netip.Addr) {
	l := a.ListenTCP(t, netip.AddrPortFrom(server, 0), netnstest.Mark(0x7))
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	c, err := b.DialTCP(ctx, netip.AddrPort{}, l.Addr().(*net.TCPAddr).AddrPort())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := l.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := c.Write([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 4)
	if _, err := io.ReadFull(s, got); err != nil || string(got) != "ping" {
		t.Errorf("the server read %q, %v", got, err)
	}
}

// roundTripUDP sends from an address that b does not have.
func roundTripUDP(t *testing.T, a, b *netnstest.NS, server, spoofed netip.Addr) {
	l := a.ListenUDP(t, netip.AddrPortFrom(server, 0))
	to := l.LocalAddr().(*net.UDPAddr).AddrPort()
	c, err := b.DialUDP(t.Context(), netip.AddrPortFrom(spoofed, 4000), to, netnstest.Transparent())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	if err := l.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 16)
	n, from, err := l.ReadFromUDPAddrPort(buf)
	if err != nil {
		t.Fatal(err)
	}
	if from != netip.AddrPortFrom(spoofed, 4000) || string(buf[:n]) != "ping" {
		t.Errorf("got %q from %s, want ping from %s", buf[:n], from, spoofed)
	}
}

func inode(t *testing.T, ns *netnstest.NS) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(int(ns.File().Fd()), &st); err != nil {
		t.Fatal(err)
	}
	return st.Ino
}

// SPDX-License-Identifier: Apache-2.0

package podnet_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ambientd/tools/devproxy/podnet"
	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }

func deadline(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func open(t *testing.T, ns *netnstest.NS) *podnet.Netns {
	t.Helper()
	fd, err := unix.FcntlInt(ns.File().Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	n, err := podnet.New(os.NewFile(uintptr(fd), "netns"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n
}

// accept returns the next connection, which the test closes.
func accept(t *testing.T, l *net.TCPListener) *net.TCPConn {
	t.Helper()
	if err := l.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	c, err := l.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func remote(c net.Conn) netip.Addr { return c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap() }

type conner interface {
	SyscallConn() (syscall.RawConn, error)
}

func mark(t *testing.T, c conner) int {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var got int
	var optErr error
	if err := raw.Control(func(fd uintptr) { got, optErr = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK) }); err != nil {
		t.Fatal(err)
	}
	if optErr != nil {
		t.Fatal(optErr)
	}
	return got
}

func netnsOfThread(t *testing.T) os.FileInfo {
	t.Helper()
	info, err := os.Stat("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	return info
}

// nft loads rules in the netns.
func nft(t *testing.T, ns *netnstest.NS, rules string) {
	t.Helper()
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip("nft is missing: ", err)
	}
	ns.Do(t, func() error {
		cmd := exec.Command("nft", "-f", "-")
		cmd.Stdin = strings.NewReader(rules)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Logf("nft: %s", out)
			return err
		}
		return nil
	})
}

func loopbacks() []netip.Addr {
	return []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()}
}

func TestSocketsAreInThePodAndMarked(t *testing.T) {
	ns := netnstest.New(t)
	pod := open(t, ns)
	ctx := deadline(t)
	home := netnsOfThread(t)
	for _, addr := range loopbacks() {
		l, err := pod.ListenTCP(ctx, netip.AddrPortFrom(addr, 15001))
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		// The same address is free in the test's own netns, and in the pod it is not.
		own, err := net.Listen("tcp", netip.AddrPortFrom(addr, 15001).String())
		if err != nil {
			t.Errorf("the listener is in the test's netns: %v", err)
		} else {
			own.Close()
		}
		c, err := pod.DialTCP(ctx, netip.Addr{}, netip.AddrPortFrom(addr, 15001))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		accepted := accept(t, l)
		u, err := pod.ListenUDP(ctx, netip.AddrPortFrom(addr, 15053))
		if err != nil {
			t.Fatal(err)
		}
		defer u.Close()
		for name, raw := range map[string]conner{"listener": l, "dialled": c, "accepted": accepted, "UDP": u} {
			if got := mark(t, raw); got != podnet.Mark {
				t.Errorf("%s %s: mark %#x, want %#x", addr, name, got, podnet.Mark)
			}
		}
	}
	if got := netnsOfThread(t); !os.SameFile(home, got) {
		t.Error("the thread is in another netns than before")
	}
}

func TestErrorsLeaveNoThreadBehind(t *testing.T) {
	ns := netnstest.New(t)
	pod := open(t, ns)
	ctx := deadline(t)
	nobody := netip.MustParseAddrPort("127.0.0.1:9")
	for range 50 {
		if _, err := pod.DialTCP(ctx, netip.Addr{}, nobody); !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatalf("DialTCP = %v, want ECONNREFUSED", err)
		}
		if _, err := pod.ListenTCP(ctx, netip.MustParseAddrPort("192.0.2.1:80")); !errors.Is(err, unix.EADDRNOTAVAIL) {
			t.Fatalf("ListenTCP = %v, want EADDRNOTAVAIL", err)
		}
		ended, cancel := context.WithCancel(ctx)
		cancel()
		if _, err := pod.DialTCP(ended, netip.Addr{}, nobody); !errors.Is(err, context.Canceled) {
			t.Fatalf("DialTCP with an ended context = %v", err)
		}
	}
	pod.Close()
	if _, err := pod.DialTCP(ctx, netip.Addr{}, nobody); err == nil {
		t.Fatal("DialTCP in a closed netns succeeded")
	}
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	home := netnsOfThread(t)
	for _, task := range tasks {
		got, err := os.Stat("/proc/self/task/" + task.Name() + "/ns/net")
		if err != nil {
			continue // the thread has ended
		}
		if !os.SameFile(home, got) {
			t.Errorf("thread %s is still away", task.Name())
		}
	}
}

func TestNewRefusesWhatIsNoNetns(t *testing.T) {
	for _, path := range []string{"/proc/self/ns/mnt", "/dev/null"} {
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := podnet.New(f); err == nil {
			t.Errorf("New(%s) succeeded", path)
		}
	}
}

func TestSame(t *testing.T) {
	a, b := netnstest.New(t), netnstest.New(t)
	if same, err := open(t, a).Same(open(t, a)); err != nil || !same {
		t.Errorf("Same of one netns = %t, %v", same, err)
	}
	if same, err := open(t, a).Same(open(t, b)); err != nil || same {
		t.Errorf("Same of two netns = %t, %v", same, err)
	}
}

func TestOriginalDst(t *testing.T) {
	ns := netnstest.New(t)
	nft(t, ns, `
		table inet t {
			chain out {
				type nat hook output priority -100
				tcp dport 80 redirect to :15001
			}
		}`)
	pod := open(t, ns)
	ctx := deadline(t)
	for _, addr := range loopbacks() {
		l, err := pod.ListenTCP(ctx, netip.AddrPortFrom(addr, 15001))
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		for _, tc := range []struct {
			port uint16
			want error
		}{{80, nil}, {15001, podnet.ErrNotRedirected}} {
			to := netip.AddrPortFrom(addr, tc.port)
			c, err := pod.DialTCP(ctx, netip.Addr{}, to)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			got, err := podnet.OriginalDst(accept(t, l))
			if !errors.Is(err, tc.want) || err == nil && got != to {
				t.Errorf("to %s: OriginalDst = %s, %v; want error %v", to, got, err, tc.want)
			}
		}
	}
}

// With a foreign source address the listener sees that; the replies find back
// because everything is local to the netns here.
func TestDialInAnothersName(t *testing.T) {
	ns := netnstest.New(t)
	ns.Do(t, func() error {
		for _, args := range [][]string{
			{"route", "add", "local", "192.0.2.0/24", "dev", "lo"},
			{"-6", "route", "add", "local", "2001:db8::/64", "dev", "lo"},
		} {
			if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
				t.Logf("ip %v: %s", args, out)
				return err
			}
		}
		return nil
	})
	pod := open(t, ns)
	ctx := deadline(t)
	for i, source := range []netip.Addr{netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("2001:db8::7")} {
		l, err := pod.ListenTCP(ctx, netip.AddrPortFrom(loopbacks()[i], 8080))
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		c, err := pod.DialTCP(ctx, source, netip.AddrPortFrom(loopbacks()[i], 8080))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if got := remote(accept(t, l)); got != source {
			t.Errorf("the listener sees %s, want %s", got, source)
		}
	}
}

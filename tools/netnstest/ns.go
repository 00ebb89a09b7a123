// SPDX-License-Identifier: Apache-2.0

package netnstest

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
)

// threadNetns is the netns of the thread that opens it. /proc/self would be the
// main thread's.
const threadNetns = "/proc/thread-self/ns/net"

// NS is a network namespace. It lives as long as its descriptor, which the
// test's cleanup closes, or a process, socket or pin in it.
type NS struct {
	file *os.File
}

// New returns a fresh netns with lo up, as a container runtime leaves it.
// It calls Require.
func New(tb testing.TB) *NS {
	tb.Helper()
	Require(tb)
	ns := Self(tb)
	var fresh *NS
	// Inside Self, so that the thread is put back where it was.
	ns.Do(tb, func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unsharing the netns: %w", err)
		}
		fresh = Self(tb)
		return loopbackUp()
	})
	return fresh
}

// Self returns the netns the calling thread is in: outside Do that is the test
// process's own, which stands for the host's. It calls Require.
func Self(tb testing.TB) *NS {
	tb.Helper()
	Require(tb)
	f, err := os.Open(threadNetns)
	if err != nil {
		tb.Fatalf("opening the thread's netns: %v", err)
	}
	tb.Cleanup(func() {
		// The agent's tests may have closed or passed on the file themselves.
		if err := f.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
			tb.Errorf("closing a netns: %v", err)
		}
	})
	return &NS{file: f}
}

// File returns the namespace's descriptor, which stays the NS's: to hand it to
// something that closes it, hand over a dup.
func (ns *NS) File() *os.File { return ns.file }

// Do calls fn on the calling goroutine with its thread inside the netns, and
// fails the test on an error. fn may fail the test itself and may nest another
// Do; goroutines that it starts are outside.
func (ns *NS) Do(tb testing.TB, fn func() error) {
	tb.Helper()
	if err := ns.run(fn); err != nil {
		tb.Fatal(err)
	}
}

// Runner returns the function that code under test takes to run something in a
// pod's netns; it returns fn's error.
func (ns *NS) Runner() redirection.Runner { return ns.run }

func (ns *NS) run(fn func() error) (err error) {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		defer runtime.UnlockOSThread()
		return ns.runElsewhere(fn)
	}
	back, err := os.Open(threadNetns)
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("opening the thread's netns: %w", err)
	}
	defer func() {
		if backErr := setns(back); backErr != nil {
			// Still locked: the thread ends with the goroutine and is not reused.
			err = errors.Join(err, fmt.Errorf("returning to the thread's netns: %w", backErr))
		} else {
			runtime.UnlockOSThread()
		}
		err = errors.Join(err, back.Close())
	}()
	if err := setns(ns.file); err != nil {
		return fmt.Errorf("entering the netns: %w", err)
	}
	return fn()
}

// setns moves the calling thread. A test's end may close the file meanwhile, while what
// it tested still looks into the netns.
func setns(file *os.File) error {
	conn, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var setnsErr error
	err = conn.Control(func(fd uintptr) { setnsErr = unix.Setns(int(fd), unix.CLONE_NEWNET) })
	return errors.Join(err, setnsErr)
}

// runElsewhere is run for a goroutine that holds the main thread: that one never
// leaves, since /proc/self/ns/net, and what others see of the process, is its
// netns. Locked here, it is not the thread that the new goroutine gets.
func (ns *NS) runElsewhere(fn func() error) error {
	var err error
	returned := false
	done := make(chan struct{})
	go func() {
		defer close(done)
		err = ns.run(fn)
		returned = true
	}()
	<-done
	if !returned {
		runtime.Goexit() // fn failed the test, which ends the goroutine it is called on
	}
	return err
}

// Port is one end of a veth pair.
type Port struct {
	NS    *NS
	Name  string         // interface name, unique in its netns
	Addrs []netip.Prefix // of either family; usable at once, without duplicate address detection
	// Gateways get a default route each, through this port. They are the other
	// end's addresses as a rule.
	Gateways []netip.Addr
}

// Connect makes a veth pair between a and b, up, with addresses and routes. It
// ends with either netns.
func Connect(tb testing.TB, a, b Port) {
	tb.Helper()
	a.NS.Do(tb, func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = a.Name
		veth := &netlink.Veth{LinkAttrs: attrs, PeerName: b.Name, PeerNamespace: netlink.NsFd(int(b.NS.file.Fd()))}
		if err := netlink.LinkAdd(veth); err != nil {
			return fmt.Errorf("adding veth %s-%s: %w", a.Name, b.Name, err)
		}
		return nil
	})
	// Both ends up before routes: a port without carrier takes none of IPv6.
	a.NS.Do(tb, a.up)
	b.NS.Do(tb, b.up)
	a.NS.Do(tb, a.route)
	b.NS.Do(tb, b.route)
	a.NS.Do(tb, a.awaitLocal)
	b.NS.Do(tb, b.awaitLocal)
}

func (p Port) up() error {
	link, err := netlink.LinkByName(p.Name)
	if err != nil {
		return fmt.Errorf("looking up %s: %w", p.Name, err)
	}
	for _, addr := range p.Addrs {
		a := &netlink.Addr{IPNet: netlink.NewIPNet(addr.Addr().AsSlice())}
		a.IPNet.Mask = maskOf(addr)
		if addr.Addr().Is6() {
			a.Flags = unix.IFA_F_NODAD
		}
		if err := netlink.AddrAdd(link, a); err != nil {
			return fmt.Errorf("adding %s to %s: %w", addr, p.Name, err)
		}
	}
	if err := withoutDAD(p.Name); err != nil {
		return err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("setting %s up: %w", p.Name, err)
	}
	return nil
}

// withoutDAD spares the port's link-local address, which the kernel makes, the one
// or two seconds of duplicate address detection. Until then a netns that forwards
// does not even ask for its neighbours' addresses: it has none to ask from
// (ndisc_send_ns, net/ipv6/ndisc.c).
func withoutDAD(name string) error {
	err := os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/accept_dad", []byte("0"), 0)
	if err != nil && !errors.Is(err, os.ErrNotExist) { // the kernel has no IPv6
		return fmt.Errorf("switching duplicate address detection off: %w", err)
	}
	return nil
}

func (p Port) route() error {
	link, err := netlink.LinkByName(p.Name)
	if err != nil {
		return fmt.Errorf("looking up %s: %w", p.Name, err)
	}
	for _, gw := range p.Gateways {
		route := &netlink.Route{LinkIndex: link.Attrs().Index, Gw: gw.AsSlice()}
		if err := netlink.RouteAdd(route); err != nil {
			return fmt.Errorf("adding the default route via %s: %w", gw, err)
		}
	}
	return nil
}

// awaitLocal waits until the netns knows the port's IPv6 addresses for its own. The
// kernel adds the route that says so later than the address, from a work queue
// (addrconf_dad_work in net/ipv6/addrconf.c); until then the netns can listen there,
// but what it sends there leaves by the link.
func (p Port) awaitLocal() error {
	// Subscribed before the first look, so that no change is missed.
	events, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("opening a socket for route changes: %w", err)
	}
	defer unix.Close(events)
	group := unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1 << (unix.RTNLGRP_IPV6_ROUTE - 1)}
	patience := unix.Timeval{Sec: 10}
	if err := errors.Join(unix.SetsockoptTimeval(events, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &patience), unix.Bind(events, &group)); err != nil {
		return fmt.Errorf("subscribing to route changes: %w", err)
	}
	for _, addr := range p.Addrs {
		for addr.Addr().Is6() {
			routes, err := netlink.RouteGet(addr.Addr().AsSlice())
			if err == nil && routes[0].Type == unix.RTN_LOCAL {
				break
			}
			if _, err := unix.Read(events, make([]byte, 4096)); err != nil && !errors.Is(err, unix.EINTR) {
				return fmt.Errorf("waiting until %s is an address of %s: %w", addr.Addr(), p.Name, err)
			}
		}
	}
	return nil
}

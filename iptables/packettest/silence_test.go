// SPDX-License-Identifier: Apache-2.0

package packettest_test

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

// attempt is a TCP connection that is begun and not waited for.
type attempt struct {
	ns   *netnstest.NS
	to   netip.AddrPort
	mark uint32
}

// start sends the first packet: when it returns, the packet is where it gets to
// without another's help. The caller closes the socket that it returns.
func (a attempt) start(t *testing.T) *os.File {
	t.Helper()
	var socket *os.File
	a.ns.Do(t, func() error {
		family := unix.AF_INET
		var to unix.Sockaddr
		if addr := a.to.Addr(); addr.Is6() {
			family, to = unix.AF_INET6, &unix.SockaddrInet6{Port: int(a.to.Port()), Addr: addr.As16()}
		} else {
			to = &unix.SockaddrInet4{Port: int(a.to.Port()), Addr: addr.As4()}
		}
		fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		socket = os.NewFile(uintptr(fd), "attempt")
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(a.mark)); err != nil {
			return err
		}
		if err := unix.Connect(fd, to); err != nil && !errors.Is(err, unix.EINPROGRESS) {
			return err
		}
		return nil
	})
	return socket
}

// expectSilence starts the attempt and expects that the pod sends no TCP packet
// from the address given, as seen by the peer: up to the answer to a connection
// that is made after it, and of which the pod's rules make nothing.
func (n *network) expectSilence(t *testing.T, a attempt, from netip.Addr) {
	t.Helper()
	watch := openCapture(t, n.peer, "eth0")
	defer watch.close(t)
	defer a.start(t).Close()
	if a.ns == n.peer {
		// It leaves as soon as the pod's link has told its address.
		if err := watch.await(func(p packet) bool { return p.to == a.to }); err != nil {
			t.Fatalf("the packet to %s never left: %v", a.to, err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	direct := netip.AddrPortFrom(n.addr(pod, redirection.IPv4), redirection.HBONEPort)
	if _, err := sendTCP(ctx, n.peer, netip.AddrPort{}, direct); err != nil {
		t.Fatal(err)
	}
	err := watch.await(func(p packet) bool {
		if p.from.Addr() == from {
			t.Errorf("the pod sent %+v", p)
		}
		return p.from == direct && p.isAnswer()
	})
	if err != nil {
		t.Fatalf("waiting for the connection that is always answered: %v", err)
	}
}

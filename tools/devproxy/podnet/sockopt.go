// SPDX-License-Identifier: Apache-2.0

package podnet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// ErrNotRedirected is returned for a connection that no rule has redirected.
var ErrNotRedirected = errors.New("connection was not redirected")

func onFD(raw syscall.RawConn, f func(fd int) error) error {
	var err error
	if ctlErr := raw.Control(func(fd uintptr) { err = f(int(fd)) }); ctlErr != nil {
		return ctlErr
	}
	return err
}

func mark(fd int) error {
	return os.NewSyscallError("setsockopt SO_MARK", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, Mark))
}

// transparent allows a socket to have a source address that is not the netns's.
func transparent(network string) func(fd int) error {
	return func(fd int) error {
		if strings.HasSuffix(network, "6") {
			return os.NewSyscallError("setsockopt IPV6_TRANSPARENT", unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1))
		}
		return os.NewSyscallError("setsockopt IP_TRANSPARENT", unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1))
	}
}

// OriginalDst returns where a connection that reached a listener by a redirect
// was going (SO_ORIGINAL_DST, which conntrack answers for both families), or
// ErrNotRedirected: connection tracking knows the others too, but they were
// going to the listener itself.
func OriginalDst(c *net.TCPConn) (netip.AddrPort, error) {
	local := addrPort(c.LocalAddr())
	raw, err := c.SyscallConn()
	if err != nil {
		return netip.AddrPort{}, err
	}
	var dst netip.AddrPort
	err = onFD(raw, func(fd int) (err error) {
		if local.Addr().Is4() {
			dst, err = originalDst4(fd)
		} else {
			dst, err = originalDst6(fd)
		}
		return err
	})
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("reading the original destination: %w", err)
	}
	if dst == local {
		return netip.AddrPort{}, ErrNotRedirected
	}
	return dst, nil
}

// originalDst4 reads a sockaddr_in, for which the kernel wants 16 bytes.
func originalDst4(fd int) (netip.AddrPort, error) {
	raw, err := unix.GetsockoptIPv6Mreq(fd, unix.SOL_IP, unix.SO_ORIGINAL_DST)
	if err != nil {
		return netip.AddrPort{}, os.NewSyscallError("getsockopt SO_ORIGINAL_DST", err)
	}
	b := raw.Multiaddr // family (2), port (2, big endian), address (4)
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), uint16(b[2])<<8|uint16(b[3])), nil
}

// originalDst6 reads a sockaddr_in6, which an IPv6MTUInfo begins with.
func originalDst6(fd int) (netip.AddrPort, error) {
	raw, err := unix.GetsockoptIPv6MTUInfo(fd, unix.SOL_IPV6, unix.SO_ORIGINAL_DST)
	if err != nil {
		return netip.AddrPort{}, os.NewSyscallError("getsockopt IP6T_SO_ORIGINAL_DST", err)
	}
	port := raw.Addr.Port // big endian as it lies in memory
	return netip.AddrPortFrom(netip.AddrFrom16(raw.Addr.Addr), port<<8|port>>8), nil
}

func addrPort(a net.Addr) netip.AddrPort {
	ap := a.(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap().WithZone(""), ap.Port())
}

// SPDX-License-Identifier: Apache-2.0

package netnstest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// Option prepares a socket before it is bound. Network is "tcp4", "tcp6",
// "udp4" or "udp6".
type Option func(network string, fd int) error

// Mark sets the socket's mark (SO_MARK), which every packet of it carries.
func Mark(mark uint32) Option {
	return func(_ string, fd int) error {
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark))
	}
}

// Transparent lets the socket use addresses that are not the netns's own
// (IP_TRANSPARENT), as a proxy does that keeps its client's source address.
func Transparent() Option {
	return func(network string, fd int) error {
		if strings.HasSuffix(network, "6") {
			return unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1)
		}
		return unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1)
	}
}

// ListenTCP listens on addr inside the netns until the test ends. Port 0 picks
// one. An IPv6 listener takes no IPv4, and MPTCP is off: SO_ORIGINAL_DST is not
// to be had on such connections.
func (ns *NS) ListenTCP(tb testing.TB, addr netip.AddrPort, opts ...Option) *net.TCPListener {
	tb.Helper()
	network := family("tcp", addr.Addr())
	lc := net.ListenConfig{Control: control(opts)}
	lc.SetMultipathTCP(false)
	var l net.Listener
	ns.Do(tb, func() (err error) {
		l, err = lc.Listen(context.Background(), network, addr.String())
		return err
	})
	tb.Cleanup(func() { closeOnce(tb, l) })
	return as[*net.TCPListener](tb, l)
}

// ListenUDP binds a UDP socket to addr inside the netns until the test ends.
func (ns *NS) ListenUDP(tb testing.TB, addr netip.AddrPort, opts ...Option) *net.UDPConn {
	tb.Helper()
	network := family("udp", addr.Addr())
	lc := net.ListenConfig{Control: control(opts)}
	var c net.PacketConn
	ns.Do(tb, func() (err error) {
		c, err = lc.ListenPacket(context.Background(), network, addr.String())
		return err
	})
	tb.Cleanup(func() { closeOnce(tb, c) })
	return as[*net.UDPConn](tb, c)
}

// DialTCP connects from local (the zero value: the kernel chooses) to remote
// inside the netns. The caller closes the connection.
func (ns *NS) DialTCP(ctx context.Context, local, remote netip.AddrPort, opts ...Option) (*net.TCPConn, error) {
	d := net.Dialer{Control: control(opts)}
	if local.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(local)
	}
	return dial[*net.TCPConn](ctx, ns, &d, "tcp", remote)
}

// DialUDP connects a UDP socket, which then takes answers from remote only.
// The caller closes it.
func (ns *NS) DialUDP(ctx context.Context, local, remote netip.AddrPort, opts ...Option) (*net.UDPConn, error) {
	d := net.Dialer{Control: control(opts)}
	if local.IsValid() {
		d.LocalAddr = net.UDPAddrFromAddrPort(local)
	}
	return dial[*net.UDPConn](ctx, ns, &d, "udp", remote)
}

// dial relies on package net opening the socket of a literal address on the
// calling goroutine: only for several addresses does it start others.
func dial[C net.Conn](ctx context.Context, ns *NS, d *net.Dialer, proto string, remote netip.AddrPort) (conn C, err error) {
	err = ns.run(func() error {
		c, err := d.DialContext(ctx, family(proto, remote.Addr()), remote.String())
		if err != nil {
			return err
		}
		var ok bool
		if conn, ok = c.(C); !ok {
			return errors.Join(fmt.Errorf("dialling %s gave a %T", proto, c), c.Close())
		}
		return nil
	})
	return conn, err
}

// as asserts the type that package net documents for the network.
func as[T any](tb testing.TB, v any) T {
	tb.Helper()
	t, ok := v.(T)
	if !ok {
		tb.Fatalf("package net gave a %T", v)
	}
	return t
}

// OriginalDst returns where a redirected connection was going (SO_ORIGINAL_DST,
// linux/netfilter_ipv4.h and netfilter_ipv6/ip6_tables.h). For a connection
// that was not redirected it is the connection's own local address; ENOENT
// means that connection tracking does not know the connection.
func OriginalDst(c *net.TCPConn) (netip.AddrPort, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return netip.AddrPort{}, err
	}
	local, err := netip.ParseAddrPort(c.LocalAddr().String())
	if err != nil {
		return netip.AddrPort{}, err
	}
	var dst netip.AddrPort
	var getErr error
	err = raw.Control(func(fd uintptr) {
		if local.Addr().Unmap().Is4() {
			dst, getErr = originalDst4(int(fd))
		} else {
			dst, getErr = originalDst6(int(fd))
		}
	})
	if err := errors.Join(err, getErr); err != nil {
		return netip.AddrPort{}, fmt.Errorf("reading SO_ORIGINAL_DST: %w", err)
	}
	return dst, nil
}

// soOriginalDst is SO_ORIGINAL_DST and IP6T_SO_ORIGINAL_DST alike.
const soOriginalDst = 80

// originalDst4 borrows a getter whose result is as long as a sockaddr_in or
// longer: family, port big-endian, address.
func originalDst4(fd int) (netip.AddrPort, error) {
	v, err := unix.GetsockoptIPv6Mreq(fd, unix.SOL_IP, soOriginalDst)
	if err != nil {
		return netip.AddrPort{}, err
	}
	b := v.Multiaddr
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), binary.BigEndian.Uint16(b[2:4])), nil
}

// originalDst6 borrows a getter whose result begins with a sockaddr_in6.
func originalDst6(fd int) (netip.AddrPort, error) {
	v, err := unix.GetsockoptIPv6MTUInfo(fd, unix.SOL_IPV6, soOriginalDst)
	if err != nil {
		return netip.AddrPort{}, err
	}
	var port [2]byte
	binary.NativeEndian.PutUint16(port[:], v.Addr.Port)
	return netip.AddrPortFrom(netip.AddrFrom16(v.Addr.Addr), binary.BigEndian.Uint16(port[:])), nil
}

func control(opts []Option) func(network, address string, raw syscall.RawConn) error {
	return func(network, _ string, raw syscall.RawConn) error {
		var optErr error
		err := raw.Control(func(fd uintptr) {
			for _, opt := range opts {
				optErr = errors.Join(optErr, opt(network, int(fd)))
			}
		})
		return errors.Join(err, optErr)
	}
}

func family(proto string, a netip.Addr) string {
	if a.Is4() {
		return proto + "4"
	}
	return proto + "6"
}

// closeOnce closes what the test may have closed already.
func closeOnce(tb testing.TB, c interface{ Close() error }) {
	if err := c.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		tb.Errorf("closing a socket: %v", err)
	}
}

func maskOf(p netip.Prefix) net.IPMask { return net.CIDRMask(p.Bits(), p.Addr().BitLen()) }

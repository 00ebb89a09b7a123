// SPDX-License-Identifier: Apache-2.0

package packettest_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/tools/netnstest"
)

// sysctls work on the netns of the calling thread.

func readSysctl(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile("/proc/sys/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

func writeSysctl(t *testing.T, name, value string) {
	t.Helper()
	if err := os.WriteFile("/proc/sys/"+name, []byte(value), 0); err != nil {
		t.Fatal(err)
	}
}

// connection is a conntrack entry.
type connection struct {
	from, to netip.AddrPort
	mark     uint32
	zone     uint16
}

func connections(t *testing.T, ns *netnstest.NS) []connection {
	t.Helper()
	var all []connection
	ns.Do(t, func() error {
		for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
			entries, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
			if err != nil {
				return fmt.Errorf("listing conntrack: %w", err)
			}
			for _, e := range entries {
				src, _ := netip.AddrFromSlice(e.Forward.SrcIP)
				dst, _ := netip.AddrFromSlice(e.Forward.DstIP)
				all = append(all, connection{mark: e.Mark, zone: e.Zone,
					from: netip.AddrPortFrom(src.Unmap(), e.Forward.SrcPort), to: netip.AddrPortFrom(dst.Unmap(), e.Forward.DstPort)})
			}
		}
		return nil
	})
	return all
}

// capture sees every packet on one link, as tcpdump does.
type capture struct{ file *os.File }

// packet is what the tests look at of a TCP packet.
type packet struct {
	from, to netip.AddrPort
	flags    byte
}

// isAnswer: SYN and ACK are set (RFC 9293, 3.1).
func (p packet) isAnswer() bool { return p.flags&0x12 == 0x12 }

func openCapture(t *testing.T, ns *netnstest.NS, link string) *capture {
	t.Helper()
	var c *capture
	ns.Do(t, func() error {
		l, err := netlink.LinkByName(link)
		if err != nil {
			return err
		}
		all := bigEndian(unix.ETH_P_ALL)
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, int(all))
		if err != nil {
			return fmt.Errorf("opening a packet socket: %w", err)
		}
		c = &capture{file: os.NewFile(uintptr(fd), "packet socket")}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: l.Attrs().Index})
	})
	t.Cleanup(func() { c.close(t) })
	return c
}

func (c *capture) close(t *testing.T) {
	if err := c.file.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		t.Error(err)
	}
}

// await returns nil with the first TCP packet that match accepts, and an error
// when the capture is closed or nothing came.
func (c *capture) await(match func(packet) bool) error {
	if err := c.file.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	buf := make([]byte, 65536)
	for {
		size, err := c.file.Read(buf)
		if err != nil {
			return err
		}
		if p, ok := parsePacket(buf[:size]); ok && match(p) {
			return nil
		}
	}
}

// parsePacket reads the headers of a TCP packet of either family (RFC 791, RFC
// 8200 without extension headers, RFC 9293).
func parsePacket(b []byte) (packet, bool) {
	var src, dst netip.Addr
	var tcp []byte
	switch {
	case len(b) >= 20 && b[0]>>4 == 4 && b[9] == unix.IPPROTO_TCP && len(b) >= int(b[0]&0xf)*4:
		src, dst, tcp = netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20])), b[int(b[0]&0xf)*4:]
	case len(b) >= 40 && b[0]>>4 == 6 && b[6] == unix.IPPROTO_TCP:
		src, dst, tcp = netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40])), b[40:]
	}
	if len(tcp) < 20 {
		return packet{}, false
	}
	return packet{
		from:  netip.AddrPortFrom(src, binary.BigEndian.Uint16(tcp)),
		to:    netip.AddrPortFrom(dst, binary.BigEndian.Uint16(tcp[2:])),
		flags: tcp[13],
	}, true
}

// bigEndian returns v as it lies in memory in network order.
func bigEndian(v uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], v)
	return binary.NativeEndian.Uint16(b[:])
}

// ping sends an echo request with to's port as identifier (RFC 792, RFC 4443) and
// returns the landing "echo" when the answer is there. The sender is who got the
// answer, since the kernel that answers does not say whom it saw.
func ping(ns *netnstest.NS, from netip.Addr, to netip.AddrPort) (landing, error) {
	network, request, reply := "ip4:icmp", byte(8), byte(0)
	if from.Is6() {
		network, request, reply = "ip6:ipv6-icmp", 128, 129
	}
	var c net.PacketConn
	if err := ns.Runner()(func() (err error) {
		c, err = net.ListenPacket(network, from.String())
		return err
	}); err != nil {
		return landing{}, err
	}
	defer c.Close()
	message := []byte{request, 0, 0, 0, 0, 0, 0, 1}
	binary.BigEndian.PutUint16(message[4:], to.Port())
	// The kernel fills in the sum of ICMPv6; this one is of ICMP, over 16-bit words.
	sum := uint32(request)<<8 + uint32(to.Port()) + 1
	binary.BigEndian.PutUint16(message[2:], ^uint16(sum+sum>>16))
	if _, err := c.WriteTo(message, &net.IPAddr{IP: to.Addr().AsSlice()}); err != nil {
		return landing{}, err
	}
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return landing{}, err
	}
	buf := make([]byte, 1500)
	for {
		size, source, err := c.ReadFrom(buf)
		if err != nil {
			return landing{}, fmt.Errorf("waiting for an echo: %w", err)
		}
		if size >= 8 && buf[0] == reply && binary.BigEndian.Uint16(buf[4:]) == to.Port() && source.String() == to.Addr().String() {
			return landing{At: "echo", From: netip.AddrPortFrom(from, 0)}, nil
		}
	}
}

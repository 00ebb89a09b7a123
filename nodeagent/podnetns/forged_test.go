// SPDX-License-Identifier: Apache-2.0

package podnetns

import (
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/tools/netnstest"
)

// TestForgedAddress has somebody in the netns send an address that it does not have.
func TestForgedAddress(t *testing.T) {
	netnstest.Require(t)
	socket := func() int {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
			t.Fatal(err)
		}
		return fd
	}
	ours, other := socket(), socket()
	buf := make([]byte, 32<<10)
	var want, got []netip.Addr
	if err := dumpAddresses(ours, buf, func(ip netip.Addr) { want = append(want, ip) }); err != nil {
		t.Fatal(err)
	}
	forged := rawnetlink.AppendAttribute(make([]byte, unix.SizeofIfAddrmsg), rawnetlink.Attribute{Type: unix.IFA_LOCAL, Data: []byte{192, 0, 2, 1}})
	to, err := unix.Getsockname(ours)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Sendto(other, rawnetlink.AppendMessage(nil, rawnetlink.Message{Type: unix.RTM_NEWADDR, Payload: forged}), 0, to); err != nil {
		t.Fatal(err)
	}
	if err := dumpAddresses(ours, buf, func(ip netip.Addr) { got = append(got, ip) }); err != nil || !slices.Equal(got, want) {
		t.Errorf("read %v, %v, want %v", got, err, want)
	}
}

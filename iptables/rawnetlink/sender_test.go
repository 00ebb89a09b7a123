// SPDX-License-Identifier: Apache-2.0

package rawnetlink

import (
	"testing"

	"golang.org/x/sys/unix"

	"ambientd/tools/netnstest"
)

// TestSenderIsTheKernel has somebody send to a socket that has its address and is not connected yet. Who does so all the
// time to the agent's process ID meets one opening in a thousand.
func TestSenderIsTheKernel(t *testing.T) {
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
	address, err := unix.Getsockname(ours)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		forged := AppendMessage(nil, Message{Type: unix.RTM_NEWLINK, Sequence: 8, Payload: make([]byte, 16)})
		if err := unix.Sendto(other, forged, 0, address); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Connect(ours, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		t.Fatal(err)
	}
	request := Message{Type: unix.RTM_GETLINK, Flags: unix.NLM_F_REQUEST, Sequence: 7, Payload: make([]byte, 16)}
	request.Payload[4] = 1 // the interface's index
	buffer := make([]byte, 0, bufferSize)
	s := &Socket{fd: ours, protocol: unix.NETLINK_ROUTE, buffer: &buffer}
	answer, err := s.Query(AppendMessage(nil, request), 1)
	if err != nil {
		t.Fatal(err)
	}
	if m, rest, err := Next(answer); err != nil || m.Sequence != 7 || len(rest) != 0 {
		t.Errorf("the answer has number %d and %d bytes more, %v; want the kernel's", m.Sequence, len(rest), err)
	}
	if _, err := ReadKernel(ours, buffer[:1]); err != unix.EAGAIN { //nolint:errorlint // system calls return a bare errno
		t.Errorf("something is left: %v", err)
	}
}

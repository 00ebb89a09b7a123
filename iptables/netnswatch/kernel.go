// SPDX-License-Identifier: Apache-2.0

package netnswatch

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
)

// receiveBuffer bounds what the kernel keeps for one socket, in bytes. A notification takes about 1 KiB there, so this is
// for some thousand changes that nobody has read of yet.
const receiveBuffer = 4 << 20

// readRate bounds how many notifications are read each second, and readBurst those at once. A pod that may change its network
// can make a million in a few seconds, or send as many forged ones: those that are too many are lost, and stand for a change
// anywhere ([All]).
const (
	readRate  = rate.Limit(5000)
	readBurst = 2000
)

// subscribe opens a socket in the thread's namespace that gets rtnetlink's notifications of the groups from every namespace
// with a number here, as far as the filter lets them pass.
func subscribe(filter []unix.SockFilter, groups ...int) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("opening a netlink socket for notifications: %w", err)
	}
	program := &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	err = errors.Join(
		unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, program),
		unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_LISTEN_ALL_NSID, 1),
		enlarge(fd),
		// Without an address of its own a socket gets nothing: notifications skip the sender's address, which is 0 where
		// it does not matter (do_one_broadcast, net/netlink/af_netlink.c).
		unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
	)
	for _, group := range groups {
		if err == nil {
			err = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, group)
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("subscribing to notifications of policy rules and routes: %w", err), unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), "netlink"), nil
}

// enlarge sets the receive buffer, as far as the system lets it where the process may not go beyond that.
func enlarge(fd int) error {
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer) == nil {
		return nil
	}
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer)
}

// receive notes every change that the kernel tells of, until the context ends.
func (w *Watcher) receive(ctx context.Context) error {
	conn, err := w.route.SyscallConn()
	if err != nil {
		return fmt.Errorf("reading notifications: %w", err)
	}
	// The messages have passed the filter, and nothing more is taken from them.
	var message [1]byte
	control := make([]byte, unix.CmsgSpace(4))
	pace := rate.NewLimiter(readRate, readBurst)
	for pace.Wait(ctx) == nil { // it fails when ctx ends
		var length int
		var readErr error
		err := conn.Read(func(fd uintptr) bool {
			_, length, _, _, readErr = unix.Recvmsg(int(fd), message[:], control, 0)
			return !errors.Is(readErr, unix.EAGAIN)
		})
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // closing the file is what ended the read
		case err != nil:
			return fmt.Errorf("reading notifications: %w", err)
		case errors.Is(readErr, unix.ENOBUFS):
			w.changed(All)
		case errors.Is(readErr, unix.EINTR):
		case readErr != nil:
			return fmt.Errorf("reading notifications: %w", readErr)
		default:
			w.changed(sender(control[:length]))
		}
	}
	return nil
}

// sender returns whose notification it is, from the control message that comes with one from another namespace.
func sender(control []byte) ID {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return All
	}
	for _, m := range messages {
		if m.Header.Level == unix.SOL_NETLINK && m.Header.Type == unix.NETLINK_LISTEN_ALL_NSID && len(m.Data) >= 4 {
			return ID(binary.NativeEndian.Uint32(m.Data))
		}
	}
	return Own
}

// identify returns the number of a namespace, and has the kernel give it one if it has none.
func (w *Watcher) identify(netns *os.File) (id ID, err error) {
	if w.numbers == nil {
		return 0, os.ErrClosed
	}
	conn, err := netns.SyscallConn()
	if err != nil {
		return 0, err
	}
	controlErr := conn.Control(func(fd uintptr) {
		var there unix.Stat_t
		if err = unix.Fstat(int(fd), &there); err != nil {
			return
		}
		if (fileID{device: there.Dev, inode: there.Ino}) == w.own {
			id = Own
			return
		}
		id, err = w.number(int(fd))
	})
	return id, errors.Join(controlErr, err)
}

// notAssigned is NETNSA_NSID_NOT_ASSIGNED of linux/net_namespace.h.
const notAssigned = -1

// number asks for the number of a namespace, and once more after having had one given.
func (w *Watcher) number(fd int) (ID, error) {
	defer w.numbers.Forget()
	id, err := w.askNumber(fd)
	if err != nil || id != notAssigned {
		return id, err
	}
	none := int32(notAssigned) // any that is free
	payload := numberPayload(fd)
	payload = appendUint32(payload, unix.NETNSA_NSID, uint32(none))
	refused, err := w.numbers.Execute(rawnetlink.AppendMessage(nil, rawnetlink.Message{
		Type: unix.RTM_NEWNSID, Flags: unix.NLM_F_REQUEST | unix.NLM_F_ACK, Sequence: 1, Payload: payload,
	}), 1)
	if err == nil && len(refused) > 0 && refused[0].Errno != unix.EEXIST {
		err = refused[0]
	}
	if err != nil {
		return 0, fmt.Errorf("giving it a number: %w", err)
	}
	id, err = w.askNumber(fd)
	if err == nil && id == notAssigned {
		err = errors.New("it got no number")
	}
	return id, err
}

func (w *Watcher) askNumber(fd int) (ID, error) {
	answer, err := w.numbers.Query(rawnetlink.AppendMessage(nil, rawnetlink.Message{
		Type: unix.RTM_GETNSID, Flags: unix.NLM_F_REQUEST, Payload: numberPayload(fd),
	}), 1)
	if err != nil {
		return 0, fmt.Errorf("asking for its number: %w", err)
	}
	m, _, err := rawnetlink.Next(answer)
	if err == nil {
		err = m.Failure()
	}
	if err != nil {
		return 0, fmt.Errorf("asking for its number: %w", err)
	}
	for rest := m.Payload[min(rtgenHeader, len(m.Payload)):]; len(rest) > 0; {
		var a rawnetlink.Attribute
		if a, rest, err = rawnetlink.NextAttribute(rest); err != nil {
			return 0, fmt.Errorf("asking for its number: %w", err)
		}
		if a.Type == unix.NETNSA_NSID && len(a.Data) == 4 {
			return ID(binary.NativeEndian.Uint32(a.Data)), nil
		}
	}
	return 0, errors.New("asking for its number: the answer holds none")
}

// rtgenHeader is the length of struct rtgenmsg with its padding.
const rtgenHeader = 4

func numberPayload(fd int) []byte {
	return appendUint32(make([]byte, rtgenHeader, 32), unix.NETNSA_FD, uint32(fd))
}

func appendUint32(b []byte, kind uint16, value uint32) []byte {
	return rawnetlink.AppendAttribute(b, rawnetlink.Attribute{Type: kind, Data: binary.NativeEndian.AppendUint32(nil, value)})
}

// Offsets in a netlink message that starts with struct nlmsghdr.
const (
	offsetType  = 4                     // nlmsg_type
	offsetIndex = unix.NLMSG_HDRLEN + 4 // ifi_index of struct ifinfomsg
	offsetTable = unix.NLMSG_HDRLEN + 4 // rtm_table of struct rtmsg
)

// routeFilter passes what is about policy rules, about routes of our table, and about loopback.
func routeFilter() []unix.SockFilter {
	const loopback = 1 // the interface index of lo in every namespace
	return []unix.SockFilter{
		load16(offsetType),
		passIf(bigEndian16(unix.RTM_NEWRULE), 10), // jumps to pass, counted from the next instruction
		passIf(bigEndian16(unix.RTM_DELRULE), 9),
		passIf(bigEndian16(unix.RTM_NEWROUTE), 4), // to the table
		passIf(bigEndian16(unix.RTM_DELROUTE), 3),
		passIf(bigEndian16(unix.RTM_NEWLINK), 4), // to the index
		passIf(bigEndian16(unix.RTM_DELLINK), 3),
		drop(),
		load8(offsetTable),
		jumpIf(redirection.RouteTable, 2, 3),
		load32(offsetIndex),
		jumpIf(bigEndian32(loopback), 0, 1),
		pass(),
		drop(),
	}
}

// The filter's machine reads numbers as big-endian, netlink's are in the order of this machine.
func bigEndian16(value uint16) uint32 {
	return uint32(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, value)))
}

func bigEndian32(value uint32) uint32 {
	return binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, value))
}

func load8(offset uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: offset}
}

func load16(offset uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: offset}
}

func load32(offset uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
}

// jumpIf skips as many instructions as it says, by whether what was loaded is the value.
func jumpIf(value uint32, equal, otherwise uint8) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: equal, Jf: otherwise, K: value}
}

func passIf(value uint32, equal uint8) unix.SockFilter { return jumpIf(value, equal, 0) }

// pass accepts the whole message, drop none of it.
func pass() unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: 0xffffffff} }
func drop() unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: 0} }

// SPDX-License-Identifier: Apache-2.0

package podnetns

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
)

// usualAddresses is how many are kept of a pod's as a rule, in two families and with others.
const usualAddresses = 4

// longAnswer is room for what the kernel puts into one answer at most. It looks for its place
// among the addresses anew for each.
const longAnswer = 32 << 10

// maxDumps bounds how often addresses are asked for while they keep changing.
const maxDumps = 3

// errChanged says that a dump is no consistent picture.
var errChanged = errors.New("the addresses keep changing")

// surveyor looks into netns. It is for one goroutine at a time.
type surveyor struct {
	host    *Host
	sockets *rawnetlink.Sockets // keeps those that questions were asked on
	buf     []byte              // for what the kernel answers
	wanted  map[netip.Addr][]*pursuit
}

// newSurveyor offers the kernel little room for its answers at first: it would get itself as
// much for everything that is asked on the same socket later.
func newSurveyor(h *Host, sockets *rawnetlink.Sockets, wanted map[netip.Addr][]*pursuit) *surveyor {
	return &surveyor{host: h, sockets: sockets, buf: make([]byte, rawnetlink.ShortAnswer), wanted: wanted}
}

// surveyed is what became of one file.
type surveyed struct {
	netns *Netns       // nil on an error
	key   Key          // of the netns, on an error too; zero if it was not learnt
	held  []netip.Addr // what [holding] keeps of the addresses in it
	err   error

	file   *os.File
	socket int // inside the netns; -1 without
}

// survey makes a Netns of each file of [Host.openNetns], all of which it takes over, if it is one
// that the agent may touch, and reads the addresses in it. All cost one visit, from one netns to
// the next, in which sockets are opened; the questions are asked from outside.
func (s *surveyor) survey(files ...*os.File) []surveyed {
	if len(files) == 0 {
		return nil
	}
	all := make([]surveyed, len(files))
	for i, file := range files {
		all[i] = surveyed{file: file, socket: -1}
	}
	stay := func() error { return nil }
	err := visit(s.host.file, stay, func() error {
		for i := range all {
			all[i].enter()
		}
		return nil
	})
	for i := range all {
		if err != nil {
			all[i].err = errors.Join(all[i].err, err)
		}
		s.ask(&all[i])
	}
	return all
}

// enter opens the socket, and leaves the thread where it is.
func (v *surveyed) enter() {
	err := setns(v.file)
	if errors.Is(err, unix.EINVAL) {
		err = fmt.Errorf("namespace of another type: %w", ErrNotNetns)
	}
	if err != nil {
		v.err = fmt.Errorf("entering the netns: %w", err)
		return
	}
	// Non-blocking: the kernel answers inside the call that asks.
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		v.err = fmt.Errorf("opening a socket in the netns: %w", err)
		return
	}
	v.socket = fd
	// Connected to the kernel: who is inside might send without an end otherwise.
	if err := unix.Connect(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		v.err = fmt.Errorf("connecting a socket in the netns to the kernel: %w", err)
	}
}

// ask reads what the socket tells. The socket stays with the netns that it makes: who enrols
// the pod has more to ask. If it makes none, socket and file are closed.
func (s *surveyor) ask(v *surveyed) {
	if v.err == nil {
		v.netns, v.err = s.read(v)
	}
	switch {
	case v.err == nil:
		v.err = s.sockets.Keep(v.netns, rawnetlink.Opened{FD: v.socket, Protocol: unix.NETLINK_ROUTE, Cookie: v.netns.key.Cookie})
	case v.socket >= 0:
		v.err = errors.Join(v.err, unix.Close(v.socket))
	}
	if v.err != nil {
		v.netns = nil
		v.err = errors.Join(v.err, v.file.Close())
	}
}

func (s *surveyor) read(v *surveyed) (*Netns, error) {
	cookie, err := unix.GetsockoptUint64(v.socket, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return nil, fmt.Errorf("reading the netns cookie (needs Linux 5.14 or newer): %w", err)
	}
	v.key = Key{BootID: s.host.key.BootID, Cookie: cookie}
	if v.key == s.host.key {
		return nil, fmt.Errorf("netns %s: %w", v.key, ErrHostNetns)
	}
	v.held, err = s.addresses(v.socket)
	return &Netns{file: v.file, home: s.host.file, key: v.key}, err
}

// addresses returns what decides of the addresses of all interfaces, of both families, in the
// netns that the rtnetlink socket belongs to.
func (s *surveyor) addresses(fd int) (_ []netip.Addr, err error) {
	for range maxDumps {
		found := holding{wanted: s.wanted, held: make([]netip.Addr, 0, usualAddresses)}
		err = dumpAddresses(fd, s.buf, found.add)
		if err == nil {
			return found.held, nil
		}
		if !errors.Is(err, errChanged) {
			break
		}
	}
	return nil, fmt.Errorf("reading the netns' addresses: %w", err)
}

// dumpAddresses asks once (RTM_GETADDR, rtnetlink(7)), and tells each address.
func dumpAddresses(fd int, buf []byte, tell func(netip.Addr)) error {
	request := rawnetlink.AppendMessage(buf[:0], rawnetlink.Message{
		Type: unix.RTM_GETADDR, Flags: unix.NLM_F_REQUEST | unix.NLM_F_DUMP,
		Payload: make([]byte, unix.SizeofIfAddrmsg), // zeroes: both families, all interfaces
	})
	if _, err := retrying(func() (int, error) { return unix.Write(fd, request) }); err != nil {
		return err
	}
	for changed := false; ; {
		size, err := retrying(func() (int, error) { return rawnetlink.ReadKernel(fd, buf) })
		if err != nil {
			return err
		}
		for rest := buf[:size]; len(rest) > 0; {
			var m rawnetlink.Message
			if m, rest, err = rawnetlink.Next(rest); err == nil {
				err = m.Failure()
			}
			if err != nil {
				return err
			}
			changed = changed || m.Flags&unix.NLM_F_DUMP_INTR != 0
			switch m.Type {
			case unix.NLMSG_DONE:
				if changed {
					return errChanged
				}
				return nil
			case unix.RTM_NEWADDR:
				addr, err := address(m.Payload)
				if err != nil {
					return err
				}
				tell(addr)
			}
		}
		if size > len(buf)/2 && len(buf) < longAnswer {
			buf = make([]byte, longAnswer)
		}
	}
}

// address returns the address in the payload of an RTM_NEWADDR message: on a
// point-to-point link, where the two differ, IFA_ADDRESS is the peer's and IFA_LOCAL
// our own.
func address(payload []byte) (netip.Addr, error) {
	var found netip.Addr
	for rest := payload[min(unix.SizeofIfAddrmsg, len(payload)):]; len(rest) > 0; {
		a, after, err := rawnetlink.NextAttribute(rest)
		if err != nil {
			return netip.Addr{}, err
		}
		rest = after
		if a.Type != unix.IFA_LOCAL && (a.Type != unix.IFA_ADDRESS || found.IsValid()) {
			continue
		}
		addr, ok := netip.AddrFromSlice(a.Data)
		if !ok {
			return netip.Addr{}, fmt.Errorf("an address of %d bytes", len(a.Data))
		}
		found = addr
	}
	return found, nil
}

// retrying repeats a system call that a signal interrupted.
func retrying(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// holding is what is kept of the addresses in a netns: all that decides whose it is and no
// more, because how many there are is up to the pod.
type holding struct {
	wanted map[netip.Addr][]*pursuit
	held   []netip.Addr // each of wanted that is there, and the first other one of each family

	other4, other6 bool // whether that is in held
}

func (h *holding) add(ip netip.Addr) {
	other := &h.other4
	if ip.Is6() {
		other = &h.other6
	}
	switch wanted := len(h.wanted[ip]) > 0; {
	case wanted && slices.Contains(h.held, ip): // on two interfaces
		return
	case !wanted && (*other || !ip.IsGlobalUnicast()):
		return
	case !wanted:
		*other = true
	}
	h.held = append(h.held, ip)
}

// has says why what was surveyed is not the netns of a pod with the wanted addresses.
func (v surveyed) has(wanted []netip.Addr) error {
	if v.err != nil {
		return v.err
	}
	return holds(v.held, wanted)
}

// holds says why a netns with the addresses held is not that of a pod with the wanted
// ones, or returns nil. One has to be there. Another may be missing if its whole family
// is, because IPv6 can be turned off in a pod that has an IPv6 address; if the family has
// another address instead, the netns is another pod's.
func holds(held, wanted []netip.Addr) error {
	found := false
	for _, ip := range wanted {
		if slices.Contains(held, ip) {
			found = true
			continue
		}
		for _, other := range held {
			if other.Is4() == ip.Is4() && other.IsGlobalUnicast() && !slices.Contains(wanted, other) {
				return fmt.Errorf("it holds %s, and not the pod's %s", other, ip)
			}
		}
	}
	if !found {
		return errors.New("it holds none of the pod's addresses")
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

// Package rawnetlink sends ready-made netlink messages to the kernel and reads its answers, with as few system calls as
// the protocol allows. It owns sockets, datagrams, and the framing of messages and attributes. It refuses to know what a
// message means, and to keep a socket by itself: an open netlink socket holds its network namespace, and with it the
// interfaces of a pod that is gone. Only the host's namespace is there anyway.
//
// The kernel works on a netlink request inside the call that sends it, so the answer is there when that call returns.
// Sockets are therefore non-blocking: an answer that is missing is an error at once, not a wait.
package rawnetlink

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"golang.org/x/sys/unix"
)

// maxDatagram bounds what the kernel puts in one datagram of a dump (32 KiB, netlink_recvmsg in net/netlink/af_netlink.c)
// when the reader offers that much room: it then gets itself as much for every dump.
const maxDatagram = 32 << 10

// ShortAnswer is room that the kernel needs no more of for a dump of what is short, where nobody has offered more on the same
// socket before.
const ShortAnswer = 8 << 10

// maxAnswer bounds every other answer (NLMSG_GOODSIZE, linux/netlink.h), and a dump of what is short.
const maxAnswer = ShortAnswer

// bufferSize leaves room for what a whole verification reads, so that buffers rarely grow.
const bufferSize = 2 * maxDatagram

// maxIdle bounds how many buffers are kept while no socket uses them. A sync.Pool would let go of them at each garbage
// collection, and with the little else that the agent allocates, making them anew is a good part of what makes the next
// one due.
const maxIdle = 16

// maxClosing bounds how many calls of Close may be at work in the background.
const maxClosing = 16

// Sockets opens and closes sockets. Its zero value is not usable; call [New]. It may be used concurrently.
type Sockets struct {
	idle    chan *[]byte  // buffers that no socket uses
	closing chan struct{} // one element for each Close that is at work in the background
	ceiling int           // no socket whose descriptor is as high is kept
}

// New returns a ready Sockets.
func New() *Sockets {
	return &Sockets{
		idle:    make(chan *[]byte, maxIdle),
		closing: make(chan struct{}, maxClosing),
		ceiling: ceiling(),
	}
}

// ceiling is half of what the process may have open: what is kept for speed must not be what a pod that starts lacks. The
// kernel gives the lowest descriptor that is free, so one above that says that there are as many already.
func ceiling() int {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0
	}
	return int(min(limit.Cur, math.MaxInt32) / 2)
}

// Netns is a network namespace in which sockets are opened.
type Netns interface {
	// Do runs fn on a thread that is inside.
	Do(fn func() error) error
}

// Socket is one netlink socket. It is for one goroutine at a time.
type Socket struct {
	fd       int
	protocol int
	strict   bool
	cookie   uint64 // of its network namespace; 0 until somebody asks
	room     int    // that is offered to dumps
	offered  int    // that has been offered to an answer
	unsound  bool   // it failed: there may be answers that nobody has read
	ns       Netns
	owner    *Sockets
	buffer   *[]byte
}

// Open opens a socket of each netlink protocol given, such as unix.NETLINK_ROUTE, inside the network namespace, and
// returns them in that order. If the namespace is a [Keeper] it takes those that are kept there. On an error none is left
// open.
func (s *Sockets) Open(ns Netns, protocols ...int) ([]*Socket, error) {
	sockets := make([]*Socket, len(protocols))
	missing := len(protocols)
	keeper, keeps := ns.(Keeper)
	for i, protocol := range protocols {
		if !keeps {
			break
		}
		if kept := keeper.Kept().take(protocol); kept != nil {
			sockets[i] = kept
			missing--
		}
	}
	if missing > 0 {
		if err := s.complete(ns, sockets, protocols); err != nil {
			return nil, err
		}
	}
	for _, socket := range sockets {
		socket.buffer, socket.room, socket.owner = s.takeBuffer(), maxDatagram, s
	}
	return sockets, nil
}

// takeBuffer returns an empty buffer.
func (s *Sockets) takeBuffer() *[]byte {
	select {
	case b := <-s.idle:
		return b
	default:
		b := make([]byte, 0, bufferSize)
		return &b
	}
}

// returnBuffer takes a buffer back. One that has grown is let go of.
func (s *Sockets) returnBuffer(b *[]byte) {
	if cap(*b) > bufferSize {
		return
	}
	*b = (*b)[:0]
	select {
	case s.idle <- b:
	default:
	}
}

// complete opens those of the sockets that are missing.
func (s *Sockets) complete(ns Netns, sockets []*Socket, protocols []int) error {
	err := ns.Do(func() error {
		for i, protocol := range protocols {
			if sockets[i] != nil {
				continue
			}
			fd, err := open(protocol)
			if err != nil {
				return err
			}
			sockets[i] = &Socket{fd: fd, protocol: protocol, ns: ns}
		}
		return nil
	})
	if err == nil {
		return nil
	}
	return errors.Join(err, closeAll(slices.DeleteFunc(sockets, func(s *Socket) bool { return s == nil })))
}

// open connects the socket to the kernel, whose address is 0. Otherwise anybody with CAP_NET_ADMIN in the same namespace, in
// a pod perhaps, could send it answers of his own: that all is well (netlink_getsockbyportid, net/netlink/af_netlink.c).
func open(protocol int) (int, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return 0, fmt.Errorf("opening a netlink socket of protocol %d: %w", protocol, err)
	}
	if err := unix.Connect(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return 0, errors.Join(fmt.Errorf("connecting a netlink socket of protocol %d to the kernel: %w", protocol, err), unix.Close(fd))
	}
	return fd, nil
}

// renew puts a new socket in the place of one that a dump is still under way on. What was returned stays good.
func (s *Socket) renew() error {
	var fd int
	err := s.ns.Do(func() (err error) {
		fd, err = open(s.protocol)
		return err
	})
	if err != nil {
		return err
	}
	old := &Socket{fd: s.fd}
	s.fd, s.offered = fd, 0
	if s.strict {
		s.strict = false
		err = s.SetStrict()
	}
	return errors.Join(err, s.owner.discard([]*Socket{old}))
}

// Close gives the sockets back to the [Keeper] of their network namespace, or closes them; what their methods returned must
// not be used any more. They are closed in the background as long as few enough are: when an nfnetlink socket goes, the
// kernel first waits until everything that was deleted in the same namespace a moment ago has been destroyed, which takes an
// RCU grace period, some 10 ms (nft_rcv_nl_event, net/netfilter/nf_tables_api.c).
func (s *Sockets) Close(sockets ...*Socket) error {
	return s.discard(s.giveBack(sockets))
}

// CloseNow does likewise, but closes within the call. Where nothing was deleted, that takes less than to wake up somebody
// who does it.
func (s *Sockets) CloseNow(sockets ...*Socket) error {
	return closeAll(s.giveBack(sockets))
}

// giveBack takes back the buffers, and returns the sockets that nobody keeps.
func (s *Sockets) giveBack(sockets []*Socket) []*Socket {
	var left []*Socket
	for _, socket := range sockets {
		s.returnBuffer(socket.buffer)
		socket.buffer = nil
		keeper, keeps := socket.ns.(Keeper)
		if !keeps || socket.unsound || socket.fd >= s.ceiling || !keeper.Kept().put(socket) {
			left = append(left, socket)
		}
	}
	return left
}

func (s *Sockets) discard(sockets []*Socket) error {
	if len(sockets) == 0 {
		return nil
	}
	select {
	case s.closing <- struct{}{}:
		go func() {
			defer func() { <-s.closing }()
			// Linux releases a descriptor whatever close reports, and a netlink socket has nothing to flush.
			_ = closeAll(sockets)
		}()
		return nil
	default:
		return closeAll(sockets)
	}
}

func closeAll(sockets []*Socket) error {
	var err error
	for _, socket := range sockets {
		err = errors.Join(err, unix.Close(socket.fd))
	}
	return err
}

// Copy returns a copy of requests in the socket's buffer, for a change that is only for this socket. It counts as an answer
// as to how long it may be used.
func (s *Socket) Copy(requests []byte) []byte {
	used := len(*s.buffer)
	*s.buffer = append(*s.buffer, requests...)
	return (*s.buffer)[used:]
}

// Forget drops all answers that the socket's methods have returned; they must not be used any more. It is for a socket
// that is kept: without it, answers pile up until Close.
func (s *Socket) Forget() { *s.buffer = (*s.buffer)[:0] }

// Close closes the socket alone, like [Sockets.Close].
func (s *Socket) Close() error { return s.owner.Close(s) }

// NetnsCookie returns the number that the kernel names the socket's network namespace by: never 0, never used again
// until the next boot (SO_NETNS_COOKIE, since 5.14).
func (s *Socket) NetnsCookie() (uint64, error) {
	if s.cookie != 0 {
		return s.cookie, nil
	}
	cookie, err := unix.GetsockoptUint64(s.fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("reading the network namespace's cookie: %w", err)
	}
	s.cookie = cookie
	return cookie, nil
}

// SetStrict makes the kernel check dump requests strictly and, with that, heed their filters (NETLINK_GET_STRICT_CHK,
// since 4.20). It is for sockets of NETLINK_ROUTE.
func (s *Socket) SetStrict() error {
	if s.strict {
		return nil
	}
	if err := unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1); err != nil {
		return fmt.Errorf("asking for strict netlink checks: %w", err)
	}
	s.strict = true
	return nil
}

// ExpectShort has dumps hold messages of less than 8 KiB each, as those of rtnetlink are that tell of policy rules and of
// routes with less than a hundred ways to go. Then the kernel takes less memory for each dump, and less time to find it.
// [Socket.Dump] asks again with more room where that is too little.
func (s *Socket) ExpectShort() { s.room = maxAnswer }

// Execute sends requests that change something and returns what the kernel refused, in order. Of the requests, at least
// the one with the sequence number last must ask for an acknowledgement, and the kernel must see it last.
func (s *Socket) Execute(requests []byte, last uint32) ([]Error, error) {
	_, refused, err := s.ExecuteEchoed(requests, last)
	return refused, err
}

// ExecuteEchoed likewise returns everything that the kernel answered, for requests that ask for their echo.
func (s *Socket) ExecuteEchoed(requests []byte, last uint32) (answers []byte, refused []Error, err error) {
	defer s.note(&err)
	if err := s.send(requests); err != nil {
		return nil, nil, err
	}
	start := len(*s.buffer)
	for {
		datagram, err := s.receive(maxAnswer)
		if errors.Is(err, unix.EAGAIN) && len(refused) > 0 {
			break // a batch that is refused as a whole never gets to its last message
		}
		if err != nil {
			return nil, nil, err
		}
		more, ended, err := acknowledgements(datagram, last)
		if err != nil {
			return nil, nil, err
		}
		refused = append(refused, more...)
		if ended {
			break
		}
	}
	return (*s.buffer)[start:], refused, nil
}

// acknowledgements returns what a datagram says was refused, and whether it answers the request with that number.
func acknowledgements(datagram []byte, last uint32) (refused []Error, ended bool, err error) {
	for len(datagram) > 0 {
		var m Message
		if m, datagram, err = Next(datagram); err != nil {
			return nil, false, err
		}
		if m.Type != unix.NLMSG_ERROR {
			continue
		}
		var refusal Error
		if failure := m.Failure(); errors.As(failure, &refusal) {
			refused = append(refused, refusal)
		} else if failure != nil {
			return nil, false, failure
		}
		if m.Sequence == last {
			return refused, true, nil
		}
	}
	return refused, false, nil
}

// Query sends requests that read and are no dumps, and returns the answers: as many messages as there are requests, each
// what was asked for or an NLMSG_ERROR, in order.
func (s *Socket) Query(requests []byte, count int) (answers []byte, err error) {
	defer s.note(&err)
	if err := s.send(requests); err != nil {
		return nil, err
	}
	start := len(*s.buffer)
	for range count { // the kernel sends each answer as a datagram
		if _, err := s.receive(maxAnswer); err != nil {
			return nil, err
		}
	}
	return (*s.buffer)[start:], nil
}

// note marks the socket of a call that failed on the way: what it asked for may still be answered.
func (s *Socket) note(err *error) {
	if *err != nil {
		s.unsound = true
	}
}

func (s *Socket) send(requests []byte) error {
	n, err := ignoringEINTR(func() (int, error) { return unix.Write(s.fd, requests) })
	if err != nil {
		return fmt.Errorf("sending to the kernel: %w", err)
	}
	if n != len(requests) {
		return fmt.Errorf("sending to the kernel: %d of %d bytes were taken", n, len(requests))
	}
	return nil
}

// receive appends one datagram, of up to that many bytes, to the buffer and returns it.
func (s *Socket) receive(room int) ([]byte, error) {
	used := len(*s.buffer)
	if cap(*s.buffer)-used < room {
		bigger := make([]byte, used, 2*cap(*s.buffer))
		copy(bigger, *s.buffer)
		*s.buffer = bigger
	}
	free := (*s.buffer)[used : used+room]
	n, err := ignoringEINTR(func() (int, error) { return ReadKernel(s.fd, free) })
	if err != nil {
		return nil, fmt.Errorf("reading the kernel's answer: %w", err)
	}
	*s.buffer = (*s.buffer)[:used+n]
	s.offered = max(s.offered, room)
	return (*s.buffer)[used : used+n], nil
}

// ReadKernel reads the next datagram of the kernel's from a netlink socket. Others may be there, also where it is connected:
// from the moment before, after it got its address, which is all that somebody needs who sends there without a pause.
func ReadKernel(fd int, to []byte) (int, error) {
	for {
		n, from, err := unix.Recvfrom(fd, to, 0)
		if sender, is := from.(*unix.SockaddrNetlink); err != nil || is && sender.Pid == 0 {
			return n, err
		}
	}
}

func ignoringEINTR(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if err != unix.EINTR { //nolint:errorlint // system calls return a bare errno
			return n, err
		}
	}
}

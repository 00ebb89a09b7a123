// SPDX-License-Identifier: Apache-2.0

// Package rawnetlink sends ready-made netlink messages to the kernel and reads its answers, with as few system calls as
// the protocol allows. It owns sockets, datagrams, and the framing of messages and attributes. It refuses to know what a
// message means, and to keep a socket: an open netlink socket holds its network namespace, and with it the interfaces of
// a pod that is gone.
//
// The kernel works on a netlink request inside the call that sends it, so the answer is there when that call returns.
// Sockets are therefore non-blocking: an answer that is missing is an error at once, not a wait.
package rawnetlink

import (
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// maxDatagram bounds what the kernel puts in one datagram of a dump (32 KiB, netlink_recvmsg in net/netlink/af_netlink.c)
// when the reader offers that much room. Every other answer is smaller.
const maxDatagram = 32 << 10

// bufferSize leaves room for what a whole verification reads, so that buffers rarely grow.
const bufferSize = 2 * maxDatagram

// maxClosing bounds how many sockets may be in the course of being closed in the background.
const maxClosing = 16

// Sockets opens and closes sockets. Its zero value is not usable; call [New]. It may be used concurrently.
type Sockets struct {
	buffers sync.Pool     // of *[]byte
	closing chan struct{} // one element for each socket that is being closed in the background
}

// New returns a ready Sockets.
func New() *Sockets {
	return &Sockets{
		buffers: sync.Pool{New: func() any {
			b := make([]byte, 0, bufferSize)
			return &b
		}},
		closing: make(chan struct{}, maxClosing),
	}
}

// Socket is one netlink socket. It is for one goroutine at a time.
type Socket struct {
	fd      int
	owner   *Sockets
	buffer  *[]byte
	written bool // a request that may have changed something went out
}

// Open opens a socket of each netlink protocol given, such as unix.NETLINK_ROUTE, inside the network namespace that run
// enters, and returns them in that order. On an error none is left open.
func (s *Sockets) Open(run func(fn func() error) error, protocols ...int) ([]*Socket, error) {
	sockets := make([]*Socket, 0, len(protocols))
	err := run(func() error {
		for _, protocol := range protocols {
			fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
			if err != nil {
				return fmt.Errorf("opening a netlink socket of protocol %d: %w", protocol, err)
			}
			sockets = append(sockets, &Socket{fd: fd, owner: s})
		}
		return nil
	})
	if err != nil {
		for _, socket := range sockets {
			err = errors.Join(err, unix.Close(socket.fd))
		}
		return nil, err
	}
	for _, socket := range sockets {
		socket.buffer = s.buffers.Get().(*[]byte)
	}
	return sockets, nil
}

// Close closes the socket; what its methods returned must not be used any more. A socket that changed something is
// closed in the background, where a slot is free: when an nfnetlink socket goes, the kernel waits for the destruction of
// what was deleted, about 60 µs which nobody needs to wait for (nft_rcv_nl_event, net/netfilter/nf_tables_api.c).
func (s *Socket) Close() error {
	*s.buffer = (*s.buffer)[:0]
	s.owner.buffers.Put(s.buffer)
	s.buffer = nil
	if !s.written {
		return unix.Close(s.fd)
	}
	select {
	case s.owner.closing <- struct{}{}:
		go func() {
			// Linux releases the descriptor whatever close reports, and a netlink socket has nothing to flush.
			_ = unix.Close(s.fd)
			<-s.owner.closing
		}()
		return nil
	default:
		return unix.Close(s.fd)
	}
}

// SetStrict makes the kernel check dump requests strictly and, with that, heed their filters (NETLINK_GET_STRICT_CHK,
// since 4.20). It is for sockets of NETLINK_ROUTE.
func (s *Socket) SetStrict() error {
	if err := unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1); err != nil {
		return fmt.Errorf("asking for strict netlink checks: %w", err)
	}
	return nil
}

// Execute sends requests that change something and returns what the kernel refused, in order. Of the requests, at least
// the one with the sequence number last must ask for an acknowledgement, and the kernel must see it last.
func (s *Socket) Execute(requests []byte, last uint32) ([]Error, error) {
	s.written = true
	if err := s.send(requests); err != nil {
		return nil, err
	}
	var refused []Error
	for {
		datagram, err := s.receive()
		if errors.Is(err, unix.EAGAIN) && len(refused) > 0 {
			return refused, nil // a batch that is refused as a whole never gets to its last message
		}
		if err != nil {
			return nil, err
		}
		for len(datagram) > 0 {
			var m Message
			if m, datagram, err = Next(datagram); err != nil {
				return nil, err
			}
			if m.Type != unix.NLMSG_ERROR {
				continue
			}
			errno, err := failure(m.Payload)
			if err != nil {
				return nil, err
			}
			if errno != 0 {
				refused = append(refused, Error{Sequence: m.Sequence, Errno: errno})
			}
			if m.Sequence == last {
				return refused, nil
			}
		}
	}
}

// Dump sends requests that read, of which the last is a dump, and returns the messages that answer them. It fails with
// an [Error] if the kernel refuses one of them, and with [ErrInterrupted] if what was dumped changed meanwhile.
func (s *Socket) Dump(requests []byte) ([]byte, error) {
	if err := s.send(requests); err != nil {
		return nil, err
	}
	start := len(*s.buffer)
	for {
		datagram, err := s.receive()
		if err != nil {
			return nil, err
		}
		end := len(*s.buffer) - len(datagram)
		done, err := scanDump(datagram)
		if err != nil {
			return nil, err
		}
		if done >= 0 {
			return (*s.buffer)[start : end+done], nil
		}
	}
}

// ErrInterrupted means that a dump is no consistent picture, because something changed while it ran. Asking again helps.
var ErrInterrupted = errors.New("netlink dump interrupted by a change")

// scanDump returns the offset of the message that ends the dump, or -1 if the datagram does not hold it.
func scanDump(datagram []byte) (int, error) {
	for rest := datagram; len(rest) > 0; {
		offset := len(datagram) - len(rest)
		m, after, err := Next(rest)
		if err != nil {
			return 0, err
		}
		if m.Flags&unix.NLM_F_DUMP_INTR != 0 {
			return 0, ErrInterrupted
		}
		switch m.Type {
		case unix.NLMSG_DONE, unix.NLMSG_ERROR: // both begin with an error number
			errno, err := failure(m.Payload)
			if err != nil {
				return 0, err
			}
			if errno != 0 {
				return 0, Error{Sequence: m.Sequence, Errno: errno}
			}
			if m.Type == unix.NLMSG_DONE {
				return offset, nil
			}
		}
		rest = after
	}
	return -1, nil
}

func (s *Socket) send(requests []byte) error {
	// Without an address a netlink socket sends to the kernel, and is bound on the way.
	n, err := ignoringEINTR(func() (int, error) { return unix.Write(s.fd, requests) })
	if err != nil {
		return fmt.Errorf("sending to the kernel: %w", err)
	}
	if n != len(requests) {
		return fmt.Errorf("sending to the kernel: %d of %d bytes were taken", n, len(requests))
	}
	return nil
}

// receive appends one datagram to the buffer and returns it.
func (s *Socket) receive() ([]byte, error) {
	used := len(*s.buffer)
	if cap(*s.buffer)-used < maxDatagram {
		bigger := make([]byte, used, 2*cap(*s.buffer))
		copy(bigger, *s.buffer)
		*s.buffer = bigger
	}
	free := (*s.buffer)[used : used+maxDatagram]
	n, err := ignoringEINTR(func() (int, error) { return unix.Read(s.fd, free) })
	if err != nil {
		return nil, fmt.Errorf("reading the kernel's answer: %w", err)
	}
	*s.buffer = (*s.buffer)[:used+n]
	return (*s.buffer)[used : used+n], nil
}

func ignoringEINTR(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if err != unix.EINTR { //nolint:errorlint // system calls return a bare errno
			return n, err
		}
	}
}

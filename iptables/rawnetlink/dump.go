// SPDX-License-Identifier: Apache-2.0

package rawnetlink

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"
)

// Dump sends requests that read, of which the last is a dump, and returns the messages that answer them. It fails with
// [ErrInterrupted] if what was dumped changed meanwhile, with an [Error] if the kernel refuses one of the requests, and
// with [ErrTooLong] once it has read more than limit bytes, an answer's first ones of which it returns then: in a pod's
// namespace, the pod decides how much there is. It returns [ErrTooWide] with what it has read before a message that the
// kernel cannot make.
func (s *Socket) Dump(requests []byte, limit int) ([]byte, error) {
	for start := len(*s.buffer); ; *s.buffer = (*s.buffer)[:start] {
		offered := s.offered
		answer, err := s.dump(requests, limit)
		var refusal Error
		if !errors.As(err, &refusal) || refusal.Errno != unix.EMSGSIZE {
			return answer, err
		}
		// The kernel makes messages as long as the room that was offered to the answer before, and of 4 KiB to begin
		// with (netlink_dump, net/netlink/af_netlink.c): so it is asked again until it had all that it ever takes.
		if s.room = maxDatagram; offered == maxDatagram {
			return answer, ErrTooWide
		}
	}
}

func (s *Socket) dump(requests []byte, limit int) (answer []byte, err error) {
	defer s.note(&err)
	if err := s.send(requests); err != nil {
		return nil, err
	}
	start := len(*s.buffer)
	interrupted := false
	for {
		datagram, err := s.receive(s.room)
		if err != nil {
			return nil, err
		}
		end := len(*s.buffer) - len(datagram)
		part, err := scan(datagram)
		interrupted = interrupted || part.interrupted
		switch {
		case part.done && err != nil:
			return (*s.buffer)[start : end+part.length], err
		case err != nil:
			return nil, errors.Join(err, s.renew())
		case part.done && interrupted:
			return nil, ErrInterrupted
		case part.done:
			return (*s.buffer)[start : end+part.length], nil
		case len(*s.buffer)-start > limit:
			if err := s.renew(); err != nil {
				return nil, err
			}
			return (*s.buffer)[start:], ErrTooLong
		}
	}
}

// Scan sends requests that read, of which the last is a dump, and hands each message of the answers to take, as far as
// take wants more of them: it holds one datagram at a time, however much there is. It fails as [Socket.Dump] does, and when
// ctx ends.
func (s *Socket) Scan(ctx context.Context, requests []byte, take func(Message) (more bool, err error)) (err error) {
	defer s.note(&err)
	if err := s.send(requests); err != nil {
		return err
	}
	interrupted := false
	for {
		start := len(*s.buffer)
		datagram, err := s.receive(s.room)
		if err != nil {
			return err
		}
		*s.buffer = (*s.buffer)[:start]
		part, err := scan(datagram)
		interrupted = interrupted || part.interrupted
		more := !part.done
		messages := datagram
		if part.done {
			messages = datagram[:part.length]
		}
		for err == nil && len(messages) > 0 {
			var m Message
			if m, messages, err = Next(messages); err == nil {
				var wanted bool
				if wanted, err = take(m); !wanted {
					more, messages = false, nil
				}
			}
		}
		if err == nil {
			err = ctx.Err()
		}
		switch {
		case part.done && err == nil && interrupted:
			return ErrInterrupted
		case part.done:
			return err
		case err != nil || !more:
			return errors.Join(err, s.renew())
		}
	}
}

// ErrTooLong means that a dump goes on after as much of it as the caller wanted to read.
var ErrTooLong = errors.New("netlink dump is longer than what is read of it")

// ErrTooWide means that a dump ended early, at something of which not even one message of the greatest length can tell.
var ErrTooWide = errors.New("netlink dump has a message that is longer than the kernel can make it")

// ErrInterrupted means that a dump is no consistent picture, because something changed while it ran. Asking again helps.
var ErrInterrupted = errors.New("netlink dump interrupted by a change")

// dumpPart is what one datagram means for the dump that it belongs to.
type dumpPart struct {
	interrupted bool
	done        bool // it holds the message that ends the dump
	length      int  // of what precedes that message, in bytes
}

func scan(datagram []byte) (dumpPart, error) {
	var part dumpPart
	for rest := datagram; len(rest) > 0 && !part.done; {
		part.length = len(datagram) - len(rest)
		m, after, err := Next(rest)
		if err != nil {
			return dumpPart{}, err
		}
		part.done = m.Type == unix.NLMSG_DONE
		if err := m.Failure(); err != nil {
			return part, err
		}
		part.interrupted = part.interrupted || m.Flags&unix.NLM_F_DUMP_INTR != 0
		rest = after
	}
	return part, nil
}

// SPDX-License-Identifier: Apache-2.0

package rawnetlink

import (
	"errors"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// Keeper is a [Netns] whose owner holds it open, and its sockets with it: to enter it, open two sockets and close them again
// takes longer than to ask a question.
type Keeper interface {
	Netns
	Kept() *Kept
}

// Kept holds the sockets of one network namespace between uses, at most one of each protocol. Its zero value holds none and
// is ready. It may be used concurrently: who finds none opens one, and the second that comes back is closed.
type Kept struct {
	mu     sync.Mutex
	idle   []*Socket
	closed bool
}

// take takes out the socket of a protocol, nil if none is there.
func (k *Kept) take(protocol int) *Socket {
	k.mu.Lock()
	defer k.mu.Unlock()
	i := k.index(protocol)
	if i < 0 {
		return nil
	}
	socket := k.idle[i]
	k.idle = slices.Delete(k.idle, i, i+1)
	return socket
}

// put takes a socket in, unless there is one of its protocol, or none is wanted any more.
func (k *Kept) put(socket *Socket) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed || k.index(socket.protocol) >= 0 {
		return false
	}
	k.idle = append(k.idle, socket)
	return true
}

func (k *Kept) index(protocol int) int {
	return slices.IndexFunc(k.idle, func(s *Socket) bool { return s.protocol == protocol })
}

// Close closes the sockets, those of nfnetlink in the background as [Sockets.Close] does: no other waits for anything. One
// that is in use is closed by who uses it.
func (k *Kept) Close() error {
	k.mu.Lock()
	idle := k.idle
	k.idle, k.closed = nil, true
	k.mu.Unlock()
	var err error
	for _, socket := range idle {
		if socket.protocol == unix.NETLINK_NETFILTER {
			err = errors.Join(err, socket.owner.discard([]*Socket{socket}))
			continue
		}
		err = errors.Join(err, unix.Close(socket.fd))
	}
	return err
}

// Opened is a socket that was opened by somebody else.
type Opened struct {
	FD       int
	Protocol int
	Cookie   uint64 // of its network namespace; 0 if nobody has asked
}

// Keep takes over a socket that was opened inside the namespace, and keeps it there under the same conditions as one that
// comes back, or closes it. It must be as those opened here are: not blocking, connected to the kernel, without options; and
// it must have been read to the end of every answer.
func (s *Sockets) Keep(ns Keeper, opened Opened) error {
	socket := &Socket{fd: opened.FD, protocol: opened.Protocol, cookie: opened.Cookie, ns: ns, owner: s}
	if socket.fd < s.ceiling && ns.Kept().put(socket) {
		return nil
	}
	return unix.Close(socket.fd)
}

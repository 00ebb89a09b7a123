// SPDX-License-Identifier: Apache-2.0

package rawnetlink

import (
	"errors"
	"slices"
	"sync"
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

// Close closes the sockets, in the background as [Sockets.Close] does. One that is in use is closed by who uses it.
func (k *Kept) Close() error {
	k.mu.Lock()
	idle := k.idle
	k.idle, k.closed = nil, true
	k.mu.Unlock()
	var err error
	for _, socket := range idle {
		err = errors.Join(err, socket.owner.discard([]*Socket{socket}))
	}
	return err
}

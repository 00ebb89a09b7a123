// SPDX-License-Identifier: Apache-2.0

package pods

import (
	"net"
	"sync"
)

// slots bounds how many of something there are at once.
type slots chan struct{}

// try takes a slot if one is free.
func (s slots) try() bool {
	select {
	case s <- struct{}{}:
		return true
	default:
		return false
	}
}

func (s slots) free() { <-s }

// bounded is a listener of which so many connections are open at once. Those
// beyond wait in the kernel's backlog.
type bounded struct {
	*net.TCPListener
	slots slots
}

// accept returns a connection and what frees its slot, to be called once.
func (b bounded) accept() (*net.TCPConn, func(), error) {
	b.slots <- struct{}{}
	c, err := b.TCPListener.AcceptTCP()
	if err != nil {
		b.slots.free()
		return nil, nil, err
	}
	return c, b.slots.free, nil
}

// Accept returns a connection that frees its slot when it is closed.
func (b bounded) Accept() (net.Conn, error) {
	c, free, err := b.accept()
	if err != nil {
		return nil, err
	}
	return &boundedConn{TCPConn: c, free: sync.OnceFunc(free)}, nil
}

type boundedConn struct {
	*net.TCPConn
	free func()
}

// Close frees the slot, the first time.
func (c *boundedConn) Close() error {
	defer c.free()
	return c.TCPConn.Close()
}

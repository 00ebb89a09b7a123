// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"net"
	"slices"
	"sync"
)

// maxHealthConns bounds the connections to the health endpoints, which anybody
// may open; kubelet and a load balancer need one each.
const maxHealthConns = 64

// crowd is a listener that keeps at most limit connections open: one more costs
// the oldest. Whoever asks at once and goes is thus served however many others
// linger, where letting newcomers wait would let a few lingering ones make an
// agent look dead.
type crowd struct {
	net.Listener
	limit int

	mu   sync.Mutex
	open []*member // the oldest first
}

// member is a connection of a crowd.
type member struct {
	net.Conn
	crowd *crowd
}

// Accept waits for the next connection, and may close another for it.
func (c *crowd) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	m := &member{Conn: conn, crowd: c}
	c.open = append(c.open, m)
	if len(c.open) > c.limit {
		_ = c.open[0].Conn.Close() // its handler sees the end, and closes again
		c.open = slices.Delete(c.open, 0, 1)
	}
	return m, nil
}

// Close takes the connection out of the crowd.
func (m *member) Close() error {
	m.crowd.mu.Lock()
	m.crowd.open = slices.DeleteFunc(m.crowd.open, func(o *member) bool { return o == m })
	m.crowd.mu.Unlock()
	return m.Conn.Close()
}

// SPDX-License-Identifier: Apache-2.0

package packettest_test

import (
	"errors"
	"net"
	"testing"

	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
)

func keepEstablished(o *redirection.Options) { o.KeepEstablished = true }

func isReset(err error) bool {
	return errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE)
}

// TestRunningPod enrols a pod that has connections. With row 0 they live on,
// uncaptured, until they end; without, they are reset. Either way every new one is
// captured.
func TestRunningPod(t *testing.T) {
	t.Parallel()
	for name, opts := range map[string]redirection.Options{"keep": with(keepEstablished), "reset": with()} {
		t.Run(name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, b backend) {
				m := newMesh(t)
				older := m.dialAll()
				if _, err := b.Apply(within(t), m.pod.Runner(), opts); err != nil {
					t.Fatal(err)
				}
				for d, c := range older {
					err := exchange(c, []byte("still there?"))
					if opts.KeepEstablished && err != nil {
						t.Errorf("the connection %s: %v", d, err)
					}
					if !opts.KeepEstablished && !isReset(err) {
						t.Errorf("the connection %s: %v, want a reset", d, err)
					}
				}
				if relayed := m.relayed.Load(); relayed != 0 {
					t.Errorf("%d connections from before were relayed", relayed)
				}
				newer := m.dialAll()
				for d, c := range newer {
					if err := exchange(c, []byte("hello")); err != nil {
						t.Errorf("a new connection %s: %v", d, err)
					}
				}
				if relayed := m.relayed.Load(); relayed != int64(len(newer)) {
					t.Errorf("%d of %d new connections were relayed", relayed, len(newer))
				}
				if opts.KeepEstablished {
					endAll(t, older)
				}
				endAll(t, newer)
			})
		})
	}
}

// dialAll opens a connection in each direction and uses it.
func (m *mesh) dialAll() map[direction]*net.TCPConn {
	m.t.Helper()
	all := map[direction]*net.TCPConn{}
	for _, d := range directions() {
		c, err := m.dial(d)
		if err != nil {
			m.t.Fatal(err)
		}
		m.t.Cleanup(func() { c.Close() })
		if err := exchange(c, []byte("first")); err != nil {
			m.t.Fatal(err)
		}
		all[d] = c
	}
	return all
}

func endAll(t *testing.T, connections map[direction]*net.TCPConn) {
	t.Helper()
	for d, c := range connections {
		if err := endInOrder(c); err != nil {
			t.Errorf("ending the connection %s: %v", d, err)
		}
	}
}

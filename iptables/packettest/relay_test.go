// SPDX-License-Identifier: Apache-2.0

package packettest_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

// mesh is a pod beside another machine, both with a server that echoes, and in the
// pod a proxy that passes connections on as ztunnel does: outbound ones from an
// address of its own, inbound ones from the client's.
type mesh struct {
	t         *testing.T
	pod, peer *netnstest.NS
	relayed   atomic.Int64 // connections that the proxy got
}

// echoPort is where both servers are.
const echoPort = 7000

func (m *mesh) addr(p place, f redirection.Families) netip.Addr { return (&network{}).addr(p, f) }

func newMesh(t *testing.T) *mesh {
	m := &mesh{t: t, pod: netnstest.New(t), peer: netnstest.New(t)}
	prefixes := func(p place) []netip.Prefix {
		return []netip.Prefix{netip.PrefixFrom(m.addr(p, redirection.IPv4), 24), netip.PrefixFrom(m.addr(p, redirection.IPv6), 64)}
	}
	netnstest.Connect(t,
		netnstest.Port{NS: m.pod, Name: "eth0", Addrs: prefixes(pod)},
		netnstest.Port{NS: m.peer, Name: "eth0", Addrs: prefixes(peer)})
	mark := netnstest.Mark(redirection.ProxyMark)
	for _, f := range redirection.DualStack.Each() {
		m.accept(m.pod.ListenTCP(t, netip.AddrPortFrom(anyAddr(f), echoPort)), echo)
		m.accept(m.peer.ListenTCP(t, netip.AddrPortFrom(anyAddr(f), echoPort)), echo)
		m.accept(m.pod.ListenTCP(t, netip.AddrPortFrom(anyAddr(f), redirection.OutboundPort), mark), func(c *net.TCPConn) error {
			return m.relay(c, netip.AddrPort{}, mark)
		})
		m.accept(m.pod.ListenTCP(t, netip.AddrPortFrom(anyAddr(f), redirection.InboundPort), mark), func(c *net.TCPConn) error {
			client := netip.AddrPortFrom(addrPort(c.RemoteAddr()).Addr(), 0)
			return m.relay(c, client, mark, netnstest.Transparent())
		})
	}
	return m
}

// accept serves every connection in a goroutine of its own. When the test ends,
// all of them have.
func (m *mesh) accept(l *net.TCPListener, serve func(*net.TCPConn) error) {
	var group sync.WaitGroup
	ended := make(chan struct{})
	group.Go(func() {
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return // the listener is closed
			}
			group.Go(func() {
				stop := context.AfterFunc(m.t.Context(), func() { c.Close() })
				defer stop()
				defer c.Close()
				if err := serve(c); err != nil && m.t.Context().Err() == nil {
					m.t.Errorf("serving %s: %v", c.RemoteAddr(), err)
				}
			})
		}
	})
	m.t.Cleanup(func() {
		close(ended)
		l.Close()
		group.Wait()
	})
}

func echo(c *net.TCPConn) error {
	_, err := io.Copy(c, c)
	return ignoringReset(err)
}

// ignoringReset: tests end connections as they please, before this side ends its own too.
func ignoringReset(err error) error {
	if isReset(err) || errors.Is(err, unix.ENOTCONN) || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// relay passes a connection on to where it was going.
func (m *mesh) relay(c *net.TCPConn, from netip.AddrPort, opts ...netnstest.Option) error {
	m.relayed.Add(1)
	to, err := netnstest.OriginalDst(c)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(m.t.Context(), patience)
	defer cancel()
	next, err := m.pod.DialTCP(ctx, from, to, opts...)
	if err != nil {
		return fmt.Errorf("dialling %s from %s: %w", to, from, err)
	}
	stop := context.AfterFunc(m.t.Context(), func() { next.Close() })
	defer stop()
	defer next.Close()
	back := make(chan error, 1)
	go func() {
		_, err := io.Copy(c, next)
		back <- errors.Join(ignoringReset(err), ignoringReset(c.CloseWrite()))
	}()
	_, err = io.Copy(next, c)
	return errors.Join(ignoringReset(err), ignoringReset(next.CloseWrite()), <-back)
}

// direction is a way that connections go.
type direction struct {
	from     place
	families redirection.Families // one
}

func directions() []direction {
	var all []direction
	for _, f := range redirection.DualStack.Each() {
		all = append(all, direction{from: pod, families: f}, direction{from: peer, families: f})
	}
	return all
}

// String returns the direction as "from pod, ipv4".
func (d direction) String() string { return fmt.Sprintf("from %s, %s", d.from, d.families) }

// dial opens a connection in that direction.
func (m *mesh) dial(d direction) (*net.TCPConn, error) {
	ctx, cancel := context.WithTimeout(m.t.Context(), patience)
	defer cancel()
	if d.from == peer {
		return m.peer.DialTCP(ctx, netip.AddrPort{}, netip.AddrPortFrom(m.addr(pod, d.families), echoPort))
	}
	return m.pod.DialTCP(ctx, netip.AddrPort{}, netip.AddrPortFrom(m.addr(peer, d.families), echoPort))
}

// exchange sends bytes and expects them back.
func exchange(c net.Conn, message []byte) error {
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	sent := make(chan error, 1)
	go func() {
		_, err := c.Write(message)
		sent <- err
	}()
	answer := make([]byte, len(message))
	if _, err := io.ReadFull(c, answer); err != nil {
		return errors.Join(fmt.Errorf("reading what should come back: %w", err), <-sent)
	}
	if !bytes.Equal(answer, message) {
		return errors.New("other bytes came back than were sent")
	}
	return <-sent
}

// traffic keeps, in every direction, one connection busy and opens new ones.
type traffic struct {
	m      *mesh
	stop   context.CancelFunc
	group  sync.WaitGroup
	opened atomic.Int64
	news   chan struct{} // one for each connection that has been opened and served
}

// newTraffic starts it.
func (m *mesh) newTraffic() *traffic {
	ctx, cancel := context.WithCancel(m.t.Context())
	tr := &traffic{m: m, stop: cancel, news: make(chan struct{})}
	m.t.Cleanup(tr.group.Wait)
	m.t.Cleanup(cancel)
	for _, d := range directions() {
		stream, err := m.dial(d)
		if err != nil {
			m.t.Fatal(err)
		}
		tr.opened.Add(1)
		tr.group.Go(func() {
			if err := keepBusy(ctx, stream); err != nil {
				m.t.Errorf("the long-lived connection %s: %v", d, err)
			}
		})
		tr.group.Go(func() {
			for ctx.Err() == nil {
				if err := tr.one(d); err != nil {
					m.t.Errorf("a new connection %s: %v", d, err)
					return
				}
				select {
				case tr.news <- struct{}{}:
				case <-ctx.Done():
				}
			}
		})
	}
	return tr
}

// keepBusy exchanges until ctx ends, and then once more.
func keepBusy(ctx context.Context, c *net.TCPConn) error {
	defer c.Close()
	message := bytes.Repeat([]byte("all the way "), 4096)
	for ctx.Err() == nil {
		if err := exchange(c, message); err != nil {
			return err
		}
	}
	if err := exchange(c, message); err != nil {
		return err
	}
	return endInOrder(c)
}

// endInOrder ends a connection and waits for the other side to do so, too: what is
// still on its way when the rules go loses its translation.
func endInOrder(c *net.TCPConn) error {
	if err := c.CloseWrite(); err != nil {
		return err
	}
	if rest, err := io.Copy(io.Discard, c); err != nil || rest > 0 {
		return fmt.Errorf("after the end %d bytes came: %w", rest, err)
	}
	return nil
}

// one opens a connection, uses it and ends it in order.
func (tr *traffic) one(d direction) error {
	c, err := tr.m.dial(d)
	if err != nil {
		return err
	}
	defer c.Close()
	tr.opened.Add(1)
	if err := exchange(c, []byte("hello")); err != nil {
		return err
	}
	return endInOrder(c)
}

// await waits until so many connections more have been served.
func (tr *traffic) await(n int) {
	tr.m.t.Helper()
	deadline := time.After(2 * patience)
	for range n {
		select {
		case <-tr.news:
		case <-deadline:
			tr.m.t.Fatal("no new connection was served for a long time")
		}
	}
}

// end stops, and expects that each connection went through the proxy, once.
func (tr *traffic) end() {
	tr.m.t.Helper()
	tr.stop()
	tr.group.Wait()
	if opened, relayed := tr.opened.Load(), tr.m.relayed.Load(); opened != relayed {
		tr.m.t.Errorf("%d connections were opened and %d relayed", opened, relayed)
	}
}

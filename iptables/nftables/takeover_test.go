// SPDX-License-Identifier: Apache-2.0

package nftables_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

// captured is a pod beside another machine, with a proxy that echoes what it gets.
type captured struct {
	*pod
	toPeer     map[redirection.Families]netip.AddrPort
	connsProxy atomic.Int64 // connections that the proxy got
	connsPeer  atomic.Int64 // connections that got to the other machine: none should
}

func newCaptured(t *testing.T) *captured {
	t.Helper()
	c := &captured{pod: newPod(t, newBackend(t))}
	peer := netnstest.New(t)
	prefix := netip.MustParsePrefix
	netnstest.Connect(t,
		netnstest.Port{NS: c.NS, Name: "eth0", Addrs: []netip.Prefix{prefix("10.0.0.2/24"), prefix("2001:db8::2/64")}},
		netnstest.Port{NS: peer, Name: "eth0", Addrs: []netip.Prefix{prefix("10.0.0.1/24"), prefix("2001:db8::1/64")}})
	c.toPeer = map[redirection.Families]netip.AddrPort{
		redirection.IPv4: netip.MustParseAddrPort("10.0.0.1:8080"), redirection.IPv6: netip.MustParseAddrPort("[2001:db8::1]:8080"),
	}
	for _, at := range c.toPeer {
		c.echo(peer.ListenTCP(t, at), &c.connsPeer)
	}
	for _, at := range []string{"127.0.0.1:15001", "[::1]:15001"} {
		c.echo(c.ListenTCP(t, netip.MustParseAddrPort(at)), &c.connsProxy)
	}
	return c
}

// echo serves until the listener is closed, which is before the test ends.
func (c *captured) echo(l net.Listener, count *atomic.Int64) {
	var group sync.WaitGroup
	group.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			count.Add(1)
			group.Go(func() {
				defer conn.Close()
				io.Copy(conn, conn)
			})
		}
	})
	c.t.Cleanup(func() { l.Close(); group.Wait() })
}

// exchange sends some bytes and waits for them to come back.
func exchange(conn net.Conn, message []byte) error {
	if err := conn.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		return err
	}
	failed := make(chan error, 1)
	go func() {
		_, err := conn.Write(message)
		failed <- err
	}()
	answer := make([]byte, len(message))
	if _, err := io.ReadFull(conn, answer); err != nil {
		return fmt.Errorf("reading: %w", err)
	}
	if err := <-failed; err != nil {
		return err
	}
	if !bytes.Equal(answer, message) {
		return fmt.Errorf("other bytes came back than were sent")
	}
	return nil
}

// stream keeps a connection busy until the context ends, and then proves that it is still the same one.
func (c *captured) stream(ctx context.Context, family redirection.Families, open func()) error {
	conn, err := c.DialTCP(context.WithoutCancel(ctx), netip.AddrPort{}, c.toPeer[family])
	open()
	if err != nil {
		return err
	}
	defer conn.Close()
	message := bytes.Repeat([]byte("all the way "), 4096)
	for ctx.Err() == nil {
		if err := exchange(conn, message); err != nil {
			return fmt.Errorf("%s stream: %w", family, err)
		}
	}
	return exchange(conn, message)
}

// open makes new connections, one after the other, until the context ends.
func (c *captured) open(ctx context.Context, family redirection.Families, count *atomic.Int64) error {
	for ctx.Err() == nil {
		conn, err := c.DialTCP(context.WithoutCancel(ctx), netip.AddrPort{}, c.toPeer[family])
		if err != nil {
			return err
		}
		count.Add(1)
		err = exchange(conn, []byte("hello"))
		conn.Close()
		if err != nil {
			return fmt.Errorf("%s connection %d: %w", family, count.Load(), err)
		}
	}
	return nil
}

// whileBusy calls change with streams open and connections being made, in both families, before, meanwhile and after. Each
// connection must reach the proxy, once, and none the other machine.
func (c *captured) whileBusy(change func()) {
	c.t.Helper()
	ctx, cancel := context.WithCancel(c.t.Context())
	defer cancel()
	var opened atomic.Int64
	var group, streams sync.WaitGroup
	streams.Add(2)
	for _, family := range redirection.DualStack.Each() {
		group.Go(func() {
			if err := c.stream(ctx, family, streams.Done); err != nil {
				c.t.Error(err)
			}
		})
		group.Go(func() {
			if err := c.open(ctx, family, &opened); err != nil {
				c.t.Error(err)
			}
		})
	}
	enough := func(target int64) {
		for opened.Load() < target && !c.t.Failed() {
			time.Sleep(time.Millisecond) // what it waits for are packets, which nothing announces
		}
	}
	streams.Wait()
	enough(50)
	change()
	enough(opened.Load() + 50)
	cancel()
	group.Wait()
	if want, got := opened.Load()+2, c.connsProxy.Load(); got != want {
		c.t.Errorf("the proxy got %d connections of %d", got, want)
	}
	if got := c.connsPeer.Load(); got != 0 {
		c.t.Errorf("%d connections left the pod uncaptured", got)
	}
}

// TestTakeoverUnderTraffic takes a pod over from another agent, and then out of our own hands and back, while it talks.
func TestTakeoverUnderTraffic(t *testing.T) {
	for _, way := range []string{"iptables-nft", "native"} {
		t.Run(way, func(t *testing.T) {
			c := newCaptured(t)
			c.setUpByPeer(way)
			opts := redirection.DefaultOptions()
			c.whileBusy(func() {
				c.apply(opts)
				c.removeForeign(true)
			})
			c.verify(opts)
			c.hasForeign(false)
		})
	}
}

// TestReplacementUnderTraffic replaces the rules again and again, with other options each time.
func TestReplacementUnderTraffic(t *testing.T) {
	c := newCaptured(t)
	opts := redirection.DefaultOptions()
	c.apply(opts)
	c.whileBusy(func() {
		for i := range 100 {
			other := opts
			other.ExcludeOutboundPorts = []redirection.PortRange{redirection.SinglePort(uint16(9000 + i))}
			other.DNSCapture = i%2 == 0
			c.apply(other)
		}
		c.apply(opts)
	})
	c.verify(opts)
}

// TestEnrolmentUnderTraffic enrols a pod that talks already: what was open lives on, past the proxy, until it ends, and
// what is opened from then on is captured.
func TestEnrolmentUnderTraffic(t *testing.T) {
	for _, family := range redirection.DualStack.Each() {
		t.Run(family.String(), func(t *testing.T) {
			c := newCaptured(t)
			opts := redirection.DefaultOptions()
			opts.KeepEstablished = true
			dial := func() net.Conn {
				conn, err := c.DialTCP(t.Context(), netip.AddrPort{}, c.toPeer[family])
				if err != nil {
					t.Fatal(err)
				}
				return conn
			}
			message := bytes.Repeat([]byte("all the way "), 1000)
			old := dial()
			defer old.Close()
			if err := exchange(old, message); err != nil {
				t.Fatal(err)
			}
			c.apply(opts)
			for range 10 {
				if err := exchange(old, message); err != nil {
					t.Fatalf("connection from before: %v", err)
				}
			}
			fresh := dial()
			defer fresh.Close()
			if err := exchange(fresh, message); err != nil {
				t.Fatalf("connection from after: %v", err)
			}
			if toProxy, toPeer := c.connsProxy.Load(), c.connsPeer.Load(); toProxy != 1 || toPeer != 1 {
				t.Errorf("%d connections got to the proxy and %d to the other machine, want one each", toProxy, toPeer)
			}
		})
	}
}

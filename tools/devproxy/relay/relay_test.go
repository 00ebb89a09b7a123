// SPDX-License-Identifier: Apache-2.0

package relay_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"ambientd/tools/devproxy/relay"
)

// pair returns two ends of a TCP connection.
func pair(t *testing.T) (a, b *net.TCPConn) {
	t.Helper()
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, err = net.DialTCP("tcp4", nil, l.Addr().(*net.TCPAddr))
	if err != nil {
		t.Fatal(err)
	}
	b, err = l.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []*net.TCPConn{a, b} {
		t.Cleanup(func() { c.Close() })
		if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
	}
	return a, b
}

// joined returns a client and a server with a relay between them, and what Join
// will return.
func joined(t *testing.T, ctx context.Context) (client, server *net.TCPConn, result <-chan error) {
	t.Helper()
	client, inner := pair(t)
	outer, server := pair(t)
	done := make(chan error, 1)
	go func() {
		err := relay.Join(ctx, relay.TCP{TCPConn: inner}, relay.TCP{TCPConn: outer})
		inner.Close()
		outer.Close()
		done <- err
	}()
	return client, server, done
}

func send(t *testing.T, c *net.TCPConn, data string) {
	t.Helper()
	if _, err := io.WriteString(c, data); err != nil {
		t.Fatal(err)
	}
}

func expect(t *testing.T, c *net.TCPConn, want string) {
	t.Helper()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != want {
		t.Fatalf("got %q, %v; want %q", got, err, want)
	}
}

func expectEOF(t *testing.T, c *net.TCPConn) {
	t.Helper()
	if n, err := c.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Fatalf("read %d bytes, %v; want EOF", n, err)
	}
}

func TestEitherSideMayEndFirst(t *testing.T) {
	for _, first := range []string{"client", "server"} {
		t.Run(first, func(t *testing.T) {
			client, server, result := joined(t, t.Context())
			one, other := client, server
			if first == "server" {
				one, other = server, client
			}
			send(t, one, "question")
			expect(t, other, "question")
			if err := one.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			expectEOF(t, other)
			// The other direction goes on, with more than any buffer holds.
			big := bytes.Repeat([]byte("answer"), 2<<20)
			go func() {
				other.Write(big)
				other.CloseWrite()
			}()
			got, err := io.ReadAll(one)
			if err != nil || !bytes.Equal(got, big) {
				t.Fatalf("got %d bytes, %v; want %d", len(got), err, len(big))
			}
			if err := <-result; err != nil {
				t.Errorf("Join = %v, want nil", err)
			}
		})
	}
}

func TestABreakIsPassedOnAsABreak(t *testing.T) {
	client, server, result := joined(t, t.Context())
	send(t, client, "half of a messa")
	expect(t, server, "half of a messa")
	client.SetLinger(0)
	client.Close() // a reset
	if _, err := server.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the server saw %v, want a reset", err)
	}
	if err := <-result; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("Join = %v, want the reset", err)
	}
}

func TestTheContextBreaksBoth(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	client, server, result := joined(t, ctx)
	why := errors.New("pod removed")
	cancel(why)
	for _, c := range []*net.TCPConn{client, server} {
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("read = %v, want a reset", err)
		}
	}
	if err := <-result; !errors.Is(err, why) {
		t.Errorf("Join = %v, want the context's cause", err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package hbone_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"ambientd/certfetch/spiffeid"
	"ambientd/tools/devproxy/hbone"
	"ambientd/tools/devproxy/mtls"
	"ambientd/tools/devproxy/mtls/mtlstest"
	"ambientd/tools/devproxy/relay"
)

const td = "mesh.test"

// world is a destination pod with an application, and a source pod's pool. All
// of it is on loopback; who stands for which address is the pool's Dial.
type world struct {
	t       *testing.T
	ctx     context.Context
	certs   *mtlstest.Source
	web, db spiffeid.ID // the source's and the destination's identity
	app     *net.TCPListener
	hbone   net.Listener
	server  *http.Server
	handler *handler
	pool    *hbone.Pool

	mu    sync.Mutex
	dials int
}

// handler connects every stream to the application, unless refuse is set.
type handler struct {
	app    netip.AddrPort
	refuse error
	opened chan hbone.Inbound
	closed chan error
}

func (h *handler) Open(ctx context.Context, in hbone.Inbound) (hbone.Upstream, error) {
	h.opened <- in
	if h.refuse != nil {
		return nil, h.refuse
	}
	c, err := new(net.Dialer).DialContext(ctx, "tcp4", h.app.String())
	if err != nil {
		return nil, err
	}
	return relay.TCP{TCPConn: c.(*net.TCPConn)}, nil
}

func (h *handler) Closed(_ hbone.Inbound, err error) { h.closed <- err }

func newWorld(t *testing.T) *world {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	w := &world{t: t, ctx: ctx, certs: mtlstest.New(t, td), web: mtlstest.ID(t, td, "web"), db: mtlstest.ID(t, td, "db")}
	w.certs.Issue(t, w.web)
	w.certs.Issue(t, w.db)
	w.app = listen(t)
	w.hbone = listen(t)
	w.handler = &handler{app: addrPort(w.app), opened: make(chan hbone.Inbound, 1000), closed: make(chan error, 1000)}
	w.server = hbone.NewServer(ctx, mtls.Server(w.certs, w.db, w.web.TrustDomain()), w.handler, slog.New(slog.DiscardHandler))
	go w.server.ServeTLS(w.hbone, "", "")
	t.Cleanup(func() { w.server.Close() })
	w.pool = hbone.NewPool(hbone.PoolConfig{Source: w.web, Certificates: w.certs, Dial: w.dial})
	t.Cleanup(w.pool.Close)
	return w
}

func listen(t *testing.T) *net.TCPListener {
	t.Helper()
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func addrPort(l net.Listener) netip.AddrPort { return l.Addr().(*net.TCPAddr).AddrPort() }

func (w *world) dial(ctx context.Context, to netip.AddrPort) (*net.TCPConn, error) {
	w.mu.Lock()
	w.dials++
	w.mu.Unlock()
	if to.Port() != hbone.Port {
		return nil, fmt.Errorf("dialling %s, want port %d", to, hbone.Port)
	}
	c, err := new(net.Dialer).DialContext(ctx, "tcp4", w.hbone.Addr().String())
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

func (w *world) dialled() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.dials
}

func (w *world) destination() hbone.Destination {
	return hbone.Destination{Identity: w.db, Addr: netip.MustParseAddr("127.0.0.1")}
}

// connect opens a stream and returns the application's end of it too.
func (w *world) connect() (hbone.Upstream, *net.TCPConn) {
	w.t.Helper()
	s, err := w.pool.Connect(w.ctx, w.destination(), addrPort(w.app))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { s.Close() })
	w.app.SetDeadline(time.Now().Add(10 * time.Second))
	c, err := w.app.AcceptTCP()
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(10 * time.Second))
	return s, c
}

func (w *world) ended() error {
	w.t.Helper()
	select {
	case err := <-w.handler.closed:
		return err
	case <-w.ctx.Done():
		w.t.Fatal("the stream does not end")
		return nil
	}
}

func send(t *testing.T, to io.Writer, data string) {
	t.Helper()
	if _, err := io.WriteString(to, data); err != nil {
		t.Fatal(err)
	}
}

func expect(t *testing.T, from io.Reader, want string) {
	t.Helper()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(from, got); err != nil || string(got) != want {
		t.Fatalf("got %q, %v; want %q", got, err, want)
	}
}

func TestStream(t *testing.T) {
	w := newWorld(t)
	s, app := w.connect()
	in := <-w.handler.opened
	if in.Source != w.web || in.Target != addrPort(w.app) || in.Local != w.destination().Addr || !in.Client.IsValid() {
		t.Errorf("the server was told %+v", in)
	}
	// Small writes arrive at once, in both directions.
	send(t, s, "ping")
	expect(t, app, "ping")
	send(t, app, "pong")
	expect(t, s, "pong")
	// And much data, both ways at the same time.
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<19)
	go func() { s.Write(big); s.CloseWrite() }()
	go func() { app.Write(big) }()
	down := make(chan error, 1)
	go func() {
		got := make([]byte, len(big))
		_, err := io.ReadFull(s, got)
		if err == nil && !bytes.Equal(got, big) {
			err = errors.New("other bytes than were sent")
		}
		down <- err
	}()
	up, err := io.ReadAll(app)
	if err != nil || !bytes.Equal(up, big) {
		t.Fatalf("upload: %d bytes, %v; want %d", len(up), err, len(big))
	}
	if err := <-down; err != nil {
		t.Fatalf("download: %v", err)
	}
	// The source has ended its side; the application still talks.
	send(t, app, "bye")
	app.Close()
	rest, err := io.ReadAll(s)
	if err != nil || string(rest) != "bye" {
		t.Errorf("after the half-close: %q, %v", rest, err)
	}
	if err := w.ended(); err != nil {
		t.Errorf("the stream ended with %v", err)
	}
}

func TestTheDestinationEndsFirst(t *testing.T) {
	w := newWorld(t)
	s, app := w.connect()
	send(t, app, "all there is")
	app.Close()
	got, err := io.ReadAll(s)
	if err != nil || string(got) != "all there is" {
		t.Errorf("got %q, %v", got, err)
	}
	if err := w.ended(); err != nil {
		t.Errorf("the stream ended with %v", err)
	}
}

func TestBreaksStayBreaks(t *testing.T) {
	t.Run("of the source", func(t *testing.T) {
		w := newWorld(t)
		s, app := w.connect()
		send(t, s, "half")
		expect(t, app, "half")
		s.Abort()
		if n, err := app.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, io.EOF) {
			t.Errorf("the application read %d bytes, %v; want a reset", n, err)
		}
		if w.ended() == nil {
			t.Error("the server took it for an end in order")
		}
	})
	t.Run("of the application", func(t *testing.T) {
		w := newWorld(t)
		s, app := w.connect()
		send(t, app, "half")
		expect(t, s, "half")
		app.SetLinger(0)
		app.Close()
		if n, err := s.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, io.EOF) {
			t.Errorf("the source read %d bytes, %v; want an error", n, err)
		}
		if w.ended() == nil {
			t.Error("the server took it for an end in order")
		}
	})
	t.Run("of the connection", func(t *testing.T) {
		w := newWorld(t)
		s, app := w.connect()
		w.pool.Close()
		if n, err := app.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, io.EOF) {
			t.Errorf("the application read %d bytes, %v; want a reset", n, err)
		}
		if n, err := s.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, io.EOF) {
			t.Errorf("the source read %d bytes, %v; want an error", n, err)
		}
		if _, err := w.pool.Connect(w.ctx, w.destination(), addrPort(w.app)); err == nil {
			t.Error("Connect of a closed pool succeeded")
		}
	})
}

func TestOneAbortLeavesTheOthers(t *testing.T) {
	w := newWorld(t)
	one, _ := w.connect()
	other, app := w.connect()
	one.Abort()
	if w.ended() == nil {
		t.Error("the server took it for an end in order")
	}
	send(t, other, "still here")
	expect(t, app, "still here")
	if n := w.dialled(); n != 1 {
		t.Errorf("%d connections, want 1", n)
	}
}

func TestARefusalIsAnError(t *testing.T) {
	w := newWorld(t)
	w.handler.refuse = errors.New("secret reason")
	_, err := w.pool.Connect(w.ctx, w.destination(), addrPort(w.app))
	if err == nil || !strings.Contains(err.Error(), "503") || strings.Contains(err.Error(), "secret") {
		t.Errorf("Connect = %v, want the status and no more", err)
	}
	w.handler.refuse = nil
	w.connect() // on the same connection
	if n := w.dialled(); n != 1 {
		t.Errorf("%d connections, want 1", n)
	}
}

func TestConcurrentStreamsShareAConnection(t *testing.T) {
	w := newWorld(t)
	var connects sync.WaitGroup
	for range 50 {
		connects.Go(func() {
			s, err := w.pool.Connect(w.ctx, w.destination(), addrPort(w.app))
			if err != nil {
				t.Error(err)
				return
			}
			s.Close()
		})
	}
	connects.Wait()
	if n := w.dialled(); n != 1 {
		t.Errorf("%d connections, want 1", n)
	}
}

func TestTheKeyOfThePool(t *testing.T) {
	w := newWorld(t)
	w.connect()
	if _, err := w.pool.Connect(w.ctx, hbone.Destination{Identity: w.web, Addr: w.destination().Addr}, addrPort(w.app)); err == nil {
		t.Error("a connection to db was used for web")
	} else if !strings.Contains(err.Error(), "server is "+w.db.String()) {
		t.Errorf("Connect = %v, want a complaint about the identity", err)
	}
	before := w.dialled()
	s, err := w.pool.Connect(w.ctx, hbone.Destination{Identity: w.db, Addr: netip.MustParseAddr("127.0.0.2")}, addrPort(w.app))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if w.dialled() != before+1 {
		t.Error("a connection to one address was used for another")
	}
}

func TestRenewedAndWithdrawnCertificates(t *testing.T) {
	w := newWorld(t)
	old, app := w.connect()
	w.certs.Issue(t, w.web)
	w.connect()
	if n := w.dialled(); n != 2 {
		t.Errorf("%d connections, want a new one for the new certificate", n)
	}
	send(t, old, "the old stream goes on")
	expect(t, app, "the old stream goes on")

	w.certs.Withdraw(w.web)
	if _, err := w.pool.Connect(w.ctx, w.destination(), addrPort(w.app)); !errors.Is(err, mtlstest.ErrNone) {
		t.Errorf("Connect without a certificate = %v, want ErrNone though a connection is open", err)
	}
	w.certs.Issue(t, w.web)
	w.certs.Withdraw(w.db)
	if _, err := w.pool.Connect(w.ctx, w.destination(), addrPort(w.app)); err == nil {
		t.Error("a server without a certificate was connected to")
	}
}

func TestWaitingForADialEndsWithTheContext(t *testing.T) {
	w := newWorld(t)
	dialling, release := make(chan struct{}), make(chan struct{})
	pool := hbone.NewPool(hbone.PoolConfig{Source: w.web, Certificates: w.certs, Dial: func(ctx context.Context, to netip.AddrPort) (*net.TCPConn, error) {
		close(dialling)
		<-release
		return w.dial(ctx, to)
	}})
	defer pool.Close()
	first := make(chan error, 1)
	go func() {
		s, err := pool.Connect(w.ctx, w.destination(), addrPort(w.app))
		if err == nil {
			s.Close()
		}
		first <- err
	}()
	<-dialling
	ctx, cancel := context.WithCancel(w.ctx)
	cancel()
	if _, err := pool.Connect(ctx, w.destination(), addrPort(w.app)); !errors.Is(err, context.Canceled) {
		t.Errorf("Connect = %v, want the context's error", err)
	}
	close(release)
	if err := <-first; err != nil {
		t.Errorf("the dialling Connect = %v", err)
	}
}

// The server's side, against clients that are not our pool.
func TestServerRefusesRequests(t *testing.T) {
	w := newWorld(t)
	cert, err := w.certs.Certificate(w.web)
	if err != nil {
		t.Fatal(err)
	}
	protocols := new(http.Protocols)
	protocols.SetHTTP2(true)
	transport := &http.Transport{Protocols: protocols, TLSClientConfig: mtls.Client(w.certs, cert, w.db)}
	defer transport.CloseIdleConnections()
	for _, tc := range []struct{ method, authority string }{
		{http.MethodGet, addrPort(w.app).String()},
		{http.MethodConnect, "example.org:80"},
		{http.MethodConnect, "127.0.0.1"},
	} {
		req, err := http.NewRequestWithContext(w.ctx, tc.method, "https://"+w.hbone.Addr().String(), http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = tc.authority
		resp, err := transport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusBadRequest {
			t.Errorf("%s %s: status %d, want 400", tc.method, tc.authority, resp.StatusCode)
		}
	}
	select {
	case in := <-w.handler.opened:
		t.Errorf("%+v was opened", in)
	default:
	}
}

func TestServerSpeaksNoHTTP1(t *testing.T) {
	w := newWorld(t)
	cert, err := w.certs.Certificate(w.web)
	if err != nil {
		t.Fatal(err)
	}
	cfg := mtls.Client(w.certs, cert, w.db)
	cfg.NextProtos = []string{"http/1.1"}
	c, err := tls.Dial("tcp4", w.hbone.Addr().String(), cfg)
	if err != nil {
		return // refused in the handshake
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.WriteString(c, "CONNECT "+addrPort(w.app).String()+" HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		return
	}
	if resp, err := http.ReadResponse(bufio.NewReader(c), nil); err == nil && resp.StatusCode == http.StatusOK {
		t.Error("the server accepted CONNECT over HTTP/1.1")
	}
	select {
	case in := <-w.handler.opened:
		t.Errorf("%+v was opened", in)
	default:
	}
}

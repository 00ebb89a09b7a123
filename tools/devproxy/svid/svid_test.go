// SPDX-License-Identifier: Apache-2.0

package svid_test

import (
	"context"
	"crypto/x509"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"testing"
	"time"

	secretv3 "github.com/envoyproxy/go-control-plane/envoy/service/secret/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	"ambientd/certfetch"
	"ambientd/certfetch/catest"
	"ambientd/certfetch/sds"
	"ambientd/certfetch/spiffeid"
	"ambientd/tools/devproxy/svid"
)

// world is an agent's certificate side, and a Store that asks it.
type world struct {
	t       *testing.T
	ctx     context.Context
	ca      *catest.CA
	fetcher *certfetch.Fetcher
	socket  string
	server  *grpc.Server
	store   *svid.Store
}

func newWorld(t *testing.T) *world {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	w := &world{t: t, ctx: ctx, ca: catest.New(t), socket: filepath.Join(t.TempDir(), "sds.sock")}
	var err error
	w.fetcher, err = certfetch.New(certfetch.Config{Source: w.ca})
	w.check(err)
	w.background("fetcher", w.fetcher.Run)
	w.serve()

	conn, err := grpc.NewClient("unix:"+w.socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: time.Millisecond, Multiplier: 1, MaxDelay: 10 * time.Millisecond}}))
	w.check(err)
	t.Cleanup(func() { conn.Close() })
	w.store = svid.New(svid.Config{Client: secretv3.NewSecretDiscoveryServiceClient(conn), Logger: slog.New(slog.DiscardHandler)})
	w.background("store", w.store.Run)
	return w
}

func (w *world) background(name string, run func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.ctx))
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	w.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Errorf("%s: %v", name, err)
		}
	})
}

// serve starts the agent's SDS server, again after it was stopped.
func (w *world) serve() {
	w.t.Helper()
	server, err := sds.NewServer(sds.Config{Fetcher: w.fetcher})
	w.check(err)
	w.server = grpc.NewServer()
	server.Register(w.server)
	l, err := net.Listen("unix", w.socket)
	w.check(err)
	go w.server.Serve(l)
	w.t.Cleanup(w.server.Stop)
}

func (w *world) check(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// await returns once cond holds.
func (w *world) await(what string, cond func() bool) {
	w.t.Helper()
	for {
		changed := w.store.Changed()
		if cond() {
			return
		}
		select {
		case <-changed:
		case <-w.ctx.Done():
			w.t.Fatal("waited in vain until ", what)
		}
	}
}

func (w *world) has(id spiffeid.ID) func() bool {
	return func() bool { _, err := w.store.Certificate(id); return err == nil }
}

func (w *world) hasNone(id spiffeid.ID) func() bool {
	return func() bool { _, err := w.store.Certificate(id); return errors.Is(err, svid.ErrNoCertificate) }
}

func identity(t *testing.T, account string) spiffeid.ID {
	t.Helper()
	id, err := spiffeid.Parse("spiffe://cluster.local/ns/shop/sa/" + account)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestCertificateAndRoots(t *testing.T) {
	w := newWorld(t)
	web := identity(t, "web")
	if _, err := w.store.Certificate(web); !errors.Is(err, svid.ErrNoCertificate) {
		t.Errorf("Certificate before Acquire = %v", err)
	}
	w.check(w.fetcher.Register("uid-1", web))
	release := w.store.Acquire(w.ctx, web)
	w.await("the certificate is there", w.has(web))
	w.await("the roots are there", func() bool { _, err := w.store.Roots(); return err == nil })
	cert, err := w.store.Certificate(web)
	w.check(err)
	roots, err := w.store.Roots()
	w.check(err)
	if _, err := cert.Leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		t.Errorf("the certificate does not lead to the roots: %v", err)
	}
	if again, err := w.store.Certificate(web); err != nil || again != cert {
		t.Errorf("Certificate changed without a change: %v", err)
	}
	release()
	if !w.hasNone(web)() {
		t.Error("the certificate is there after its release")
	}
}

func TestTwoPodsOfOneIdentity(t *testing.T) {
	w := newWorld(t)
	web := identity(t, "web")
	w.check(w.fetcher.Register("uid-1", web))
	ctx, cancel := context.WithCancel(w.ctx)
	first := w.store.Acquire(ctx, web)
	second := w.store.Acquire(w.ctx, web)
	w.await("the certificate is there", w.has(web))
	cancel()
	first()
	if !w.has(web)() {
		t.Error("the certificate went with the first of two pods")
	}
	w.ca.Rotate(t)
	second()
	if !w.hasNone(web)() {
		t.Error("the certificate is there after the last release")
	}
}

func TestTheAgentTakesACertificateBack(t *testing.T) {
	w := newWorld(t)
	web, db := identity(t, "web"), identity(t, "db")
	w.check(w.fetcher.Register("uid-1", web))
	w.check(w.fetcher.Register("uid-2", db))
	defer w.store.Acquire(w.ctx, web)()
	defer w.store.Acquire(w.ctx, db)()
	w.await("both certificates are there", func() bool { return w.has(web)() && w.has(db)() })
	w.fetcher.Unregister("uid-1")
	w.await("the certificate is gone", w.hasNone(web))
	if !w.has(db)() {
		t.Error("another identity's certificate went too")
	}
	// The stream is opened again, so a new pod of the identity finds it.
	w.check(w.fetcher.Register("uid-3", web))
	w.await("the certificate is back", w.has(web))
}

func TestARefusedIdentityComesOnceItIsRegistered(t *testing.T) {
	w := newWorld(t)
	web := identity(t, "web")
	defer w.store.Acquire(w.ctx, web)()
	w.await("the roots are there", func() bool { _, err := w.store.Roots(); return err == nil })
	if !w.hasNone(web)() {
		t.Error("a certificate for an identity that is not registered")
	}
	w.check(w.fetcher.Register("uid-1", web))
	w.await("the certificate is there", w.has(web))
}

func TestAnAgentThatIsAwayTakesNothingBack(t *testing.T) {
	w := newWorld(t)
	web := identity(t, "web")
	w.check(w.fetcher.Register("uid-1", web))
	defer w.store.Acquire(w.ctx, web)()
	w.await("certificate and roots are there", func() bool {
		_, err := w.store.Roots()
		return w.has(web)() && err == nil
	})
	old, err := w.store.Certificate(web)
	w.check(err)
	w.server.Stop()
	if now, err := w.store.Certificate(web); err != nil || now != old {
		t.Fatalf("without the agent: %v", err)
	}
	w.serve()
	w.check(w.fetcher.Register("uid-2", identity(t, "db")))
	defer w.store.Acquire(w.ctx, identity(t, "db"))()
	w.await("the new agent is talked to", w.has(identity(t, "db")))
	if now, err := w.store.Certificate(web); err != nil || now != old {
		t.Fatalf("with the new agent, and the old certificate: %v", err)
	}
	w.fetcher.Unregister("uid-1")
	w.await("the new agent takes the certificate back", w.hasNone(web))
}

// SPDX-License-Identifier: Apache-2.0

package certfetch_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"ambientd/certfetch"
	"ambientd/certfetch/catest"
	"ambientd/certfetch/spiffeid"
)

// The tests of this package run in synctest bubbles: time stands still while anybody works, and
// jumps to the next timer when all wait. A certificate of a day is renewed in an instant, and a
// moment that is asserted is exact.

// account is the identity of a service account in the namespace test.
func account(t testing.TB, name string) spiffeid.ID {
	t.Helper()
	id, err := spiffeid.Parse("spiffe://cluster.local/ns/test/sa/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// start runs a fetcher over ca to the end of the test. What cfg leaves out is the default, with an
// hour as TTL and the usual linger.
func start(t *testing.T, ca *catest.CA, cfg certfetch.Config) *certfetch.Fetcher {
	t.Helper()
	cfg.Source = ca
	if cfg.TTL == 0 {
		cfg.TTL = time.Hour
	}
	if cfg.Linger == 0 {
		cfg.Linger = certfetch.DefaultLinger
	}
	return run(t, cfg)
}

// run runs a fetcher as configured to the end of the test, which must also be its end.
func run(t *testing.T, cfg certfetch.Config) *certfetch.Fetcher {
	t.Helper()
	f, err := certfetch.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	begin(t, f)
	return f
}

// begin is for a test that has something to do between New and Run.
func begin(t *testing.T, f *certfetch.Fetcher) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

func register(t *testing.T, f *certfetch.Fetcher, uid string, id spiffeid.ID) {
	t.Helper()
	if err := f.Register(uid, id); err != nil {
		t.Fatal(err)
	}
}

// wait is Wait with a bound: the roots' timer keeps a bubble going, so that what never comes would
// be waited for without an end.
func wait(t *testing.T, f *certfetch.Fetcher, id spiffeid.ID) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	return f.Wait(ctx, id)
}

// await registers a pod and waits for its certificate.
func await(t *testing.T, f *certfetch.Fetcher, uid string, id spiffeid.ID) *certfetch.SVID {
	t.Helper()
	register(t, f, uid, id)
	if err := wait(t, f, id); err != nil {
		t.Fatal(err)
	}
	return held(t, f, id)
}

// held returns the certificate that is served for id, after checking that it may be.
func held(t *testing.T, f *certfetch.Fetcher, id spiffeid.ID) *certfetch.SVID {
	t.Helper()
	svid, err := f.SVID(id)
	if err != nil {
		t.Fatal(err)
	}
	leaf := svid.Chain[0]
	if svid.ID != id || len(leaf.URIs) != 1 || leaf.URIs[0].String() != id.String() {
		t.Fatalf("SVID(%s) is for %s and names %v", id, svid.ID, leaf.URIs)
	}
	if !svid.Key.Public().(*ecdsa.PublicKey).Equal(leaf.PublicKey) {
		t.Fatalf("SVID(%s): key and certificate do not belong together", id)
	}
	if now := time.Now(); now.After(leaf.NotAfter) || now.Before(leaf.NotBefore) {
		t.Fatalf("SVID(%s) at %s: valid from %s to %s", id, now, leaf.NotBefore, leaf.NotAfter)
	}
	return svid
}

// assertRefused is for an identity that must be as if it did not exist.
func assertRefused(t *testing.T, f *certfetch.Fetcher, id spiffeid.ID) {
	t.Helper()
	if svid, err := f.SVID(id); !errors.Is(err, certfetch.ErrNotRegistered) {
		t.Errorf("SVID(%s) = %v, %v; want ErrNotRegistered", id, svid, err)
	}
	if err := wait(t, f, id); !errors.Is(err, certfetch.ErrNotRegistered) {
		t.Errorf("Wait(%s) = %v; want ErrNotRegistered", id, err)
	}
	for _, listed := range f.Identities() {
		if listed.ID == id {
			t.Errorf("%s is listed: %+v", id, listed)
		}
	}
}

func assertPending(t *testing.T, f *certfetch.Fetcher, id spiffeid.ID) {
	t.Helper()
	if svid, err := f.SVID(id); !errors.Is(err, certfetch.ErrPending) {
		t.Errorf("SVID(%s) = %v, %v; want ErrPending", id, svid, err)
	}
}

// status is the line of Identities about id.
func status(t *testing.T, f *certfetch.Fetcher, id spiffeid.ID) certfetch.IdentityStatus {
	t.Helper()
	for _, s := range f.Identities() {
		if s.ID == id {
			return s
		}
	}
	t.Fatalf("%s is not listed", id)
	return certfetch.IdentityStatus{}
}

// pass lets d of the bubble's time pass, and everything due in it happen.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// signalled takes the signal of a subscription, if there is one.
func signalled(s *certfetch.Subscription) bool {
	select {
	case <-s.Changed():
		return true
	default:
		return false
	}
}

// assertSignal is about the one signal that all changes since the last look amount to.
func assertSignal(t *testing.T, s *certfetch.Subscription, of string) {
	t.Helper()
	synctest.Wait()
	if !signalled(s) {
		t.Errorf("no signal of %s", of)
	}
	if signalled(s) {
		t.Errorf("a second signal of %s", of)
	}
}

func assertNoSignal(t *testing.T, s *certfetch.Subscription, of string) {
	t.Helper()
	synctest.Wait()
	if signalled(s) {
		t.Errorf("a signal of %s", of)
	}
}

// logTo is a logger for tests that read what was logged.
func logTo(buf *bytes.Buffer) *slog.Logger {
	return slog.New(slog.NewTextHandler(buf, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

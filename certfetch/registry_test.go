// SPDX-License-Identifier: Apache-2.0

package certfetch_test

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"ambientd/certfetch"
	"ambientd/certfetch/catest"
	"ambientd/certfetch/spiffeid"
)

func TestRegistrationFetchesAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		f := start(t, ca, certfetch.Config{})
		id, began := account(t, "a"), time.Now()
		assertRefused(t, f, id)

		svid := await(t, f, "pod-1", id)
		if waited := time.Since(began); waited != 0 {
			t.Errorf("the certificate took %s, with a CA that answers at once", waited)
		}
		if want := began.Add(time.Hour); !svid.NotAfter.Equal(want) {
			t.Errorf("NotAfter is %s, want %s", svid.NotAfter, want)
		}
		if s := status(t, f, id); s.State != certfetch.StateReady || s.Pods != 1 || !s.NotAfter.Equal(svid.NotAfter) || s.LastError != "" {
			t.Errorf("status %+v", s)
		}
		if requests := ca.Requests(id); len(requests) != 1 || requests[0].TTL != time.Hour || requests[0].CSR.Subject.String() != "" {
			t.Errorf("the CA was asked %+v", requests)
		}
	})
}

func TestSecondPodCostsNoCSR(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		f := start(t, ca, certfetch.Config{})
		id := account(t, "a")
		first := await(t, f, "pod-1", id)
		second := await(t, f, "pod-2", id)
		register(t, f, "pod-2", id) // again: the same
		if first != second {
			t.Error("the second pod got another certificate")
		}
		if n := ca.Total(); n != 1 {
			t.Errorf("%d CSRs, want 1", n)
		}
		if s := status(t, f, id); s.Pods != 2 {
			t.Errorf("counted %d pods, want 2", s.Pods)
		}

		f.Unregister("pod-1")
		f.Unregister("pod-1")
		f.Unregister("never-seen")
		if held(t, f, id) != first {
			t.Error("one pod left and the other's certificate changed")
		}
		f.Unregister("pod-2")
		assertRefused(t, f, id)
	})
}

func TestRegisterRefusesContradictions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		f := start(t, ca, certfetch.Config{})
		a, b := account(t, "a"), account(t, "b")
		await(t, f, "pod-1", a)
		if err := f.Register("pod-1", b); err == nil || !strings.Contains(err.Error(), a.String()) || !strings.Contains(err.Error(), "pod-1") {
			t.Errorf("another identity under the same UID: %v; want an error that names pod and identity", err)
		}
		assertRefused(t, f, b)
		if err := f.Register("", a); err == nil {
			t.Error("no UID: no error")
		}
		if err := f.Register("pod-2", spiffeid.ID{}); err == nil {
			t.Error("no identity: no error")
		}
		if n := len(f.Identities()); n != 1 {
			t.Errorf("%d identities, want 1", n)
		}
	})
}

func TestRegistrationWaitsForRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		f, err := certfetch.New(certfetch.Config{Source: ca})
		if err != nil {
			t.Fatal(err)
		}
		id := account(t, "a")
		register(t, f, "pod-1", id)
		synctest.Wait()
		if ca.Total() != 0 {
			t.Error("the CA was asked before Run")
		}
		assertPending(t, f, id)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- f.Run(ctx) }()
		if err := f.Wait(ctx, id); err != nil {
			t.Fatal(err)
		}
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		// A shutdown is no removal.
		held(t, f, id)
	})
}

func TestWaitEndsWithTheReason(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		ca.AnswerAll(catest.Unavailable)
		f := start(t, ca, certfetch.Config{})
		id := account(t, "a")
		register(t, f, "pod-1", id)

		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		began := time.Now()
		err := f.Wait(ctx, id)
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "connection refused") || !strings.Contains(err.Error(), id.String()) {
			t.Errorf("Wait = %v; want the deadline, with identity and the CA's error", err)
		}
		if waited := time.Since(began); waited != 3*time.Second {
			t.Errorf("waited %s, want 3s", waited)
		}

		unregistered := make(chan error)
		go func() { unregistered <- wait(t, f, id) }()
		synctest.Wait()
		f.Unregister("pod-1")
		if err := <-unregistered; !errors.Is(err, certfetch.ErrNotRegistered) {
			t.Errorf("Wait = %v when the last pod went; want ErrNotRegistered", err)
		}
	})
}

// The linger is what a rollout needs: the pod goes, its successor comes, and nobody has to sign.
func TestRegistrationWithinTheLingerFindsTheCertificate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		f := start(t, ca, certfetch.Config{Linger: 10 * time.Second})
		id := account(t, "a")
		first := await(t, f, "pod-1", id)

		f.Unregister("pod-1")
		pass(10*time.Second - time.Nanosecond)
		assertRefused(t, f, id)
		if await(t, f, "pod-2", id) != first || ca.Total() != 1 {
			t.Errorf("%d CSRs within the linger, want 1", ca.Total())
		}
		pass(time.Minute)
		if held(t, f, id) != first {
			t.Error("the first pod's linger ended the second's certificate")
		}

		f.Unregister("pod-2")
		pass(10 * time.Second)
		if await(t, f, "pod-3", id) == first || ca.Total() != 2 {
			t.Errorf("%d CSRs after the linger, want 2", ca.Total())
		}
	})
}

func TestLingerNeverRevivesAnExpiredCertificate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		var log bytes.Buffer
		f := start(t, ca, certfetch.Config{TTL: time.Minute, Linger: time.Hour, Logger: logTo(&log)})
		id := account(t, "a")
		first := await(t, f, "pod-1", id)
		f.Unregister("pod-1")
		pass(time.Minute)
		if await(t, f, "pod-2", id) == first {
			t.Error("the expired certificate came back")
		}
		if log.Len() > 0 {
			t.Errorf("an expiry that concerned no pod was logged: %s", &log)
		}
	})
}

// While it lingers nothing is renewed; a pod that comes back past the half gets what is there, and
// the renewal at once.
func TestRenewalThatFellIntoTheLingerIsMadeUpFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		f := start(t, ca, certfetch.Config{TTL: time.Hour, Linger: time.Hour})
		id := account(t, "a")
		first := await(t, f, "pod-1", id)
		f.Unregister("pod-1")
		pass(50 * time.Minute)
		if n := ca.Total(); n != 1 {
			t.Errorf("%d CSRs while nobody had the identity registered, want 1", n)
		}
		register(t, f, "pod-2", id)
		if held(t, f, id) != first {
			t.Error("the certificate did not linger")
		}
		synctest.Wait()
		if held(t, f, id) == first || ca.Total() != 2 {
			t.Errorf("%d CSRs, want the overdue renewal at once", ca.Total())
		}
	})
}

func TestKeyIsDroppedAfterTheLinger(t *testing.T) {
	for name, linger := range map[string]time.Duration{"usual": 10 * time.Second, "none": 0} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := run(t, certfetch.Config{Source: catest.New(t), Linger: linger})
				id := account(t, "a")
				svid := weak.Make(await(t, f, "pod-1", id))
				f.Unregister("pod-1")
				if linger > 0 {
					pass(linger - time.Nanosecond)
					runtime.GC()
					if svid.Value() == nil {
						t.Error("the key is gone before the linger was over")
					}
				}
				pass(time.Nanosecond)
				runtime.GC()
				if svid.Value() != nil {
					t.Error("the key is still held")
				}
			})
		})
	}
}

func TestRenewedKeyIsDroppedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, catest.New(t), certfetch.Config{TTL: time.Hour})
		id := account(t, "a")
		svid := weak.Make(await(t, f, "pod-1", id))
		pass(40 * time.Minute)
		held(t, f, id)
		runtime.GC()
		if svid.Value() != nil {
			t.Error("the key before the renewal is still held")
		}
	})
}

func TestIdentitiesAreSortedAndOnlyTheRegistered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		denied := account(t, "c")
		ca.AnswerFor(denied, catest.Deny)
		f := start(t, ca, certfetch.Config{})
		for _, name := range []string{"d", "b", "a", "c"} {
			register(t, f, "pod-"+name, account(t, name))
		}
		f.Unregister("pod-d")
		synctest.Wait()
		var got []string
		for _, s := range f.Identities() {
			got = append(got, s.ID.ServiceAccount()+" "+string(s.State))
		}
		if want := "a ready, b ready, c denied"; strings.Join(got, ", ") != want {
			t.Errorf("Identities() = %v, want %s", got, want)
		}
	})
}

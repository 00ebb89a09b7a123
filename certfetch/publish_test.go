// SPDX-License-Identifier: Apache-2.0

package certfetch_test

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"ambientd/certfetch"
	"ambientd/certfetch/catest"
)

func TestSubscriptionSignalsWhatItWatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		f := start(t, ca, certfetch.Config{TTL: time.Hour})
		synctest.Wait() // the roots are there
		watched, other := account(t, "a"), account(t, "b")
		s := f.Subscribe()
		s.Watch(watched)
		assertNoSignal(t, s, "nothing")

		await(t, f, "pod-b", other)
		assertNoSignal(t, s, "an identity that is not watched")
		register(t, f, "pod-1", watched)
		assertSignal(t, s, "the first certificate, registration and all")
		await(t, f, "pod-2", watched)
		assertNoSignal(t, s, "a second pod")

		version := held(t, f, watched).Version
		pass(35 * time.Minute)
		assertSignal(t, s, "the renewal")
		if got := held(t, f, watched).Version; got <= version {
			t.Errorf("version %d after %d", got, version)
		}

		ca.AnswerAll(catest.Unavailable)
		pass(time.Hour)
		assertSignal(t, s, "the end of the certificate")
		f.Unregister("pod-1")
		assertNoSignal(t, s, "one of two pods leaving")
		f.Unregister("pod-2")
		assertSignal(t, s, "the removal")

		s.Unwatch(watched)
		s.Unwatch(watched)
		register(t, f, "pod-3", watched)
		assertNoSignal(t, s, "an identity that is no longer watched")
		s.Watch(watched)
		s.Close()
		s.Close()
		s.Watch(other)
		f.Unregister("pod-b")
		f.Unregister("pod-3")
		assertNoSignal(t, s, "anything after Close")
	})
}

func TestSubscriptionCoalesces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		f := start(t, ca, certfetch.Config{})
		s := f.Subscribe()
		defer s.Close()
		for i := range 50 {
			id := account(t, fmt.Sprint("a", i))
			s.Watch(id)
			await(t, f, fmt.Sprint("pod-", i), id)
		}
		assertSignal(t, s, "fifty certificates")
	})
}

func TestRootsAreThereBeforeAnyIdentity(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		f, err := certfetch.New(certfetch.Config{Source: ca})
		if err != nil {
			t.Fatal(err)
		}
		if b := f.Bundle(); len(b.Roots) != 0 || b.Version != 0 {
			t.Errorf("before the CA has answered: %+v", b)
		}
		s := f.Subscribe()
		defer s.Close()
		begin(t, f)
		assertSignal(t, s, "the first roots")
		if b := f.Bundle(); len(b.Roots) != 1 || !b.Roots[0].Equal(ca.Root()) || b.Version == 0 {
			t.Errorf("Bundle() = %+v, want the CA's root", b)
		}
		pass(24 * time.Hour)
		assertNoSignal(t, s, "the same roots again")
		if n := ca.RootCalls(); n < 200 || n > 350 {
			t.Errorf("asked for the roots %d times in a day, want about every 5 minutes", n)
		}
	})
}

func TestRootsAreRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		ca.FailRoots(errors.New("connection refused"))
		f := start(t, ca, certfetch.Config{})
		pass(2 * time.Second)
		if n := ca.RootCalls(); n < 3 || n > 8 {
			t.Errorf("asked %d times in 2 s, want a short backoff", n)
		}
		ca.FailRoots(nil)
		pass(3200 * time.Millisecond) // the longest pause that can have begun by then
		if len(f.Bundle().Roots) != 1 {
			t.Error("no roots, though the CA is well again")
		}
		// And a failure later on takes nothing away.
		ca.FailRoots(errors.New("connection refused"))
		pass(time.Hour)
		if len(f.Bundle().Roots) != 1 {
			t.Error("the roots are gone with the CA")
		}
	})
}

// New roots are published before the first leaf under them, by enough for every proxy to have them.
func TestRootsArePublishedBeforeTheFirstLeaf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		f := start(t, ca, certfetch.Config{TTL: time.Hour})
		old := await(t, f, "pod-1", account(t, "old"))
		ca.Rotate(t)
		s := f.Subscribe()
		defer s.Close()
		id, began := account(t, "new"), time.Now()
		register(t, f, "pod-2", id)
		assertSignal(t, s, "the new roots")
		if !f.Bundle().Roots[0].Equal(ca.Root()) {
			t.Error("the bundle is not the new root")
		}
		assertPending(t, f, id)
		// Another one that is signed in these moments must not be earlier.
		third := account(t, "third")
		register(t, f, "pod-3", third)
		synctest.Wait()
		assertPending(t, f, third)
		if err := wait(t, f, id); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		held(t, f, third)
		if lead := time.Since(began); lead != 500*time.Millisecond {
			t.Errorf("the first leaf came %s after its root, want 500ms", lead)
		}

		// The leaf under the old root is still served, and soon replaced: peers refuse it.
		if held(t, f, old.ID) != old {
			t.Error("the old leaf is gone")
		}
		pass(32 * time.Second)
		if held(t, f, old.ID) == old {
			t.Error("the old leaf was not renewed, though nobody trusts its root any more")
		}
		n := ca.Total()
		pass(10 * time.Minute)
		if ca.Total() != n {
			t.Errorf("%d more CSRs after the rotation", ca.Total()-n)
		}
		began = time.Now()
		await(t, f, "pod-4", account(t, "fourth"))
		if waited := time.Since(began); waited != 0 {
			t.Errorf("a leaf long after the rotation waited %s", waited)
		}
	})
}

// An answer that was under way while the roots changed brings neither the old ones back, nor a leaf
// that stays.
func TestAnswerFromBeforeARotation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		f := start(t, ca, certfetch.Config{TTL: time.Hour})
		slow, release := account(t, "slow"), make(chan struct{})
		ca.AnswerFor(slow, func(ctx context.Context, r catest.Request) (certfetch.Issued, error) {
			issued, err := ca.Sign(ctx, r)
			<-release
			return issued, err
		})
		register(t, f, "pod-1", slow)
		synctest.Wait()
		ca.Rotate(t)
		await(t, f, "pod-2", account(t, "fast"))
		bundle := f.Bundle()
		close(release)
		ca.AnswerFor(slow, ca.Sign)
		if err := wait(t, f, slow); err != nil {
			t.Fatal(err)
		}
		old := held(t, f, slow)
		if f.Bundle().Version != bundle.Version {
			t.Error("the old roots are back")
		}
		pass(31 * time.Second)
		if held(t, f, slow) == old {
			t.Error("the leaf under the old root was not renewed")
		}
	})
}

// A rotation that only the roots' own refresh shows is the same.
func TestRotationIsNoticedWithoutAnIssuance(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		f := start(t, ca, certfetch.Config{TTL: 24 * time.Hour})
		id := account(t, "a")
		first := await(t, f, "pod-1", id)
		ca.Rotate(t)
		pass(6*time.Minute + 31*time.Second)
		if !f.Bundle().Roots[0].Equal(ca.Root()) {
			t.Error("the new root is not known")
		}
		if held(t, f, id) == first {
			t.Error("the leaf under the old root was not renewed")
		}
	})
}

// The order and repetition of roots mean nothing, so they must not be pushed as a change.
func TestRootsAreASet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca, second := catest.New(t), catest.New(t)
		both := func(order ...int) catest.Answer {
			return func(ctx context.Context, r catest.Request) (certfetch.Issued, error) {
				issued, err := ca.Sign(ctx, r)
				roots := []*x509.Certificate{ca.Root(), second.Root()}
				issued.Roots = nil
				for _, i := range order {
					issued.Roots = append(issued.Roots, roots[i])
				}
				return issued, err
			}
		}
		ca.FailRoots(errors.New("only with certificates"))
		ca.AnswerAll(both(0, 1))
		f := start(t, ca, certfetch.Config{})
		await(t, f, "pod-1", account(t, "a"))
		bundle := f.Bundle()
		for i, answer := range []catest.Answer{both(1, 0), both(0, 1, 1, 0)} {
			ca.AnswerAll(answer)
			await(t, f, fmt.Sprint("pod-b", i), account(t, fmt.Sprint("b", i)))
			if f.Bundle().Version != bundle.Version {
				t.Error("the same roots in another order are a new version")
			}
		}
		ca.AnswerAll(both(0))
		await(t, f, "pod-3", account(t, "c"))
		if b := f.Bundle(); b.Version <= bundle.Version || !slices.Equal(b.Roots, []*x509.Certificate{ca.Root()}) {
			t.Errorf("one root less: %d roots, version %d", len(b.Roots), b.Version)
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package certfetch_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"ambientd/certfetch"
	"ambientd/certfetch/catest"
	"ambientd/certfetch/spiffeid"
)

// Case 11: the CA denies sa-x for 3 s, then signs; p1 and p2 share sa-x.
func TestSharedIdentityThatTheCADeniesAtFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		x, other := account(t, "x"), account(t, "other")
		began := time.Now()
		ca.AnswerFor(x, catest.Until(began.Add(3*time.Second), catest.Deny, ca.Sign))
		f := start(t, ca, certfetch.Config{TTL: time.Hour, Linger: 10 * time.Second})
		stream := f.Subscribe()
		defer stream.Close()
		stream.Watch(x)

		register(t, f, "p1", x)
		register(t, f, "p2", x)
		if err := wait(t, f, x); !errors.Is(err, certfetch.ErrDenied) {
			t.Errorf("Wait = %v, want the denial", err)
		}
		if time.Since(began) != 0 {
			t.Errorf("the denial took %s to come through, want at once", time.Since(began))
		}
		if s := status(t, f, x); s.State != certfetch.StateDenied || s.Pods != 2 || s.LastError == "" {
			t.Errorf("status %+v, want denied, with both pods and the reason", s)
		}
		await(t, f, "p3", other) // others are unaffected
		if time.Since(began) != 0 {
			t.Errorf("another identity waited %s for this one", time.Since(began))
		}

		// The backoff is short: from 3 s on it is a matter of seconds.
		pass(3*time.Second + 3300*time.Millisecond)
		first := held(t, f, x)
		asked := len(ca.Requests(x))
		if n := ca.MostAtOnce(x); n != 1 {
			t.Errorf("%d CSRs in flight at once, want 1", n)
		}
		if asked < 4 || asked > 8 {
			t.Errorf("%d CSRs in those seconds, want a growing pause between them", asked)
		}

		// One certificate for both, and renewals go on after p1.
		f.Unregister("p1")
		pass(35 * time.Minute)
		second := held(t, f, x)
		if second == first || len(ca.Requests(x)) != asked+1 {
			t.Errorf("%d renewals after p1 went, want 1", len(ca.Requests(x))-asked)
		}
		signalled(stream)

		// They stop after p2, the streams see it, and the key goes.
		f.Unregister("p2")
		assertSignal(t, stream, "the removal")
		assertRefused(t, f, x)
		pass(24 * time.Hour)
		if n := len(ca.Requests(x)); n != asked+1 {
			t.Errorf("%d CSRs after the last pod went", n-asked-1)
		}
		if renewed := len(ca.Requests(other)); renewed < 20 {
			t.Errorf("the other identity was renewed %d times in a day, want about 48", renewed)
		}
	})
}

// A denial is for the pods that were known then. A new pod is asked for at once, without waiting
// for the backoff, and its Wait is not ended by the old answer.
func TestNewPodIsNotDeniedByAnEarlierAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		id := account(t, "a")
		ca.AnswerFor(id, catest.Deny)
		f := start(t, ca, certfetch.Config{})
		register(t, f, "pod-1", id)
		pass(10 * time.Minute) // the backoff is at its longest
		ca.AnswerFor(id, ca.Sign)
		began := time.Now()
		await(t, f, "pod-2", id)
		if waited := time.Since(began); waited != 0 {
			t.Errorf("the new pod waited %s", waited)
		}
	})
}

// A renewal that is denied changes nothing for those who wait: the certificate is still good.
func TestDeniedRenewalLeavesTheCertificate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		f := start(t, ca, certfetch.Config{TTL: time.Hour})
		id := account(t, "a")
		first := await(t, f, "pod-1", id)
		ca.AnswerAll(catest.Deny)
		pass(45 * time.Minute)
		if await(t, f, "pod-2", id) != first {
			t.Error("another certificate")
		}
		if s := status(t, f, id); s.State != certfetch.StateReady || s.LastError == "" {
			t.Errorf("status %+v, want ready, with the denial", s)
		}
		pass(15 * time.Minute)
		if s := status(t, f, id); s.State != certfetch.StateDenied {
			t.Errorf("status %+v after the end, want denied", s)
		}
	})
}

func TestRenewalIsAtAJitteredHalf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const identities = 100
		ca := catest.New(t)
		f := start(t, ca, certfetch.Config{TTL: 24 * time.Hour})
		began := time.Now()
		for i := range identities {
			await(t, f, fmt.Sprint("pod-", i), account(t, fmt.Sprint("a", i)))
		}
		pass(10*time.Hour + 48*time.Minute - time.Nanosecond) // 0.45 of the lifetime
		if n := ca.Total(); n != identities {
			t.Errorf("%d renewals before 0.45 of the lifetime", n-identities)
		}
		pass(2*time.Hour + 24*time.Minute) // 0.55
		if n := ca.Total(); n != 2*identities {
			t.Errorf("%d renewals at 0.55 of the lifetime, want %d", n-identities, identities)
		}
		var times []time.Duration
		keys := make(map[string]bool)
		for i := range identities {
			requests := ca.Requests(account(t, fmt.Sprint("a", i)))
			times = append(times, requests[1].At.Sub(began))
			for _, r := range requests {
				keys[string(r.CSR.RawSubjectPublicKeyInfo)] = true
			}
		}
		if len(keys) != 2*identities {
			t.Errorf("%d keys for %d certificates, want a new one each time", len(keys), 2*identities)
		}
		slices.Sort(times)
		if spread := times[len(times)-1] - times[0]; spread < time.Hour {
			t.Errorf("all renewals within %s: no jitter", spread)
		}
	})
}

// A CA that signs for next to nothing does not make the fetcher run hot.
func TestShortestLivedCertificatesAreNotRenewedInALoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		f := start(t, ca, certfetch.Config{TTL: certfetch.MinTTL})
		id := account(t, "a")
		ca.AnswerAll(func(ctx context.Context, r catest.Request) (certfetch.Issued, error) {
			r.TTL = time.Second
			return ca.Sign(ctx, r)
		})
		register(t, f, "pod-1", id)
		pass(time.Minute)
		if n := ca.Total(); n > 70 {
			t.Errorf("%d CSRs in a minute, want about one a second", n)
		}
	})
}

func TestBackoffGrowsPerIdentityAndIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		broken, fine := account(t, "broken"), account(t, "fine")
		ca.AnswerFor(broken, catest.Unavailable)
		var log bytes.Buffer
		f := start(t, ca, certfetch.Config{Logger: logTo(&log)})
		register(t, f, "pod-1", broken)
		pass(time.Hour)
		requests := ca.Requests(broken)
		for i := 1; i < len(requests); i++ {
			most := min(200*time.Millisecond<<min(i-1, 16), time.Minute)
			if pause := requests[i].At.Sub(requests[i-1].At); pause < most/2 || pause > most {
				t.Errorf("pause %d is %s, want %s to %s", i, pause, most/2, most)
			}
		}
		if n := len(requests); n < 60 || n > 130 {
			t.Errorf("%d CSRs in an hour", n)
		}
		if n := strings.Count(log.String(), "no certificate from the CA"); n != 1 {
			t.Errorf("%d log lines about the same trouble, want 1", n)
		}

		began := time.Now()
		await(t, f, "pod-2", fine)
		if waited := time.Since(began); waited != 0 {
			t.Errorf("an identity without trouble waited %s", waited)
		}
		ca.AnswerFor(broken, ca.Sign)
		pass(time.Minute)
		held(t, f, broken)
		if n := strings.Count(log.String(), "certificate obtained after failures"); n != 1 {
			t.Errorf("%d log lines about its end, want 1", n)
		}
	})
}

// occupy has the only worker of f busy with an identity of its own until release is called.
func occupy(t *testing.T, f *certfetch.Fetcher, ca *catest.CA) (release func()) {
	t.Helper()
	id, released := account(t, "busy"), make(chan struct{})
	ca.AnswerFor(id, catest.Deaf(released, ca.Sign))
	register(t, f, "busy", id)
	synctest.Wait()
	if len(ca.Requests(id)) != 1 {
		t.Fatal("the worker is not free to be occupied")
	}
	return func() { close(released) }
}

// namesSince is what the CA was asked for after n requests.
func namesSince(ca *catest.CA, n int) []string {
	var names []string
	for _, id := range ca.Order()[n:] {
		names = append(names, id.ServiceAccount())
	}
	return names
}

// A pod that is waiting goes before all that can wait.
func TestNewPodGoesBeforeRenewals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		f := start(t, ca, certfetch.Config{TTL: 10 * time.Second, Workers: 1})
		for i := range 5 {
			await(t, f, fmt.Sprint("pod-", i), account(t, fmt.Sprint("old", i)))
		}
		pass(2 * time.Second)
		release := occupy(t, f, ca)
		pass(3500 * time.Millisecond) // all five are due
		n := ca.Total()
		register(t, f, "pod-new", account(t, "new"))
		release()
		synctest.Wait()
		if order := namesSince(ca, n); len(order) != 6 || order[0] != "new" {
			t.Errorf("asked for %v, want the new pod's identity first and the five renewals after", order)
		}
	})
}

// A retry that nobody waits for queues with the renewals; a Wait moves it up.
func TestWaitMovesARetryUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		ca.AnswerAll(catest.Unavailable)
		f := start(t, ca, certfetch.Config{Workers: 1})
		for i := range 5 {
			register(t, f, fmt.Sprint("pod-", i), account(t, fmt.Sprint("a", i)))
		}
		synctest.Wait() // all have failed once
		release := occupy(t, f, ca)
		pass(time.Second) // all are due again, and queue
		ca.AnswerAll(ca.Sign)
		n := ca.Total()
		waited := make(chan error, 1)
		go func() { waited <- wait(t, f, account(t, "a3")) }()
		synctest.Wait()
		release()
		synctest.Wait()
		if order := namesSince(ca, n); len(order) != 5 || order[0] != "a3" {
			t.Errorf("asked for %v, want a3 first of five", order)
		}
		if err := <-waited; err != nil {
			t.Error(err)
		}
	})
}

// Pods that come and go do not push those that came before to the end of the queue.
func TestQueueKeepsItsOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		f := start(t, ca, certfetch.Config{Workers: 1})
		release := occupy(t, f, ca)
		for _, name := range []string{"a", "b", "gone", "c"} {
			register(t, f, "pod-"+name, account(t, name))
		}
		register(t, f, "pod-a2", account(t, "a"))
		f.Unregister("pod-gone")
		n := ca.Total()
		release()
		synctest.Wait()
		if order := namesSince(ca, n); !slices.Equal(order, []string{"a", "b", "c"}) {
			t.Errorf("asked for %v, want a b c", order)
		}
	})
}

// When the last pod goes, the CSR in flight is given up at once; when another comes before that
// call has returned, it waits for it: never two in flight.
func TestPodThatComesBackWhileACSRIsInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		id, release := account(t, "a"), make(chan struct{})
		ca.AnswerFor(id, catest.Deaf(release, ca.Sign))
		f := start(t, ca, certfetch.Config{})
		register(t, f, "pod-1", id)
		synctest.Wait()
		f.Unregister("pod-1")
		assertRefused(t, f, id)
		ca.AnswerFor(id, ca.Sign)
		register(t, f, "pod-2", id)
		pass(time.Minute)
		assertPending(t, f, id)
		close(release)
		if err := wait(t, f, id); err != nil {
			t.Fatal(err)
		}
		if n, most := len(ca.Requests(id)), ca.MostAtOnce(id); n != 2 || most != 1 {
			t.Errorf("%d CSRs, %d at once; want 2, one after the other", n, most)
		}
	})
}

func TestAnswerForAnIdentityThatIsGoneIsDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		id, release := account(t, "a"), make(chan struct{})
		ca.AnswerFor(id, catest.Deaf(release, ca.Sign))
		f := start(t, ca, certfetch.Config{})
		register(t, f, "pod-1", id)
		synctest.Wait()
		f.Unregister("pod-1")
		close(release)
		pass(time.Minute)
		assertRefused(t, f, id)
		if n := len(ca.Requests(id)); n != 1 {
			t.Errorf("%d CSRs, want no second one", n)
		}
		await(t, f, "pod-2", id)
		if n := len(ca.Requests(id)); n != 2 {
			t.Errorf("%d CSRs, want a new one for the new pod", n)
		}
	})
}

// A good source ends with the ctx of its call, so an unregistered identity stops costing anything.
func TestUnregisteringEndsTheCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		id := account(t, "a")
		var cause error
		ca.AnswerFor(id, func(ctx context.Context, r catest.Request) (certfetch.Issued, error) {
			issued, err := catest.Hang(ctx, r)
			cause = err
			return issued, err
		})
		var log bytes.Buffer
		f := start(t, ca, certfetch.Config{Logger: logTo(&log)})
		register(t, f, "pod-1", id)
		synctest.Wait()
		f.Unregister("pod-1")
		synctest.Wait()
		if !errors.Is(cause, context.Canceled) {
			t.Errorf("the call ended with %v, want it cancelled", cause)
		}
		if log.Len() > 0 {
			t.Errorf("logged about what is no failure: %s", &log)
		}
	})
}

// A thousand identities are no thousand goroutines.
func TestGoroutinesDoNotGrowWithIdentities(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		f := start(t, ca, certfetch.Config{TTL: 24 * time.Hour})
		synctest.Wait()
		before := runtime.NumGoroutine()
		for i := range 1000 {
			register(t, f, fmt.Sprint("pod-", i), account(t, fmt.Sprint("a", i)))
		}
		synctest.Wait()
		if n := runtime.NumGoroutine(); n > before {
			t.Errorf("%d goroutines with 1,000 identities, %d without", n, before)
		}
		for _, s := range f.Identities() {
			if s.State != certfetch.StateReady {
				t.Errorf("%s is %s", s.ID, s.State)
			}
		}
	})
}

// Random pods come and go, many at once, under a CA that is not always well. At the end exactly the
// registered identities are held, and none was ever asked for twice at once.
func TestRandomComingsAndGoings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		ca.AnswerAll(func(ctx context.Context, r catest.Request) (certfetch.Issued, error) {
			switch rand.N(10) {
			case 0:
				return catest.Deny(ctx, r)
			case 1:
				return catest.Hang(ctx, r)
			case 2:
				return ca.WrongKey(ctx, r)
			}
			time.Sleep(rand.N(100 * time.Millisecond)) // the CA's own time
			return ca.Sign(ctx, r)
		})
		f := start(t, ca, certfetch.Config{TTL: time.Minute, Linger: time.Second, Workers: 3, IssueTimeout: time.Second})
		ids := make([]spiffeid.ID, 8)
		for i := range ids {
			ids[i] = account(t, fmt.Sprint("a", i))
		}
		var pods sync.WaitGroup
		for g := range 8 {
			pods.Go(func() {
				for i := range 100 {
					uid, id := fmt.Sprint("pod-", g, "-", i), ids[rand.N(len(ids))]
					if err := f.Register(uid, id); err != nil {
						t.Error(err)
					}
					ctx, cancel := context.WithTimeout(t.Context(), rand.N(time.Second))
					_ = f.Wait(ctx, id) // may end in any way
					cancel()
					time.Sleep(rand.N(5 * time.Second))
					f.Unregister(uid)
				}
			})
		}
		pods.Wait()
		if listed := f.Identities(); len(listed) != 0 {
			t.Errorf("still registered: %+v", listed)
		}
		register(t, f, "last", ids[0])
		ca.AnswerAll(ca.Sign)
		pass(2 * time.Minute)
		held(t, f, ids[0])
		for _, id := range ids {
			if n := ca.MostAtOnce(id); n > 1 {
				t.Errorf("%d CSRs at once for %s", n, id)
			}
			if id != ids[0] {
				assertRefused(t, f, id)
			}
		}
	})
}

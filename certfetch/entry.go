// SPDX-License-Identifier: Apache-2.0

package certfetch

import (
	"container/list"
	"context"
	"math/rand/v2"
	"time"

	"ambientd/certfetch/spiffeid"
)

const (
	// Retries begin soon, because a pod may be waiting for the CA to hear of it, and end at a pace
	// that a CA bears from every identity of a cluster.
	firstBackoff = 200 * time.Millisecond
	maxBackoff   = time.Minute

	// A renewal is never sooner than this, however short-lived the CA's certificates are.
	minRenewal = time.Second
)

// entry is all there is about one identity. Everything in it is guarded by Fetcher.mu.
type entry struct {
	id   spiffeid.ID
	pods int // zero: lingering, or only waiting for its attempt to return

	svid   *SVID // the last one published, until it ends or is dropped
	wipeAt time.Time

	err      error // the last failure since the last certificate
	denied   bool  // that failure was a denial
	failures int
	askAt    time.Time // when the CA is to be asked next
	attempt  *attempt  // the CSR in flight, if any: never two

	fresh   bool          // a pod came since the CA was last asked: ask with priority
	waiters int           // how many Waits there are
	outcome chan struct{} // closed at the next outcome, for them; nil without

	lane  *list.List // where it queues for a worker, if it does
	place *list.Element

	due   time.Time // see timeline
	index int
}

// attempt is one call of the source under way.
type attempt struct {
	cancel context.CancelFunc
	// abandoned: its worker is free for others, and whatever it still returns is dropped.
	abandoned bool
}

// holds reports whether e has a certificate that may be served at now.
func (e *entry) holds(now time.Time) bool { return e.svid != nil && now.Before(e.svid.NotAfter) }

// next is when e needs attention, the zero time for never.
func (e *entry) next() time.Time {
	if e.pods == 0 {
		return e.wipeAt
	}
	var due time.Time
	if e.attempt == nil && e.place == nil {
		due = e.askAt
	}
	if e.svid != nil && (due.IsZero() || e.svid.NotAfter.Before(due)) {
		due = e.svid.NotAfter
	}
	return due
}

// signal tells the Waits to look again.
func (e *entry) signal() {
	if e.outcome != nil {
		close(e.outcome)
		e.outcome = nil
	}
}

// status is what an operator sees of e at now.
func (e *entry) status(now time.Time) IdentityStatus {
	s := IdentityStatus{ID: e.id, Pods: e.pods, State: StatePending}
	switch {
	case e.holds(now):
		s.State, s.NotAfter = StateReady, e.svid.NotAfter
	case e.denied:
		s.State = StateDenied
	}
	if e.err != nil {
		s.LastError = e.err.Error()
	}
	return s
}

// wallNow is now without the monotonic reading: certificates end by the wall clock, also when that
// is set or the machine was suspended.
func wallNow() time.Time { return time.Now().Round(0) }

// backoff is how long to wait after so many failures in a row, at least one: doubling, and anywhere
// in the upper half of the doubled time, so that identities that failed together part.
func backoff(failures int) time.Duration {
	wait := maxBackoff
	// Beyond 2^16 the shift would only overflow.
	if shift := min(failures-1, 16); firstBackoff<<shift < maxBackoff {
		wait = firstBackoff << shift
	}
	return wait/2 + rand.N(wait/2)
}

// renewal is how long after an issuance the next one is due: half of the lifetime that is left,
// give or take a tenth of that half, so that a node's identities do not stay in step.
func renewal(lifetime time.Duration) time.Duration {
	half := max(lifetime/2, minRenewal)
	return half - half/10 + rand.N(half/5)
}

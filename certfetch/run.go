// SPDX-License-Identifier: Apache-2.0

package certfetch

import (
	"container/list"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"time"
)

const (
	// maxCallsOut bounds the calls that the source has not returned from, for each worker: the one
	// that holds the worker, and those given up. When so many are out, the source is taken for broken
	// and not called until one comes back.
	maxCallsOut = 4

	// maxSleep is the longest that Run sleeps: a wall clock that was set forward is noticed then.
	maxSleep = time.Minute

	// shutdownGrace is what calls get to return after the end of Run's ctx.
	shutdownGrace = time.Second
)

// errInterrupted is about a call whose result nobody wants any more: neither a success nor a failure.
var errInterrupted = errors.New("the request was given up")

// Run asks, renews, retries and drops, until ctx ends; it is called once. It returns nil then, or
// an error if the source has calls that do not return in spite of that.
//
// However many identities there are, it uses one goroutine for the roots, and one for each call that
// the source has not returned from. A call gives its worker back when its deadline is over or its
// identity gone, also if it does not return; then it keeps only its own identity from being asked
// for again. When four calls for each worker are out, no more are made.
//
// What is held stays readable after the end, so that a shutdown does not look like a removal to
// those who watch.
func (f *Fetcher) Run(ctx context.Context) error {
	var calls sync.WaitGroup
	calls.Go(func() { f.keepRoots(ctx) })
	timer := time.NewTimer(maxSleep)
	defer timer.Stop()
	for ctx.Err() == nil {
		timer.Reset(f.step(ctx, &calls))
		select {
		case <-ctx.Done():
		case <-f.wake:
		case <-timer.C:
		}
	}
	return awaitCalls(&calls)
}

func awaitCalls(calls *sync.WaitGroup) error {
	returned := make(chan struct{})
	go func() {
		calls.Wait()
		close(returned)
	}()
	select {
	case <-returned:
		return nil
	case <-time.After(shutdownGrace):
		return fmt.Errorf("the certificate source has not returned %s after its calls were cancelled", shutdownGrace)
	}
}

// step does what is due, gives free workers their next identity, and returns how long to sleep.
func (f *Fetcher) step(ctx context.Context, calls *sync.WaitGroup) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := wallNow()
	for e := f.due.first(); e != nil && !e.due.After(now); e = f.due.first() {
		f.attend(e, now)
		f.schedule(e)
	}
	for f.running < f.cfg.Workers && f.running+f.abandoned < maxCallsOut*f.cfg.Workers {
		e := f.pop()
		if e == nil {
			break
		}
		callCtx, cancel := context.WithTimeout(ctx, f.cfg.IssueTimeout)
		a := &attempt{cancel: cancel}
		e.attempt, e.fresh = a, false
		f.running++
		f.schedule(e)
		calls.Go(func() { f.carryOut(callCtx, e, a) })
	}
	pause := maxSleep
	if e := f.due.first(); e != nil {
		pause = min(pause, max(0, e.due.Sub(now)))
	}
	return pause
}

// attend does for e what is due at now. It needs f.mu.
func (f *Fetcher) attend(e *entry, now time.Time) {
	if e.pods == 0 {
		f.drop(e)
		return
	}
	if e.svid != nil && !e.holds(now) {
		f.cfg.Logger.Error("certificate expired before the CA renewed it", "identity", e.id, "not_after", e.svid.NotAfter, "err", e.err)
		e.svid = nil
		f.notify(e.id)
	}
	if e.attempt == nil && e.place == nil && !e.askAt.After(now) {
		f.enqueue(e)
	}
}

// carryOut is one attempt, in a goroutine of its own. When its time is up or nobody wants it any
// more, its worker is free at once, whether or not the source returns.
func (f *Fetcher) carryOut(ctx context.Context, e *entry, a *attempt) {
	defer a.cancel()
	stop := context.AfterFunc(ctx, func() { f.giveUp(e, a, ctx.Err()) })
	svid, err := f.issue(ctx, e)
	stop()
	switch ended := ctx.Err(); {
	case errors.Is(ended, context.DeadlineExceeded):
		err = f.noAnswer()
	case ended != nil:
		err = errInterrupted
	}
	f.settle(e, a, svid, err)
}

func (f *Fetcher) noAnswer() error {
	return fmt.Errorf("asking the CA: no answer within %s", f.cfg.IssueTimeout)
}

// issue makes a key, has it certified, and verifies the result. The key is new every time and
// known to nobody but the SVID returned.
func (f *Fetcher) issue(ctx context.Context, e *entry) (*SVID, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making a key: %w", err)
	}
	csr, err := newRequest(key, e.id)
	if err != nil {
		return nil, err
	}
	// The identity's last pod may have gone while the request was made: it does not leave the node then.
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("asking the CA: %w", err)
	}
	known := f.Bundle().Version
	issued, err := f.cfg.Source.Issue(ctx, e.id, csr, f.cfg.TTL)
	if err != nil {
		return nil, fmt.Errorf("asking the CA: %w", err)
	}
	svid, err := verify(issued, e.id, key, wallNow())
	if err != nil {
		return nil, fmt.Errorf("discarding what the CA returned: %w", err)
	}
	// A late answer must not change the roots either.
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("asking the CA: %w", err)
	}
	if err := sleep(ctx, f.adoptRoots(issued.Roots, known)); err != nil {
		return nil, fmt.Errorf("waiting for the new roots to reach everybody: %w", err)
	}
	return svid, nil
}

// settle takes the result of an attempt that has returned.
func (f *Fetcher) settle(e *entry, a *attempt, svid *SVID, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	e.attempt = nil
	switch {
	case a.abandoned:
		// Not wanted, or too late. If it is wanted again, askAt says since when.
		f.abandoned--
	case errors.Is(err, errInterrupted):
		f.running--
	case err != nil:
		f.running--
		f.fail(e, err)
	default:
		f.running--
		f.publish(e, svid)
	}
	if e.pods == 0 && e.svid == nil {
		f.drop(e)
	}
	f.schedule(e)
	f.wakeUp()
}

// giveUp ends an attempt whose ctx has ended: its time is up, or Run ends.
func (f *Fetcher) giveUp(e *entry, a *attempt, cause error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if e.attempt != a || a.abandoned {
		return
	}
	f.abandon(a)
	if errors.Is(cause, context.DeadlineExceeded) {
		f.fail(e, f.noAnswer())
	}
	f.wakeUp()
}

// abandon takes the worker from an attempt, whether or not the source returns from it. It needs f.mu.
func (f *Fetcher) abandon(a *attempt) {
	if a.abandoned {
		return
	}
	a.abandoned = true
	a.cancel()
	f.running--
	f.abandoned++
	if f.abandoned == maxCallsOut*f.cfg.Workers {
		f.cfg.Logger.Error("the certificate source does not return from its calls; no more are made until one does", "calls", f.abandoned)
	}
}

// publish makes svid the one that is served. It needs f.mu.
func (f *Fetcher) publish(e *entry, svid *SVID) {
	if e.failures > 0 {
		f.cfg.Logger.Info("certificate obtained after failures", "identity", e.id, "failures", e.failures)
	}
	f.version++
	svid.Version = f.version
	e.svid = svid
	e.err, e.denied, e.failures, e.fresh = nil, false, 0, false
	now := wallNow()
	e.askAt = now.Add(renewal(svid.NotAfter.Sub(now)))
	if !f.bundle.has(svid.anchor) {
		// The roots changed while the CA was being asked.
		e.askAt = now.Add(rotationDelay())
	}
	e.signal()
	f.notify(e.id)
}

// fail remembers why, and when to try again. It needs f.mu.
func (f *Fetcher) fail(e *entry, err error) {
	e.failures++
	wait := backoff(e.failures)
	e.askAt = wallNow().Add(wait)
	// One line when trouble begins or changes its kind, not one for every retry.
	if e.err == nil || e.err.Error() != err.Error() {
		f.cfg.Logger.Warn("no certificate from the CA", "identity", e.id, "err", err, "retry_in", wait, "failures", e.failures)
	}
	e.err = err
	e.denied = errors.Is(err, ErrDenied)
	if e.denied {
		e.signal()
	}
}

// drop lets go of e's key, and of e itself unless its attempt is still out. It needs f.mu.
//
// The reference is all that can be dropped for sure: Go's own copies inside crypto packages cannot
// be reached, and overwriting a key that a handshake is just using would break the handshake.
func (f *Fetcher) drop(e *entry) {
	e.svid = nil
	e.wipeAt = time.Time{}
	if e.attempt == nil {
		delete(f.entries, e.id)
	}
}

// enqueue puts e at the end of the lane that is right for it now, unless it is there. It needs f.mu.
func (f *Fetcher) enqueue(e *entry) {
	lane := f.normal
	if e.fresh || e.waiters > 0 {
		lane = f.urgent
	}
	if e.lane == lane {
		return // it keeps its turn
	}
	f.dequeue(e)
	e.lane, e.place = lane, lane.PushBack(e)
}

// dequeue takes e out of its lane. It needs f.mu.
func (f *Fetcher) dequeue(e *entry) {
	if e.place != nil {
		e.lane.Remove(e.place)
		e.lane, e.place = nil, nil
	}
}

// pop takes the next entry that is to be asked for, nil without. It needs f.mu.
func (f *Fetcher) pop() *entry {
	for _, lane := range []*list.List{f.urgent, f.normal} {
		if first := lane.Front(); first != nil {
			e := first.Value.(*entry) // only enqueue fills the lanes
			f.dequeue(e)
			return e
		}
	}
	return nil
}

// schedule has Run attend to e when the next thing is due. It needs f.mu.
func (f *Fetcher) schedule(e *entry) { f.due.place(e, e.next()) }

// wakeUp has Run look again.
func (f *Fetcher) wakeUp() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// sleep returns when d is over, or ctx's error when that ends first.
func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

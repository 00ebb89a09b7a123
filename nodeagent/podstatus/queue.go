// SPDX-License-Identifier: Apache-2.0

package podstatus

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"
)

const (
	// maxWaiting bounds a queue. A node has a few hundred pods at most.
	maxWaiting = 4096

	// firstPause and lastPause bound the time between two attempts at the same key; it
	// doubles from one to the other.
	firstPause = time.Second
	lastPause  = time.Minute
)

// queue holds keys that something has to be done about, each once, and each with one
// worker at a time.
type queue struct {
	wake chan struct{} // holds a token when a key may be due earlier than the run waits

	mu      sync.Mutex
	waiting map[string]*turn
}

// turn is when a key's turn is.
type turn struct {
	at    time.Time
	pause time.Duration // before the next attempt, if this one fails
	busy  bool          // a worker has it
	again bool          // it was put once more meanwhile
}

func newQueue() *queue {
	return &queue{wake: make(chan struct{}, 1), waiting: map[string]*turn{}}
}

// put asks for the key to be done after a delay. One that waits already keeps the time
// it has. It returns false if the queue is full.
func (q *queue) put(key string, delay time.Duration) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	t, waits := q.waiting[key]
	switch {
	case waits:
		t.again = t.busy
		return true
	case len(q.waiting) >= maxWaiting:
		return false
	}
	q.waiting[key] = &turn{at: time.Now().Add(delay), pause: firstPause}
	q.signal()
	return true
}

func (q *queue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// run has workers do what is due until ctx ends. A key for which do returns an error is
// tried again.
func (q *queue) run(ctx context.Context, workers int, do func(ctx context.Context, key string) error) {
	var working sync.WaitGroup
	defer working.Wait()
	places := make(chan struct{}, workers)
	for {
		select {
		case places <- struct{}{}:
		case <-ctx.Done():
			return
		}
		key, ok := q.next(ctx)
		if !ok {
			return
		}
		working.Go(func() {
			q.done(key, do(ctx, key))
			<-places
		})
	}
}

// next waits for a key to be due and takes it, false at the end of ctx.
func (q *queue) next(ctx context.Context) (string, bool) {
	for {
		key, wait := q.take(time.Now())
		if wait <= 0 {
			return key, true
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return "", false
		case <-q.wake:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// take takes the key that has been due for longest, or says how long none will be.
func (q *queue) take(now time.Time) (key string, wait time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	var first *turn
	for k, t := range q.waiting {
		if !t.busy && (first == nil || t.at.Before(first.at)) {
			key, first = k, t
		}
	}
	if first == nil {
		return "", time.Hour
	}
	if wait = first.at.Sub(now); wait <= 0 {
		first.busy = true
	}
	return key, wait
}

// done ends a turn. A key that failed, or was put meanwhile, waits anew.
func (q *queue) done(key string, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	t := q.waiting[key]
	switch {
	case err != nil:
		// Spread by a fifth either way, so that nodes that failed together part.
		t.at = time.Now().Add(t.pause*4/5 + rand.N(t.pause*2/5))
		t.pause = min(2*t.pause, lastPause)
	case t.again:
		t.at, t.pause = time.Now(), firstPause
	default:
		delete(q.waiting, key)
	}
	t.busy, t.again = false, false
	q.signal()
}

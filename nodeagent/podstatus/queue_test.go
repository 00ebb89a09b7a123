// SPDX-License-Identifier: Apache-2.0

package podstatus

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"
)

// attempts notes when which key was tried, and fails as often as it is told to.
type attempts struct {
	began time.Time

	mu    sync.Mutex
	fail  map[string]int
	times map[string][]time.Duration
}

func (a *attempts) do(_ context.Context, key string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.times[key] = append(a.times[key], time.Since(a.began))
	if a.fail[key] > 0 {
		a.fail[key]--
		return errors.New("not yet")
	}
	return nil
}

func withQueue(t *testing.T, test func(*queue, *attempts)) {
	synctest.Test(t, func(t *testing.T) {
		q := newQueue()
		a := &attempts{began: time.Now(), fail: map[string]int{}, times: map[string][]time.Duration{}}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			q.run(ctx, 2, a.do)
			close(ended)
		}()
		test(q, a)
		cancel()
		<-ended
	})
}

// Each key has pauses of its own, which grow to a minute, and nobody waits for another.
func TestQueueTriesAgain(t *testing.T) {
	withQueue(t, func(q *queue, a *attempts) {
		a.fail["bad"] = 10
		q.put("bad", 0)
		q.put("good", 0)
		time.Sleep(20 * time.Minute)
		synctest.Wait()
		if len(a.times["bad"]) != 11 || len(a.times["good"]) != 1 {
			t.Fatalf("tried at %v", a.times)
		}
		for i, pause := 1, firstPause; i < len(a.times["bad"]); i, pause = i+1, min(2*pause, lastPause) {
			got := a.times["bad"][i] - a.times["bad"][i-1]
			if got < pause*4/5 || got > pause*6/5 {
				t.Errorf("pause %d is %s, want about %s", i, got, pause)
			}
		}
		if len(q.waiting) != 0 {
			t.Errorf("%v are left", q.waiting)
		}
	})
}

// A key that is put again and again is done once for all that came before its turn, and
// once more for what came while it had it.
func TestQueueGathers(t *testing.T) {
	withQueue(t, func(q *queue, a *attempts) {
		for range 5 {
			q.put("pod", time.Minute)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if got := a.times["pod"]; len(got) != 1 || got[0] != time.Minute {
			t.Errorf("done at %v, want once after a minute", got)
		}
		q.mu.Lock()
		q.waiting["busy"] = &turn{busy: true, pause: firstPause}
		q.mu.Unlock()
		q.put("busy", 0)
		q.done("busy", nil)
		synctest.Wait()
		if got := a.times["busy"]; len(got) != 1 {
			t.Errorf("done %d times more, want once", len(got))
		}
	})
}

func TestQueueIsBounded(t *testing.T) {
	q := newQueue()
	for i := range maxWaiting {
		if !q.put(fmt.Sprint(i), 0) {
			t.Fatalf("full at %d", i)
		}
	}
	if q.put("one more", 0) || !q.put("0", 0) {
		t.Error("it takes another key, or refuses one that it has")
	}
}

func TestShorten(t *testing.T) {
	for message, want := range map[string]string{
		"short":                        "short",
		"no\xfftext":                   "no?text",
		strings.Repeat("x", 1024):      strings.Repeat("x", 1024),
		strings.Repeat("x", 1025):      strings.Repeat("x", 1021) + "…",
		"x" + strings.Repeat("ä", 600): "x" + strings.Repeat("ä", 510) + "…",
	} {
		got := shorten(message)
		if got != want || !utf8.ValidString(got) || len(got) > maxMessage {
			t.Errorf("%.20q of %d bytes becomes %.20q… of %d bytes, want %d", message, len(message), got, len(got), len(want))
		}
	}
}

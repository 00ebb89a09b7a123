// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// Whatever is put in, moved and taken out, what comes out is what is due, in order.
func TestQueue(t *testing.T) {
	const subjects, rounds = 50, 5000
	now := time.Now()
	var q queue
	all := make([]*subject, subjects)
	for i := range all {
		all[i] = &subject{}
	}
	for range rounds {
		s := all[rand.IntN(subjects)]
		switch rand.IntN(4) {
		case 0:
			q.remove(s)
		case 1:
			s.due, s.prompted = now.Add(rand.N(time.Minute)), time.Time{}
			q.put(s)
		case 2:
			s.prompted = now.Add(rand.N(time.Minute))
			q.put(s)
		case 3:
			checkDue(t, &q, all, now.Add(rand.N(time.Minute)))
		}
	}
}

func checkDue(t *testing.T, q *queue, all []*subject, now time.Time) {
	t.Helper()
	var want *subject
	for _, s := range all {
		if s.queued && (want == nil || s.at().Before(want.at())) {
			want = s
		}
	}
	got, pause := q.due(now, time.Hour)
	switch {
	case want == nil:
		if got != nil || pause != time.Hour {
			t.Fatalf("an empty queue has %v due, after %s", got, pause)
		}
	case want.at().After(now):
		if got != nil || pause != want.at().Sub(now) {
			t.Fatalf("%v is due after %s, want nothing before %s", got, pause, want.at().Sub(now))
		}
	case got == nil || got.at() != want.at() || got.queued || slices.Contains(q.byTime, got):
		t.Fatalf("%v is due, want %v, out of the queue", got, want)
	}
}

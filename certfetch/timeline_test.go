// SPDX-License-Identifier: Apache-2.0

package certfetch

import (
	"math/rand/v2"
	"testing"
	"time"
)

// Whatever is placed, moved and removed, first is the earliest of what is there.
func TestTimelineFirstIsTheEarliest(t *testing.T) {
	var line timeline
	base := time.Date(2026, time.May, 1, 0, 0, 0, 0, time.UTC)
	entries := make([]*entry, 50)
	for i := range entries {
		entries[i] = &entry{index: notInTimeline}
	}
	due := make(map[*entry]time.Time)
	for range 5000 {
		e := entries[rand.N(len(entries))]
		if rand.N(4) == 0 {
			line.place(e, time.Time{})
			delete(due, e)
		} else {
			due[e] = base.Add(rand.N(time.Hour))
			line.place(e, due[e])
		}
		if len(line) != len(due) {
			t.Fatalf("%d entries, want %d", len(line), len(due))
		}
		first := line.first()
		if (first == nil) != (len(due) == 0) {
			t.Fatalf("first is %v of %d", first, len(due))
		}
		for other, at := range due {
			if at.Before(due[first]) {
				t.Fatalf("first is due at %s, another at %s", due[first], at)
			}
			if line[other.index] != other {
				t.Fatal("an entry does not know its place")
			}
		}
	}
	for line.first() != nil {
		line.remove(line.first())
	}
	line.remove(entries[0]) // not there: nothing
}

func TestBackoffAndRenewalStayInTheirBounds(t *testing.T) {
	for failures := 1; failures < 200; failures++ {
		most := maxBackoff
		if failures <= 9 { // 200 ms doubled eight times is 51.2 s
			most = firstBackoff << (failures - 1)
		}
		if wait := backoff(failures); wait < most/2 || wait > most {
			t.Errorf("backoff(%d) = %s, want %s to %s", failures, wait, most/2, most)
		}
	}
	for _, lifetime := range []time.Duration{0, time.Nanosecond, time.Second, time.Minute, 24 * time.Hour, 90 * 24 * time.Hour} {
		half := max(lifetime/2, minRenewal)
		if wait := renewal(lifetime); wait < half*9/10 || wait > half*11/10 {
			t.Errorf("renewal(%s) = %s, want half of it ± 10 %%", lifetime, wait)
		}
	}
}

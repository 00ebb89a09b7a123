// SPDX-License-Identifier: Apache-2.0

package audit_test

import (
	"testing"
	"time"

	"ambientd/iptables/netnswatch"
	"ambientd/nodeagent/audit"
	"ambientd/nodeagent/podnetns"
)

// opened returns a second Netns of the same network namespace, as the ADD of a second
// interface makes.
func opened(t *testing.T, ns *podnetns.Netns) *podnetns.Netns {
	t.Helper()
	host, err := podnetns.OpenHost()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { host.Close() })
	again, err := host.Adopt(ns.File())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { again.Close() })
	return again
}

// watchedBy returns what the watcher reads the packet rules of a pod through.
func (w *world) watchedBy(ns *podnetns.Netns) *podnetns.Netns {
	w.mu.Lock()
	defer w.mu.Unlock()
	for number, cookie := range w.numbers {
		if cookie == ns.Key().String() {
			return w.open[number]
		}
	}
	return nil
}

// The pins hold another descriptor of the same netns now, and have closed the one that the
// watcher was given.
func TestWatchesWhatIsPinned(t *testing.T) {
	spaces := namespaces(t, 1)
	second, third := opened(t, spaces[0]), opened(t, spaces[0])
	in(t, spaces, nil, func(w *world, _ *audit.Auditor) {
		pass(time.Millisecond)
		w.enrol("uid-0", second)
		if w.watchedBy(second) != second {
			t.Error("after a second ADD the netns is watched through a descriptor that is closed")
		}
		// An ADD that fails after the pin changes nothing that is told of; but the watcher cannot read
		// any more, which is a notification.
		w.mu.Lock()
		w.netns["uid-0"] = third
		w.mu.Unlock()
		w.change("uid-0")
		pass(time.Second)
		if w.watchedBy(third) != third {
			t.Error("after an ADD that failed the netns is watched through a descriptor that is closed")
		}
	})
}

// The number of a netns that is gone is another's before its end is told.
func TestNumberIsGivenAgain(t *testing.T) {
	spaces := namespaces(t, 2)
	in(t, spaces[:1], nil, func(w *world, _ *audit.Auditor) {
		pass(time.Millisecond)
		w.mu.Lock()
		number := w.last
		w.last-- // the next gets the same
		w.mu.Unlock()
		w.enrol("uid-1", spaces[1])
		w.enrol("uid-0", nil)
		if w.watchedBy(spaces[1]) == nil {
			t.Error("the netns that has the number now is not watched any more")
		}
		now := time.Now()
		w.events <- number
		pass(time.Second)
		if w.after("uid-1", now) == 0 || number == netnswatch.Own {
			t.Error("a notification of the netns that has the number now prompts nothing")
		}
	})
}

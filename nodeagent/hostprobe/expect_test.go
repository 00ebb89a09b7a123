// SPDX-License-Identifier: Apache-2.0

package hostprobe_test

import (
	"context"
	"errors"
	"iter"
	"net/netip"
	"testing"

	"ambientd/iptables/redirection"
)

// pods yields each of the targets as a pod of its own.
func pods(t *testing.T, targets ...string) iter.Seq2[[]netip.Addr, []uint16] {
	return func(yield func([]netip.Addr, []uint16) bool) {
		for _, target := range targets {
			if !yield(parse(t, target)) {
				return
			}
		}
	}
}

// TestExpect: what is expected is written before it is added, is no difference meanwhile, and
// goes with the expectation unless it was added.
func TestExpect(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		r := newRig(t, b)
		r.settle()
		r.add("p1", "10.0.0.1")
		added := 0
		r.kernel.before = func(op string, _ redirection.HostEntry) error {
			if op == "add" {
				added++
			}
			return nil
		}
		done, err := r.Expect(t.Context(), pods(t, "10.0.0.1", "10.0.0.2", "fd00::2", "10.0.0.3", "10.0.0.3"))
		r.must(err)
		if added != 3 {
			t.Errorf("%d entries were written, want 3", added)
		}
		r.holds("10.0.0.1", "10.0.0.2", "10.0.0.3", "fd00::2")
		r.add("p2", "10.0.0.2", "fd00::2")
		if added != 3 {
			t.Error("what was expected was written again")
		}
		r.must(r.Repair(t.Context()))
		r.holds("10.0.0.1", "10.0.0.2", "10.0.0.3", "fd00::2")
		r.must(done(t.Context()))
		r.holds("10.0.0.1", "10.0.0.2", "fd00::2")
		r.remove("p2")
		r.must(done(t.Context()))
		r.holds("10.0.0.1")
	})
}

// TestRestWhileExpected: pods on their way in need the rule, and the entries that are there.
func TestRestWhileExpected(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		r := newRig(t, b)
		r.settle()
		done, err := r.Expect(t.Context(), pods(t, "10.0.0.1"))
		r.must(err)
		r.must(r.Rest(t.Context()))
		r.holds("10.0.0.1")
		r.add("p1", "10.0.0.1")
		r.must(done(t.Context()))
		r.holds("10.0.0.1")
	})
}

// TestExpectRefused: an expectation that fails leaves nothing, and keeps nobody from adding.
func TestExpectRefused(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		r := newRig(t, b)
		r.settle()
		r.add("p1", "10.0.0.1")
		r.kernel.before = func(op string, _ redirection.HostEntry) error {
			if op == "add" {
				return errKernel
			}
			return nil
		}
		done, err := r.Expect(t.Context(), pods(t, "10.0.0.2", "10.0.0.3"))
		if !errors.Is(err, errKernel) {
			t.Errorf("the kernel refused, and the error is %v", err)
		}
		r.must(done(t.Context()))
		r.kernel.before = nil
		r.holds("10.0.0.1")
		r.add("p2", "10.0.0.2")
		r.holds("10.0.0.1", "10.0.0.2")

		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := r.Expect(ctx, pods(t, "10.0.0.4")); !errors.Is(err, context.Canceled) {
			t.Errorf("after the deadline: %v", err)
		}
	})
}

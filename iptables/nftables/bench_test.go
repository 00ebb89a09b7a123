// SPDX-License-Identifier: Apache-2.0

package nftables_test

import (
	"slices"
	"testing"
	"time"

	google "github.com/google/nftables"

	"ambientd/iptables/nftables"
	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

// operation is one of the backend's, in the namespace that run enters.
type operation func(run redirection.Runner) error

// inFreshNetns times measured once in each of b.N namespaces, which before has prepared, and reports the median and the
// fastest tenth too: a fresh namespace costs the kernel far more than the operation does, and disturbs it now and then, as
// do other users of the machine.
func inFreshNetns(b *testing.B, before, measured operation) {
	b.Helper()
	b.ReportAllocs()
	b.StopTimer()
	took := make([]time.Duration, 0, b.N)
	for range b.N {
		run := netnstest.New(b).Runner()
		if err := before(run); err != nil {
			b.Fatal(err)
		}
		b.StartTimer() // stops the world for a moment
		start := time.Now()
		err := measured(run)
		took = append(took, time.Since(start))
		b.StopTimer()
		if err != nil {
			b.Fatal(err)
		}
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "median-ns/op")
	b.ReportMetric(float64(took[len(took)/10].Nanoseconds()), "p10-ns/op")
}

// operations returns those of a backend that has seen its rules once, as it has after the first pod of a node.
func operations(b *testing.B) (apply, verify, remove operation) {
	b.Helper()
	backend, err := nftables.New()
	if err != nil {
		b.Fatal(err)
	}
	opts := redirection.DefaultOptions()
	apply = func(run redirection.Runner) error {
		_, err := backend.Apply(b.Context(), run, opts)
		return err
	}
	verify = func(run redirection.Runner) error {
		_, differences, err := backend.Verify(b.Context(), run, opts)
		for _, d := range differences {
			b.Error(d)
		}
		return err
	}
	remove = func(run redirection.Runner) error { return backend.Remove(b.Context(), run) }
	first := netnstest.New(b).Runner()
	for _, op := range []operation{apply, verify} {
		if err := op(first); err != nil {
			b.Fatal(err)
		}
	}
	return apply, verify, remove
}

func nothing(redirection.Runner) error { return nil }

func BenchmarkApply(b *testing.B) {
	apply, _, _ := operations(b)
	inFreshNetns(b, nothing, apply)
}

func BenchmarkApplyAgain(b *testing.B) {
	apply, _, _ := operations(b)
	inFreshNetns(b, apply, apply)
}

// BenchmarkChange changes a pod's options: of what is in place only what differs is replaced.
func BenchmarkChange(b *testing.B) {
	apply, verify, _ := operations(b)
	backend, err := nftables.New()
	if err != nil {
		b.Fatal(err)
	}
	other := redirection.DefaultOptions()
	other.ExcludeOutboundPorts = []redirection.PortRange{{First: 5432, Last: 5432}}
	with := func(opts redirection.Options) operation {
		return func(run redirection.Runner) error {
			if _, err := backend.Apply(b.Context(), run, opts); err != nil {
				return err
			}
			_, _, err := backend.Verify(b.Context(), run, opts)
			return err
		}
	}
	first := netnstest.New(b).Runner()
	for _, op := range []operation{apply, verify, with(other), with(redirection.DefaultOptions())} {
		if err := op(first); err != nil {
			b.Fatal(err)
		}
	}
	inFreshNetns(b, with(redirection.DefaultOptions()), func(run redirection.Runner) error {
		_, err := backend.Apply(b.Context(), run, other)
		return err
	})
}

// BenchmarkRepair replaces rules that somebody has emptied.
func BenchmarkRepair(b *testing.B) {
	apply, _, _ := operations(b)
	damage := func(run redirection.Runner) error {
		if err := apply(run); err != nil {
			return err
		}
		return run(func() error {
			// Closing a socket after it has deleted something keeps others waiting for a while.
			conn, err := google.New(google.AsLasting())
			if err != nil {
				return err
			}
			b.Cleanup(func() { conn.CloseLasting() })
			_, chain := ours("nat_output")
			conn.FlushChain(chain)
			return conn.Flush()
		})
	}
	inFreshNetns(b, damage, apply)
}

func BenchmarkVerify(b *testing.B) {
	apply, verify, _ := operations(b)
	inFreshNetns(b, apply, verify)
}

func BenchmarkRemove(b *testing.B) {
	apply, _, remove := operations(b)
	inFreshNetns(b, apply, remove)
}

// BenchmarkRunner is what entering a namespace and leaving it takes in all the others.
func BenchmarkRunner(b *testing.B) {
	inFreshNetns(b, nothing, func(run redirection.Runner) error { return run(func() error { return nil }) })
}

// BenchmarkHostEntry adds and deletes one entry of the host's sets: what an enrolment and a withdrawal wait for.
func BenchmarkHostEntry(b *testing.B) {
	backend, err := nftables.New()
	if err != nil {
		b.Fatal(err)
	}
	run := netnstest.New(b).Runner()
	here := redirection.Runner(func(fn func() error) error { return fn() })
	opts := hostOptions()
	entry := entries(b, "10.0.0.2")[0]
	// The agent's threads are in the host's namespace already.
	err = run(func() error {
		if err := backend.EnsureHost(b.Context(), here, opts); err != nil {
			return err
		}
		b.ReportAllocs()
		for b.Loop() {
			if err := backend.AddEntries(b.Context(), here, opts, entry); err != nil {
				return err
			}
			if err := backend.DelEntries(b.Context(), here, opts, entry); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"testing"

	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

// bench runs one operation per iteration in a netns that prepare has made, with
// only the operation timed. A fresh netns each time, since that is what a node
// agent meets.
func bench(b *testing.B, variant Variant, prepare, operation func(ctx context.Context, backend *Backend, run redirection.Runner) error) {
	netnstest.Require(b)
	backend, err := New(b.Context(), Config{Variant: variant})
	if err != nil {
		b.Skip(err)
	}
	for b.Loop() {
		b.StopTimer()
		run := netnstest.New(b).Runner()
		if err := prepare(b.Context(), backend, run); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		if err := operation(b.Context(), backend, run); err != nil {
			b.Fatal(err)
		}
	}
}

func nothing(context.Context, *Backend, redirection.Runner) error { return nil }

func applyDefault(ctx context.Context, backend *Backend, run redirection.Runner) error {
	_, err := backend.Apply(ctx, run, redirection.DefaultOptions())
	return err
}

// twoRestores is the yardstick: the same rules by bare runs, one per family.
func twoRestores(ctx context.Context, backend *Backend, run redirection.Runner) error {
	for _, family := range redirection.DualStack.Each() {
		want, err := render(redirection.DefaultOptions(), redirection.DualStack, family)
		if err != nil {
			return err
		}
		if err := backend.programs[family].Restore(ctx, run, creation(want)); err != nil {
			return err
		}
	}
	return nil
}

func eachVariantBench(b *testing.B, prepare, operation func(context.Context, *Backend, redirection.Runner) error) {
	for _, variant := range []Variant{NFTables, Legacy} {
		b.Run(string(variant), func(b *testing.B) { bench(b, variant, prepare, operation) })
	}
}

func BenchmarkTwoRestores(b *testing.B) { eachVariantBench(b, nothing, twoRestores) }

func BenchmarkApply(b *testing.B) { eachVariantBench(b, nothing, applyDefault) }

func BenchmarkApplyAgain(b *testing.B) { eachVariantBench(b, applyDefault, applyDefault) }

// BenchmarkReplace applies other options, which changes NAT in both families.
func BenchmarkReplace(b *testing.B) {
	eachVariantBench(b, applyDefault, func(ctx context.Context, backend *Backend, run redirection.Runner) error {
		opts := redirection.DefaultOptions()
		opts.ExcludeOutboundPorts = []redirection.PortRange{redirection.SinglePort(5432)}
		_, err := backend.Apply(ctx, run, opts)
		return err
	})
}

func BenchmarkVerify(b *testing.B) {
	eachVariantBench(b, applyDefault, func(ctx context.Context, backend *Backend, run redirection.Runner) error {
		_, _, err := backend.Verify(ctx, run, redirection.DefaultOptions())
		return err
	})
}

func BenchmarkRemove(b *testing.B) {
	eachVariantBench(b, applyDefault, func(ctx context.Context, backend *Backend, run redirection.Runner) error {
		return backend.Remove(ctx, run)
	})
}

// SPDX-License-Identifier: Apache-2.0

package certfetch_test

import (
	"context"
	"fmt"
	"syscall"
	"testing"
	"time"

	"ambientd/certfetch"
	"ambientd/certfetch/ca"
	"ambientd/certfetch/spiffeid"
)

// benchFetcher runs a fetcher over the built-in CA for the length of the benchmark.
func benchFetcher(b *testing.B) *certfetch.Fetcher {
	b.Helper()
	td, err := spiffeid.ParseTrustDomain("cluster.local")
	if err != nil {
		b.Fatal(err)
	}
	authority, err := ca.New(ca.Config{TrustDomain: td})
	if err != nil {
		b.Fatal(err)
	}
	fetcher, err := certfetch.New(certfetch.Config{Source: authority, Linger: certfetch.DefaultLinger})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	done := make(chan error, 1)
	go func() { done <- fetcher.Run(ctx) }()
	b.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			b.Error(err)
		}
	})
	return fetcher
}

func benchID(b *testing.B, n int) spiffeid.ID {
	b.Helper()
	id, err := spiffeid.Parse(fmt.Sprintf("spiffe://cluster.local/ns/bench/sa/account-%d", n))
	if err != nil {
		b.Fatal(err)
	}
	return id
}

// BenchmarkIssuance is all that a new identity costs the node with the built-in CA: registration,
// key, CSR, the CA's checks and signature, verification. CPU counts all threads, the garbage
// collector's too.
func BenchmarkIssuance(b *testing.B) {
	fetcher := benchFetcher(b)
	ctx, cancel := context.WithTimeout(b.Context(), 10*time.Minute)
	defer cancel()
	n, before := 0, cpuTime(b)
	b.ReportAllocs()
	for b.Loop() {
		id := benchID(b, n)
		uid := id.String()
		n++
		if err := fetcher.Register(uid, id); err != nil {
			b.Fatal(err)
		}
		if err := fetcher.Wait(ctx, id); err != nil {
			b.Fatal(err)
		}
		fetcher.Unregister(uid)
	}
	b.ReportMetric(float64((cpuTime(b)-before).Microseconds())/float64(n), "cpu-µs/op")
}

// BenchmarkRegisterHeld is what another pod of an identity costs, with so many identities held: no
// crypto, and nothing that grows with them.
func BenchmarkRegisterHeld(b *testing.B) {
	for _, held := range []int{10, 1000} {
		b.Run(fmt.Sprintf("held=%d", held), func(b *testing.B) {
			fetcher := benchFetcher(b)
			for n := range held {
				id := benchID(b, n)
				if err := fetcher.Register(id.String(), id); err != nil {
					b.Fatal(err)
				}
			}
			for n := range held {
				if err := fetcher.Wait(b.Context(), benchID(b, n)); err != nil {
					b.Fatal(err)
				}
			}
			id := benchID(b, 0)
			b.ReportAllocs()
			for b.Loop() {
				if err := fetcher.Register("another", id); err != nil {
					b.Fatal(err)
				}
				if err := fetcher.Wait(b.Context(), id); err != nil {
					b.Fatal(err)
				}
				fetcher.Unregister("another")
			}
		})
	}
}

// cpuTime is what this process has used, in all threads.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

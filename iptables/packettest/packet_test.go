// SPDX-License-Identifier: Apache-2.0

// Package packettest sends real packets through real network namespaces and
// looks where they end: the same table of flows for every backend and both IP
// families. It owns the question whether redirection does what a node proxy
// relies on. It refuses to look at rules; that is for each backend's own tests.
//
// A test that could not fail would prove nothing, so each flow is also sent
// without redirection, and each row of the model is taken out in turn to see that
// a flow then ends elsewhere.
package packettest_test

import (
	"context"
	"os"
	"testing"
	"time"

	"ambientd/iptables/iptables"
	"ambientd/iptables/nftables"
	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }

// backend is what both backends are.
type backend interface {
	podRules
	othersRules
	hostRule
}

type podRules interface {
	Apply(ctx context.Context, ns redirection.Netns, opts redirection.Options) (redirection.Families, error)
	Verify(ctx context.Context, ns redirection.Netns, opts redirection.Options) (redirection.Families, []redirection.Difference, error)
	HasOwn(ctx context.Context, run redirection.Runner) (bool, error)
	Remove(ctx context.Context, ns redirection.Netns) error
}

type othersRules interface {
	HasForeign(ctx context.Context, run redirection.Runner) (bool, error)
	RemoveForeign(ctx context.Context, run redirection.Runner) (bool, error)
	RemoveOther(ctx context.Context, run redirection.Runner) (bool, error)
}

type hostRule interface {
	EnsureHost(ctx context.Context, run redirection.Runner, opts redirection.HostOptions) error
	SetEntries(ctx context.Context, run redirection.Runner, opts redirection.HostOptions, entries []redirection.HostEntry) error
}

// Names of the backends, and of the variants of one.
const (
	onNFTables = "nftables"
	onNFT      = "iptables-nft"
	onLegacy   = "iptables-legacy"
)

func backendNames() []string { return []string{onNFTables, onNFT, onLegacy} }

// newBackend skips the test where this system has no such backend.
func newBackend(t *testing.T, name string) backend {
	t.Helper()
	netnstest.Require(t)
	if name == onNFTables {
		b, err := nftables.New()
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	b, err := iptables.New(t.Context(), iptables.Config{Variant: variantOf(name)})
	if err != nil {
		t.Skip(err)
	}
	return b
}

func variantOf(name string) iptables.Variant {
	if name == onLegacy {
		return iptables.Legacy
	}
	return iptables.NFTables
}

// eachBackend runs test with every backend, and variant of one, at the same time:
// each test has namespaces of its own.
func eachBackend(t *testing.T, test func(t *testing.T, b backend)) {
	t.Parallel()
	for _, name := range backendNames() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, newBackend(t, name))
		})
	}
}

// apply applies to the pod and expects the families given.
func apply(t *testing.T, b backend, n *network, opts redirection.Options, want redirection.Families) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	families, err := b.Apply(ctx, n.pod.Runner(), opts)
	if err != nil {
		t.Fatal(err)
	}
	if families != want {
		t.Errorf("redirection is for %s, want %s", families, want)
	}
	families, differences, err := b.Verify(ctx, n.pod.Runner(), opts)
	if err != nil {
		t.Fatal(err)
	}
	if families != want || len(differences) != 0 {
		t.Errorf("verified for %s, want %s; differences: %v", families, want, differences)
	}
}

// TestFlows sends every flow of the table. Flows with the same options share a
// network: none may be disturbed by those before it.
func TestFlows(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		networks := map[string]*network{}
		for _, fl := range flows() {
			n := networks[fl.opts.Key()]
			if n == nil {
				n = newNetwork(t, nil)
				apply(t, b, n, fl.opts, redirection.DualStack)
				networks[fl.opts.Key()] = n
			}
			expect(t, n, fl, fl.at, redirection.DualStack)
		}
	})
}

// expect sends the flow in each family and compares where it ends.
func expect(t *testing.T, n *network, fl flow, at string, families redirection.Families) {
	for _, f := range families.Each() {
		t.Run(fl.name+"/"+f.String(), func(t *testing.T) {
			if got, want := fl.run(t, n, f), fl.want(at); got != want {
				t.Errorf("it ended at %+v, want %+v", got, want)
			}
		})
	}
}

// TestWithoutRedirection sends every flow in a pod that has none, and in one that
// had it and was withdrawn: the same packets end where they would without a mesh.
func TestWithoutRedirection(t *testing.T) {
	bare := func(t *testing.T, n *network) {
		for _, fl := range flows() {
			for _, f := range redirection.DualStack.Each() {
				t.Run(fl.name+"/"+f.String(), func(t *testing.T) {
					got, want := fl.run(t, n, f), fl.want(fl.bare)
					got.original, want.original = nowhere, nowhere // connection tracking may be on or off
					if got != want {
						t.Errorf("it ended at %+v, want %+v", got, want)
					}
				})
			}
		}
	}
	t.Parallel()
	t.Run("never", func(t *testing.T) {
		netnstest.Require(t)
		bare(t, newNetwork(t, nil))
	})
	t.Run("withdrawn", func(t *testing.T) {
		eachBackend(t, func(t *testing.T, b backend) {
			n := newNetwork(t, nil)
			apply(t, b, n, with(reroute), redirection.DualStack)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			if err := b.Remove(ctx, n.pod.Runner()); err != nil {
				t.Fatal(err)
			}
			bare(t, n)
		})
	})
}

// SPDX-License-Identifier: Apache-2.0

// Package growth_test shows that a pod that has come and gone leaves nothing behind: no
// descriptor, thread, goroutine or memory of this process, no network namespace, and no
// memory of the kernel's.
package growth_test

import (
	"context"
	"os"
	"os/exec"
	"testing"

	"ambientd/iptables/iptables"
	"ambientd/iptables/nftables"
	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }

const (
	// roundsPerNetns is how often a pod's rules come and go before its netns does.
	roundsPerNetns = 20
	// warmUp is by how much fewer the rounds are in which caches fill and the runtime gets its
	// threads: still more of them than there are variants of options.
	warmUp = 5
	// mostTimes is how many times the rounds are repeated while something else seems to make
	// the kernel's memory grow: that becomes less for each round, unlike what rounds leave.
	mostTimes = 10
)

// backend is what both backends are to this test.
type backend interface {
	Apply(ctx context.Context, ns redirection.Netns, opts redirection.Options) (redirection.Families, error)
	Verify(ctx context.Context, ns redirection.Netns, opts redirection.Options) (redirection.Families, []redirection.Difference, error)
	Remove(ctx context.Context, ns redirection.Netns) error
}

func TestNFTablesDoesNotGrow(t *testing.T) {
	netnstest.Require(t)
	b, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	rounds := 2000
	if testing.Short() {
		rounds = 200
	}
	g := newGrower(t, b, rounds)
	t.Run("kernel's memory", g.slab)
	g.before.awaitSame(t)
}

// A round of iptables starts processes and takes a hundred times as long, so there are
// fewer of them: too few for the kernel's memory to stand out from what else the machine
// does. What they leave there is of the same kind.
func TestIPTablesDoesNotGrow(t *testing.T) {
	netnstest.Require(t)
	for _, program := range []string{"iptables-nft-restore", "ip6tables-nft-restore"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("%s is needed: %v", program, err)
		}
	}
	b, err := iptables.New(t.Context(), iptables.Config{Variant: iptables.NFTables})
	if err != nil {
		t.Fatal(err)
	}
	rounds := 200
	if testing.Short() {
		rounds = 20
	}
	g := newGrower(t, b, rounds)
	g.live(t, g.rounds)
	g.before.awaitSame(t)
}

// grower lets pods come and go on one backend.
type grower struct {
	backend    backend
	rounds     int // each time
	namespaces *namespaces
	before     footprint // once caches are full and the runtime has its threads
}

func newGrower(t *testing.T, b backend, rounds int) *grower {
	t.Helper()
	g := &grower{backend: b, rounds: rounds, namespaces: newNamespaces(t)}
	g.live(t, rounds/warmUp)
	g.before = takeProcess(t)
	return g
}

// slab fails the test if the kernel's memory grows with the rounds.
func (g *grower) slab(t *testing.T) {
	before := takeSlab(t)
	for times := range mostTimes {
		g.live(t, g.rounds)
		rounds := (times + 1) * g.rounds
		grown := (takeSlab(t) - before) / int64(rounds)
		t.Logf("after %d rounds the kernel's memory has grown by %d bytes a round", rounds, grown)
		if grown < slabLimit {
			return
		}
	}
	t.Errorf("the kernel's memory grows by more than %d bytes a round", slabLimit)
}

// live has pods whose rules are applied, verified and removed, and who then end.
func (g *grower) live(t *testing.T, rounds int) {
	t.Helper()
	variants := optionVariants()
	// A test of its own, at whose end its network namespaces are closed.
	ok := t.Run("pods", func(t *testing.T) {
		for done := 0; done < rounds; {
			pod := g.namespaces.make(t)
			for range min(roundsPerNetns, rounds-done) {
				round(t, g.backend, pod, variants[done%len(variants)])
				done++
			}
		}
	})
	if !ok {
		t.FailNow()
	}
	g.namespaces.awaitGone(t)
}

// optionVariants are options of pods that follow each other in one netns.
func optionVariants() []redirection.Options {
	plain, least, excluding := redirection.DefaultOptions(), redirection.DefaultOptions(), redirection.DefaultOptions()
	least.InboundBypass, least.DNSCapture, least.IPv6 = true, false, false
	excluding.KeepEstablished, excluding.ExcludeInboundPorts = true, []redirection.PortRange{{First: 8000, Last: 8010}}
	return []redirection.Options{plain, least, excluding}
}

func round(t *testing.T, b backend, pod *netnstest.NS, opts redirection.Options) {
	t.Helper()
	if _, err := b.Apply(t.Context(), pod.Runner(), opts); err != nil {
		t.Fatal(err)
	}
	_, differences, err := b.Verify(t.Context(), pod.Runner(), opts)
	if err != nil || len(differences) > 0 {
		t.Fatalf("what was applied differs by %v (%v)", differences, err)
	}
	if err := b.Remove(t.Context(), pod.Runner()); err != nil {
		t.Fatal(err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package nftables_test

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	google "github.com/google/nftables"

	"ambientd/iptables/redirection"
)

// randomOptions returns options of which each differs from the default now and then.
func randomOptions(r *rand.Rand) redirection.Options {
	sometimes := func() bool { return r.IntN(3) == 0 }
	opts := redirection.DefaultOptions()
	opts.InboundBypass, opts.DNSCapture, opts.KeepEstablished = sometimes(), !sometimes(), sometimes()
	if sometimes() {
		opts.IPv6 = false
	}
	for range r.IntN(3) {
		first := uint16(1000 + r.IntN(5)*100)
		opts.ExcludeInboundPorts = append(opts.ExcludeInboundPorts, redirection.PortRange{First: first, Last: first + uint16(r.IntN(10))})
		opts.ExcludeOutboundPorts = append(opts.ExcludeOutboundPorts, redirection.SinglePort(first))
		opts.ExcludeOutboundCIDRs = append(opts.ExcludeOutboundCIDRs, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(r.IntN(3))}), 16))
		opts.RerouteInterfaces = append(opts.RerouteInterfaces, []string{"tap0", "tap1", "tap2"}[r.IntN(3)])
	}
	return opts
}

// exact fails the test unless somebody who knows nothing finds the namespace as the options call for.
func (p *pod) exact(opts redirection.Options) {
	p.t.Helper()
	(&pod{NS: p.NS, t: p.t, backend: newBackend(p.t), run: p.run}).verify(opts)
}

// TestChangesAreExact changes a pod's options at random, with and without others' transactions in between and a look now
// and then, and compares with what the options call for each time.
func TestChangesAreExact(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	p := newPod(t, newBackend(t))
	for step := range 150 {
		opts := randomOptions(random)
		before := p.generation()
		p.apply(opts)
		if after := p.generation(); after > before+1 {
			t.Errorf("step %d took %d transactions", step, after-before)
		}
		p.exact(opts)
		switch random.IntN(4) {
		case 0:
			p.verify(opts)
		case 1:
			p.nft(func(conn *google.Conn) error {
				conn.DelTable(conn.AddTable(&google.Table{Name: "foreign", Family: google.TableFamilyIPv4}))
				return nil
			})
		}
	}
	p.remove()
	p.empty()
}

// TestChangesLeaveTheRestAlone has the kernel's own numbers of rules say which ones are new.
func TestChangesLeaveTheRestAlone(t *testing.T) {
	backend := newBackend(t)
	first := newPod(t, backend) // from which the backend learns how the kernel counts
	opts := redirection.DefaultOptions()
	first.apply(opts)
	first.verify(opts)

	p := newPod(t, backend)
	p.apply(opts)
	chains := []string{"raw_prerouting", "mangle_prerouting", "nat_prerouting", "raw_output", "mangle_output", "nat_output"}
	handles := func() map[string][]uint64 {
		all := map[string][]uint64{}
		for _, chain := range chains {
			all[chain] = p.handles(chain)
		}
		return all
	}
	before := handles()
	other := opts
	other.ExcludeOutboundPorts = []redirection.PortRange{{First: 5432, Last: 5432}, {First: 6379, Last: 6379}}
	other.ExcludeInboundPorts = []redirection.PortRange{{First: 22, Last: 22}}
	for round, change := range []struct {
		opts redirection.Options
		more map[string]int // rules than at first
	}{
		{other, map[string]int{"nat_output": 2, "nat_prerouting": 1}}, {opts, nil}, {other, map[string]int{"nat_output": 2, "nat_prerouting": 1}},
	} {
		p.apply(change.opts)
		p.exact(change.opts)
		for chain, now := range handles() {
			stayed := slices.DeleteFunc(slices.Clone(now), func(handle uint64) bool { return !slices.Contains(before[chain], handle) })
			if !slices.Equal(stayed, before[chain]) || len(now) != len(before[chain])+change.more[chain] {
				t.Errorf("round %d, chain %s: rules %v, at first %v", round, chain, now, before[chain])
			}
		}
	}
}

// TestChangeOfNothingRepairs has options that differ, rules that do not, and damage that was done meanwhile.
func TestChangeOfNothingRepairs(t *testing.T) {
	p := newPod(t, newBackend(t))
	opts := redirection.DefaultOptions()
	other := opts
	other.IPv6Uncaptured = redirection.UncapturedAllow // which is no matter where IPv6 is captured
	p.apply(opts)
	p.verify(opts)
	before := p.generation()
	p.apply(other)
	p.verify(other)
	if after := p.generation(); after != before {
		t.Errorf("%d transactions", after-before)
	}
	p.nft(func(conn *google.Conn) error {
		_, chain := ours("nat_output")
		conn.FlushChain(chain)
		return nil
	})
	p.apply(opts)
	p.exact(opts)
}

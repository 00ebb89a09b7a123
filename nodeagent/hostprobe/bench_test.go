// SPDX-License-Identifier: Apache-2.0

package hostprobe_test

import (
	"fmt"
	"net/netip"
	"testing"

	"ambientd/iptables/nftables"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/hostprobe"
	"ambientd/tools/netnstest"
)

// BenchmarkNode is what a node with 250 pods of two addresses pays: a pod that comes and
// goes, and an audit that finds nothing. The agent is in the host's netns already.
func BenchmarkNode(b *testing.B) {
	netnstest.Require(b)
	kernel, err := nftables.New()
	if err != nil {
		b.Fatal(err)
	}
	run := func(fn func() error) error { return fn() }
	defaults := redirection.DefaultOptions()
	set, err := hostprobe.New(hostprobe.Config{
		Kernel: kernel, Run: run,
		Options: redirection.HostOptions{
			ProbeSourceIPv4: defaults.ProbeSourceIPv4, ProbeSourceIPv6: defaults.ProbeSourceIPv6,
			IPv6: true, Scope: redirection.ProbeScopePod,
		},
	})
	if err != nil {
		b.Fatal(err)
	}
	add := func(i int) {
		addrs := []netip.Addr{netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), netip.AddrFrom16([16]byte{0: 0xfd, 14: byte(i >> 8), 15: byte(i)})}
		if err := set.Add(b.Context(), fmt.Sprintf("p%d", i), addrs, nil); err != nil {
			b.Fatal(err)
		}
	}
	for i := range 250 {
		add(i)
	}
	if err := set.Settle(b.Context()); err != nil {
		b.Fatal(err)
	}
	b.Run("pod", func(b *testing.B) {
		for b.Loop() {
			add(250)
			if err := set.Remove(b.Context(), "p250"); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("audit", func(b *testing.B) {
		for b.Loop() {
			if found, err := set.Verify(b.Context()); err != nil || len(found) > 0 {
				b.Fatal(found, err)
			}
		}
	})
	if err := kernel.RemoveHost(b.Context(), run); err != nil {
		b.Fatal(err)
	}
}

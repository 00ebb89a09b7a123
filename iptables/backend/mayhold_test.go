// SPDX-License-Identifier: Apache-2.0

package backend_test

import (
	"testing"

	"ambientd/iptables/nftables"
	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

// One look tells pods in which only we have programmed something from all others, also
// where somebody's tables hold nothing.
func TestMayHoldOthers(t *testing.T) {
	netnstest.Require(t)
	b, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		make func(ns *netnstest.NS)
		want bool
	}{
		"nothing":              {func(*netnstest.NS) {}, false},
		"an empty native one":  {func(ns *netnstest.NS) { command(t, ns, "table arp theirs {}", "nft", "-f", "-") }, true},
		"our name, another's":  {func(ns *netnstest.NS) { command(t, ns, "table ip ambientd {}", "nft", "-f", "-") }, true},
		"empty legacy":         {func(ns *netnstest.NS) { command(t, ns, "", "iptables-legacy", "-t", "nat", "-S") }, true},
		"empty legacy of IPv6": {func(ns *netnstest.NS) { command(t, ns, "", "ip6tables-legacy", "-t", "raw", "-S") }, true},
	} {
		for _, when := range []string{"before ours", "besides ours"} {
			t.Run(name+" "+when, func(t *testing.T) {
				ns := netnstest.New(t)
				c.make(ns)
				if when == "besides ours" {
					if _, err := b.Apply(t.Context(), ns.Runner(), redirection.DefaultOptions()); err != nil {
						t.Fatal(err)
					}
				}
				if got, err := b.MayHoldOthers(t.Context(), ns.Runner()); got != c.want || err != nil {
					t.Errorf("got %t, %v, want %t", got, err, c.want)
				}
			})
		}
	}
}

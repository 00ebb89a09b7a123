// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"slices"
	"testing"

	"ambientd/iptables/redirection"
	"ambientd/iptables/xtables"
	"ambientd/tools/netnstest"
)

// guarded returns the families in which the guardrail stands.
func guarded(t *testing.T, b *Backend, ns *netnstest.NS) redirection.Families {
	t.Helper()
	var families redirection.Families
	for family, s := range state(t, b, ns) {
		if s[filterTable] != nil && slices.ContainsFunc(s[filterTable].Chains, redirection.IsOurChain) {
			families |= family
		}
	}
	return families
}

// cutShort returns a backend whose restores end in failure after so many
// transactions, as a child does that is killed.
func cutShort(t *testing.T, config Config, transactions int) *Backend {
	t.Helper()
	putInFront(t, config.Variant, func(name, path string) string {
		if name == "iptables-save" || name == "ip6tables-save" {
			return fmt.Sprintf("exec %s \"$@\"\n", path)
		}
		return fmt.Sprintf("awk -v n=%d '{ print } /^COMMIT/ && ++done == n { exit }' >$0.$$\n%s \"$@\" <$0.$$\nrm $0.$$\nexit 9\n", transactions, path)
	})
	b, err := New(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestGuardOutlivesAFailure: wherever a replacement ends, the guardrail stands; it
// is told by Verify, and gone with the next Apply or Remove.
func TestGuardOutlivesAFailure(t *testing.T) {
	opts := redirection.DefaultOptions()
	eachVariant(t, func(t *testing.T, b *Backend) {
		for transactions := 1; transactions <= 3; transactions++ { // the fourth takes it down
			for name, end := range map[string]func(ns *netnstest.NS){
				"apply":  func(ns *netnstest.NS) { apply(t, b, ns, opts, redirection.DualStack) },
				"remove": func(ns *netnstest.NS) { remove(t, b, ns) },
			} {
				ns := netnstest.New(t)
				apply(t, b, ns, opts, redirection.DualStack)
				restore(t, b, ns, "*nat\n-F AMBIENTD_OUTPUT\nCOMMIT\n*mangle\n-F AMBIENTD_OUTPUT\nCOMMIT\n", redirection.IPv4)
				if _, err := cutShort(t, b.config, transactions).Apply(within(t), ns.Runner(), opts); err == nil {
					t.Fatal("a restore that failed was not noticed")
				}
				if got := guarded(t, b, ns); got != redirection.IPv4 {
					t.Errorf("after %d transactions the guardrail stands for %s, want ipv4", transactions, got)
				}
				_, differences, err := b.Verify(within(t), ns.Runner(), opts)
				if err != nil {
					t.Fatal(err)
				}
				if !slices.ContainsFunc(differences, func(d redirection.Difference) bool {
					return d.String() == "table filter (ipv4): unexpected chain AMBIENTD_GUARD_IN"
				}) {
					t.Errorf("Verify does not tell of the guardrail: %v", differences)
				}
				end(ns)
				if got := guarded(t, b, ns); got != 0 {
					t.Errorf("after %s the guardrail stands for %s", name, got)
				}
			}
		}
	})
}

// TestGuardWhere: it stands while NAT and another table are replaced or repaired,
// even when nothing was left of them, unless traffic is to be let by. (The golden files
// show that a pod's first rules take none.)
func TestGuardWhere(t *testing.T) {
	opts := redirection.DefaultOptions()
	const flushed = "*nat\n-F\n-X\nCOMMIT\n*mangle\n-F\n-X\nCOMMIT\n*raw\n-F\n-X\nCOMMIT\n"
	for _, c := range []struct {
		name     string
		onRepair OnRepair
		before   string // a script over applied rules
		want     redirection.Families
	}{
		{"two tables", RepairDrop, "*nat\n-F\nCOMMIT\n*raw\n-F\nCOMMIT\n", redirection.IPv4},
		{"one transaction", RepairDrop, "*nat\n-F\nCOMMIT\n", 0},
		{"all gone", RepairDrop, flushed, redirection.IPv4},
		{"two tables, let by", RepairAllow, "*nat\n-F\nCOMMIT\n*raw\n-F\nCOMMIT\n", 0},
		{"all gone, let by", RepairAllow, flushed, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			eachVariant(t, func(t *testing.T, b *Backend) {
				ns := netnstest.New(t)
				apply(t, b, ns, opts, redirection.DualStack)
				restore(t, b, ns, c.before)
				broken := cutShort(t, Config{Variant: b.Variant(), OnRepair: c.onRepair}, 2)
				if _, err := broken.Apply(within(t), ns.Runner(), opts); err == nil {
					t.Fatal("a restore that failed was not noticed")
				}
				if got := guarded(t, b, ns); got != c.want {
					t.Errorf("the guardrail stands for %s, want %s", got, c.want)
				}
			})
		})
	}
}

func TestConfig(t *testing.T) {
	netnstest.Require(t)
	for _, bad := range []Config{{Variant: NFTables, OnRepair: "leak"}, {Variant: NFTables, HostLockWait: -1}, {}, {Variant: "none-such"}} {
		if _, err := New(t.Context(), bad); err == nil {
			t.Errorf("%+v was accepted", bad)
		}
	}
	if len(xtables.Variants()) != 3 {
		t.Error("a variant is not among those that Detect tries")
	}
}

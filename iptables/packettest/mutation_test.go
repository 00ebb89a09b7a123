// SPDX-License-Identifier: Apache-2.0

package packettest_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
)

// TestEveryRowCounts takes each row out of the kernel in turn: the flows that name
// it must then end elsewhere. So each row is needed, and the table would notice if
// a backend rendered it without effect. It is iptables' rules that are taken out,
// which are the model's, one by one.
func TestEveryRowCounts(t *testing.T) {
	t.Parallel()
	b := newBackend(t, onLegacy)
	networks := map[string]*network{}
	covered := map[int]bool{}
	for _, fl := range flows() {
		if len(fl.rows) == 0 {
			continue
		}
		n := networks[fl.opts.Key()]
		if n == nil {
			n = newNetwork(t, nil)
			networks[fl.opts.Key()] = n
		}
		for _, row := range fl.rows {
			covered[row] = true
			apply(t, b, n, fl.opts, redirection.DualStack)
			deleteRow(t, n, fl.opts, row)
			expectElsewhere(t, n, fl, fmt.Sprintf("without row %d", row))
		}
	}
	for _, rule := range redirection.Rules(with(reroute, exclude), redirection.DualStack) {
		if !covered[rule.Row] {
			t.Errorf("no flow shows what row %d is for", rule.Row)
		}
	}
}

// TestShutRowsCount does the same with what keeps IPv6 shut.
func TestShutRowsCount(t *testing.T) {
	t.Parallel()
	b := newBackend(t, onLegacy)
	n := newNetwork(t, nil)
	apply(t, b, n, with(ipv6Off), redirection.IPv4)
	deleteRow(t, n, with(ipv6Off), 20)
	expect(t, n, egress(), "peer", redirection.IPv6)
}

// TestPolicyRoutingCounts does the same with the policy rule and the route.
func TestPolicyRoutingCounts(t *testing.T) {
	t.Parallel()
	b := newBackend(t, onNFTables)
	fl := flows()[slices.IndexFunc(flows(), func(fl flow) bool { return slices.Contains(fl.rows, 6) })]
	n := newNetwork(t, nil)
	for _, part := range []struct {
		name   string
		remove func(family int) error
	}{
		{"policy rule", func(family int) error {
			rules, err := netlink.RuleList(family)
			for _, r := range rules {
				if r.Priority == int(redirection.RulePriority) {
					return netlink.RuleDel(&r)
				}
			}
			return fmt.Errorf("no such rule: %w", err)
		}},
		{"route", func(family int) error {
			routes, err := netlink.RouteListFiltered(family, &netlink.Route{Table: int(redirection.RouteTable)}, netlink.RT_FILTER_TABLE)
			if err != nil || len(routes) != 1 {
				return fmt.Errorf("%d routes: %w", len(routes), err)
			}
			return netlink.RouteDel(&routes[0])
		}},
	} {
		apply(t, b, n, fl.opts, redirection.DualStack)
		n.pod.Do(t, func() error {
			for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
				if err := part.remove(family); err != nil {
					return fmt.Errorf("removing the %s: %w", part.name, err)
				}
			}
			return nil
		})
		expectElsewhere(t, n, fl, "without the "+part.name)
	}
}

func expectElsewhere(t *testing.T, n *network, fl flow, without string) {
	for _, f := range redirection.DualStack.Each() {
		t.Run(fl.name+"/"+without+"/"+f.String(), func(t *testing.T) {
			if got := fl.run(t, n, f); got.at == fl.at {
				t.Errorf("it still ended at %+v", got)
			}
		})
	}
}

// deleteRow deletes the rules of one row from the chains of iptables-legacy.
func deleteRow(t *testing.T, n *network, opts redirection.Options, row int) {
	t.Helper()
	deleted := 0
	for _, f := range redirection.DualStack.Each() {
		next := map[redirection.Chain]int{}
		var script strings.Builder
		for _, rule := range redirection.Rules(opts, redirection.DualStack) {
			if !rule.Families.Has(f) {
				continue
			}
			at := next[rule.Chain] + 1
			// A range of ICMPv6 types takes a rule for each.
			next[rule.Chain] += 1 + int(rule.Match.ICMPType.Last-rule.Match.ICMPType.First)
			if rule.Row == row {
				chain := redirection.IPTablesPrerouting
				if rule.Chain.Hook == redirection.Output {
					chain = redirection.IPTablesOutput
				}
				fmt.Fprintf(&script, "*%s\n-D %s %d\nCOMMIT\n", rule.Chain.Table, chain, at)
				deleted++
				next[rule.Chain]--
			}
		}
		restoreIn(t, n.pod, onLegacy, f, script.String())
	}
	if deleted == 0 {
		t.Fatalf("row %d has no rule", row)
	}
}

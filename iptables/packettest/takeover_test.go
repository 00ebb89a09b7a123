// SPDX-License-Identifier: Apache-2.0

package packettest_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"ambientd/iptables/redirection"
	"ambientd/iptables/xtables"
	"ambientd/tools/netnstest"
)

// someConnections is how many new ones are awaited before and after a change.
const someConnections = 40

// TestTakeover takes pods over from another agent while they are busy: connections
// through the proxy live on, and each new one is redirected once, in both
// directions and families. Then the pod is withdrawn, and nothing of anybody's but
// the pod itself is left.
func TestTakeover(t *testing.T) {
	t.Parallel()
	for _, theirs := range agents() {
		t.Run("from "+theirs, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, b backend) {
				m := newMesh(t)
				run := m.pod.Runner()
				enrolByAgent(t, m.pod, theirs)
				expectForeign(t, b, run, true)
				tr := m.newTraffic()
				tr.await(someConnections)
				if _, err := b.Apply(t.Context(), run, with()); err != nil {
					t.Fatal(err)
				}
				tr.await(someConnections / 4) // both stand
				if found, err := b.RemoveForeign(t.Context(), run); !found || err != nil {
					t.Fatalf("removing theirs: %t, %v", found, err)
				}
				tr.await(someConnections)
				tr.end()
				expectForeign(t, b, run, false)
				expectApplied(t, b, run)
				expectPodsOwn(t, m.pod, theirs)
				if err := b.Remove(t.Context(), run); err != nil {
					t.Fatal(err)
				}
				expectPodsOwn(t, m.pod, theirs)
				expectNothingOfAgents(t, m.pod)
			})
		})
	}
}

// TestMigration does the same between our own backends: the new one's rules go in
// before the old one's go, and never both are at rest.
func TestMigration(t *testing.T) {
	t.Parallel()
	for _, from := range backendNames() {
		t.Run("from "+from, func(t *testing.T) {
			t.Parallel()
			for _, to := range backendNames() {
				if to == from {
					continue
				}
				t.Run("to "+to, func(t *testing.T) {
					t.Parallel()
					older, newer := newBackend(t, from), newBackend(t, to)
					m := newMesh(t)
					run := m.pod.Runner()
					if _, err := older.Apply(t.Context(), run, with()); err != nil {
						t.Fatal(err)
					}
					expectOwn(t, older, run, true)
					expectOwn(t, newer, run, false)
					tr := m.newTraffic()
					tr.await(someConnections)
					if _, err := newer.Apply(t.Context(), run, with()); err != nil {
						t.Fatal(err)
					}
					expectOwn(t, older, run, true)
					tr.await(someConnections / 4)
					if found, err := newer.RemoveOther(t.Context(), run); !found || err != nil {
						t.Fatalf("removing the older rules: %t, %v", found, err)
					}
					tr.await(someConnections)
					tr.end()
					expectApplied(t, newer, run)
					expectOwn(t, older, run, false)
					expectOwn(t, newer, run, true)
					if found, err := newer.RemoveOther(t.Context(), run); found || err != nil {
						t.Errorf("removing the older rules again: %t, %v", found, err)
					}
					if err := newer.Remove(t.Context(), run); err != nil {
						t.Fatal(err)
					}
					expectOwn(t, newer, run, false)
					expectNothingOfAgents(t, m.pod)
				})
			}
		})
	}
}

func expectForeign(t *testing.T, b backend, run redirection.Runner, want bool) {
	t.Helper()
	if found, err := b.HasForeign(t.Context(), run); found != want || err != nil {
		t.Fatalf("another agent's rules: %t, %v; want %t", found, err, want)
	}
	if want {
		return
	}
	if found, err := b.RemoveForeign(t.Context(), run); found || err != nil {
		t.Errorf("removing them again: %t, %v", found, err)
	}
}

func expectOwn(t *testing.T, b backend, run redirection.Runner, want bool) {
	t.Helper()
	if found, err := b.HasOwn(t.Context(), run); found != want || err != nil {
		t.Errorf("its own rules: %t, %v; want %t", found, err, want)
	}
}

func expectApplied(t *testing.T, b backend, run redirection.Runner) {
	t.Helper()
	families, differences, err := b.Verify(t.Context(), run, with())
	if err != nil {
		t.Fatal(err)
	}
	if families != redirection.DualStack || len(differences) > 0 {
		t.Errorf("verified for %s, differences: %v", families, differences)
	}
}

// expectPodsOwn expects the rules that were the pod's, as they were.
func expectPodsOwn(t *testing.T, ns *netnstest.NS, means string) {
	t.Helper()
	if means == onNFTables {
		if got := runIn(t, ns, "", "nft", "list", "table", "inet", "pods-own"); !strings.Contains(got, "tcp dport 7777 accept") {
			t.Errorf("of the pod's own table there is\n%s", got)
		}
		return
	}
	for _, f := range redirection.DualStack.Each() {
		var rules []string
		for _, table := range saveIn(t, ns, means, f) {
			for _, r := range table.Rules {
				rules = append(rules, r...)
			}
		}
		for _, want := range podsOwn() {
			if !slices.Contains(rules, want) {
				t.Errorf("%s: of the pod's own rules %q is gone; there are %q", f, want, rules)
			}
		}
	}
}

func saveIn(t *testing.T, ns *netnstest.NS, means string, f redirection.Families) xtables.Saved {
	t.Helper()
	programs, err := xtables.Find(t.Context(), variantOf(means), f)
	if err != nil {
		return nil // then nobody has written with them either
	}
	saved, err := programs.Save(t.Context(), ns.Runner())
	if err != nil {
		t.Fatal(err)
	}
	return saved
}

// expectNothingOfAgents expects that no agent has left a rule, a chain, a table, a
// policy rule or a route.
func expectNothingOfAgents(t *testing.T, ns *netnstest.NS) {
	t.Helper()
	for _, means := range []string{onNFT, onLegacy} {
		for _, f := range redirection.DualStack.Each() {
			for name, table := range saveIn(t, ns, means, f) {
				for _, c := range table.Chains {
					if redirection.IsForeignChain(c) || redirection.IsOurChain(c) {
						t.Errorf("%s, %s: chain %s of table %s is left", means, f, c, name)
					}
				}
				if own := table.Rules["PODS_OWN"] != nil || name == "mangle"; means == onNFT && !own {
					t.Errorf("%s: table %s is left, with nothing of the pod's in it", f, name)
				}
			}
		}
	}
	for line := range strings.Lines(runIn(t, ns, "", "nft", "list", "tables")) {
		if strings.Contains(line, "istio") || strings.Contains(line, "ambient") {
			t.Errorf("%s is left", strings.TrimSpace(line))
		}
	}
	ns.Do(t, func() error {
		rules, err := netlink.RuleList(netlink.FAMILY_ALL)
		if err != nil {
			return err
		}
		for _, r := range rules {
			if r.Priority == int(redirection.RulePriority) {
				t.Errorf("policy rule %s is left", r)
			}
		}
		routes, err := netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: int(redirection.RouteTable)}, netlink.RT_FILTER_TABLE)
		for _, r := range routes {
			t.Errorf("route %s is left", r)
		}
		return err
	})
}

// within bounds a test by what a hang may cost.
func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	t.Cleanup(cancel)
	return ctx
}

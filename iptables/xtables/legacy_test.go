// SPDX-License-Identifier: Apache-2.0

package xtables

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

const (
	// agents is what another ambient agent leaves, among rules of the pod's own that
	// look alike.
	agents = `*mangle
-N ISTIO_PRERT
-A PREROUTING -j ISTIO_PRERT
-A ISTIO_PRERT -m mark --mark 0x539/0xfff -j CONNMARK --set-xmark 0x111/0xfff
COMMIT
*nat
-N ISTIO_PRERT
-N ISTIO_OUTPUT
-N THEIRS
-A PREROUTING -p tcp -m tcp --dport 80 -j THEIRS
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A OUTPUT -p tcp -m comment --comment "once ISTIO_OUTPUT" -j ACCEPT
-A THEIRS -g ISTIO_PRERT
-A ISTIO_PRERT -p tcp -j REDIRECT --to-ports 15006
-A ISTIO_OUTPUT -p tcp -j ISTIO_PRERT
COMMIT
`
	// sidecars is what a sidecar's init container leaves, shortened.
	sidecars = `*nat
-N ISTIO_OUTPUT
-N ISTIO_REDIRECT
-A OUTPUT -p tcp -j ISTIO_OUTPUT
-A ISTIO_OUTPUT -j ISTIO_REDIRECT
COMMIT
`
	ours = "*nat\n-N AMBIENTD_OUTPUT\n-I OUTPUT 1 -j AMBIENTD_OUTPUT\nCOMMIT\n*filter\n-N AMBIENTD_GUARD_IN\n-I INPUT 1 -j AMBIENTD_GUARD_IN\nCOMMIT\n"
)

func within(tb testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(tb.Context(), 20*time.Second)
	tb.Cleanup(cancel)
	return ctx
}

// eachFamily returns the programs of x_tables.
func eachFamily(t *testing.T, test func(t *testing.T, p Programs)) {
	for _, family := range redirection.DualStack.Each() {
		t.Run(family.String(), func(t *testing.T) {
			netnstest.Require(t)
			p, err := Find(t.Context(), Legacy, family)
			if err != nil {
				t.Skip(err)
			}
			test(t, p)
		})
	}
}

func write(t *testing.T, p Programs, ns *netnstest.NS, script string) {
	t.Helper()
	if err := p.Restore(within(t), ns.Runner(), script); err != nil {
		t.Fatal(err)
	}
}

func TestRemoveLegacy(t *testing.T) {
	eachFamily(t, func(t *testing.T, p Programs) {
		for _, c := range []struct {
			name, script string
			whose        Whose
			want         bool
			left         []string // rules of nat and mangle
		}{
			{"another agent's", agents, Foreign, true, []string{
				"-A PREROUTING -p tcp -m tcp --dport 80 -j THEIRS",
				`-A OUTPUT -p tcp -m comment --comment "once ISTIO_OUTPUT" -j ACCEPT`}},
			{"another agent's are not ours", agents, Ours, false, nil},
			{"sidecar's", sidecars, Foreign, false, nil},
			{"ours", ours, Ours, true, []string{}},
			{"ours are no other agent's", ours, Foreign, false, nil},
		} {
			t.Run(c.name, func(t *testing.T) {
				ns := netnstest.New(t)
				write(t, p, ns, c.script)
				before := rules(t, p, ns)
				for _, want := range []bool{c.want, false} { // once more finds nothing
					if has, err := HasLegacy(within(t), ns.Runner(), c.whose); has != want || err != nil {
						t.Errorf("has: %t, %v; want %t", has, err, want)
					}
					if found, err := RemoveLegacy(within(t), ns.Runner(), c.whose); found != want || err != nil {
						t.Errorf("removed: %t, %v; want %t", found, err, want)
					}
				}
				left := c.left
				if left == nil {
					left = before
				}
				if diff := cmp.Diff(left, rules(t, p, ns)); diff != "" {
					t.Errorf("rules (-want +got):\n%s", diff)
				}
			})
		}
	})
}

// rules returns all rules, table by table.
func rules(t *testing.T, p Programs, ns *netnstest.NS) []string {
	t.Helper()
	s, err := p.Save(within(t), ns.Runner())
	if err != nil {
		t.Fatal(err)
	}
	all := []string{}
	for _, name := range []string{"filter", "mangle", "nat"} {
		if s[name] == nil {
			continue
		}
		for _, c := range s[name].Chains {
			for _, rule := range s[name].Rules[c] {
				all = append(all, "-A "+c+" "+rule)
			}
		}
	}
	return all
}

// TestLegacyLeavesNoTrace: where x_tables has no tables it gets none by being
// asked, and no program is run or missed.
func TestLegacyLeavesNoTrace(t *testing.T) {
	ns := netnstest.New(t)
	t.Setenv("PATH", t.TempDir())
	for _, whose := range []Whose{Ours, Foreign} {
		if has, err := HasLegacy(within(t), ns.Runner(), whose); has || err != nil {
			t.Errorf("has: %t, %v", has, err)
		}
		if found, err := RemoveLegacy(within(t), ns.Runner(), whose); found || err != nil {
			t.Errorf("removed: %t, %v", found, err)
		}
		if found, err := RemoveLegacyFromHost(within(t), ns.Runner(), whose, time.Second); found || err != nil {
			t.Errorf("removed from the host: %t, %v", found, err)
		}
	}
	for _, family := range redirection.DualStack.Each() {
		if tables, err := LegacyTables(ns.Runner(), family); len(tables) > 0 || err != nil {
			t.Errorf("%s: x_tables has %v (%v)", family, tables, err)
		}
	}
}

// TestListOnHost tells an absent chain from an empty one and from a broken table,
// with both variants.
func TestListOnHost(t *testing.T) {
	for _, variant := range []Variant{NFTables, Legacy} {
		t.Run(string(variant), func(t *testing.T) {
			ns := netnstest.New(t)
			p, err := Find(t.Context(), variant, redirection.IPv4)
			if err != nil {
				t.Skip(err)
			}
			list := func(chain string) (string, error) {
				rules, err := p.ListOnHost(within(t), ns.Runner(), "nat", chain, time.Second)
				return strings.Join(rules, "; "), err
			}
			expect := func(chain, want string, absent bool) {
				t.Helper()
				got, err := list(chain)
				if isAbsent := strings.Contains(errorText(err), ErrNoChain.Error()); got != want || isAbsent != absent || err != nil && !absent {
					t.Errorf("%s: got %q, %v", chain, got, err)
				}
			}
			expect("OURS", "", true)
			write(t, p, ns, "*nat\n-N OURS\n-N OURS2\n-A POSTROUTING -p tcp -j OURS\n-A OURS2 -p udp -j ACCEPT\nCOMMIT\n")
			expect("OURS", "", false)
			expect("POSTROUTING", "-p tcp -j OURS", false)
			expect("OURS2", "-p udp -j ACCEPT", false)
			expect("NONE", "", true)
		})
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// TestSeconds: --wait counts whole seconds, and 0 is for ever.
func TestSeconds(t *testing.T) {
	for d, want := range map[time.Duration]string{0: "1", time.Millisecond: "1", time.Second: "1", 1500 * time.Millisecond: "2", time.Minute: "60"} {
		if got := seconds(d); got != want {
			t.Errorf("%s: got %s, want %s", d, got, want)
		}
	}
}

// TestEmptyTables: tables that hold nothing are known to by asking the kernel, so
// that nobody misses the programs because somebody has looked with them.
func TestEmptyTables(t *testing.T) {
	eachFamily(t, func(t *testing.T, p Programs) {
		for script, want := range map[string]bool{
			"*nat\nCOMMIT\n*raw\nCOMMIT\n*filter\nCOMMIT\n*mangle\nCOMMIT\n*security\nCOMMIT\n": true,
			"*nat\n-N EMPTY\nCOMMIT\n":            false,
			"*nat\n-A OUTPUT -j ACCEPT\nCOMMIT\n": false,
			"*raw\nCOMMIT\n*nat\n-N E\nCOMMIT\n":  false,
		} {
			ns := netnstest.New(t)
			write(t, p, ns, script)
			tables, err := LegacyTables(ns.Runner(), p.family)
			if err != nil {
				t.Fatal(err)
			}
			if len(tables) == 0 {
				t.Fatal("no table was made")
			}
			empty, err := tablesAreEmpty(ns.Runner(), p.family, tables)
			if err != nil || empty != want {
				t.Errorf("%q: empty is %t, %v; want %t", script, empty, err, want)
			}
		}
	})
}

// TestAbsentTable: asking for a table that went meanwhile is an error, not an
// answer.
func TestAbsentTable(t *testing.T) {
	ns := netnstest.New(t)
	if _, err := tablesAreEmpty(ns.Runner(), redirection.IPv4, []string{"no-such-table"}); err == nil {
		t.Error("a table that does not exist was found empty")
	}
}

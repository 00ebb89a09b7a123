// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
	"ambientd/iptables/xtables"
	"ambientd/tools/netnstest"
)

// eachVariant runs test with the two variants; [Plain] is one of them.
func eachVariant(t *testing.T, test func(t *testing.T, b *Backend)) {
	for _, variant := range []Variant{NFTables, Legacy} {
		t.Run(string(variant), func(t *testing.T) {
			b, err := New(t.Context(), Config{Variant: variant})
			if err != nil {
				t.Skipf("variant %s: %v", variant, err)
			}
			test(t, b)
		})
	}
}

// within bounds a test by what a hang may cost.
func within(tb testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(tb.Context(), 20*time.Second)
	tb.Cleanup(cancel)
	return ctx
}

// state returns all rules of both families, as the backend's programs see them.
func state(t *testing.T, b *Backend, ns *netnstest.NS) map[redirection.Families]xtables.Saved {
	t.Helper()
	all := map[redirection.Families]xtables.Saved{}
	for family, p := range b.programs {
		s, err := p.Save(within(t), ns.Runner())
		if err != nil {
			t.Fatal(err)
		}
		all[family] = s
	}
	return all
}

// restore writes rules of the test's own, of both families unless told which.
func restore(t *testing.T, b *Backend, ns *netnstest.NS, script string, families ...redirection.Families) {
	t.Helper()
	if families == nil {
		families = redirection.DualStack.Each()
	}
	for _, family := range families {
		if err := b.programs[family].Restore(within(t), ns.Runner(), script); err != nil {
			t.Fatal(err)
		}
	}
}

// apply applies and expects that Verify agrees.
func apply(t *testing.T, b *Backend, ns *netnstest.NS, opts redirection.Options, want redirection.Families) {
	t.Helper()
	families, err := b.Apply(within(t), ns.Runner(), opts)
	if err != nil {
		t.Fatal(err)
	}
	if families != want {
		t.Errorf("applied for %s, want %s", families, want)
	}
	verify(t, b, ns, opts, want)
}

func verify(t *testing.T, b *Backend, ns *netnstest.NS, opts redirection.Options, want redirection.Families, differences ...string) {
	t.Helper()
	families, got, err := b.Verify(within(t), ns.Runner(), opts)
	if err != nil {
		t.Fatal(err)
	}
	if families != want {
		t.Errorf("verified for %s, want %s", families, want)
	}
	var lines []string
	for _, d := range got {
		lines = append(lines, d.String())
	}
	if diff := cmp.Diff(differences, lines); diff != "" {
		t.Errorf("differences (-want +got):\n%s", diff)
	}
}

func remove(t *testing.T, b *Backend, ns *netnstest.NS) {
	t.Helper()
	if err := b.Remove(within(t), ns.Runner()); err != nil {
		t.Fatal(err)
	}
	for family, s := range state(t, b, ns) {
		if s.Has(redirection.IsOurChain) {
			t.Errorf("%s: after Remove there are still %v", family, compare(s, nil))
		}
	}
	ns.Do(t, func() error {
		for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
			rules, err := netlink.RuleList(family)
			if err != nil {
				return err
			}
			for _, r := range rules {
				if r.Priority == int(redirection.RulePriority) {
					t.Errorf("after Remove there is still the policy rule %s", r)
				}
			}
		}
		return nil
	})
}

// TestLife takes one netns through every option set, each applied twice over the
// one before, and out again.
func TestLife(t *testing.T) {
	eachVariant(t, func(t *testing.T, b *Backend) {
		ns := netnstest.New(t)
		remove(t, b, ns) // of nothing
		for _, set := range optionSets() {
			apply(t, b, ns, set.opts, set.opts.Allowed())
			apply(t, b, ns, set.opts, set.opts.Allowed()) // the guardrail has left an empty table
			once := state(t, b, ns)
			apply(t, b, ns, set.opts, set.opts.Allowed())
			if diff := cmp.Diff(once, state(t, b, ns)); diff != "" {
				t.Errorf("%s: applying twice changed (-once +twice):\n%s", set.name, diff)
			}
		}
		remove(t, b, ns)
		remove(t, b, ns)
	})
}

// TestSavedGolden shows what iptables-save prints of an enrolled pod, the same with
// either variant. Documentation explains it line by line.
func TestSavedGolden(t *testing.T) {
	eachVariant(t, func(t *testing.T, b *Backend) {
		ns := netnstest.New(t)
		apply(t, b, ns, redirection.DefaultOptions(), redirection.DualStack)
		for family, s := range state(t, b, ns) {
			var text strings.Builder
			for _, name := range []string{"raw", "mangle", "nat"} {
				fmt.Fprintf(&text, "*%s\n", name)
				for _, c := range []string{"PREROUTING", "OUTPUT", redirection.IPTablesPrerouting, redirection.IPTablesOutput} {
					for _, rule := range s[name].Rules[c] {
						fmt.Fprintf(&text, "-A %s %s\n", c, rule)
					}
				}
			}
			golden(t, "enrolled."+family.String()+".iptables-save", text.String())
		}
	})
}

// TestForeignRules: others' rules stay as they are, behind ours.
func TestForeignRules(t *testing.T) {
	eachVariant(t, func(t *testing.T, b *Backend) {
		ns := netnstest.New(t)
		restore(t, b, ns, "*nat\n-N THEIRS\n-A PREROUTING -p tcp -j THEIRS\n-A THEIRS -p tcp -m tcp --dport 80 -j ACCEPT\nCOMMIT\n"+
			"*filter\n-A INPUT -i lo -j ACCEPT\nCOMMIT\n")
		before := state(t, b, ns)
		apply(t, b, ns, redirection.DefaultOptions(), redirection.DualStack)
		remove(t, b, ns)
		for family, s := range state(t, b, ns) {
			for name, table := range before[family] {
				if diff := cmp.Diff(table.Rules, s[name].Rules); diff != "" {
					t.Errorf("%s, table %s: others' rules changed (-before +after):\n%s", family, name, diff)
				}
			}
		}
	})
}

// TestRepair: whatever is changed by hand is named by Verify, and put right by
// Apply or taken out by Remove. Each script is applied over the default rules.
func TestRepair(t *testing.T) {
	for _, c := range []struct {
		name, script string
		want         []string
	}{
		{"rule deleted", "*nat\n-D AMBIENTD_OUTPUT 4\nCOMMIT\n",
			[]string{"table nat, chain AMBIENTD_OUTPUT, rule 4 (ipv4): missing, want -p tcp -m mark --mark 0x111/0xfff -j ACCEPT"}},
		{"rule added", "*nat\n-I AMBIENTD_OUTPUT -p tcp -j RETURN\nCOMMIT\n",
			[]string{"table nat, chain AMBIENTD_OUTPUT, rule 1 (ipv4): unexpected -p tcp -j RETURN"}},
		{"rule replaced", "*mangle\n-R AMBIENTD_PRERT 1 -j CONNMARK --set-xmark 0x111/0xfff\nCOMMIT\n",
			[]string{"table mangle, chain AMBIENTD_PRERT, rule 1 (ipv4): want -m mark --mark 0x539/0xfff -j CONNMARK --set-xmark 0x111/0xfff, got -j CONNMARK --set-xmark 0x111/0xfff"}},
		{"chain emptied", "*raw\n-F AMBIENTD_OUTPUT\nCOMMIT\n",
			[]string{"table raw, chain AMBIENTD_OUTPUT, rule 1 (ipv4): missing, want -p udp -m udp --dport 53 -m mark --mark 0x539/0xfff -j CT --zone 1"}},
		{"built-in chain emptied", "*nat\n-F OUTPUT\nCOMMIT\n",
			[]string{"table nat, jump from OUTPUT to AMBIENTD_OUTPUT (ipv4): missing, want as rule 1"}},
		{"jump doubled", "*nat\n-A PREROUTING -j AMBIENTD_PRERT\nCOMMIT\n",
			[]string{"table nat, jump from PREROUTING to AMBIENTD_PRERT (ipv4): want as rule 1, got as rule 1 and 2"}},
		{"jump outrun", "*nat\n-I PREROUTING -p tcp -m tcp --dport 80 -j ACCEPT\nCOMMIT\n",
			[]string{"table nat, jump from PREROUTING to AMBIENTD_PRERT (ipv4): want as rule 1, got as rule 2"}},
		{"jumps from elsewhere", "*nat\n:THEIRS - [0:0]\n-A THEIRS -m comment --comment \"a \\\"b\\\"\" -g AMBIENTD_OUTPUT\n-A AMBIENTD_OUTPUT -j AMBIENTD_PRERT\nCOMMIT\n",
			[]string{"table nat, chain AMBIENTD_OUTPUT, rule 7 (ipv4): unexpected -j AMBIENTD_PRERT",
				"table nat, chain THEIRS, rule 1 (ipv4): unexpected -m comment --comment \"a \\\"b\\\"\" -g AMBIENTD_OUTPUT"}},
		{"chain of ours in filter", "*filter\n-N AMBIENTD_PRERT\n-A INPUT -j AMBIENTD_PRERT\nCOMMIT\n",
			[]string{"table filter, chain INPUT, rule 1 (ipv4): unexpected -j AMBIENTD_PRERT", "table filter (ipv4): unexpected chain AMBIENTD_PRERT"}},
		{"table raw gone", "*raw\n-F\n-X\nCOMMIT\n",
			[]string{"table raw, chain AMBIENTD_PRERT (ipv4): missing, want 1 rules",
				"table raw, jump from PREROUTING to AMBIENTD_PRERT (ipv4): missing, want as rule 1",
				"table raw, chain AMBIENTD_OUTPUT (ipv4): missing, want 1 rules",
				"table raw, jump from OUTPUT to AMBIENTD_OUTPUT (ipv4): missing, want as rule 1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			eachVariant(t, func(t *testing.T, b *Backend) {
				opts := redirection.DefaultOptions()
				ns := netnstest.New(t)
				for _, repair := range []func(){
					func() { apply(t, b, ns, opts, redirection.DualStack) },
					func() { remove(t, b, ns) },
				} {
					apply(t, b, ns, opts, redirection.DualStack)
					restore(t, b, ns, c.script, redirection.IPv4)
					verify(t, b, ns, opts, redirection.DualStack, c.want...)
					repair()
				}
			})
		})
	}
}

// TestCutShort: a child that ended between two tables leaves nothing that the
// next Apply or Remove does not deal with.
func TestCutShort(t *testing.T) {
	eachVariant(t, func(t *testing.T, b *Backend) {
		want, err := render(redirection.DefaultOptions(), redirection.IPv4, redirection.IPv4)
		if err != nil {
			t.Fatal(err)
		}
		least := optionSets()[4].opts // needs no raw chains
		tables := strings.SplitAfter(creation(want), "COMMIT\n")
		for done := range tables {
			ns := netnstest.New(t)
			partial := strings.Join(tables[:done], "")
			if partial != "" {
				restore(t, b, ns, partial, redirection.IPv4)
			}
			apply(t, b, ns, least, redirection.IPv4)
			remove(t, b, ns)
			if partial != "" {
				restore(t, b, ns, partial, redirection.IPv4)
			}
			remove(t, b, ns)
		}
	})
}

// TestPolicyRouting: rule and route count as much as rules.
func TestPolicyRouting(t *testing.T) {
	eachVariant(t, func(t *testing.T, b *Backend) {
		ns := netnstest.New(t)
		opts := redirection.DefaultOptions()
		apply(t, b, ns, opts, redirection.DualStack)
		ns.Do(t, func() error {
			routes, err := netlink.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{Table: int(redirection.RouteTable)}, netlink.RT_FILTER_TABLE)
			if err != nil {
				return err
			}
			for _, r := range routes {
				if err := netlink.RouteDel(&r); err != nil {
					return err
				}
			}
			return nil
		})
		verify(t, b, ns, opts, redirection.DualStack, "route (ipv6): missing, want local default dev lo table 100")
		apply(t, b, ns, opts, redirection.DualStack)
	})
}

// TestWithoutIPv6: a netns whose lo takes no IPv6 gets capture of IPv4 only, and
// verify agrees. What is left of IPv6 is shut, or open if the options say so; rules
// left from when it was captured are noticed and go.
func TestWithoutIPv6(t *testing.T) {
	shut, open := redirection.DefaultOptions(), redirection.DefaultOptions()
	open.IPv6Uncaptured = redirection.UncapturedAllow
	for _, device := range []string{"all", "lo"} {
		t.Run(device, func(t *testing.T) {
			eachVariant(t, func(t *testing.T, b *Backend) {
				ns, late := netnstest.New(t), netnstest.New(t)
				disable := func() error {
					return os.WriteFile(filepath.Join("/proc/sys/net/ipv6/conf", device, "disable_ipv6"), []byte("1"), 0)
				}
				ns.Do(t, disable)
				apply(t, b, ns, open, redirection.IPv4)
				expectTables(t, b, ns)
				apply(t, b, ns, shut, redirection.IPv4)
				expectTables(t, b, ns, "mangle")
				apply(t, b, ns, open, redirection.IPv4)
				expectTables(t, b, ns)
				remove(t, b, ns)

				apply(t, b, late, shut, redirection.DualStack)
				late.Do(t, disable)
				_, differences, err := b.Verify(within(t), late.Runner(), shut)
				if err != nil {
					t.Fatal(err)
				}
				if !slices.ContainsFunc(differences, func(d redirection.Difference) bool {
					return d.String() == "table nat (ipv6): unexpected chain AMBIENTD_OUTPUT"
				}) {
					t.Errorf("rules of a family that went away are not noticed: %v", differences)
				}
				apply(t, b, late, shut, redirection.IPv4)
				expectTables(t, b, late, "mangle")
				remove(t, b, late)
			})
		})
	}
}

// expectTables compares the tables that hold chains of ours for IPv6.
func expectTables(t *testing.T, b *Backend, ns *netnstest.NS, want ...string) {
	t.Helper()
	var got []string
	for name, table := range state(t, b, ns)[redirection.IPv6] {
		if slices.ContainsFunc(table.Chains, redirection.IsOurChain) {
			got = append(got, name)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("tables with chains of ours for IPv6: %v, want %v", got, want)
	}
}

// TestLoopbackDown: nothing can be redirected, and nothing gets past: the rules are there
// until they are removed.
func TestLoopbackDown(t *testing.T) {
	eachVariant(t, func(t *testing.T, b *Backend) {
		ns := netnstest.New(t)
		ns.Do(t, func() error {
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			return netlink.LinkSetDown(lo)
		})
		_, err := b.Apply(within(t), ns.Runner(), redirection.DefaultOptions())
		if err == nil || !strings.Contains(err.Error(), "lo is down") {
			t.Errorf("got the error %v", err)
		}
		for family, s := range state(t, b, ns) {
			if len(s) == 0 && family == redirection.IPv4 {
				t.Errorf("%s: there are no rules", family)
			}
		}
		remove(t, b, ns)
	})
}

// TestReadingLeavesNoTrace: neither Verify nor Remove makes a table of x_tables
// or nf_tables.
func TestReadingLeavesNoTrace(t *testing.T) {
	eachVariant(t, func(t *testing.T, b *Backend) {
		ns := netnstest.New(t)
		if _, _, err := b.Verify(within(t), ns.Runner(), redirection.DefaultOptions()); err != nil {
			t.Fatal(err)
		}
		remove(t, b, ns)
		for _, family := range redirection.DualStack.Each() {
			if tables, err := xtables.LegacyTables(ns.Runner(), family); len(tables) > 0 || err != nil {
				t.Errorf("%s: x_tables has %v (%v)", family, tables, err)
			}
		}
		for family, s := range state(t, b, ns) {
			if len(s) != 0 {
				t.Errorf("%s: tables were made: %v", family, s)
			}
		}
	})
}

// TestDetect leaves the scratch netns as it was, and takes nf_tables where it
// can.
func TestDetect(t *testing.T) {
	ns := netnstest.New(t)
	b, err := Detect(within(t), ns.Runner(), Config{})
	if err != nil {
		t.Skip(err)
	}
	if _, err := exec.LookPath("/usr/sbin/iptables-nft-restore"); err == nil && b.Variant() != NFTables {
		t.Errorf("variant %s was chosen", b.Variant())
	}
	for family, s := range state(t, b, ns) {
		if s.Has(redirection.IsOurChain) {
			t.Errorf("%s: rules were left: %v", family, s)
		}
	}
}

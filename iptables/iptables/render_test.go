// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"ambientd/iptables/redirection"
	"ambientd/iptables/xtables"
	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }

var update = flag.Bool("update", false, "write the golden files in testdata")

// optionSet is one of the option sets that golden and kernel tests share.
type optionSet struct {
	name string
	opts redirection.Options
}

func optionSets() []optionSet {
	with := func(change func(*redirection.Options)) redirection.Options {
		o := redirection.DefaultOptions()
		change(&o)
		return o
	}
	return []optionSet{
		{"default", redirection.DefaultOptions()},
		{"inbound-bypass", with(func(o *redirection.Options) { o.InboundBypass = true })},
		{"no-dns", with(func(o *redirection.Options) { o.DNSCapture = false })},
		{"reroute", with(func(o *redirection.Options) { o.RerouteInterfaces = []string{"vm0", "tap-1.2@x"} })},
		{"least", with(func(o *redirection.Options) { o.InboundBypass, o.DNSCapture, o.IPv6 = true, false, false })},
		{"probe-source", with(func(o *redirection.Options) {
			o.ProbeSourceIPv4, o.ProbeSourceIPv6 = netip.MustParseAddr("169.254.7.9"), netip.MustParseAddr("fe80::9")
		})},
		{"exclusions", with(func(o *redirection.Options) {
			o.ExcludeInboundPorts = []redirection.PortRange{redirection.SinglePort(22), {First: 8000, Last: 8010}}
			o.ExcludeOutboundPorts = []redirection.PortRange{{First: 3306, Last: 3307}, redirection.SinglePort(53)}
			o.ExcludeOutboundCIDRs = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("203.0.113.5/32"),
				netip.MustParsePrefix("2001:db8::/32"), netip.MustParsePrefix("::/0")}
			o.ExcludeInterfaces = []string{"net1", "net-2.x"}
		})},
		{"established", with(func(o *redirection.Options) { o.KeepEstablished = true })},
		{"ipv6-shut", with(func(o *redirection.Options) { o.IPv6 = false })},
		{"ipv6-open", with(func(o *redirection.Options) { o.IPv6, o.IPv6Uncaptured = false, redirection.UncapturedAllow })},
	}
}

// TestGolden compares the scripts for an empty netns with testdata, where they
// are to be reviewed. go test -update writes them.
func TestGolden(t *testing.T) {
	for _, set := range optionSets() {
		for _, family := range redirection.DualStack.Each() {
			name := set.name + "." + family.String() + ".rules"
			t.Run(name, func(t *testing.T) {
				want, err := render(set.opts, redirection.DualStack, family)
				if err != nil {
					t.Fatal(err)
				}
				got := creation(want)
				golden(t, name, got)
			})
		}
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("the script differs from %s (-golden +got):\n%s", path, diff)
	}
}

// TestEveryRuleIsRendered: no rule of the model is left out, and none of the
// other family is put in.
func TestEveryRuleIsRendered(t *testing.T) {
	for _, set := range optionSets() {
		for _, family := range redirection.DualStack.Each() {
			want, err := render(set.opts, redirection.DualStack, family)
			if err != nil {
				t.Fatal(err)
			}
			rendered := 0
			for _, chains := range want.tables {
				for _, c := range chains {
					rendered += len(c.rules)
				}
			}
			expected := 0
			for _, rule := range redirection.Rules(set.opts, redirection.DualStack) {
				if rule.Families.Has(family) {
					expected += 1 + int(rule.Match.ICMPType.Last-rule.Match.ICMPType.First)
				}
			}
			if rendered != expected {
				t.Errorf("%s, %s: %d rules were rendered of %d", set.name, family, rendered, expected)
			}
		}
	}
}

// TestGuardGolden compares the script that replaces rules, which shows the
// guardrail, with testdata. What it replaces is a table that lost its rules.
func TestGuardGolden(t *testing.T) {
	for _, name := range []string{"default", "exclusions", "inbound-bypass"} {
		set := optionSets()[slices.IndexFunc(optionSets(), func(s optionSet) bool { return s.name == name })]
		want, err := render(set.opts, redirection.DualStack, redirection.IPv4)
		if err != nil {
			t.Fatal(err)
		}
		got := xtables.Saved{"nat": {Chains: []string{"OUTPUT", redirection.IPTablesOutput}}}
		golden(t, name+".ipv4.replacement", transition(got, want))
	}
}

// TestGuardStandsThroughout: the guardrail is the first that a replacement puts
// up, and the last that it takes down, and one that is left over is replaced.
func TestGuardStandsThroughout(t *testing.T) {
	for _, set := range optionSets() {
		for _, family := range redirection.DualStack.Each() {
			want, err := render(set.opts, redirection.DualStack, family)
			if err != nil {
				t.Fatal(err)
			}
			left := xtables.Saved{filterTable: {Chains: []string{"INPUT", redirection.IPTablesGuardInput},
				Rules: map[string][]string{"INPUT": {"-j " + redirection.IPTablesGuardInput}}}}
			for _, got := range []xtables.Saved{{}, left} {
				script := transition(got, want)
				if !set.opts.Allowed().Has(family) {
					if strings.Contains(script, "-N AMBIENTD_GUARD") {
						t.Errorf("%s, %s: nothing is captured, but a guardrail is put up", set.name, family)
					}
					continue
				}
				tables := strings.SplitAfter(script, "COMMIT\n")
				first, last := tables[0], tables[len(tables)-2] // after the last is nothing
				if !strings.HasPrefix(first, "*filter\n") || !strings.Contains(first, "-I OUTPUT 1 -j AMBIENTD_GUARD_OUT\n") {
					t.Errorf("%s, %s: the first transaction is\n%s", set.name, family, first)
				}
				if !strings.HasPrefix(last, "*filter\n") || !strings.HasSuffix(last, "-X AMBIENTD_GUARD_OUT\nCOMMIT\n") {
					t.Errorf("%s, %s: the last transaction is\n%s", set.name, family, last)
				}
				if removed := strings.Contains(first, "-X AMBIENTD_GUARD_IN\n"); removed != (len(got) > 0) {
					t.Errorf("%s, %s: a guardrail that is left over: removed is %t", set.name, family, removed)
				}
			}
		}
	}
}

// TestMangleIsNeverEmpty: an interrupted Apply or Remove is noticed by the next
// Apply because mangle is written first and removed last.
func TestMangleIsNeverEmpty(t *testing.T) {
	for _, set := range optionSets() {
		want, err := render(set.opts, redirection.IPv4, redirection.IPv4)
		if err != nil {
			t.Fatal(err)
		}
		script := creation(want)
		if !strings.HasPrefix(script, "*mangle\n-N "+redirection.IPTablesPrerouting+"\n") {
			t.Errorf("%s: the script begins with %.40q, not with a chain in mangle", set.name, script)
		}
		got := xtables.Saved{}
		for _, table := range tables() {
			got[table] = &xtables.Table{Chains: []string{redirection.IPTablesOutput}}
		}
		removal := transition(got, ruleset{})
		if !strings.HasSuffix(removal, "*mangle\n-F AMBIENTD_OUTPUT\n-X AMBIENTD_OUTPUT\nCOMMIT\n") {
			t.Errorf("the removal ends in %q, not with mangle", removal)
		}
	}
}

func TestUnknownToIPTables(t *testing.T) {
	for _, action := range []redirection.Action{0, 99} {
		if text, err := renderVerdict(redirection.Verdict{Action: action}); err == nil || err.Error() != fmt.Sprintf("action %d cannot be said in iptables", action) {
			t.Errorf("action %d: got %q, %v", action, text, err)
		}
	}
	if _, _, err := chainNames("postrouting"); err == nil {
		t.Error("a hook without a chain of ours was accepted")
	}
}

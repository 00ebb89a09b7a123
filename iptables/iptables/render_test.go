// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"ambientd/iptables/redirection"
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
			o.ProbeSourceIPv4, o.ProbeSourceIPv6 = netip.MustParseAddr("192.0.2.9"), netip.MustParseAddr("2001:db8::9")
		})},
	}
}

// TestGolden compares the scripts for an empty netns with testdata, where they
// are to be reviewed. go test -update writes them.
func TestGolden(t *testing.T) {
	for _, set := range optionSets() {
		for _, family := range set.opts.Allowed().Each() {
			name := set.name + "." + family.String() + ".rules"
			t.Run(name, func(t *testing.T) {
				want, err := render(set.opts, family)
				if err != nil {
					t.Fatal(err)
				}
				got := creation(want)
				path := filepath.Join("testdata", name)
				if *update {
					if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
						t.Fatal(err)
					}
				}
				golden, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(string(golden), got); diff != "" {
					t.Errorf("the script differs from the golden one (-golden +got):\n%s", diff)
				}
			})
		}
	}
}

// TestEveryRuleIsRendered: no rule of the model is left out, and none of the
// other family is put in.
func TestEveryRuleIsRendered(t *testing.T) {
	for _, set := range optionSets() {
		for _, family := range set.opts.Allowed().Each() {
			want, err := render(set.opts, family)
			if err != nil {
				t.Fatal(err)
			}
			rendered := 0
			for _, chains := range want {
				for _, c := range chains {
					rendered += len(c.rules)
				}
			}
			if rules := redirection.Rules(set.opts, family); rendered != len(rules) {
				t.Errorf("%s, %s: %d rules were rendered of %d", set.name, family, rendered, len(rules))
			}
		}
	}
}

// TestMangleIsNeverEmpty: an interrupted Apply or Remove is noticed by the next
// Apply because mangle is written first and removed last.
func TestMangleIsNeverEmpty(t *testing.T) {
	for _, set := range optionSets() {
		want, err := render(set.opts, redirection.IPv4)
		if err != nil {
			t.Fatal(err)
		}
		script := creation(want)
		if !strings.HasPrefix(script, "*mangle\n-N "+redirection.IPTablesPrerouting+"\n") {
			t.Errorf("%s: the script begins with %.40q, not with a chain in mangle", set.name, script)
		}
		got := saved{}
		for _, table := range tables() {
			got[table] = &savedTable{chains: []string{redirection.IPTablesOutput}}
		}
		removal := transition(got, ruleset{})
		if !strings.HasSuffix(removal, "*mangle\n-F AMBIENTD_OUTPUT\n-X AMBIENTD_OUTPUT\nCOMMIT\n") {
			t.Errorf("the removal ends in %q, not with mangle", removal)
		}
	}
}

func TestUnknownToIPTables(t *testing.T) {
	for _, c := range []struct {
		name string
		rule redirection.Rule
		want string
	}{
		{"action", redirection.Rule{Verdict: redirection.Verdict{Action: 99}}, "action 99 cannot be said in iptables"},
		{"no action", redirection.Rule{}, "action 0 cannot be said in iptables"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if text, err := renderRule(c.rule); err == nil || err.Error() != c.want {
				t.Errorf("got %q, %v; want the error %q", text, err, c.want)
			}
		})
	}
	if _, _, err := chainNames("postrouting"); err == nil {
		t.Error("a hook without a chain of ours was accepted")
	}
}

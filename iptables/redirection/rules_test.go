// SPDX-License-Identifier: Apache-2.0

package redirection_test

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
)

var update = flag.Bool("update", false, "write the golden files")

// variants are the option sets whose rules are kept as golden files.
func variants() map[string]redirection.Options {
	build := func(change func(*redirection.Options)) redirection.Options {
		o := redirection.DefaultOptions()
		change(&o)
		return o
	}
	return map[string]redirection.Options{
		"default":        redirection.DefaultOptions(),
		"inbound-bypass": build(func(o *redirection.Options) { o.InboundBypass = true }),
		"no-dns":         build(func(o *redirection.Options) { o.DNSCapture = false }),
		"reroute":        build(func(o *redirection.Options) { o.RerouteInterfaces = []string{"tap1", "k6t-net0", "tap1"} }),
		"ipv4-only":      build(func(o *redirection.Options) { o.IPv6 = false }),
		"probe-source": build(func(o *redirection.Options) {
			o.ProbeSourceIPv4, o.ProbeSourceIPv6 = netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("2001:db8::7")
		}),
	}
}

func TestRulesGolden(t *testing.T) {
	for name, opts := range variants() {
		t.Run(name, func(t *testing.T) {
			var b strings.Builder
			for _, rule := range redirection.Rules(opts, redirection.DualStack) {
				fmt.Fprintf(&b, "%s\n    %s\n", rule, rule.Why)
			}
			golden(t, name, b.String())
		})
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("rules changed (run with -update if that is meant; -golden +rules):\n%s", diff)
	}
}

// TestRowsOfOptions states which rows each option takes away, apart from the goldens, which are easily updated.
func TestRowsOfOptions(t *testing.T) {
	for _, test := range []struct {
		variant string
		want    []int
	}{
		{"default", []int{2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}},
		{"inbound-bypass", []int{2, 4, 6, 7, 8, 9, 10, 11, 12, 13}},
		{"no-dns", []int{2, 3, 4, 5, 6, 11, 12, 13}},
		{"reroute", []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}},
	} {
		t.Run(test.variant, func(t *testing.T) {
			var rows []int
			for _, rule := range redirection.Rules(variants()[test.variant], redirection.DualStack) {
				rows = append(rows, rule.Row)
			}
			slices.Sort(rows)
			if got := slices.Compact(rows); !slices.Equal(got, test.want) {
				t.Errorf("rows %v, want %v", got, test.want)
			}
		})
	}
}

// TestOrderWithinChains holds the order that the proxies' contract prescribes.
func TestOrderWithinChains(t *testing.T) {
	order := map[redirection.Chain][]int{}
	for _, rule := range redirection.Rules(variants()["reroute"], redirection.IPv4) {
		rows := order[rule.Chain]
		if len(rows) == 0 || rows[len(rows)-1] != rule.Row {
			order[rule.Chain] = append(rows, rule.Row)
		}
	}
	want := map[redirection.Chain][]int{
		{Table: redirection.Raw, Hook: redirection.Prerouting}:    {10},
		{Table: redirection.Raw, Hook: redirection.Output}:        {9},
		{Table: redirection.Mangle, Hook: redirection.Prerouting}: {2},
		{Table: redirection.Mangle, Hook: redirection.Output}:     {6},
		{Table: redirection.NAT, Hook: redirection.Prerouting}:    {1, 3, 5},
		{Table: redirection.NAT, Hook: redirection.Output}:        {4, 7, 8, 11, 12, 13},
	}
	if diff := cmp.Diff(want, order); diff != "" {
		t.Errorf("order of rows (-want +got):\n%s", diff)
	}
}

func TestRulesOfFamilies(t *testing.T) {
	opts := redirection.DefaultOptions()
	for _, families := range []redirection.Families{redirection.IPv4, redirection.IPv6, redirection.DualStack} {
		for _, rule := range redirection.Rules(opts, families) {
			if rule.Families == 0 || !families.Has(rule.Families) {
				t.Errorf("for %s: %s", families, rule)
			}
			for _, address := range []netip.Prefix{rule.Match.Source.Prefix, rule.Match.Destination.Prefix} {
				if address.IsValid() && address.Addr().Is4() != (rule.Families == redirection.IPv4) {
					t.Errorf("address of another family: %s", rule)
				}
			}
		}
	}
	opts.IPv6 = false
	if rules := redirection.Rules(opts, redirection.IPv6); len(rules) > 0 {
		t.Errorf("rules for a family that the options do not allow: %v", rules)
	}
}

func TestRuleString(t *testing.T) {
	rules := redirection.Rules(redirection.DefaultOptions(), redirection.IPv4)
	got := rules[len(rules)-1].String()
	want := "row 13, ipv4, nat output: destination != 127.0.0.0/8 tcp mark != 0x539/0xfff -> redirect to :15001"
	if got != want {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

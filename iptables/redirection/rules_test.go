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
		"ipv4-only-ipv6-open": build(func(o *redirection.Options) {
			o.IPv6, o.IPv6Uncaptured = false, redirection.UncapturedAllow
		}),
		"probe-source": build(func(o *redirection.Options) {
			o.ProbeSourceIPv4, o.ProbeSourceIPv6 = netip.MustParseAddr("169.254.1.7"), netip.MustParseAddr("fe80::7")
		}),
		"keep-established": build(func(o *redirection.Options) { o.KeepEstablished = true }),
		"exclusions": build(func(o *redirection.Options) {
			o.ExcludeInboundPorts = []redirection.PortRange{{First: 8000, Last: 8010}, {First: 22, Last: 22}}
			o.ExcludeOutboundPorts = []redirection.PortRange{{First: 5432, Last: 5432}, {First: 53, Last: 53}}
			o.ExcludeOutboundCIDRs = []netip.Prefix{netip.MustParsePrefix("2001:db8::/33"), netip.MustParsePrefix("10.1.2.3/9")}
			o.ExcludeInterfaces = []string{"net1"}
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
		{"keep-established", []int{0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}},
		{"exclusions", []int{2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18}},
		{"ipv4-only", []int{2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 19, 20}},
		{"ipv4-only-ipv6-open", []int{2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}},
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

// TestOrderWithinChains holds the order that the proxies' contract prescribes, with every row that there is.
func TestOrderWithinChains(t *testing.T) {
	opts := variants()["exclusions"]
	opts.RerouteInterfaces, opts.KeepEstablished = []string{"tap0"}, true
	order := map[redirection.Chain][]int{}
	for _, rule := range redirection.Rules(opts, redirection.IPv4) {
		rows := order[rule.Chain]
		if len(rows) == 0 || rows[len(rows)-1] != rule.Row {
			order[rule.Chain] = append(rows, rule.Row)
		}
	}
	want := map[redirection.Chain][]int{
		{Table: redirection.Raw, Hook: redirection.Prerouting}:    {10},
		{Table: redirection.Raw, Hook: redirection.Output}:        {9},
		{Table: redirection.Mangle, Hook: redirection.Prerouting}: {19, 20, 2},
		{Table: redirection.Mangle, Hook: redirection.Output}:     {19, 20, 6},
		{Table: redirection.NAT, Hook: redirection.Prerouting}:    {0, 1, 3, 14, 15, 5},
		{Table: redirection.NAT, Hook: redirection.Output}:        {0, 4, 7, 8, 11, 12, 16, 17, 18, 13},
	}
	if diff := cmp.Diff(want, order); diff != "" {
		t.Errorf("order of rows (-want +got):\n%s", diff)
	}
}

func TestRulesOfFamilies(t *testing.T) {
	opts := redirection.DefaultOptions()
	for _, families := range []redirection.Families{redirection.IPv4, redirection.IPv6, redirection.DualStack} {
		for _, rule := range redirection.Rules(opts, families) {
			wanted := families
			if rule.Row >= 19 { // they are for what is not captured
				wanted = redirection.IPv6 &^ families
			}
			if rule.Families == 0 || !wanted.Has(rule.Families) {
				t.Errorf("for %s: %s", families, rule)
			}
			for _, address := range []netip.Prefix{rule.Match.Source.Prefix, rule.Match.Destination.Prefix} {
				if address.IsValid() && address.Addr().Is4() != (rule.Families == redirection.IPv4) {
					t.Errorf("address of another family: %s", rule)
				}
			}
		}
	}
	opts.IPv6, opts.IPv6Uncaptured = false, redirection.UncapturedAllow
	if rules := redirection.Rules(opts, redirection.IPv6); len(rules) > 0 {
		t.Errorf("rules for a family that the options do not allow: %v", rules)
	}
}

// TestIPv6WithoutCapture looks at what becomes of IPv6 where it is allowed but the namespace has it not on loopback, and
// where it is not allowed.
func TestIPv6WithoutCapture(t *testing.T) {
	off := redirection.DefaultOptions()
	off.IPv6 = false
	for name, opts := range map[string]redirection.Options{"not on loopback": redirection.DefaultOptions(), "not allowed": off} {
		t.Run(name, func(t *testing.T) {
			hooks := map[redirection.Hook][]string{}
			for _, rule := range redirection.Rules(opts, redirection.IPv4) {
				if rule.Families == redirection.IPv6 {
					hooks[rule.Chain.Hook] = append(hooks[rule.Chain.Hook], rule.String())
				} else if rule.Families != redirection.IPv4 {
					t.Errorf("a rule of a family that is not captured: %s", rule)
				}
			}
			want := map[redirection.Hook][]string{
				redirection.Prerouting: {
					"row 19, ipv6, mangle prerouting: icmpv6 type 130-137 -> accept",
					"row 19, ipv6, mangle prerouting: icmpv6 type 143 -> accept",
					"row 20, ipv6, mangle prerouting: in != lo -> drop",
				},
				redirection.Output: {
					"row 19, ipv6, mangle output: icmpv6 type 130-137 -> accept",
					"row 19, ipv6, mangle output: icmpv6 type 143 -> accept",
					"row 20, ipv6, mangle output: out != lo -> drop",
				},
			}
			if diff := cmp.Diff(want, hooks); diff != "" {
				t.Errorf("rules of IPv6 (-want +got):\n%s", diff)
			}
		})
	}
}

// TestExclusionsInOrder normalises: lists that mean the same make the same rules.
func TestExclusionsInOrder(t *testing.T) {
	opts := redirection.DefaultOptions()
	opts.ExcludeOutboundPorts = []redirection.PortRange{{First: 9000, Last: 65535}, {First: 80, Last: 90}, {First: 91, Last: 91}, {First: 85, Last: 88}, {First: 65535, Last: 65535}, {First: 93, Last: 93}}
	for _, cidr := range []string{"10.2.0.0/16", "2001:db8::/64", "10.0.0.0/8", "10.0.0.7/8", "2001:db8::/32", "192.0.2.0/25", "192.0.2.128/25"} {
		opts.ExcludeOutboundCIDRs = append(opts.ExcludeOutboundCIDRs, netip.MustParsePrefix(cidr))
	}
	opts.ExcludeInterfaces = []string{"net1", "net0", "net1"}
	var got []string
	for _, rule := range redirection.Rules(opts, redirection.DualStack) {
		if rule.Row >= 16 {
			got = append(got, fmt.Sprintf("%s: %s", rule.Families, rule.Match))
		}
	}
	want := []string{
		"ipv4,ipv6: out net0 tcp", "ipv4,ipv6: out net1 tcp",
		"ipv4,ipv6: tcp dport 80-91", "ipv4,ipv6: tcp dport 93", "ipv4,ipv6: tcp dport 9000-65535",
		"ipv4: destination 10.0.0.0/8 tcp", "ipv4: destination 192.0.2.0/25 tcp", "ipv4: destination 192.0.2.128/25 tcp",
		"ipv6: destination 2001:db8::/32 tcp",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("exclusions (-want +got):\n%s", diff)
	}
	opts.InboundBypass = true
	opts.ExcludeInboundPorts = []redirection.PortRange{{First: 22, Last: 22}}
	for _, rule := range redirection.Rules(opts, redirection.DualStack) {
		if rule.Row == 14 || rule.Row == 15 {
			t.Errorf("nothing is captured that it could be excluded from: %s", rule)
		}
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

// TestEveryAddressExcluded has prefixes of no bits, which renderers cannot compare.
func TestEveryAddressExcluded(t *testing.T) {
	opts := redirection.DefaultOptions()
	opts.ExcludeOutboundCIDRs = []netip.Prefix{netip.MustParsePrefix("::/0"), netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("1.2.3.4/0")}
	var got []string
	for _, rule := range redirection.Rules(opts, redirection.DualStack) {
		if rule.Row == 18 {
			got = append(got, fmt.Sprintf("%s: %s", rule.Families, rule.Match))
		}
	}
	if want := []string{"ipv4: tcp", "ipv6: tcp"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

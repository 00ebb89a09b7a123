// SPDX-License-Identifier: Apache-2.0

package redirection_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"ambientd/iptables/redirection"
)

func TestValidate(t *testing.T) {
	for _, test := range []struct {
		name    string
		change  func(*redirection.Options)
		wantErr string // empty: valid
	}{
		{"default", func(*redirection.Options) {}, ""},
		{"zero value", func(o *redirection.Options) { *o = redirection.Options{} }, "probe source ipv4: no address"},
		{"interfaces", func(o *redirection.Options) {
			o.RerouteInterfaces = []string{"k6t-eth0", "br0.12", "a_b@c", "123456789012345"}
		}, ""},
		{"empty interface", func(o *redirection.Options) { o.RerouteInterfaces = []string{""} }, "reroute interface: empty name"},
		{"long interface", func(o *redirection.Options) { o.RerouteInterfaces = []string{"1234567890123456"} }, "longer than 15 bytes"},
		{"wildcard of iptables", func(o *redirection.Options) { o.RerouteInterfaces = []string{"eth+"} }, `holds '+'`},
		{"wildcard of nft", func(o *redirection.Options) { o.RerouteInterfaces = []string{"eth*"} }, `holds '*'`},
		{"blank", func(o *redirection.Options) { o.RerouteInterfaces = []string{"a b"} }, `holds ' '`},
		{"line break", func(o *redirection.Options) { o.RerouteInterfaces = []string{"a\nCOMMIT"} }, `holds '\n'`},
		{"slash", func(o *redirection.Options) { o.RerouteInterfaces = []string{"a/b"} }, `holds '/'`},
		{"option of iptables", func(o *redirection.Options) { o.RerouteInterfaces = []string{"-j"} }, "not allowed"},
		{"dots", func(o *redirection.Options) { o.RerouteInterfaces = []string{".."} }, "not allowed"},
		{"loopback", func(o *redirection.Options) { o.RerouteInterfaces = []string{"lo"} }, "loopback"},
		{"too many", func(o *redirection.Options) {
			o.RerouteInterfaces = slices.Repeat([]string{"tap0"}, redirection.MaxRerouteInterfaces+1)
		}, "17 given, at most 16"},
		{"families swapped", func(o *redirection.Options) { o.ProbeSourceIPv4 = o.ProbeSourceIPv6 }, "another family"},
		{"mapped", func(o *redirection.Options) { o.ProbeSourceIPv6 = netip.MustParseAddr("::ffff:192.0.2.1") }, "another family"},
		{"zone", func(o *redirection.Options) { o.ProbeSourceIPv6 = netip.MustParseAddr("fe80::1%eth0") }, "zone"},
		{"loopback source", func(o *redirection.Options) { o.ProbeSourceIPv4 = netip.MustParseAddr("127.0.0.1") }, "not link-local"},
		{"private source", func(o *redirection.Options) { o.ProbeSourceIPv4 = netip.MustParseAddr("10.0.0.1") }, "not link-local"},
		{"unspecified source", func(o *redirection.Options) { o.ProbeSourceIPv6 = netip.IPv6Unspecified() }, "neither link-local"},
		{"multicast source", func(o *redirection.Options) { o.ProbeSourceIPv4 = netip.MustParseAddr("224.0.0.1") }, "not link-local"},
		{"multicast source on the link", func(o *redirection.Options) { o.ProbeSourceIPv6 = netip.MustParseAddr("ff02::1") }, "neither link-local"},
		{"global source", func(o *redirection.Options) { o.ProbeSourceIPv6 = netip.MustParseAddr("2001:db8::1") }, "neither link-local"},
		{"link-local source", func(o *redirection.Options) { o.ProbeSourceIPv6 = netip.MustParseAddr("fe80::1") }, ""},
		{"unique local source", func(o *redirection.Options) { o.ProbeSourceIPv6 = netip.MustParseAddr("fc00::1") }, ""},
		{"no IPv6 source", func(o *redirection.Options) { o.ProbeSourceIPv6 = netip.Addr{} }, "probe source ipv6: no address"},
		{"uncaptured IPv6 allowed", func(o *redirection.Options) { o.IPv6Uncaptured = redirection.UncapturedAllow }, ""},
		{"uncaptured IPv6 unknown", func(o *redirection.Options) { o.IPv6Uncaptured = "reject" }, `"reject" is neither "drop" nor "allow"`},
		{"port 0", func(o *redirection.Options) { o.ExcludeInboundPorts = []redirection.PortRange{{First: 0, Last: 80}} },
			"excluded inbound port: port range 0-80"},
		{"empty range", func(o *redirection.Options) { o.ExcludeOutboundPorts = []redirection.PortRange{{First: 81, Last: 80}} },
			"excluded outbound port: port range 81-80"},
		{"all ports", func(o *redirection.Options) {
			o.ExcludeOutboundPorts = []redirection.PortRange{{First: 1, Last: 65535}}
		}, ""},
		{"no CIDR", func(o *redirection.Options) { o.ExcludeOutboundCIDRs = []netip.Prefix{{}} }, "excluded outbound CIDR: invalid Prefix"},
		{"mapped CIDR", func(o *redirection.Options) {
			o.ExcludeOutboundCIDRs = []netip.Prefix{netip.PrefixFrom(netip.MustParseAddr("::ffff:10.0.0.0"), 104)}
		}, "no prefix of IPv4 or IPv6"},
		{"every CIDR", func(o *redirection.Options) {
			o.ExcludeOutboundCIDRs = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}
		}, ""},
		{"excluded loopback", func(o *redirection.Options) { o.ExcludeInterfaces = []string{"lo"} }, "excluded interface: name"},
		{"too many ports", func(o *redirection.Options) {
			o.ExcludeInboundPorts = slices.Repeat([]redirection.PortRange{{First: 1, Last: 1}}, redirection.MaxExclusions+1)
		}, "excluded inbound ports: 65 given, at most 64"},
		{"too many CIDRs", func(o *redirection.Options) {
			o.ExcludeOutboundCIDRs = slices.Repeat([]netip.Prefix{netip.MustParsePrefix("::/0")}, redirection.MaxExclusions+1)
		}, "excluded outbound CIDRs: 65 given, at most 64"},
		{"too many excluded interfaces", func(o *redirection.Options) {
			o.ExcludeInterfaces = slices.Repeat([]string{"net1"}, redirection.MaxExclusions+1)
		}, "excluded interfaces: 65 given, at most 64"},
		{"no IPv6 source, no IPv6", func(o *redirection.Options) { o.ProbeSourceIPv6, o.IPv6 = netip.Addr{}, false }, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			opts := redirection.DefaultOptions()
			test.change(&opts)
			err := opts.Validate()
			switch {
			case test.wantErr == "" && err != nil:
				t.Errorf("unexpected error: %v", err)
			case test.wantErr != "" && (err == nil || !strings.Contains(err.Error(), test.wantErr)):
				t.Errorf("error %v, want one with %q", err, test.wantErr)
			}
		})
	}
}

func TestKey(t *testing.T) {
	keys := map[string]string{}
	for name, opts := range variants() {
		key := opts.Key()
		if other, taken := keys[key]; taken {
			t.Errorf("%s and %s have the same key %q", name, other, key)
		}
		keys[key] = name
	}
	for name, change := range map[string]func(*redirection.Options){
		"inbound port":  func(o *redirection.Options) { o.ExcludeInboundPorts = []redirection.PortRange{{First: 1, Last: 2}} },
		"outbound port": func(o *redirection.Options) { o.ExcludeOutboundPorts = []redirection.PortRange{{First: 1, Last: 2}} },
		"another port":  func(o *redirection.Options) { o.ExcludeOutboundPorts = []redirection.PortRange{{First: 1, Last: 3}} },
		"CIDR": func(o *redirection.Options) {
			o.ExcludeOutboundCIDRs = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
		},
		"longer CIDR": func(o *redirection.Options) {
			o.ExcludeOutboundCIDRs = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/9")}
		},
		"excluded": func(o *redirection.Options) { o.ExcludeInterfaces = []string{"tap0"} },
		"rerouted": func(o *redirection.Options) { o.RerouteInterfaces = []string{"tap0"} },
	} {
		opts := redirection.DefaultOptions()
		change(&opts)
		key := opts.Key()
		if other, taken := keys[key]; taken {
			t.Errorf("%s and %s have the same key %q", name, other, key)
		}
		keys[key] = name
	}
}

// TestKeyOfEqualOptions has lists that differ and mean the same.
func TestKeyOfEqualOptions(t *testing.T) {
	a, b := redirection.DefaultOptions(), redirection.DefaultOptions()
	a.RerouteInterfaces, b.RerouteInterfaces = []string{"tap0", "tap1", "tap0"}, []string{"tap1", "tap0"}
	a.ExcludeInterfaces, b.ExcludeInterfaces = []string{"net1", "net0"}, []string{"net0", "net1", "net1"}
	a.ExcludeInboundPorts, b.ExcludeInboundPorts = []redirection.PortRange{{First: 1, Last: 9}}, []redirection.PortRange{{First: 5, Last: 9}, {First: 1, Last: 4}}
	a.ExcludeOutboundCIDRs = []netip.Prefix{netip.MustParsePrefix("10.1.2.3/8")}
	b.ExcludeOutboundCIDRs = []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16"), netip.MustParsePrefix("10.0.0.0/8")}
	if a.Key() != b.Key() {
		t.Errorf("order, repetition and overlap make a difference: %q, %q", a.Key(), b.Key())
	}
	if got := a.RerouteInterfaces; !slices.Equal(got, []string{"tap0", "tap1", "tap0"}) {
		t.Errorf("Key changed its receiver: %v", got)
	}
	if got := b.ExcludeInboundPorts; got[0].First != 5 || got[1].First != 1 {
		t.Errorf("Key changed its receiver: %v", got)
	}
}

// FuzzOptions looks for options that validate and then render to something else than they say.
func FuzzOptions(f *testing.F) {
	f.Add(true, true, true, "169.254.7.127", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff", "tap0,tap1")
	f.Add(false, false, false, "10.0.0.1", "", "")
	f.Add(false, true, true, "::1", "1.2.3.4", "eth+,a b,\n-j ACCEPT")
	f.Fuzz(func(t *testing.T, bypass, dns, ipv6 bool, source4, source6, interfaces string) {
		opts := redirection.Options{InboundBypass: bypass, DNSCapture: dns, IPv6: ipv6, IPv6Uncaptured: redirection.UncapturedDrop}
		opts.ProbeSourceIPv4, _ = netip.ParseAddr(source4) // an invalid one is what Validate is to find
		opts.ProbeSourceIPv6, _ = netip.ParseAddr(source6)
		if interfaces != "" {
			opts.RerouteInterfaces = strings.Split(interfaces, ",")
		}
		if opts.Validate() != nil {
			return
		}
		rules := redirection.Rules(opts, redirection.DualStack)
		rerouted := 0
		for _, rule := range rules {
			if rule.Row < 1 || rule.Row > 20 || rule.Why == "" || rule.Row < 19 && !opts.Allowed().Has(rule.Families) {
				t.Errorf("rule %s", rule)
			}
			if rule.Row == 1 {
				rerouted++
				if !slices.Contains(opts.RerouteInterfaces, rule.Match.In.Name) || strings.ContainsAny(rule.Match.In.Name, " \n\"'+*!") {
					t.Errorf("interface %q", rule.Match.In.Name)
				}
			}
		}
		if want := len(slices.Compact(slices.Sorted(slices.Values(opts.RerouteInterfaces)))); rerouted != want {
			t.Errorf("%d rules for %d interfaces", rerouted, want)
		}
		if strings.Contains(opts.Key(), "\n") {
			t.Errorf("key %q", opts.Key())
		}
	})
}

func TestFamilies(t *testing.T) {
	for _, test := range []struct {
		families redirection.Families
		text     string
		list     []string
	}{
		{0, "none", []string{}},
		{redirection.IPv4, "ipv4", []string{"ipv4"}},
		{redirection.IPv6, "ipv6", []string{"ipv6"}},
		{redirection.DualStack, "ipv4,ipv6", []string{"ipv4", "ipv6"}},
	} {
		if got := test.families.String(); got != test.text {
			t.Errorf("String: got %q, want %q", got, test.text)
		}
		if got := test.families.List(); got == nil || !slices.Equal(got, test.list) {
			t.Errorf("List: got %#v, want %#v", got, test.list)
		}
	}
}

func TestDifferenceString(t *testing.T) {
	for _, test := range []struct {
		difference redirection.Difference
		want       string
	}{
		{redirection.Difference{What: "chain c", Want: "w"}, "chain c: missing, want w"},
		{redirection.Difference{What: "route", Family: redirection.IPv6, Got: "g"}, "route (ipv6): unexpected g"},
		{redirection.Difference{What: "loopback device", Want: "up", Got: "down"}, "loopback device: want up, got down"},
	} {
		if got := test.difference.String(); got != test.want {
			t.Errorf("got %q, want %q", got, test.want)
		}
	}
}

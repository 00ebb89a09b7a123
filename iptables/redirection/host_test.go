// SPDX-License-Identifier: Apache-2.0

package redirection_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"ambientd/iptables/redirection"
)

func hostOptions() redirection.HostOptions {
	defaults := redirection.DefaultOptions()
	return redirection.HostOptions{
		ProbeSourceIPv4: defaults.ProbeSourceIPv4, ProbeSourceIPv6: defaults.ProbeSourceIPv6,
		IPv6: true, Scope: redirection.ProbeScopePod,
	}
}

func TestHostOptions(t *testing.T) {
	for _, test := range []struct {
		name    string
		change  func(*redirection.HostOptions)
		wantErr string // empty: valid
	}{
		{"default", func(*redirection.HostOptions) {}, ""},
		{"declared", func(o *redirection.HostOptions) { o.Scope = redirection.ProbeScopeDeclared }, ""},
		{"zero value", func(o *redirection.HostOptions) { *o = redirection.HostOptions{} }, "probe scope"},
		{"scope", func(o *redirection.HostOptions) { o.Scope = "node" }, `probe scope "node" is neither "pod" nor "declared"`},
		{"source", func(o *redirection.HostOptions) { o.ProbeSourceIPv4 = netip.MustParseAddr("192.0.2.1") }, "not link-local"},
		{"no IPv6 source", func(o *redirection.HostOptions) { o.ProbeSourceIPv6 = netip.Addr{} }, "probe source ipv6: no address"},
		{"no IPv6", func(o *redirection.HostOptions) { o.ProbeSourceIPv6, o.IPv6 = netip.Addr{}, false }, ""},
		{"a bad source of a family that is off", func(o *redirection.HostOptions) {
			o.ProbeSourceIPv6, o.IPv6 = netip.IPv6Loopback(), false
		}, "neither link-local"},
	} {
		t.Run(test.name, func(t *testing.T) {
			opts := hostOptions()
			test.change(&opts)
			checkError(t, opts.Validate(), test.wantErr)
		})
	}
}

func checkError(t *testing.T, err error, want string) {
	t.Helper()
	switch {
	case want == "" && err != nil:
		t.Errorf("unexpected error: %v", err)
	case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
		t.Errorf("error %v, want one with %q", err, want)
	}
}

func TestHostEntries(t *testing.T) {
	v4, v6 := netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("2001:db8::2")
	whole := hostOptions()
	declared := whole
	declared.Scope = redirection.ProbeScopeDeclared
	only4 := whole
	only4.IPv6 = false
	for _, test := range []struct {
		name    string
		opts    redirection.HostOptions
		entry   redirection.HostEntry
		wantErr string
	}{
		{"v4", whole, redirection.HostEntry{Addr: v4}, ""},
		{"v6", whole, redirection.HostEntry{Addr: v6}, ""},
		{"declared", declared, redirection.HostEntry{Addr: v6, Port: 80}, ""},
		{"zero", whole, redirection.HostEntry{}, "probe entry invalid IP: no address of a pod"},
		{"mapped", whole, redirection.HostEntry{Addr: netip.MustParseAddr("::ffff:10.0.0.2")}, "no address of a pod"},
		{"zone", whole, redirection.HostEntry{Addr: netip.MustParseAddr("fe80::2%eth0")}, "no address of a pod"},
		{"unspecified", whole, redirection.HostEntry{Addr: netip.IPv4Unspecified()}, "no address of a pod"},
		{"no set", only4, redirection.HostEntry{Addr: v6}, "probe entry 2001:db8::2: there is no set for its family"},
		{"port too many", whole, redirection.HostEntry{Addr: v4, Port: 80}, "probe entry 10.0.0.2:80: no port is expected"},
		{"port missing", declared, redirection.HostEntry{Addr: v4}, "probe entry 10.0.0.2: a port is expected"},
	} {
		t.Run(test.name, func(t *testing.T) { checkError(t, test.opts.ValidateEntry(test.entry), test.wantErr) })
	}
	entries := []redirection.HostEntry{{Addr: v6}, {Addr: v4, Port: 81}, {Addr: v4, Port: 80}, {Addr: v4}}
	slices.SortFunc(entries, redirection.HostEntry.Compare)
	var got []string
	for _, e := range entries {
		got = append(got, e.String())
	}
	if want := []string{"10.0.0.2", "10.0.0.2:80", "10.0.0.2:81", "2001:db8::2"}; !slices.Equal(got, want) {
		t.Errorf("sorted to %v, want %v", got, want)
	}
}

func TestHostRules(t *testing.T) {
	opts := hostOptions()
	want := []redirection.HostRule{
		{Family: redirection.IPv4, Set: "ambientd-probes-v4", Scope: redirection.ProbeScopePod, Source: opts.ProbeSourceIPv4},
		{Family: redirection.IPv6, Set: "ambientd-probes-v6", Scope: redirection.ProbeScopePod, Source: opts.ProbeSourceIPv6},
	}
	options := cmp.Options{cmpopts.EquateComparable(netip.Addr{}), cmpopts.IgnoreFields(redirection.HostRule{}, "Why")}
	if diff := cmp.Diff(want, redirection.HostRules(opts), options); diff != "" {
		t.Errorf("dual stack (-want +got):\n%s", diff)
	}
	opts.IPv6 = false
	if diff := cmp.Diff(want[:1], redirection.HostRules(opts), options); diff != "" {
		t.Errorf("IPv4 (-want +got):\n%s", diff)
	}
}

func TestNamesOfOthers(t *testing.T) {
	for name, want := range map[string]bool{
		"ISTIO_PRERT": true, "ISTIO_OUTPUT": true, "ISTIO_POSTRT": true,
		"ISTIO_INBOUND": false, "AMBIENTD_OUTPUT": false, "PREROUTING": false, "": false,
	} {
		if got := redirection.IsForeignChain(name); got != want {
			t.Errorf("chain %q: %t", name, got)
		}
	}
	for name, want := range map[string]bool{"ISTIO_INBOUND": true, "ISTIO_REDIRECT": true, "ISTIO_IN_REDIRECT": true, "ISTIO_OUTPUT": false} {
		if got := redirection.IsSidecarChain(name); got != want {
			t.Errorf("sidecar's chain %q: %t", name, got)
		}
	}
	for name, want := range map[string]bool{
		"istio-ambient-nat": true, "istio-ambient-mangle": true, "istio-ambient-raw": true, "istio-ambient-nat-host": true,
		"istio-ambient-": false, "istio-proxy-nat": false, "ambientd": false, "nat": false, "": false,
	} {
		if got := redirection.IsForeignTable(name); got != want {
			t.Errorf("table %q: %t", name, got)
		}
	}
	for name, want := range map[string]bool{
		"AMBIENTD_PRERT": true, "AMBIENTD_OUTPUT": true, "AMBIENTD_POSTRT": true, "AMBIENTD_OTHER": false, "ISTIO_PRERT": false,
	} {
		if got := redirection.IsOurChain(name); got != want {
			t.Errorf("chain %q: %t", name, got)
		}
	}
}

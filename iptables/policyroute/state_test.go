// SPDX-License-Identifier: Apache-2.0

package policyroute

import (
	"encoding/binary"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
)

// link returns the payload of a link message for a lo that is up, with the address families given in IFLA_AF_SPEC.
func link(families ...rawnetlink.Attribute) []byte {
	payload := make([]byte, linkHeader)
	binary.NativeEndian.PutUint32(payload[8:], unix.IFF_UP|unix.IFF_LOOPBACK)
	var spec []byte
	for _, family := range families {
		spec = rawnetlink.AppendAttribute(spec, family)
	}
	payload = rawnetlink.AppendAttribute(payload, rawnetlink.Attribute{Type: unix.IFLA_IFNAME, Data: []byte("lo\x00")})
	return rawnetlink.AppendAttribute(payload, rawnetlink.Attribute{Type: unix.IFLA_AF_SPEC, Data: spec})
}

// ipv6 returns the data that the kernel has on a device's IPv6, with disable_ipv6 as given.
func ipv6(disabled uint32, settings int) rawnetlink.Attribute {
	conf := make([]byte, settings*4)
	if settings > disableIPv6Index {
		binary.NativeEndian.PutUint32(conf[disableIPv6Index*4:], disabled)
	}
	data := rawnetlink.AppendAttribute(nil, rawnetlink.Attribute{Type: unix.IFLA_INET6_CONF, Data: conf})
	return rawnetlink.Attribute{Type: unix.AF_INET6, Data: data}
}

func TestStateWithoutIPv6InTheKernel(t *testing.T) {
	ipv4 := rawnetlink.Attribute{Type: unix.AF_INET, Data: make([]byte, 16)}
	for _, test := range []struct {
		name    string
		payload []byte
		want    redirection.Families
	}{
		{"both", link(ipv4, ipv6(0, 60)), redirection.DualStack},
		{"kernel without IPv6", link(ipv4), redirection.IPv4},
		{"switched off", link(ipv4, ipv6(1, 60)), redirection.IPv4},
		{"settings cut off", link(ipv4, ipv6(0, 20)), redirection.IPv4},
	} {
		t.Run(test.name, func(t *testing.T) {
			var s State
			if err := s.readLoopback(test.payload); err != nil {
				t.Fatal(err)
			}
			if got := s.Families(redirection.DualStack); got != test.want {
				t.Errorf("families %s, want %s", got, test.want)
			}
			if got := s.Families(redirection.IPv4); got != redirection.IPv4 {
				t.Errorf("families %s though only IPv4 is allowed", got)
			}
			if err := s.CheckLoopback(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestNewerKernelsAttributes has attributes that this code does not know: what is zero does not count, what is set does.
func TestNewerKernelsAttributes(t *testing.T) {
	const unknown = 200
	for _, test := range []struct {
		name  string
		added rawnetlink.Attribute
		want  bool
	}{
		{"none", rawnetlink.Attribute{Type: unix.FRA_PROTOCOL, Data: []byte{3}}, true},
		{"unset", rawnetlink.Attribute{Type: unknown, Data: make([]byte, 4)}, true},
		{"set", rawnetlink.Attribute{Type: unknown, Data: []byte{1, 0, 0, 0}}, false},
		{"known selector, though zero", rawnetlink.Attribute{Type: unix.FRA_IP_PROTO, Data: []byte{0}}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := isOurRule(rawnetlink.AppendAttribute(reportedRule(), test.added))
			if err != nil || got != test.want {
				t.Errorf("got %t, %v; want %t", got, err, test.want)
			}
		})
	}
}

// reportedRule is our rule as kernels report it: with the prefix length, which nobody sets.
func reportedRule() []byte {
	return appendUint32(slices.Clone(addRule(redirection.IPv4).payload), unix.FRA_SUPPRESS_PREFIXLEN, 0xffffffff)
}

// FuzzRead feeds arbitrary payloads to the readers and describers: they may refuse, not panic.
func FuzzRead(f *testing.F) {
	f.Add(link(ipv6(0, 60)))
	f.Add(reportedRule())
	f.Add(addRoute(redirection.IPv6).payload)
	f.Fuzz(func(t *testing.T, payload []byte) {
		var s State
		// Refusals are fine; what is taken up must hold.
		if err := s.readLoopback(payload); err == nil && s.Families(redirection.DualStack) == 0 {
			t.Error("no family at all")
		}
		ruleErr, routeErr := s.addRule(payload), s.addRoute(payload)
		for _, d := range s.Differences(redirection.DualStack) {
			if d.What == "" || d.String() == "" {
				t.Errorf("empty difference; rule: %v, route: %v", ruleErr, routeErr)
			}
		}
	})
}

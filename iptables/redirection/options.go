// SPDX-License-Identifier: Apache-2.0

package redirection

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// MaxRerouteInterfaces bounds what a pod's author can make an agent hold and send for one pod.
const MaxRerouteInterfaces = 16

// maxInterfaceName is IFNAMSIZ-1: the kernel's buffer holds a terminating zero.
const maxInterfaceName = 15

// Options say which rows a pod gets. They are a value: copy and change them freely. The zero value does not validate;
// start from [DefaultOptions].
type Options struct {
	// InboundBypass leaves ingress alone: rows 3 and 5 are absent.
	InboundBypass bool
	// DNSCapture sends the applications' DNS to the proxy: rows 7 to 10 are present.
	DNSCapture bool
	// RerouteInterfaces are interfaces in the pod whose incoming TCP is treated as egress (row 1): those of virtual
	// machines and nested containers. Order and repetition carry no meaning.
	RerouteInterfaces []string
	// ProbeSourceIPv4 and ProbeSourceIPv6 are the addresses that the host's probes of pods are translated to.
	ProbeSourceIPv4, ProbeSourceIPv6 netip.Addr
	// IPv6 allows rules for IPv6, which then are made where the namespace has IPv6. Without it there are none anywhere.
	IPv6 bool
}

// DefaultOptions returns the options of a pod without annotations: everything captured, DNS too, both families.
func DefaultOptions() Options {
	return Options{
		DNSCapture:      true,
		ProbeSourceIPv4: netip.AddrFrom4([4]byte{169, 254, 7, 127}),
		ProbeSourceIPv6: netip.MustParseAddr("fd16:9254:7127:1337:ffff:ffff:ffff:ffff"),
		IPv6:            true,
	}
}

// Validate returns an error that names the option which cannot be rendered, and nil if there is none.
func (o Options) Validate() error {
	if len(o.RerouteInterfaces) > MaxRerouteInterfaces {
		return fmt.Errorf("reroute interfaces: %d given, at most %d are allowed", len(o.RerouteInterfaces), MaxRerouteInterfaces)
	}
	for _, name := range o.RerouteInterfaces {
		if err := ValidateInterface(name); err != nil {
			return fmt.Errorf("reroute interface: %w", err)
		}
	}
	if err := validateProbeSource(o.ProbeSourceIPv4, IPv4); err != nil {
		return err
	}
	if !o.IPv6 && !o.ProbeSourceIPv6.IsValid() {
		return nil
	}
	return validateProbeSource(o.ProbeSourceIPv6, IPv6)
}

// ValidateInterface returns an error unless name is an interface name that both renderings take literally. That is less
// than what the kernel allows: iptables reads a trailing "+" as a wildcard and its restore format splits at blanks and
// quotes, nft has "*".
func ValidateInterface(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("empty name")
	case len(name) > maxInterfaceName:
		return fmt.Errorf("name %.20q is longer than %d bytes", name, maxInterfaceName)
	case name == "." || name == ".." || name[0] == '-':
		return fmt.Errorf("name %q is not allowed", name)
	case name == Loopback:
		return fmt.Errorf("name %q: what comes in by loopback was sent from this namespace and has been decided on already", name)
	}
	for i := range len(name) {
		if !allowedInInterface(name[i]) {
			return fmt.Errorf("name %q holds %q; letters, digits and ._-@ are allowed", name, name[i])
		}
	}
	return nil
}

func allowedInInterface(c byte) bool {
	switch {
	case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9':
		return true
	default:
		return strings.IndexByte("._-@", c) >= 0
	}
}

func validateProbeSource(addr netip.Addr, family Families) error {
	switch {
	case !addr.IsValid():
		return fmt.Errorf("probe source %s: no address given", family)
	case family == IPv4 && !addr.Is4(), family == IPv6 && (!addr.Is6() || addr.Is4In6()):
		return fmt.Errorf("probe source %s: %s is of another family", family, addr)
	case addr.Zone() != "":
		return fmt.Errorf("probe source %s: %s carries a zone", family, addr)
	case addr.IsUnspecified(), addr.IsLoopback(), addr.IsMulticast():
		return fmt.Errorf("probe source %s: %s is no unicast address that another host could have", family, addr)
	}
	return nil
}

// Key returns a string that is equal for options that make the same rules, and different for others. It is meant as
// the key of caches of rendered rules.
func (o Options) Key() string {
	flag := func(name string, on bool) string { return name + "=" + strconv.FormatBool(on) }
	return strings.Join([]string{
		flag("inbound-bypass", o.InboundBypass),
		flag("dns-capture", o.DNSCapture),
		flag("ipv6", o.IPv6),
		"probe-source-ipv4=" + o.ProbeSourceIPv4.String(),
		"probe-source-ipv6=" + o.ProbeSourceIPv6.String(),
		"reroute=" + strings.Join(o.interfaces(), ","),
	}, ";")
}

// Allowed returns the families that the options allow where the kernel has both.
func (o Options) Allowed() Families {
	if o.IPv6 {
		return DualStack
	}
	return IPv4
}

// interfaces returns the reroute interfaces sorted, each once.
func (o Options) interfaces() []string {
	return slices.Compact(slices.Sorted(slices.Values(o.RerouteInterfaces)))
}

// SPDX-License-Identifier: Apache-2.0

package redirection

import (
	"fmt"
	"net/netip"
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
	// IPv6 allows capture of IPv6, which then is made where the namespace has IPv6.
	IPv6 bool
	// IPv6Uncaptured says what becomes of IPv6 in a pod where it is not captured: because IPv6 is false, or because the
	// namespace has it on other interfaces but not on loopback, without which nothing can be redirected.
	IPv6Uncaptured Uncaptured
	// ExcludeInboundPorts are TCP ports of the pod whose ingress reaches the application directly (row 15), outside mTLS.
	// Of this list and the next three, order, repetition and overlap carry no meaning.
	ExcludeInboundPorts []PortRange
	// ExcludeOutboundPorts are TCP ports of others whose egress leaves the pod directly (row 17). DNS capture comes first:
	// an excluded port 53 is still captured where DNSCapture is on.
	ExcludeOutboundPorts []PortRange
	// ExcludeOutboundCIDRs are destinations whose egress over TCP leaves the pod directly (row 18), of either family. Bits
	// beyond the prefix length carry no meaning.
	ExcludeOutboundCIDRs []netip.Prefix
	// ExcludeInterfaces are interfaces in the pod whose TCP is captured in neither direction (rows 14 and 16). An
	// interface that is among RerouteInterfaces too is rerouted: row 1 comes first.
	ExcludeInterfaces []string
	// KeepEstablished leaves TCP connections alone, until they end, that were established before the rules were there
	// (row 0). It is for pods that are enrolled while they run; others have no such connections.
	KeepEstablished bool
}

// Uncaptured says what becomes of a family's packets that are not captured.
type Uncaptured string

// What can become of them.
const (
	// UncapturedDrop discards what comes in and goes out, except by loopback, and except what IPv6 itself needs to live
	// on a link: neighbour discovery and multicast listener discovery. It spares nobody else, the node proxy included: its
	// answers to IPv6 peers could not be told from the application's before connection tracking.
	UncapturedDrop Uncaptured = "drop"
	// UncapturedAllow makes no rule: the pod talks IPv6 past the mesh.
	UncapturedAllow Uncaptured = "allow"
)

// DefaultOptions returns the options of a pod without annotations: everything captured, DNS too, both families; IPv6 that
// cannot be captured is dropped.
func DefaultOptions() Options {
	return Options{
		DNSCapture:      true,
		ProbeSourceIPv4: netip.AddrFrom4([4]byte{169, 254, 7, 127}),
		ProbeSourceIPv6: netip.MustParseAddr("fd16:9254:7127:1337:ffff:ffff:ffff:ffff"),
		IPv6:            true,
		IPv6Uncaptured:  UncapturedDrop,
	}
}

// Validate returns an error that names the option which cannot be rendered, and nil if there is none.
func (o Options) Validate() error {
	if err := validateInterfaces("reroute interface", o.RerouteInterfaces, MaxRerouteInterfaces); err != nil {
		return err
	}
	if err := o.validateExclusions(); err != nil {
		return err
	}
	if err := validateProbeSource(o.ProbeSourceIPv4, IPv4); err != nil {
		return err
	}
	if o.IPv6 || o.ProbeSourceIPv6.IsValid() {
		if err := validateProbeSource(o.ProbeSourceIPv6, IPv6); err != nil {
			return err
		}
	}
	if o.IPv6Uncaptured != UncapturedDrop && o.IPv6Uncaptured != UncapturedAllow {
		return fmt.Errorf("uncaptured IPv6: %q is neither %q nor %q", o.IPv6Uncaptured, UncapturedDrop, UncapturedAllow)
	}
	return nil
}

func validateInterfaces(what string, names []string, most int) error {
	if len(names) > most {
		return fmt.Errorf("%ss: %d given, at most %d are allowed", what, len(names), most)
	}
	for _, name := range names {
		if err := ValidateInterface(name); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	return nil
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
	case addr.IsLinkLocalUnicast(), family == IPv6 && addr.IsPrivate():
		return nil
	case family == IPv4:
		return fmt.Errorf("probe source %s: %s is not link-local (169.254.0.0/16): a source that others could have would let them past the proxy", family, addr)
	default:
		return fmt.Errorf("probe source %s: %s is neither link-local (fe80::/10) nor unique local (fc00::/7): a source that others could have would let them past the proxy", family, addr)
	}
}

// Key returns a string that is equal for options that make the same rules, and different for others. It is meant as
// the key of caches of rendered rules.
func (o Options) Key() string {
	flag := func(name string, on bool) string { return name + "=" + strconv.FormatBool(on) }
	return strings.Join([]string{
		flag("inbound-bypass", o.InboundBypass),
		flag("dns-capture", o.DNSCapture),
		flag("ipv6", o.IPv6),
		"ipv6-uncaptured=" + string(o.IPv6Uncaptured),
		flag("keep-established", o.KeepEstablished),
		"probe-source-ipv4=" + o.ProbeSourceIPv4.String(),
		"probe-source-ipv6=" + o.ProbeSourceIPv6.String(),
		"reroute=" + strings.Join(sortedOnce(o.RerouteInterfaces), ","),
		"exclude-inbound-ports=" + join(mergePorts(o.ExcludeInboundPorts)),
		"exclude-outbound-ports=" + join(mergePorts(o.ExcludeOutboundPorts)),
		"exclude-outbound-cidrs=" + join(mergePrefixes(o.ExcludeOutboundCIDRs)),
		"exclude-interfaces=" + strings.Join(sortedOnce(o.ExcludeInterfaces), ","),
	}, ";")
}

// Allowed returns the families that the options allow where the kernel has both.
func (o Options) Allowed() Families {
	if o.IPv6 {
		return DualStack
	}
	return IPv4
}

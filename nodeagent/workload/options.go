// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"ambientd/cni-plugin/spelling"
	"ambientd/iptables/redirection"
)

// Annotations by which a pod sets options of its own redirection.
const (
	// AnnotationBypassInbound ("true" or "false"): inbound traffic is not captured.
	AnnotationBypassInbound = "ambient.istio.io/bypass-inbound-capture" //nolint:gosec // no password, in spite of "bypass"
	// AnnotationDNSCapture ("true" or "false") overrides the node's default.
	AnnotationDNSCapture = "ambient.istio.io/dns-capture"
	// AnnotationRerouteInterfaces (names, separated by commas): traffic that
	// arrives from them, from a virtual machine for instance, is egress.
	AnnotationRerouteInterfaces = "istio.io/reroute-virtual-interfaces"
)

// Annotations of our own, each a list separated by commas: what a pod's author may take
// out of the mesh's mTLS. They count only where the operator allows them
// ([Defaults.Allowed]).
const (
	// AnnotationExcludeInboundPorts (TCP ports, or ranges as 8000-8010) reach the
	// application directly.
	AnnotationExcludeInboundPorts = ownPrefix + "exclude-inbound-ports"
	// AnnotationExcludeOutboundPorts are such ports of others.
	AnnotationExcludeOutboundPorts = ownPrefix + "exclude-outbound-ports"
	// AnnotationExcludeOutboundCIDRs (10.0.0.0/8, fd00::/8) are destinations that are
	// reached directly.
	AnnotationExcludeOutboundCIDRs = ownPrefix + "exclude-outbound-cidrs"
	// AnnotationExcludeInterfaces are interfaces in the pod on which nothing is captured.
	AnnotationExcludeInterfaces = ownPrefix + "exclude-interfaces"

	ownPrefix = "ambientd.io/"
)

// IsOption tells whether the annotation is one of those above.
func IsOption(annotation string) bool {
	switch annotation {
	case AnnotationBypassInbound, AnnotationDNSCapture, AnnotationRerouteInterfaces,
		AnnotationExcludeInboundPorts, AnnotationExcludeOutboundPorts, AnnotationExcludeOutboundCIDRs, AnnotationExcludeInterfaces:
		return true
	}
	return false
}

// misspelt returns which of the annotations above was meant by one that is none, but below the
// same prefix and but for a slip the same; "" if none was.
func misspelt(annotation string) (meant string) {
	if IsOption(annotation) || annotation == AnnotationRedirection {
		return ""
	}
	prefix, name, _ := strings.Cut(annotation, "/")
	for _, option := range [...]string{
		AnnotationBypassInbound, AnnotationDNSCapture, AnnotationRerouteInterfaces,
		AnnotationExcludeInboundPorts, AnnotationExcludeOutboundPorts, AnnotationExcludeOutboundCIDRs, AnnotationExcludeInterfaces,
	} {
		if known, same := strings.CutPrefix(option, prefix+"/"); same && spelling.Near(name, known) {
			return option
		}
	}
	return ""
}

// SameOptions tells whether the pods say the same in the annotations above, be they misspelt:
// then their options are the same too, where the defaults are.
func SameOptions(a, b Pod) bool {
	says := func(p, q Pod) bool {
		for annotation, value := range p.Annotations {
			if !IsOption(annotation) && misspelt(annotation) == "" {
				continue
			}
			if other, ok := q.Annotations[annotation]; !ok || other != value {
				return false
			}
		}
		return true
	}
	return says(a, b) && says(b, a)
}

// AllowableOptions returns the names, without ambientd.io/, of the annotations that need
// an operator's leave.
func AllowableOptions() []string {
	names := make([]string, 0, 4)
	for _, annotation := range []string{
		AnnotationExcludeInboundPorts, AnnotationExcludeOutboundPorts, AnnotationExcludeOutboundCIDRs, AnnotationExcludeInterfaces,
	} {
		names = append(names, strings.TrimPrefix(annotation, ownPrefix))
	}
	return names
}

// Defaults are the node's.
type Defaults struct {
	// Redirection are the options of a pod that sets none itself.
	Redirection redirection.Options
	// Allowed are those of [AllowableOptions] that a pod's author may set.
	Allowed []string
}

// Malformed is an annotation that counts as absent, because its name is misspelt, its value
// cannot be read, or the operator does not allow it.
type Malformed struct {
	Annotation string
	Value      string
	Problem    string // what name or value should have been
}

// String names annotation, value and problem. Of a long value, which a pod's author may
// have written, only the beginning is shown.
func (m Malformed) String() string {
	return fmt.Sprintf("annotation %s=%.128q counts as absent: %s", m.Annotation, m.Value, m.Problem)
}

// Options returns the redirection options of pod: the defaults, changed by its
// annotations. A malformed one counts as absent and is reported: nothing of it is in
// force, be it a list of which one entry cannot be read.
func Options(pod Pod, defaults Defaults) (redirection.Options, []Malformed) {
	opts := defaults.Redirection
	opts.RerouteInterfaces = slices.Clone(opts.RerouteInterfaces)
	var malformed []Malformed
	for _, option := range []struct {
		annotation string
		set        func(value string) (problem string)
	}{
		{AnnotationBypassInbound, into(&opts.InboundBypass, parseBool)},
		{AnnotationDNSCapture, into(&opts.DNSCapture, parseBool)},
		{AnnotationRerouteInterfaces, into(&opts.RerouteInterfaces, parseInterfaces)},
		{AnnotationExcludeInboundPorts, into(&opts.ExcludeInboundPorts, parsePorts)},
		{AnnotationExcludeOutboundPorts, into(&opts.ExcludeOutboundPorts, parsePorts)},
		{AnnotationExcludeOutboundCIDRs, into(&opts.ExcludeOutboundCIDRs, parseCIDRs)},
		{AnnotationExcludeInterfaces, into(&opts.ExcludeInterfaces, parseExcludedInterfaces)},
	} {
		value, ok := pod.Annotations[option.annotation]
		if !ok {
			continue
		}
		problem := defaults.refusal(option.annotation)
		if problem == "" {
			problem = option.set(value)
		}
		if problem != "" {
			malformed = append(malformed, Malformed{Annotation: option.annotation, Value: value, Problem: problem})
		}
	}
	return opts, append(malformed, misspellings(pod)...)
}

// misspellings are the pod's misspelt options: one of each, since an author can make any number.
func misspellings(pod Pod) (found []Malformed) {
	reported := map[string]bool{}
	for _, annotation := range slices.Sorted(maps.Keys(pod.Annotations)) {
		if meant := misspelt(annotation); meant != "" && !reported[meant] {
			reported[meant] = true
			found = append(found, Malformed{Annotation: annotation, Value: pod.Annotations[annotation], Problem: "there is no such option; did you mean " + meant + "?"})
		}
	}
	return found
}

// refusal says why a pod may not have the annotation, "" if it may.
func (d Defaults) refusal(annotation string) string {
	name, ours := strings.CutPrefix(annotation, ownPrefix)
	if !ours || slices.Contains(d.Allowed, name) {
		return ""
	}
	return "the operator does not allow it (--allowed-pod-options)"
}

// into returns a function that sets target to the parsed value unless there is
// a problem with it.
func into[T any](target *T, parse func(string) (T, string)) func(string) string {
	return func(value string) string {
		parsed, problem := parse(value)
		if problem == "" {
			*target = parsed
		}
		return problem
	}
}

func parseBool(value string) (parsed bool, problem string) {
	parsed, err := strconv.ParseBool(value)
	if err != nil {
		return false, "it must be true or false"
	}
	return parsed, ""
}

// parseInterfaces reads names separated by commas. Spaces around a name and empty
// names are ignored, as the ecosystem's agent does.
func parseInterfaces(value string) (names []string, problem string) {
	return parseList(value, redirection.MaxRerouteInterfaces, parseInterface)
}

func parseExcludedInterfaces(value string) (names []string, problem string) {
	return parseList(value, redirection.MaxExclusions, parseInterface)
}

func parsePorts(value string) ([]redirection.PortRange, string) {
	return parseList(value, redirection.MaxExclusions, parsePortRange)
}

func parseCIDRs(value string) ([]netip.Prefix, string) {
	return parseList(value, redirection.MaxExclusions, parseCIDR)
}

// parseList reads items separated by commas, each once. Spaces around an item and
// empty items are ignored. One that cannot be read makes the whole list a problem.
func parseList[T comparable](value string, most int, parse func(string) (T, string)) (items []T, problem string) {
	for text := range strings.SplitSeq(value, ",") {
		text = strings.TrimSpace(text)
		if text == "" {
			continue
		}
		item, problem := parse(text)
		if problem != "" {
			return nil, problem
		}
		if slices.Contains(items, item) {
			continue
		}
		if len(items) == most {
			return nil, fmt.Sprintf("it has more items than the at most %d that are allowed", most)
		}
		items = append(items, item)
	}
	return items, ""
}

func parseInterface(text string) (name, problem string) {
	if err := redirection.ValidateInterface(text); err != nil {
		return "", err.Error()
	}
	return text, ""
}

// parsePortRange reads "8000" or "8000-8010".
func parsePortRange(text string) (r redirection.PortRange, problem string) {
	first, last, isRange := strings.Cut(text, "-")
	if !isRange {
		last = first
	}
	low, lowOK := parsePort(first)
	high, highOK := parsePort(last)
	if !lowOK || !highOK || low > high {
		return r, fmt.Sprintf("%.32q is neither a port from 1 to 65535 nor a range such as 8000-8010", text)
	}
	return redirection.PortRange{First: low, Last: high}, ""
}

// parsePort takes what ParseUint does: decimal digits, no sign.
func parsePort(text string) (port uint16, ok bool) {
	number, err := strconv.ParseUint(text, 10, 16)
	return uint16(number), err == nil && number > 0
}

// parseCIDR reads a prefix of either family. Bits beyond its length carry no meaning.
func parseCIDR(text string) (prefix netip.Prefix, problem string) {
	prefix, err := netip.ParsePrefix(text)
	if err != nil || prefix.Addr().Is4In6() {
		return netip.Prefix{}, fmt.Sprintf("%.64q is no CIDR such as 10.0.0.0/8 or fd00::/8", text)
	}
	return prefix.Masked(), ""
}

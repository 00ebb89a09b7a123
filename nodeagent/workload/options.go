// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

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

// Defaults are the node's: the options of a pod that sets none itself.
type Defaults redirection.Options

// Malformed is an annotation that counts as absent because its value cannot be
// read.
type Malformed struct {
	Annotation string
	Value      string
	Problem    string // what the value should have been
}

// String names annotation, the beginning of the value, and problem: a pod's author
// may write 256 KiB, and each ADD logs it.
func (m Malformed) String() string {
	return fmt.Sprintf("annotation %s=%.64q counts as absent: %s", m.Annotation, m.Value, m.Problem)
}

// Options returns the redirection options of pod: the defaults, changed by its
// annotations. A malformed one counts as absent and is reported.
func Options(pod Pod, defaults Defaults) (redirection.Options, []Malformed) {
	opts := redirection.Options(defaults)
	opts.RerouteInterfaces = slices.Clone(opts.RerouteInterfaces)
	var malformed []Malformed
	apply := func(annotation string, parse func(value string) (problem string)) {
		value, ok := pod.Annotations[annotation]
		if !ok {
			return
		}
		if problem := parse(value); problem != "" {
			malformed = append(malformed, Malformed{Annotation: annotation, Value: value, Problem: problem})
		}
	}
	apply(AnnotationBypassInbound, into(&opts.InboundBypass, parseBool))
	apply(AnnotationDNSCapture, into(&opts.DNSCapture, parseBool))
	apply(AnnotationRerouteInterfaces, into(&opts.RerouteInterfaces, parseInterfaces))
	return opts, malformed
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
	for name := range strings.SplitSeq(value, ",") {
		name = strings.TrimSpace(name)
		if name == "" || slices.Contains(names, name) {
			continue
		}
		if err := redirection.ValidateInterface(name); err != nil {
			return nil, err.Error()
		}
		names = append(names, name)
	}
	if len(names) > redirection.MaxRerouteInterfaces {
		return nil, fmt.Sprintf("%d names, of which at most %d are allowed", len(names), redirection.MaxRerouteInterfaces)
	}
	return names, ""
}

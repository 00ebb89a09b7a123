// SPDX-License-Identifier: Apache-2.0

package workload_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"ambientd/iptables/redirection"
	"ambientd/nodeagent/workload"
)

func TestOptions(t *testing.T) {
	many := strings.Repeat("x,", redirection.MaxRerouteInterfaces) + numbered(redirection.MaxRerouteInterfaces+1)
	for _, test := range []struct {
		name, annotation, value string
		want                    func(*redirection.Options)
		problem                 string
	}{
		{"none", "", "", nil, ""},
		{"inbound bypass", workload.AnnotationBypassInbound, "true", func(o *redirection.Options) { o.InboundBypass = true }, ""},
		{"inbound bypass off", workload.AnnotationBypassInbound, "false", nil, ""},
		{"inbound bypass, other spelling", workload.AnnotationBypassInbound, "True", func(o *redirection.Options) { o.InboundBypass = true }, ""},
		{"inbound bypass, malformed", workload.AnnotationBypassInbound, "yes", nil, "true or false"},
		{"inbound bypass, empty", workload.AnnotationBypassInbound, "", nil, "true or false"},
		{"DNS off", workload.AnnotationDNSCapture, "false", func(o *redirection.Options) { o.DNSCapture = false }, ""},
		{"DNS on", workload.AnnotationDNSCapture, "true", nil, ""},
		{"DNS, malformed", workload.AnnotationDNSCapture, "tweedledum", nil, "true or false"},
		{"interfaces", workload.AnnotationRerouteInterfaces, "k6t-eth0, tap0 ,,k6t-eth0", func(o *redirection.Options) { o.RerouteInterfaces = []string{"k6t-eth0", "tap0"} }, ""},
		{"interfaces, none named", workload.AnnotationRerouteInterfaces, " , ", func(o *redirection.Options) { o.RerouteInterfaces = nil }, ""},
		{"interfaces, one malformed", workload.AnnotationRerouteInterfaces, `tap0,a b`, nil, "a b"},
		{"interfaces, wildcard", workload.AnnotationRerouteInterfaces, "tap+", nil, "tap+"},
		{"interfaces, too long", workload.AnnotationRerouteInterfaces, "sixteen-bytes-xx", nil, "longer"},
		{"interfaces, too many", workload.AnnotationRerouteInterfaces, many, nil, "at most"},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := pod("", ambient, annotate(test.annotation, test.value))
			want := redirection.DefaultOptions()
			want.RerouteInterfaces = []string{"node0"}
			defaults := workload.Defaults(want)
			if test.want != nil {
				test.want(&want)
			}
			got, malformed := workload.Options(p, defaults)
			if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
			if err := got.Validate(); err != nil {
				t.Errorf("the options do not validate: %v", err)
			}
			if test.problem == "" {
				if len(malformed) > 0 {
					t.Errorf("reported %v", malformed)
				}
				return
			}
			if len(malformed) != 1 || malformed[0].Annotation != test.annotation || malformed[0].Value != test.value ||
				!strings.Contains(malformed[0].Problem, test.problem) || !strings.Contains(malformed[0].String(), test.annotation) {
				t.Errorf("reported %v, want one about %q", malformed, test.problem)
			}
		})
	}
}

// What a pod's author writes does not fill the log.
func TestMalformedIsShort(t *testing.T) {
	for _, value := range []string{strings.Repeat("x", 1<<18), strings.Repeat("\x00,", 1<<17)} {
		p := pod("", ambient)
		p.Annotations = map[string]string{workload.AnnotationDNSCapture: value, workload.AnnotationRerouteInterfaces: value}
		_, malformed := workload.Options(p, workload.Defaults(redirection.DefaultOptions()))
		if len(malformed) != 2 {
			t.Errorf("%d reported, want both", len(malformed))
		}
		for _, m := range malformed {
			if n := len(m.String()); n > 600 {
				t.Errorf("the report about %s has %d bytes", m.Annotation, n)
			}
		}
	}
}

// numbered returns n interface names.
func numbered(n int) string {
	var names strings.Builder
	for i := range n {
		names.WriteString("tap" + string(rune('a'+i)) + ",")
	}
	return names.String()
}

// The defaults are shared by all pods.
func TestOptionsLeaveDefaultsAlone(t *testing.T) {
	shared := redirection.DefaultOptions()
	shared.RerouteInterfaces = []string{"node0", "node1"}
	opts, _ := workload.Options(pod("", ambient), workload.Defaults(shared))
	opts.RerouteInterfaces[0] = "changed"
	if shared.RerouteInterfaces[0] != "node0" {
		t.Error("a pod's options share memory with the defaults")
	}
}

func TestOptionsDefaultsCanBeOverriddenBothWays(t *testing.T) {
	defaults := redirection.DefaultOptions()
	defaults.DNSCapture, defaults.InboundBypass = false, true
	p := pod("", ambient)
	p.Annotations = map[string]string{workload.AnnotationDNSCapture: "true", workload.AnnotationBypassInbound: "false"}
	opts, malformed := workload.Options(p, workload.Defaults(defaults))
	if !opts.DNSCapture || opts.InboundBypass || len(malformed) > 0 {
		t.Errorf("got %+v, %v", opts, malformed)
	}
}

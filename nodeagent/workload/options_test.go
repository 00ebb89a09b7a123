// SPDX-License-Identifier: Apache-2.0

package workload_test

import (
	"net/netip"
	"slices"
	"strconv"
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
			defaults := workload.Defaults{Redirection: want}
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
	opts, _ := workload.Options(pod("", ambient), workload.Defaults{Redirection: shared})
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
	opts, malformed := workload.Options(p, workload.Defaults{Redirection: defaults})
	if !opts.DNSCapture || opts.InboundBypass || len(malformed) > 0 {
		t.Errorf("got %+v, %v", opts, malformed)
	}
}

func ranges(bounds ...uint16) (r []redirection.PortRange) {
	for i := 0; i < len(bounds); i += 2 {
		r = append(r, redirection.PortRange{First: bounds[i], Last: bounds[i+1]})
	}
	return r
}

func TestExclusions(t *testing.T) {
	tooMany := "1"
	for port := 2; port <= redirection.MaxExclusions+1; port++ {
		tooMany += "," + strconv.Itoa(port)
	}
	for _, test := range []struct {
		name, annotation, value string
		want                    func(*redirection.Options)
		problem                 string
	}{
		{
			"inbound ports", workload.AnnotationExcludeInboundPorts, "8080, 9000-9010,8080,",
			func(o *redirection.Options) { o.ExcludeInboundPorts = ranges(8080, 8080, 9000, 9010) }, "",
		},
		{
			"outbound ports", workload.AnnotationExcludeOutboundPorts, "1,65535,5-5",
			func(o *redirection.Options) { o.ExcludeOutboundPorts = ranges(1, 1, 65535, 65535, 5, 5) }, "",
		},
		{"no ports", workload.AnnotationExcludeOutboundPorts, "", nil, ""},
		{"port 0", workload.AnnotationExcludeInboundPorts, "80,0", nil, `"0" is neither`},
		{"port too high", workload.AnnotationExcludeInboundPorts, "65536", nil, `"65536" is neither`},
		{"signed port", workload.AnnotationExcludeInboundPorts, "+80", nil, `"+80" is neither`},
		{"named port", workload.AnnotationExcludeInboundPorts, "http", nil, "8000-8010"},
		{"range backwards", workload.AnnotationExcludeOutboundPorts, "80,9-8", nil, `"9-8"`},
		{"range without end", workload.AnnotationExcludeOutboundPorts, "9-", nil, `"9-"`},
		{"range of three", workload.AnnotationExcludeOutboundPorts, "1-2-3", nil, `"1-2-3"`},
		{"as iptables writes it", workload.AnnotationExcludeOutboundPorts, "8000:8010", nil, "8000-8010"},
		{"too many ports", workload.AnnotationExcludeOutboundPorts, tooMany, nil, "at most 64"},
		{
			"CIDRs", workload.AnnotationExcludeOutboundCIDRs, "10.1.2.3/8, fd00::/8,192.0.2.1/32", func(o *redirection.Options) {
				o.ExcludeOutboundCIDRs = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8"), netip.MustParsePrefix("192.0.2.1/32")}
			}, "",
		},
		{"an address", workload.AnnotationExcludeOutboundCIDRs, "10.0.0.1", nil, "no CIDR"},
		{"prefix too long", workload.AnnotationExcludeOutboundCIDRs, "10.0.0.0/8,10.0.0.0/33", nil, `"10.0.0.0/33"`},
		{"mapped", workload.AnnotationExcludeOutboundCIDRs, "::ffff:10.0.0.0/104", nil, "no CIDR"},
		{"everything, by its name elsewhere", workload.AnnotationExcludeOutboundCIDRs, "*", nil, "no CIDR"},
		{
			"interfaces", workload.AnnotationExcludeInterfaces, "net1, net2,net1",
			func(o *redirection.Options) { o.ExcludeInterfaces = []string{"net1", "net2"} }, "",
		},
		{"loopback", workload.AnnotationExcludeInterfaces, "net1,lo", nil, "loopback"},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := pod("", ambient, annotate(test.annotation, test.value))
			want := redirection.DefaultOptions()
			if test.want != nil {
				test.want(&want)
			}
			checkOptions(t, p, workload.Defaults{Redirection: redirection.DefaultOptions(), Allowed: workload.AllowableOptions()}, want, test.problem)
			if test.problem != "" {
				return
			}
			// What an author may not set has no effect, and both are told.
			checkOptions(t, p, workload.Defaults{Redirection: redirection.DefaultOptions()}, redirection.DefaultOptions(), "--allowed-pod-options")
		})
	}
}

func checkOptions(t *testing.T, p workload.Pod, defaults workload.Defaults, want redirection.Options, problem string) {
	t.Helper()
	got, malformed := workload.Options(p, defaults)
	if got.Key() != want.Key() {
		t.Errorf("got  %s\nwant %s", got.Key(), want.Key())
	}
	if err := got.Validate(); err != nil {
		t.Errorf("the options do not validate: %v", err)
	}
	switch {
	case problem == "" && len(malformed) > 0:
		t.Errorf("reported %v", malformed)
	case problem != "" && (len(malformed) != 1 || !strings.Contains(malformed[0].Problem, problem)):
		t.Errorf("reported %v, want one about %q", malformed, problem)
	}
}

// Each option is allowed by itself.
func TestAllowedOptions(t *testing.T) {
	p := pod("", ambient)
	p.Annotations = map[string]string{
		workload.AnnotationExcludeInboundPorts: "80", workload.AnnotationExcludeOutboundPorts: "81",
		workload.AnnotationExcludeOutboundCIDRs: "10.0.0.0/8", workload.AnnotationExcludeInterfaces: "net1",
	}
	for _, allowed := range workload.AllowableOptions() {
		_, malformed := workload.Options(p, workload.Defaults{Redirection: redirection.DefaultOptions(), Allowed: []string{allowed}})
		if len(malformed) != 3 {
			t.Errorf("with %s allowed, reported %v, want the three others", allowed, malformed)
		}
		for _, m := range malformed {
			if m.Annotation == "ambientd.io/"+allowed {
				t.Errorf("%s is refused though it is allowed", allowed)
			}
		}
	}
}

// An author's long value does not flood the log.
func TestMalformedIsShort(t *testing.T) {
	p := pod("", ambient, annotate(workload.AnnotationDNSCapture, strings.Repeat("x", 100_000)))
	_, malformed := workload.Options(p, workload.Defaults{Redirection: redirection.DefaultOptions()})
	if len(malformed) != 1 || len(malformed[0].String()) > 400 {
		t.Errorf("reported in %d bytes", len(malformed[0].String()))
	}
}

// A slip in an option's name is told of, each option once; other names are somebody else's.
func TestMisspeltOptions(t *testing.T) {
	p := pod("", ambient)
	p.Annotations = map[string]string{
		"ambientd.io/exclude-inbound-port": "80", "ambientd.io/exclude-inbound-portz": "81", "ambientd.io/excludeOutboundCIDRs": "10.0.0.0/8",
		"ambient.istio.io/dns-captur": "false", "istio.io/reroute-virtual-interface": "tap0",
		"ambientd.io/exclude-inbound-ports": "90", workload.AnnotationRedirection: "enabled", "ambientd.io/owner": "me",
		"example.com/dns-captur": "false", "dns-captur": "false", "istio.io/dns-captur": "false",
	}
	options, malformed := workload.Options(p, workload.Defaults{Redirection: redirection.DefaultOptions(), Allowed: workload.AllowableOptions()})
	want := []workload.Malformed{
		{Annotation: "ambient.istio.io/dns-captur", Value: "false", Problem: "there is no such option; did you mean ambient.istio.io/dns-capture?"},
		{Annotation: "ambientd.io/exclude-inbound-port", Value: "80", Problem: "there is no such option; did you mean ambientd.io/exclude-inbound-ports?"},
		{Annotation: "ambientd.io/excludeOutboundCIDRs", Value: "10.0.0.0/8", Problem: "there is no such option; did you mean ambientd.io/exclude-outbound-cidrs?"},
		{Annotation: "istio.io/reroute-virtual-interface", Value: "tap0", Problem: "there is no such option; did you mean istio.io/reroute-virtual-interfaces?"},
	}
	if !slices.Equal(malformed, want) {
		t.Errorf("reported %q, want %q", malformed, want)
	}
	if !options.DNSCapture || len(options.ExcludeInboundPorts) != 1 || len(options.RerouteInterfaces) > 0 {
		t.Errorf("options %+v", options)
	}
	for annotation := range p.Annotations {
		key, value := workload.IsNeeded(annotation)
		foreign := strings.HasPrefix(annotation, "example") || annotation == "ambientd.io/owner" || strings.HasSuffix(annotation, "dns-captur") && !strings.HasPrefix(annotation, "ambient.")
		if key != value || key == foreign {
			t.Errorf("a source keeps of %s: %t, %t", annotation, key, value)
		}
	}
}

// A source that keeps only what is needed changes nothing of what is decided.
func TestIsNeeded(t *testing.T) {
	full := pod("", ambient)
	full.Annotations = map[string]string{
		workload.AnnotationRedirection: "enabled", "sidecar.istio.io/status": `{"long": "text"}`, "kubernetes.io/config.mirror": "hash",
		"kubernetes.io/config.hash": "hash", workload.AnnotationDNSCapture: "false", workload.AnnotationExcludeInboundPorts: "80",
		workload.AnnotationBypassInbound: "true", workload.AnnotationRerouteInterfaces: "tap0", "kubectl.kubernetes.io/last-applied-configuration": "{}",
	}
	trimmed := full
	trimmed.Annotations = map[string]string{}
	for annotation, text := range full.Annotations {
		if key, value := workload.IsNeeded(annotation); key && value {
			trimmed.Annotations[annotation] = text
		} else if key {
			trimmed.Annotations[annotation] = ""
		}
	}
	if len(trimmed.Annotations) != len(full.Annotations)-1 || trimmed.Annotations["sidecar.istio.io/status"] != "" {
		t.Errorf("kept %v", trimmed.Annotations)
	}
	defaults := workload.Defaults{Redirection: redirection.DefaultOptions(), Allowed: workload.AllowableOptions()}
	wanted, _ := workload.Options(full, defaults)
	got, malformed := workload.Options(trimmed, defaults)
	if got.Key() != wanted.Key() || len(malformed) > 0 {
		t.Errorf("options %+v, %v; want %+v", got, malformed, wanted)
	}
	policy := policy(t, workload.DefaultSelectors())
	if got, want := policy.Decide(trimmed), policy.Decide(full); got != want {
		t.Errorf("decided %+v, want %+v", got, want)
	}
}

func TestSameOptions(t *testing.T) {
	pod := func(annotations ...string) workload.Pod {
		p := workload.Pod{Annotations: map[string]string{}}
		for i := 0; i < len(annotations); i += 2 {
			p.Annotations[annotations[i]] = annotations[i+1]
		}
		return p
	}
	for name, c := range map[string]struct {
		a, b workload.Pod
		same bool
	}{
		"none":              {a: workload.Pod{}, b: pod(), same: true},
		"the same":          {a: pod(workload.AnnotationDNSCapture, "false"), b: pod(workload.AnnotationDNSCapture, "false"), same: true},
		"what is no option": {a: pod(workload.AnnotationRedirection, "enabled"), b: pod("other", "x"), same: true},
		"another value":     {a: pod(workload.AnnotationDNSCapture, "false"), b: pod(workload.AnnotationDNSCapture, "true")},
		"one more":          {a: pod(), b: pod(workload.AnnotationExcludeInboundPorts, "")},
		"a misspelt one":    {a: pod(), b: pod("ambient.istio.io/dns-captur", "false")},
		"another one":       {a: pod(workload.AnnotationExcludeInboundPorts, "80"), b: pod(workload.AnnotationExcludeOutboundPorts, "80")},
	} {
		t.Run(name, func(t *testing.T) {
			if workload.SameOptions(c.a, c.b) != c.same || workload.SameOptions(c.b, c.a) != c.same {
				t.Errorf("got %v, want %v, both ways", !c.same, c.same)
			}
		})
	}
}

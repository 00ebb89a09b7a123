// SPDX-License-Identifier: Apache-2.0

package workload_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"ambientd/nodeagent/workload"
)

func policy(t *testing.T, specs []workload.SelectorSpec) workload.Policy {
	t.Helper()
	selectors, err := workload.ParseSelectors(specs)
	if err != nil {
		t.Fatal(err)
	}
	p := workload.Policy{
		ExcludeNamespaces: []string{"kube-system"},
		AgentNamespace:    "ambientd-system",
		OwnPods:           []string{"ambientd-*", "ztunnel-*"},
		Selectors:         selectors,
	}
	if err := p.Validate(); err != nil {
		t.Fatal(err)
	}
	return p
}

// pod returns a pod of namespace shop with the given labels on pod and namespace,
// each "key=value" or "".
func pod(label, namespaceLabel string, changes ...func(*workload.Pod)) workload.Pod {
	p := workload.Pod{
		UID: "uid", Namespace: "shop", Name: "web-0", ServiceAccount: "web",
		Labels: set(label), NamespaceLabels: set(namespaceLabel), Phase: corev1.PodPending,
	}
	for _, change := range changes {
		change(&p)
	}
	return p
}

func set(label string) map[string]string {
	key, value, ok := strings.Cut(label, "=")
	if !ok {
		return nil
	}
	return map[string]string{key: value}
}

const (
	ambient = "istio.io/dataplane-mode=ambient"
	none    = "istio.io/dataplane-mode=none"
)

func TestDecide(t *testing.T) {
	policy := policy(t, workload.DefaultSelectors())
	for _, test := range []struct {
		name   string
		pod    workload.Pod
		in     bool
		reason string // a part of it
	}{
		{"no label", pod("", ""), false, "no selector matches"},
		{"pod label", pod(ambient, ""), true, "pods istio.io/dataplane-mode=ambient"},
		{"namespace label", pod("", ambient), true, "in namespaces istio.io/dataplane-mode=ambient"},
		{"both labels", pod(ambient, ambient), true, ""},
		{"pod opts out of its namespace", pod(none, ambient), false, "label istio.io/dataplane-mode=none opts out"},
		{"pod in, namespace none", pod(ambient, none), true, ""},
		{"namespace none", pod("", none), false, "no selector matches"},
		{"unknown mode on the pod", pod("istio.io/dataplane-mode=turbo", ""), false, "no selector matches"},
		{"unknown mode on the pod, namespace in", pod("istio.io/dataplane-mode=turbo", ambient), true, ""},
		{"label of another key", pod("istio-injection=ambient", ""), false, "no selector matches"},

		{"host network", pod(ambient, ambient, hostNetwork), false, "hostNetwork: true"},
		{"sidecar", pod("", ambient, annotate("sidecar.istio.io/status", `{"version":"x"}`)), false, "sidecar.istio.io/status"},
		{"sidecar, empty annotation", pod("", ambient, annotate("sidecar.istio.io/status", "")), false, "sidecar.istio.io/status"},
		{"sidecar annotation of another kind", pod("", ambient, annotate("sidecar.istio.io/inject", "false")), true, ""},
		{"excluded namespace", pod(ambient, ambient, in("kube-system")), false, "namespace kube-system is excluded"},
		{"like an excluded namespace", pod("", ambient, in("kube-system-2")), true, ""},

		{"the agent", pod("", ambient, in("ambientd-system"), named("ambientd-x7k2p")), false, "ambientd-* in namespace ambientd-system"},
		{"the node proxy", pod(ambient, "", in("ambientd-system"), named("ztunnel-x7k2p")), false, "ztunnel-* in namespace ambientd-system"},
		{"own name elsewhere", pod("", ambient, named("ztunnel-x7k2p")), true, ""},
		{"another pod of the agent's namespace", pod("", ambient, in("ambientd-system"), named("grafana-0")), true, ""},
		{"own name as a part", pod("", ambient, in("ambientd-system"), named("not-ztunnel-0")), true, ""},

		{"pending", pod("", ambient, phase(corev1.PodPending)), true, ""},
		{"running", pod("", ambient, phase(corev1.PodRunning)), true, ""},
		{"no phase yet", pod("", ambient, phase("")), true, ""},
		{"phase unknown", pod("", ambient, phase(corev1.PodUnknown)), true, ""},
		{"succeeded", pod("", ambient, phase(corev1.PodSucceeded)), false, "ended (phase Succeeded)"},
		{"failed", pod("", ambient, phase(corev1.PodFailed)), false, "ended (phase Failed)"},
		{"draining", pod("", ambient, deleting), true, ""},

		{"static without a service account", pod("", ambient, static, account("")), false, "static pod without a service account"},
		{"static with a service account", pod("", ambient, static), true, ""},
		{"without a service account", pod("", ambient, account("")), false, "no service account"},
		{"unselected and without a service account", pod("", "", account("")), false, "no service account"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := policy.Decide(test.pod)
			if got.InMesh != test.in || !strings.Contains(got.Reason, test.reason) || got.Reason == "" {
				t.Errorf("got %+v, want in=%v and a reason with %q", got, test.in, test.reason)
			}
		})
	}
}

func hostNetwork(p *workload.Pod) { p.HostNetwork = true }
func deleting(p *workload.Pod)    { p.Deleting = true }
func static(p *workload.Pod)      { p.Static = true }

func in(namespace string) func(*workload.Pod) {
	return func(p *workload.Pod) { p.Namespace = namespace }
}
func named(name string) func(*workload.Pod) { return func(p *workload.Pod) { p.Name = name } }
func account(name string) func(*workload.Pod) {
	return func(p *workload.Pod) { p.ServiceAccount = name }
}
func phase(phase corev1.PodPhase) func(*workload.Pod) {
	return func(p *workload.Pod) { p.Phase = phase }
}

func annotate(key, value string) func(*workload.Pod) {
	return func(p *workload.Pod) { p.Annotations = map[string]string{key: value} }
}

func TestNamespaceOut(t *testing.T) {
	pair := func(pod, namespace string) workload.SelectorSpec {
		return workload.SelectorSpec{
			PodSelector: metav1.LabelSelector{MatchLabels: set(pod)}, NamespaceSelector: metav1.LabelSelector{MatchLabels: set(namespace)},
		}
	}
	all := workload.SelectorSpec{
		PodSelector: metav1.LabelSelector{MatchLabels: set("mesh=yes")},
		NamespaceSelector: metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
			{Key: "kubernetes.io/metadata.name", Operator: metav1.LabelSelectorOpExists},
		}},
	}
	for _, test := range []struct {
		name            string
		selectors       []workload.SelectorSpec
		namespace, with string // its label
		out             bool
	}{
		{"unlabelled", workload.DefaultSelectors(), "shop", "", true},
		{"labelled in", workload.DefaultSelectors(), "shop", ambient, false},
		{"labelled out", workload.DefaultSelectors(), "shop", none, true},
		{"excluded and labelled in", workload.DefaultSelectors(), "kube-system", ambient, true},
		{"the agent's, labelled in", workload.DefaultSelectors(), "ambientd-system", ambient, false},
		{"some of its pods", []workload.SelectorSpec{pair("tier=web", "mesh=yes")}, "shop", "mesh=yes", false},
		{"of another label", []workload.SelectorSpec{pair("tier=web", "mesh=yes")}, "shop", "mesh=no", true},
		{"pods by themselves only", []workload.SelectorSpec{pair("mesh=yes", "")}, "shop", "", true},
		{"any namespace that has a name", []workload.SelectorSpec{all}, "shop", "kubernetes.io/metadata.name=shop", false},
		{"one of several", append(workload.DefaultSelectors(), pair("", "mesh=yes")), "shop", "mesh=yes", false},
	} {
		p := policy(t, test.selectors)
		if out := p.NamespaceOut(test.namespace, set(test.with)); out != test.out {
			t.Errorf("%s: out is %v", test.name, out)
		}
	}
}

func TestZeroPolicyTakesNobody(t *testing.T) {
	if got := (workload.Policy{}).Decide(pod(ambient, ambient)); got.InMesh {
		t.Errorf("got %+v, want out", got)
	}
	if got := (workload.Policy{Selectors: make([]workload.Selector, 1)}).Decide(pod(ambient, ambient)); got.InMesh {
		t.Errorf("zero selector: got %+v, want out", got)
	}
}

func TestConfiguredSelectors(t *testing.T) {
	var specs []workload.SelectorSpec
	err := yaml.UnmarshalStrict([]byte(`
- podSelector:
    matchExpressions: [{key: tier, operator: In, values: [web, api]}]
  namespaceSelector:
    matchLabels: {mesh: "yes"}
- namespaceSelector:
    matchExpressions: [{key: kubernetes.io/metadata.name, operator: Exists}]
  podSelector:
    matchLabels: {mesh: always}
`), &specs)
	if err != nil {
		t.Fatal(err)
	}
	policy := policy(t, specs)
	for _, test := range []struct {
		pod workload.Pod
		in  bool
	}{
		{pod("tier=web", "mesh=yes"), true},
		{pod("tier=db", "mesh=yes"), false},
		{pod("tier=web", "mesh=no"), false},
		{pod("mesh=always", "kubernetes.io/metadata.name=shop"), true},
		{pod(ambient, ambient), false}, // the default list was replaced
	} {
		if got := policy.Decide(test.pod); got.InMesh != test.in {
			t.Errorf("labels %v of pod, %v of namespace: got %+v, want in=%v", test.pod.Labels, test.pod.NamespaceLabels, got, test.in)
		}
	}
}

func TestParseSelectorsRefuses(t *testing.T) {
	good := workload.DefaultSelectors()
	bad := metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "a", Operator: "Maybe"}}}
	for _, test := range []struct {
		name string
		spec workload.SelectorSpec
		want []string
	}{
		{"both empty", workload.SelectorSpec{}, []string{"selector 3", "would select every pod"}},
		{"pod half", workload.SelectorSpec{PodSelector: bad}, []string{"selector 3", "podSelector", "Maybe"}},
		{"namespace half", workload.SelectorSpec{NamespaceSelector: bad}, []string{"selector 3", "namespaceSelector", "Maybe"}},
		{
			"label key", workload.SelectorSpec{PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"no key": "x"}}},
			[]string{"selector 3", "podSelector"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := workload.ParseSelectors(append(good[:2:2], test.spec))
			wantError(t, err, test.want...)
		})
	}
}

func TestPolicyValidate(t *testing.T) {
	for _, test := range []struct {
		name   string
		policy workload.Policy
		want   []string
	}{
		{"excluded namespace", workload.Policy{ExcludeNamespaces: []string{"a", "Kube_System"}}, []string{"excluded namespace", "Kube_System"}},
		{"own pods of nowhere", workload.Policy{OwnPods: []string{"a-*"}}, []string{"no namespace of the agent"}},
		{"agent's namespace", workload.Policy{AgentNamespace: "a/b"}, []string{"namespace of the agent", "a/b"}},
		{"pattern", workload.Policy{AgentNamespace: "a", OwnPods: []string{"a-["}}, []string{"own pods", "a-["}},
		{"empty pattern", workload.Policy{AgentNamespace: "a", OwnPods: []string{""}}, []string{"own pods"}},
	} {
		t.Run(test.name, func(t *testing.T) { wantError(t, test.policy.Validate(), test.want...) })
	}
	if err := (workload.Policy{}).Validate(); err != nil {
		t.Errorf("the zero policy: %v", err)
	}
}

func wantError(t *testing.T, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("error %q does not say %q", err, part)
		}
	}
}

func TestSelectorString(t *testing.T) {
	selectors, err := workload.ParseSelectors(append(workload.DefaultSelectors(), workload.SelectorSpec{
		NamespaceSelector: metav1.LabelSelector{MatchLabels: map[string]string{"mesh": "yes"}},
	}))
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{
		"pods istio.io/dataplane-mode=ambient",
		"pods istio.io/dataplane-mode notin (none) in namespaces istio.io/dataplane-mode=ambient",
		"namespaces mesh=yes",
	} {
		if got := selectors[i].String(); got != want {
			t.Errorf("selector %d is %q, want %q", i+1, got, want)
		}
	}
	if got := (workload.Selector{}).String(); got != "nothing" {
		t.Errorf("the zero selector is %q", got)
	}
}

func BenchmarkDecide(b *testing.B) {
	selectors, err := workload.ParseSelectors(workload.DefaultSelectors())
	if err != nil {
		b.Fatal(err)
	}
	policy := workload.Policy{Selectors: selectors, ExcludeNamespaces: []string{"kube-system"}}
	pod := pod("", ambient)
	b.ReportAllocs()
	for b.Loop() {
		if !policy.Decide(pod).InMesh {
			b.Fatal("out")
		}
	}
}

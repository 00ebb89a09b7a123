// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"ambientd/nodeagent/workload"
)

func newPod(name, uid string, version int) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID(uid), ResourceVersion: fmt.Sprint(version)},
		Spec:       corev1.PodSpec{NodeName: "node-1", ServiceAccountName: "web"},
	}
}

// names are "name/uid" of all that is known, sorted.
func (k *known) names() (names []string, complete bool) {
	items, complete := k.all()
	for _, i := range items {
		names = append(names, i.Name+"/"+string(i.UID))
	}
	slices.Sort(names)
	return names, complete
}

type knownTest struct {
	*known
	t       *testing.T
	changes int
}

func newKnownTest(t *testing.T) *knownTest {
	k := &knownTest{t: t}
	k.known = newKnown(func() { k.changes++ }, func(a, b *item) bool { return !same(a.pod, b.pod) })
	return k
}

func (k *knownTest) must(err error) {
	k.t.Helper()
	if err != nil {
		k.t.Fatal(err)
	}
}

func (k *knownTest) want(complete bool, names ...string) {
	k.t.Helper()
	if got, whole := k.names(); !slices.Equal(got, names) || whole != complete {
		k.t.Errorf("known are %v, complete %v; want %v, %v", got, whole, names, complete)
	}
}

// A list is not complete before everything was read, nor while the watch fails; what is
// known stays.
func TestKnownIsComplete(t *testing.T) {
	k := newKnownTest(t)
	k.want(false)
	k.must(k.Add(newPod("early", "u0", 1)))
	k.want(false, "early/u0")
	k.must(k.Replace([]any{newPod("a", "u1", 3), newPod("b", "u2", 2)}, "5"))
	k.want(true, "a/u1", "b/u2")
	k.note(errors.New("connection refused"))
	k.want(false, "a/u1", "b/u2")
	k.note(nil)
	k.want(true, "a/u1", "b/u2")
	// The watch had expired: what went meanwhile is missing in the new list.
	k.must(k.Replace([]any{newPod("b", "u2", 8)}, "9"))
	k.want(true, "b/u2")
	k.must(k.Delete(newPod("b", "u2", 10)))
	k.want(true)
}

// What was read before the watch showed it counts, until the watch has come so far: by
// the pod's own event, another pod's, a bookmark or a list.
func TestKnownAheadOfTheWatch(t *testing.T) {
	for name, pass := range map[string]struct {
		pass func(*knownTest) error
		left []string
	}{
		"its own event":           {func(k *knownTest) error { return k.Add(newPod("new", "u2", 12)) }, []string{"new/u2", "old/u1"}},
		"a newer one of its own":  {func(k *knownTest) error { return k.Update(newPod("new", "u2", 13)) }, []string{"new/u2", "old/u1"}},
		"an older event":          {func(k *knownTest) error { return k.Update(newPod("old", "u1", 11)) }, []string{"new/u2", "old/u1"}},
		"another pod's event":     {func(k *knownTest) error { return k.Update(newPod("old", "u1", 13)) }, []string{"old/u1"}},
		"its end":                 {func(k *knownTest) error { return k.Delete(newPod("new", "u2", 13)) }, []string{"old/u1"}},
		"a bookmark":              {func(k *knownTest) error { return k.Bookmark("13") }, []string{"old/u1"}},
		"an older bookmark":       {func(k *knownTest) error { return k.Bookmark("11") }, []string{"new/u2", "old/u1"}},
		"a list without it":       {func(k *knownTest) error { return k.Replace(nil, "13") }, nil},
		"a list from before it":   {func(k *knownTest) error { return k.Replace([]any{newPod("old", "u1", 5)}, "11") }, []string{"new/u2", "old/u1"}},
		"a version in no order":   {func(k *knownTest) error { return k.Bookmark("v13") }, []string{"new/u2", "old/u1"}},
		"a much longer version":   {func(k *knownTest) error { return k.Bookmark("100000000000000000000") }, []string{"old/u1"}},
		"the same as the reading": {func(k *knownTest) error { return k.Bookmark("12") }, []string{"old/u1"}},
	} {
		t.Run(name, func(t *testing.T) {
			k := newKnownTest(t)
			k.must(k.Replace([]any{newPod("old", "u1", 5)}, "10"))
			k.readAhead(trimPod(newPod("new", "u2", 12)))
			k.want(true, "new/u2", "old/u1")
			k.must(pass.pass(k))
			k.want(true, pass.left...)
		})
	}
}

// A reading that is slower than the watch tells nothing: the pod may be gone since.
func TestKnownBehindTheWatch(t *testing.T) {
	k := newKnownTest(t)
	k.must(k.Replace(nil, "10"))
	k.must(k.Add(newPod("web", "u1", 11)))
	k.must(k.Delete(newPod("web", "u1", 12)))
	k.readAhead(trimPod(newPod("web", "u1", 11)))
	k.want(true)
}

// A StatefulSet's pod is made anew under its name: the reading of the new one wins over
// what is still watched of the old one, whose end does not take it away. Case 12.
func TestKnownByUID(t *testing.T) {
	k := newKnownTest(t)
	k.must(k.Replace([]any{newPod("db-0", "old", 5)}, "10"))
	k.readAhead(trimPod(newPod("db-0", "new", 12)))
	k.want(true, "db-0/new")
	k.must(k.Delete(newPod("db-0", "old", 11)))
	k.want(true, "db-0/new")
	k.must(k.Add(newPod("db-0", "new", 12)))
	k.want(true, "db-0/new")
}

// Nobody is woken for what decides nothing: kubelet writes each pod's status many times,
// and the agent its annotation.
func TestKnownTellsOfChanges(t *testing.T) {
	k := newKnownTest(t)
	k.must(k.Replace([]any{newPod("web", "u1", 1)}, "1"))
	change := func(what string, want int, change func(*corev1.Pod)) {
		t.Helper()
		before := k.changes
		pod := newPod("web", "u1", 2)
		change(pod)
		k.must(k.Update(pod))
		if got := k.changes - before; got != want {
			t.Errorf("%s: told %d times, want %d", what, got, want)
		}
	}
	change("a condition", 0, func(p *corev1.Pod) { p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady}} })
	change("our annotation", 0, func(p *corev1.Pod) {
		p.Annotations = map[string]string{workload.AnnotationRedirection: "enabled"}
	})
	change("our annotation again", 0, func(*corev1.Pod) {})
	change("another's annotation", 0, func(p *corev1.Pod) { p.Annotations = map[string]string{"example.org/note": "x"} })
	change("an option", 1, func(p *corev1.Pod) { p.Annotations = map[string]string{workload.AnnotationDNSCapture: "false"} })
	change("the option gone", 1, func(*corev1.Pod) {})
	change("a label", 1, func(p *corev1.Pod) { p.Labels = map[string]string{"app": "web"} })
	change("the end", 1, func(p *corev1.Pod) {
		p.Labels = map[string]string{"app": "web"}
		p.Status.Phase = corev1.PodSucceeded
	})
	if before := k.changes; k.note(nil) != nil || k.changes != before {
		t.Error("told that the watch goes on, which it always did")
	}
}

// What is kept of a pod is what decisions need, and no reference to the rest.
func TestTrim(t *testing.T) {
	pod := newPod("web", "u1", 7)
	pod.Labels = map[string]string{"app": "web"}
	pod.Annotations = map[string]string{
		workload.AnnotationDNSCapture: "false", workload.AnnotationRedirection: "enabled", "sidecar.istio.io/status": strings.Repeat("x", 4000),
		"kubectl.kubernetes.io/last-applied-configuration": strings.Repeat("x", 4000),
	}
	pod.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "kubelet"}}
	pod.Spec.Containers = []corev1.Container{{Name: "app", Env: []corev1.EnvVar{{Name: "SECRET", Value: "x"}}, ReadinessProbe: &corev1.Probe{
		ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(8080)}},
	}}}
	pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIPs: []corev1.PodIP{{IP: "10.0.0.2"}, {IP: "fd00::2"}}}
	trimmed, err := trim(pod)
	if err != nil {
		t.Fatal(err)
	}
	want := &item{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "u1", ResourceVersion: "7"},
		node:       "node-1",
		pod: workload.Pod{
			UID: "u1", Namespace: "shop", Name: "web", ServiceAccount: "web", Labels: map[string]string{"app": "web"}, Phase: corev1.PodRunning,
			Annotations: map[string]string{workload.AnnotationDNSCapture: "false", workload.AnnotationRedirection: "enabled", "sidecar.istio.io/status": ""},
			IPs:         []netip.Addr{netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::2")}, Probes: []uint16{8080},
		},
	}
	if d := cmp.Diff(want, trimmed, cmp.AllowUnexported(item{}), cmpopts.EquateComparable(netip.Addr{})); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
	namespace, err := trim(&metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Name: "shop", Labels: map[string]string{"a": "b"}, Annotations: map[string]string{"c": "d"}, ResourceVersion: "1",
	}})
	if i, ok := namespace.(*item); err != nil || !ok || !maps.Equal(i.Labels, map[string]string{"a": "b"}) || i.Annotations != nil {
		t.Errorf("the namespace becomes %+v, %v", namespace, err)
	}
	if _, err := trim(&corev1.Secret{}); err == nil || !strings.Contains(err.Error(), "Secret") {
		t.Errorf("a secret: %v", err)
	}
}

func TestIsStaticUID(t *testing.T) {
	for uid, want := range map[string]bool{
		"0123456789abcdef0123456789abcdef": true, "0123456789ABCDEF0123456789abcdef": false, "": false,
		"6c1f2f9e-0000-4000-8000-000000000001": false, "0123456789abcdef0123456789abcde": false,
	} {
		if got := isStaticUID(uid); got != want {
			t.Errorf("%s: %v", uid, got)
		}
	}
}

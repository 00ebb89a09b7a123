// SPDX-License-Identifier: Apache-2.0

//go:build apitest

package kubernetes_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"ambientd/nodeagent/apiserver"
	"ambientd/nodeagent/podsource"
	source "ambientd/nodeagent/podsource/kubernetes"
	"ambientd/nodeagent/workload"
	"ambientd/tools/apitest"
)

// patience bounds what a test awaits; nothing takes this long.
const patience = 30 * time.Second

// cluster is the API server with a namespace, a node and a source of the test's own.
type cluster struct {
	*kubernetes.Clientset
	t         *testing.T
	namespace string
	node      string
	agent     string // in the audit log, of the source's client
	relay     *apitest.Relay
	source    *source.Source
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newCluster makes a source that does not run yet.
func newCluster(t *testing.T) *cluster {
	t.Helper()
	name := strings.ToLower(strings.NewReplacer("/", "-", "_", "-").Replace(t.Name())) + fmt.Sprintf("-%x", time.Now().UnixNano()&0xffffff)
	config, err := clientcmd.BuildConfigFromFlags("", apitest.Kubeconfig(t))
	must(t, err)
	config.QPS = -1
	admin, err := kubernetes.NewForConfig(config)
	must(t, err)
	relay, byRelay := apitest.NewRelay(t, apitest.Kubeconfig(t))
	c := &cluster{Clientset: admin, t: t, namespace: name, node: "node-" + name, agent: "agent-" + name, relay: relay}
	c.sourceBy(byRelay)
	c.makeNamespace(name)
	return c
}

// sourceBy makes the source, by a kubeconfig.
func (c *cluster) sourceBy(kubeconfig string) {
	c.t.Helper()
	client, err := apiserver.New(apiserver.Config{Kubeconfig: kubeconfig, UserAgent: c.agent})
	must(c.t, err)
	c.source, err = source.New(source.Config{Client: client, Node: c.node, LiveTimeout: 2 * time.Second, Logger: slog.New(slog.NewTextHandler(c.t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))})
	must(c.t, err)
}

// run runs the source until the test ends.
func (c *cluster) run() {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- c.source.Run(ctx) }()
	c.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			c.t.Error(err)
		}
	})
}

func (c *cluster) synced() {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), patience)
	defer cancel()
	must(c.t, c.source.AwaitSync(ctx))
}

func (c *cluster) makeNamespace(name string) {
	c.t.Helper()
	_, err := c.CoreV1().Namespaces().Create(c.t.Context(), &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"istio.io/dataplane-mode": "ambient"}},
	}, metav1.CreateOptions{})
	must(c.t, err)
	_, err = c.CoreV1().ServiceAccounts(name).Create(c.t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{})
	must(c.t, err)
	c.t.Cleanup(func() { must(c.t, c.CoreV1().Namespaces().Delete(context.Background(), name, metav1.DeleteOptions{})) })
}

func (c *cluster) label(mode string) {
	c.t.Helper()
	patch := fmt.Sprintf(`{"metadata": {"labels": {"istio.io/dataplane-mode": %q}}}`, mode)
	_, err := c.CoreV1().Namespaces().Patch(c.t.Context(), c.namespace, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	must(c.t, err)
}

// pod makes a pod of the node that runs.
func (c *cluster) pod(name string, change ...func(*corev1.Pod)) *corev1.Pod {
	c.t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: name},
		Spec: corev1.PodSpec{
			NodeName: c.node, TerminationGracePeriodSeconds: new(int64(0)),
			Containers: []corev1.Container{{Name: "app", Image: "app", Env: []corev1.EnvVar{{Name: "BIG", Value: strings.Repeat("x", 4000)}}}},
		},
	}
	for _, change := range change {
		change(pod)
	}
	made, err := c.CoreV1().Pods(pod.Namespace).Create(c.t.Context(), pod, metav1.CreateOptions{})
	must(c.t, err)
	made.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.0.0.9", PodIPs: []corev1.PodIP{{IP: "10.0.0.9"}}}
	made, err = c.CoreV1().Pods(pod.Namespace).UpdateStatus(c.t.Context(), made, metav1.UpdateOptions{})
	must(c.t, err)
	return made
}

func (c *cluster) remove(pod *corev1.Pod) {
	c.t.Helper()
	must(c.t, c.CoreV1().Pods(pod.Namespace).Delete(c.t.Context(), pod.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}))
}

// await returns once cond holds of what the source lists.
func (c *cluster) await(what string, cond func(pods map[string]workload.Pod, complete bool) bool) {
	c.t.Helper()
	deadline := time.After(patience)
	for {
		list, complete := c.source.List()
		pods := map[string]workload.Pod{}
		for _, pod := range list {
			pods[pod.Name] = pod
		}
		if cond(pods, complete) {
			return
		}
		select {
		case <-c.source.Changed():
		case <-deadline:
			c.t.Fatalf("awaiting %s: the source lists %+v, complete %v", what, pods, complete)
		}
	}
}

func has(names ...string) func(map[string]workload.Pod, bool) bool {
	return func(pods map[string]workload.Pod, complete bool) bool {
		return complete && slices.Equal(slices.Sorted(maps.Keys(pods)), names)
	}
}

// requests are those of the source to the API server that have been answered.
func (c *cluster) requests(verb string) []apitest.Request {
	return apitest.Requests(c.t, func(r apitest.Request) bool { return r.UserAgent == c.agent && r.Verb == verb })
}

// Of the node's pods, no others', the source knows what decisions need, with their
// namespace's labels; nothing is read at an ADD; it follows changes to the end.
func TestFollows(t *testing.T) {
	c := newCluster(t)
	web := c.pod("web", func(p *corev1.Pod) {
		p.Labels = map[string]string{"app": "web"}
		p.Annotations = map[string]string{workload.AnnotationDNSCapture: "false", "example.org/note": "x"}
	})
	c.pod("elsewhere", func(p *corev1.Pod) { p.Spec.NodeName = "another-node" })
	c.pod("nowhere", func(p *corev1.Pod) { p.Spec.NodeName = "" })
	if pods, complete := c.source.List(); len(pods) > 0 || complete {
		t.Errorf("before it runs it lists %v, complete %v", pods, complete)
	}
	c.run()
	c.await("the first pod", has("web"))
	got, err := c.source.Lookup(t.Context(), c.namespace, "web", string(web.UID))
	must(t, err)
	if got.ServiceAccount != "default" || !slices.Equal(got.IPs, []netip.Addr{netip.MustParseAddr("10.0.0.9")}) || got.Phase != corev1.PodRunning ||
		got.NamespaceLabels["istio.io/dataplane-mode"] != "ambient" || got.Labels["app"] != "web" || len(got.Annotations) != 1 {
		t.Errorf("the pod is %+v", got)
	}
	labels, complete := c.source.Namespaces()
	if !complete || labels[c.namespace]["istio.io/dataplane-mode"] != "ambient" || labels["kube-system"] == nil {
		t.Errorf("namespaces are %v, complete %v", labels, complete)
	}
	c.label("none")
	c.await("the namespace's label", func(pods map[string]workload.Pod, _ bool) bool {
		return pods["web"].NamespaceLabels["istio.io/dataplane-mode"] == "none"
	})
	web.Status.Phase = corev1.PodSucceeded
	_, err = c.CoreV1().Pods(c.namespace).UpdateStatus(t.Context(), web, metav1.UpdateOptions{})
	must(t, err)
	c.await("the pod's end", func(pods map[string]workload.Pod, _ bool) bool { return pods["web"].Ended() })
	c.pod("late")
	c.await("another pod", has("late", "web"))
	c.remove(web)
	c.await("the object's end", has("late"))
	if reads := c.requests("get"); len(reads) > 0 {
		t.Errorf("%d objects were read one by one: %+v", len(reads), reads)
	}
}

// A pod whose ADD comes before its event is read once, however many ask, with its
// namespace; and is listed from then on. Here the watch is late because it never begins:
// only what a list would say is known.
func TestReadsWhatIsNotKnown(t *testing.T) {
	c := newCluster(t)
	c.run()
	c.synced()
	c.relay.Cut()
	c.await("the end of the watch", func(_ map[string]workload.Pod, complete bool) bool { return !complete })
	// The API server comes back for new requests; the watch pauses.
	other := c.namespace + "-other"
	c.makeNamespace(other)
	web := c.pod("web", func(p *corev1.Pod) { p.Namespace = other })
	c.relay.Mend(t)
	found := make(chan error, 10)
	for range cap(found) {
		go func() {
			pod, err := c.source.Lookup(t.Context(), other, "web", string(web.UID))
			if err == nil && pod.NamespaceLabels["istio.io/dataplane-mode"] != "ambient" {
				err = fmt.Errorf("found as %+v", pod)
			}
			found <- err
		}()
	}
	for range cap(found) {
		must(t, <-found)
	}
	if pods, _ := c.source.List(); len(pods) != 1 {
		t.Errorf("it lists %v", pods)
	}
	c.await("the watch", has("web"))
	deadline := time.Now().Add(patience)
	var objects []string
	for len(objects) < 2 && time.Now().Before(deadline) {
		objects = nil
		for _, r := range c.requests("get") {
			objects = append(objects, r.ObjectRef.Resource)
		}
	}
	if slices.Sort(objects); !slices.Equal(objects, []string{"namespaces", "pods"}) {
		t.Errorf("read were %v", objects)
	}
	c.remove(web)
	c.await("the pod's end", has())
}

// What an operator is told of a pod that cannot be had.
func TestLookupErrors(t *testing.T) {
	c := newCluster(t)
	c.run()
	c.synced()
	c.pod("elsewhere", func(p *corev1.Pod) { p.Spec.NodeName = "another-node" })
	c.pod("web")
	for _, test := range []struct {
		name, uid string
		is        error
		parts     []string
	}{
		{"gone", "", podsource.ErrNotFound, []string{c.namespace + "/gone", "API server"}},
		{"elsewhere", "", podsource.ErrNotFound, []string{"another-node", c.node, "--node-name"}},
		{"web", "another-uid", podsource.ErrUIDMismatch, []string{"another-uid", "runtime"}},
	} {
		_, err := c.source.Lookup(t.Context(), c.namespace, test.name, test.uid)
		if !errors.Is(err, test.is) {
			t.Errorf("%s: %v, want %v", test.name, err, test.is)
			continue
		}
		for _, part := range test.parts {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%s: %q does not say %q", test.name, err, part)
			}
		}
	}
	static, err := c.source.Lookup(t.Context(), "kube-system", "etcd-node", "0123456789abcdef0123456789abcdef")
	if err != nil || !static.Static || static.ServiceAccount != "" {
		t.Errorf("a static pod is %+v, %v", static, err)
	}
	// A StatefulSet's pod is made anew: the old UID is another pod. Case 12.
	old := c.pod("db-0")
	c.await("the pod", has("db-0", "web"))
	c.remove(old)
	renewed := c.pod("db-0")
	pod, err := c.source.Lookup(t.Context(), c.namespace, "db-0", string(renewed.UID))
	if err != nil || pod.UID != string(renewed.UID) {
		t.Errorf("the new pod is %+v, %v", pod, err)
	}
	if _, err := c.source.Lookup(t.Context(), c.namespace, "db-0", string(old.UID)); !errors.Is(err, podsource.ErrUIDMismatch) {
		t.Errorf("the old pod: %v", err)
	}
}

// The API server goes: what is known stays, pods that are known are found, others are an
// error that says why, nobody is taken for gone. It comes back, with another pod and without
// one that went meanwhile.
func TestServerAway(t *testing.T) {
	c := newCluster(t)
	c.run()
	web, gone := c.pod("web"), c.pod("gone")
	c.await("the pods", has("gone", "web"))
	c.relay.Cut()
	c.await("the watch's end", func(pods map[string]workload.Pod, complete bool) bool { return !complete && len(pods) == 2 })
	c.remove(gone)
	late := c.pod("late")
	if _, err := c.source.Lookup(t.Context(), c.namespace, "web", string(web.UID)); err != nil {
		t.Errorf("a pod that is known: %v", err)
	}
	_, err := c.source.Lookup(t.Context(), c.namespace, "late", string(late.UID))
	if err == nil || !strings.Contains(err.Error(), "connection refused") || strings.Contains(err.Error(), "https://") {
		t.Errorf("a pod that is not known: %v", err)
	}
	if _, complete := c.source.Namespaces(); !complete {
		t.Error("namespaces were forgotten")
	}
	c.relay.Mend(t)
	c.await("the watch", has("late", "web"))
}

// ADDs that come before everything was read wait for it, and those whose deadline ends
// hear why.
func TestLookupWaits(t *testing.T) {
	c := newCluster(t)
	c.relay.Cut()
	web := c.pod("web")
	c.run()
	short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := c.source.Lookup(short, c.namespace, "web", string(web.UID)); err == nil || !strings.Contains(err.Error(), "pods have not been read yet: API server: ") {
		t.Errorf("with a short deadline: %v", err)
	}
	found := make(chan error, 1)
	go func() {
		_, err := c.source.Lookup(t.Context(), c.namespace, "web", string(web.UID))
		found <- err
	}()
	c.relay.Mend(t)
	must(t, <-found)
}

// An account without permissions: the operator is told what to do.
func TestForbidden(t *testing.T) {
	c := newCluster(t)
	token, err := c.CoreV1().ServiceAccounts(c.namespace).CreateToken(t.Context(), "default", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	must(t, err)
	for name, test := range map[string]struct{ token, want string }{
		"no role":  {token.Status.Token, "give the agent's account the ClusterRole of deploy/manifests"},
		"no token": {"made-up", "does not know the agent's credentials"},
	} {
		t.Run(name, func(t *testing.T) {
			client, err := apiserver.New(apiserver.Config{Kubeconfig: apitest.KubeconfigOf(t, test.token), UserAgent: c.agent})
			must(t, err)
			s, err := source.New(source.Config{Client: client, Node: c.node, LiveTimeout: time.Second, Logger: slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))})
			must(t, err)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- s.Run(ctx) }()
			wait, done := context.WithTimeout(t.Context(), 5*time.Second)
			defer done()
			if err := s.AwaitSync(wait); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
			cancel()
			must(t, <-ended)
		})
	}
}

// What the source keeps is small: nothing of a pod's spec, nor of a namespace but labels.
func TestSize(t *testing.T) {
	c := newCluster(t)
	c.run()
	c.pod("web")
	c.await("the pod", has("web"))
	list, _ := c.source.List()
	text, err := json.Marshal(list[0])
	must(t, err)
	if strings.Contains(string(text), "xxx") || len(text) > 1000 {
		t.Errorf("of the pod is kept: %s", text)
	}
}

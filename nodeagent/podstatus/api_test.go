// SPDX-License-Identifier: Apache-2.0

//go:build apitest

package podstatus_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"ambientd/nodeagent/apiserver"
	"ambientd/nodeagent/enroll"
	"ambientd/nodeagent/podstatus"
	"ambientd/nodeagent/workload"
	"ambientd/tools/apitest"
)

// patience bounds what a test awaits; nothing takes this long.
const patience = 30 * time.Second

// cluster is the API server with a namespace and a writer of the test's own.
type cluster struct {
	*kubernetes.Clientset
	t      *testing.T
	name   string // of the namespace, the node and the agent
	relay  *apitest.Relay
	writer *podstatus.Writer
	end    func() // ends the writer; nil when that was done

	log strings.Builder // for when the writer has ended

	mu    sync.Mutex
	known map[string]workload.Pod // by UID: what a watch would show
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", apitest.Kubeconfig(t))
	must(t, err)
	config.QPS = -1
	admin, err := kubernetes.NewForConfig(config)
	must(t, err)
	relay, byRelay := apitest.NewRelay(t, apitest.Kubeconfig(t))
	c := &cluster{
		Clientset: admin, t: t, name: fmt.Sprintf("%s-%x", strings.ToLower(t.Name()), time.Now().UnixNano()&0xffffff), relay: relay,
		known: map[string]workload.Pod{},
	}
	client, err := apiserver.New(apiserver.Config{Kubeconfig: byRelay, UserAgent: c.name})
	must(t, err)
	c.writer, err = podstatus.New(podstatus.Config{Client: client, Node: c.name, Known: c.lookup, Logger: slog.New(slog.NewTextHandler(io.MultiWriter(t.Output(), &c.log), nil))})
	must(t, err)
	_, err = c.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.name}}, metav1.CreateOptions{})
	must(t, err)
	_, err = c.CoreV1().ServiceAccounts(c.name).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{})
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- c.writer.Run(ctx) }()
	c.end = func() {
		cancel()
		must(t, <-ended)
	}
	t.Cleanup(func() {
		if c.end != nil {
			c.end()
		}
		must(t, c.CoreV1().Namespaces().Delete(context.Background(), c.name, metav1.DeleteOptions{}))
	})
	return c
}

func (c *cluster) lookup(_, _, uid string) (workload.Pod, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	pod, ok := c.known[uid]
	return pod, ok
}

// see has the watch show the pod as it is now.
func (c *cluster) see(name string) workload.Pod {
	c.t.Helper()
	pod, err := c.CoreV1().Pods(c.name).Get(c.t.Context(), name, metav1.GetOptions{})
	must(c.t, err)
	seen := workload.FromPod(pod, nil)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.known[seen.UID] = seen
	return seen
}

func (c *cluster) pod(name string) workload.Pod {
	c.t.Helper()
	_, err := c.CoreV1().Pods(c.name).Create(c.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{"example.org/note": "stays"}},
		Spec:       corev1.PodSpec{NodeName: c.name, Containers: []corev1.Container{{Name: "app", Image: "app"}}},
	}, metav1.CreateOptions{})
	must(c.t, err)
	return c.see(name)
}

// await polls until cond holds: nothing tells of what is not watched.
func (c *cluster) await(what string, cond func() bool) {
	c.t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); !cond(); <-tick.C {
		if time.Now().After(deadline) {
			c.t.Fatal("awaiting ", what)
		}
	}
}

func (c *cluster) annotation(pod workload.Pod) string {
	c.t.Helper()
	got, err := c.CoreV1().Pods(c.name).Get(c.t.Context(), pod.Name, metav1.GetOptions{})
	must(c.t, err)
	if got.Annotations["example.org/note"] != "stays" {
		c.t.Errorf("annotations are %v", got.Annotations)
	}
	return got.Annotations[workload.AnnotationRedirection]
}

func (c *cluster) patches(resource string) int {
	return len(apitest.Requests(c.t, func(r apitest.Request) bool {
		return r.UserAgent == c.name && r.Verb == "patch" && r.ObjectRef.Resource == resource
	}))
}

// The annotation says how the pod stands, and is gone when the pod has left; what it shows
// already costs no request.
func TestAnnotation(t *testing.T) {
	c := newCluster(t)
	pod := c.pod("web")
	for _, step := range []struct {
		state enroll.State
		want  string
	}{
		{enroll.StatePending, "pending"}, {enroll.StateEnabled, "enabled"}, {enroll.StateOut, ""}, {enroll.StateEnabled, "enabled"},
	} {
		c.writer.State(pod, step.state)
		c.await(string(step.state), func() bool { return c.annotation(pod) == step.want })
	}
	c.see("web")
	c.await("four patches", func() bool { return c.patches("pods") == 4 })
	c.writer.State(pod, enroll.StateEnabled)
	c.writer.State(pod, enroll.StatePending) // as an agent that starts anew would
	other := c.pod("other")
	c.writer.State(other, enroll.StateOut) // which it never was in
	c.writer.State(other, enroll.StateEnabled)
	c.await("another pod", func() bool { return c.annotation(other) == "enabled" })
	c.await("its patch", func() bool { return c.patches("pods") >= 5 })
	if n := c.patches("pods"); n != 5 || c.annotation(pod) != "enabled" {
		t.Errorf("%d patches, want 5; the pod shows %q", n, c.annotation(pod))
	}
}

// A pod that is gone, and another one that has its name now: neither is an error, and
// nothing is written on the other.
func TestAnnotationOfAnother(t *testing.T) {
	c := newCluster(t)
	old := c.pod("db-0")
	gone := c.pod("gone")
	for _, name := range []string{"db-0", "gone"} {
		must(t, c.CoreV1().Pods(c.name).Delete(t.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}))
	}
	renewed := c.pod("db-0")
	c.writer.State(old, enroll.StateEnabled)
	c.writer.State(gone, enroll.StateEnabled)
	c.await("both patches", func() bool { return c.patches("pods") == 2 })
	c.writer.State(renewed, enroll.StatePending)
	c.await("the new pod's", func() bool { return c.annotation(renewed) == "pending" })
	c.end()
	c.end = nil
	if strings.Contains(c.log.String(), "WARN") {
		t.Error("it counts as a failure")
	}
}

// The API server is away for a while: what was to be written last is written then.
func TestAnnotationLater(t *testing.T) {
	c := newCluster(t)
	pod := c.pod("web")
	c.relay.Cut()
	c.writer.State(pod, enroll.StatePending)
	c.writer.Event(pod, enroll.ReasonEnrolled, "while nobody listens")
	c.writer.State(pod, enroll.StateEnabled)
	c.relay.Mend(t)
	c.await("the annotation", func() bool { return c.annotation(pod) == "enabled" })
	c.await("the event", func() bool { return len(c.events()) == 1 })
}

func (c *cluster) events() []corev1.Event {
	c.t.Helper()
	list, err := c.CoreV1().Events(c.name).List(c.t.Context(), metav1.ListOptions{})
	must(c.t, err)
	slices.SortFunc(list.Items, func(a, b corev1.Event) int { return strings.Compare(a.Reason, b.Reason) })
	return list.Items
}

// Events are on the pod, of the right kind, and one object for all of a kind.
func TestEvents(t *testing.T) {
	c := newCluster(t)
	pod := c.pod("web")
	c.writer.Event(pod, enroll.ReasonRepaired, "put back in place: redirection")
	c.await("the first", func() bool { return len(c.events()) == 1 })
	c.writer.Event(pod, enroll.ReasonRefused, strings.Repeat("no ", 1000))
	for i := range 5 {
		c.writer.Event(pod, enroll.ReasonRepaired, fmt.Sprint("again ", i))
	}
	c.await("the second", func() bool { return len(c.events()) == 2 })
	got := c.events()
	refused, repaired := got[0], got[1]
	if refused.Type != corev1.EventTypeWarning || refused.Reason != "CertificateRefused" || len(refused.Message) > 1024 || refused.Count != 1 {
		t.Errorf("the refusal is %+v", refused)
	}
	want := corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: c.name, Name: "web"}
	want.UID = repaired.InvolvedObject.UID
	if repaired.Type != corev1.EventTypeNormal || repaired.InvolvedObject != want || string(want.UID) != pod.UID ||
		repaired.Source != (corev1.EventSource{Component: "ambientd", Host: c.name}) || repaired.Count != 1 || repaired.FirstTimestamp.IsZero() {
		t.Errorf("the repair is %+v", repaired)
	}
}

// An Event in a namespace that is being deleted is not made: neither the log nor the audit log
// has that as something for which the agent lacks a right.
func TestEventInNamespaceThatGoes(t *testing.T) {
	c := newCluster(t)
	going := c.name + "-going"
	// Its finalizer keeps it there for as long as the test goes on.
	_, err := c.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{Name: going, Finalizers: []string{"example.org/test"}},
	}, metav1.CreateOptions{})
	must(t, err)
	t.Cleanup(func() {
		_, err := c.CoreV1().Namespaces().Patch(context.Background(), going, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
		must(t, err)
	})
	must(t, c.CoreV1().Namespaces().Delete(t.Context(), going, metav1.DeleteOptions{}))
	c.writer.Event(workload.Pod{Namespace: going, Name: "web", UID: "u"}, enroll.ReasonEnrolled, "it is too late")
	made := func() []apitest.Request {
		return apitest.Requests(t, func(r apitest.Request) bool { return r.UserAgent == c.name && r.Verb == "create" })
	}
	c.await("the event's refusal", func() bool { return len(made()) > 0 })
	c.end()
	c.end = nil
	if got := made(); len(got) != 1 || got[0].ResponseStatus.Code != http.StatusForbidden || got[0].Refused() {
		t.Errorf("the requests are %v, want one that was forbidden for no want of rights", got)
	}
	if strings.Contains(c.log.String(), "WARN") {
		t.Error("it counts as a failure")
	}
}

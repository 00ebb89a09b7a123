// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	systemNamespace = "ambientd-system"
	// patience bounds each wait: pods start in 2 s on an idle machine, and this one may be busy.
	patience = 90 * time.Second
	// tick is how often is asked for what nobody can watch: the agent's status.
	tick = 200 * time.Millisecond
	// noticePause bounds how often a change of the cluster has conditions looked at anew.
	noticePause = 20 * time.Millisecond
)

// cluster is the real one that the tests run in.
type cluster struct {
	client kubernetes.Interface
	nodes  []node
	proxy  string      // Devproxy or Ztunnel
	cached cache.Store // all pods, as a watch tells of them
	logs   *logs
	news   *news

	// For objects of any kind.
	dynamic dynamic.Interface
	mapper  meta.RESTMapper

	runtimeFiles map[string]map[string]string // by node: what runtimeFiles returned before ambientd came
}

// news wakes whoever waits for the cluster to change.
type news struct {
	mu      sync.Mutex
	changed chan struct{}
}

func newNews() *news { return &news{changed: make(chan struct{})} }

func (n *news) next() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.changed
}

func (n *news) tell() {
	n.mu.Lock()
	defer n.mu.Unlock()
	close(n.changed)
	n.changed = make(chan struct{})
}

// join returns the cluster that this test was started in. It is watched until t ends.
func join(t *testing.T) *cluster {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", environment(t, "KUBECONFIG"))
	if err != nil {
		t.Fatal(err)
	}
	config.QPS, config.Burst = 500, 500
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{client: client, news: newNews(), proxy: environment(t, "E2E_NODE_PROXY"), runtimeFiles: map[string]map[string]string{}}
	c.logs = newLogs(c)
	c.dynamic, err = dynamic.NewForConfig(config)
	must(t, err)
	groups, err := restmapper.GetAPIGroupResources(client.Discovery())
	must(t, err)
	c.mapper = restmapper.NewDiscoveryRESTMapper(groups)
	count, err := strconv.Atoi(environment(t, "DEVCLUSTER_NODES"))
	if err != nil || count == 0 {
		t.Fatalf("the cluster has %d nodes (%v), and pods need some: use `make e2e`", count, err)
	}
	for i := range count {
		pid := environment(t, fmt.Sprintf("DEVCLUSTER_NODE%d_PID", i+1))
		c.nodes = append(c.nodes, node{name: fmt.Sprintf("node%d", i+1), root: "/proc/" + pid + "/root"})
	}
	c.watchPods(t)
	return c
}

func environment(t *testing.T, name string) string {
	t.Helper()
	value := os.Getenv(name)
	if value == "" {
		t.Fatalf("%s is not set: run this with `make e2e`", name)
	}
	return value
}

func (c *cluster) watchPods(t *testing.T) {
	t.Helper()
	source := cache.NewListWatchFromClient(c.client.CoreV1().RESTClient(), "pods", metav1.NamespaceAll, fields.Everything())
	changed := func(object any) {
		if pod, ok := object.(*corev1.Pod); ok {
			c.logs.follow(t.Context(), pod)
		}
		c.news.tell()
	}
	store, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: source, ObjectType: &corev1.Pod{},
		Handler: cache.ResourceEventHandlerFuncs{AddFunc: changed, UpdateFunc: func(_, now any) { changed(now) }, DeleteFunc: changed},
	})
	c.cached = store
	go controller.Run(t.Context().Done())
	if !cache.WaitForCacheSync(t.Context().Done(), controller.HasSynced) {
		t.Fatal("the watch of pods did not begin")
	}
}

// until waits for done to return nil. It looks whenever something has changed in the
// cluster, or in logs that are followed.
func (c *cluster) until(t *testing.T, what string, done func() error) {
	t.Helper()
	began := time.Now()
	limit := time.NewTimer(patience)
	defer limit.Stop()
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for {
		changed := c.news.next()
		err := done()
		if err == nil {
			t.Logf("%6.2f s  %s", time.Since(began).Seconds(), what)
			return
		}
		select {
		case <-changed:
			<-time.After(noticePause) // what changes at once is looked at once
		case <-ticker.C:
		case <-limit.C:
			t.Fatalf("%s: not within %s: %v", what, patience, err)
		}
	}
}

// pods returns those of a namespace that the keys and values of labels are on, by name.
func (c *cluster) pods(namespace string, labels ...string) []*corev1.Pod {
	var found []*corev1.Pod
	for _, object := range c.cached.List() {
		pod, ok := object.(*corev1.Pod)
		if !ok || pod.Namespace != namespace {
			continue
		}
		matches := true
		for i := 0; i < len(labels); i += 2 {
			matches = matches && pod.Labels[labels[i]] == labels[i+1]
		}
		if matches {
			found = append(found, pod)
		}
	}
	slices.SortFunc(found, func(a, b *corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	return found
}

// pod returns the pod as it is now.
func (c *cluster) pod(namespace, name string) (*corev1.Pod, error) {
	object, ok, err := c.cached.GetByKey(namespace + "/" + name)
	if err != nil || !ok {
		return nil, errors.Join(fmt.Errorf("there is no pod %s/%s", namespace, name), err)
	}
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return nil, fmt.Errorf("the pod %s/%s is a %T", namespace, name, object)
	}
	return pod, nil
}

// deploy applies the manifests as an operator does, with the patches of this test.
func (c *cluster) deploy(t *testing.T, denied string) {
	t.Helper()
	objects := c.manifests(t)
	patches := Patches(c.proxy, denied)
	must(t, Apply(patches, objects))
	for _, patch := range patches {
		t.Logf("otherwise than in the manifests: %s", patch)
	}
	for _, object := range objects {
		_, err := c.resource(t, object).Apply(t.Context(), object.GetName(), object, metav1.ApplyOptions{FieldManager: "e2e"})
		must(t, err)
	}
}

// manifests returns what is in those of deploy, and in the node proxy's.
func (c *cluster) manifests(t *testing.T) []*unstructured.Unstructured {
	t.Helper()
	manifests, err := Manifests(c.proxy)
	must(t, err)
	objects, err := ReadManifests(manifests...)
	must(t, err)
	return objects
}

// resource returns where the API server has objects of this one's kind, and in its namespace.
func (c *cluster) resource(t *testing.T, object *unstructured.Unstructured) dynamic.ResourceInterface {
	t.Helper()
	kind := object.GroupVersionKind()
	mapping, err := c.mapper.RESTMapping(kind.GroupKind(), kind.Version)
	must(t, err)
	if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
		return c.dynamic.Resource(mapping.Resource).Namespace(object.GetNamespace())
	}
	return c.dynamic.Resource(mapping.Resource)
}

// labelNode sets the label that decides whether the agent is on the node.
func (c *cluster) labelNode(t *testing.T, name, value string) {
	t.Helper()
	patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%q}}}`, AgentLabel, value)
	_, err := c.client.CoreV1().Nodes().Patch(t.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	must(t, err)
}

// labelNamespace sets the label that takes the namespace's pods into the mesh, or takes
// it away.
func (c *cluster) labelNamespace(t *testing.T, name, mode string) {
	t.Helper()
	value := "null"
	if mode != "" {
		value = strconv.Quote(mode)
	}
	patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%s}}}`, modeLabel, value)
	_, err := c.client.CoreV1().Namespaces().Patch(t.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	must(t, err)
}

// namespace makes one for a test, with service accounts, and has it deleted after the test.
// Nobody waits for that: the last test looks that nothing is left.
func (c *cluster) namespace(t *testing.T, name, mode string, accounts ...string) {
	t.Helper()
	object := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if mode != "" {
		object.Labels = map[string]string{modeLabel: mode}
	}
	_, err := c.client.CoreV1().Namespaces().Create(t.Context(), object, metav1.CreateOptions{})
	must(t, err)
	t.Cleanup(func() {
		err := c.client.CoreV1().Namespaces().Delete(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{})
		if err != nil {
			t.Errorf("deleting the namespace: %v", err)
		}
	})
	t.Cleanup(func() { c.explain(t, name) })
	for _, account := range accounts {
		_, err := c.client.CoreV1().ServiceAccounts(name).Create(t.Context(),
			&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: account}}, metav1.CreateOptions{})
		must(t, err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

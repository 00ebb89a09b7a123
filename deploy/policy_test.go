// SPDX-License-Identifier: Apache-2.0

//go:build apitest

package deploy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"
)

// cluster is a real API server with the manifests applied, except for what runs pods.
type cluster struct {
	t      *testing.T
	config *rest.Config
	admin  kubernetes.Interface
	ns     string // where the test's pods are
}

const agentAccount = "ambientd"

func newCluster(t *testing.T) *cluster {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	if err != nil {
		t.Fatalf("KUBECONFIG must name an administrator's: %v", err)
	}
	config.QPS, config.Burst = 1000, 1000
	admin, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{t: t, config: config, admin: admin}
	c.apply()
	made, err := admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "policy-"}}, metav1.CreateOptions{})
	c.must(err)
	c.ns = made.Name
	// No controller runs that would make it.
	c.account(c.ns, "default")
	t.Cleanup(func() {
		c.must(admin.CoreV1().Namespaces().Delete(context.WithoutCancel(t.Context()), c.ns, metav1.DeleteOptions{}))
	})
	return c
}

func (c *cluster) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// apply applies the manifests as an operator would, except for the DaemonSet.
func (c *cluster) apply() {
	c.t.Helper()
	groups, err := restmapper.GetAPIGroupResources(c.admin.Discovery())
	c.must(err)
	mapper := restmapper.NewDiscoveryRESTMapper(groups)
	client, err := dynamic.NewForConfig(c.config)
	c.must(err)
	for _, document := range documents(c.t, manifests) {
		object := &unstructured.Unstructured{}
		c.must(yaml.Unmarshal([]byte(document), &object.Object))
		if object.GetKind() == "DaemonSet" {
			continue
		}
		kind := object.GroupVersionKind()
		mapping, err := mapper.RESTMapping(kind.GroupKind(), kind.Version)
		c.must(err)
		var resource dynamic.ResourceInterface = client.Resource(mapping.Resource)
		if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
			resource = client.Resource(mapping.Resource).Namespace(object.GetNamespace())
		}
		_, err = resource.Apply(c.t.Context(), object.GetName(), object, metav1.ApplyOptions{FieldManager: "test", Force: true})
		c.must(err)
	}
}

func (c *cluster) account(namespace, name string) {
	c.t.Helper()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if _, err := c.admin.CoreV1().ServiceAccounts(namespace).Create(c.t.Context(), account, metav1.CreateOptions{}); !apierrors.IsAlreadyExists(err) {
		c.must(err)
	}
}

// pod makes a pod on the node, as one that runs looks like.
func (c *cluster) pod(namespace, account, node string) *corev1.Pod {
	c.t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			GenerateName: "pod-",
			Labels:       map[string]string{"app": "web"},
			Annotations:  map[string]string{"example.com/kept": "yes"},
			Finalizers:   []string{"example.com/keep"},
		},
		Spec: corev1.PodSpec{
			NodeName: node, ServiceAccountName: account,
			Containers: []corev1.Container{{Name: "c", Image: "localhost/testapp:dev"}},
		},
	}
	pod, err := c.admin.CoreV1().Pods(namespace).Create(c.t.Context(), pod, metav1.CreateOptions{})
	c.must(err)
	c.t.Cleanup(func() {
		ctx := context.WithoutCancel(c.t.Context())
		_, err := c.admin.CoreV1().Pods(namespace).Patch(ctx, pod.Name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
		none := int64(0)
		err = errors.Join(err, c.admin.CoreV1().Pods(namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: &none}))
		if err != nil && !strings.Contains(err.Error(), "not found") {
			c.t.Error(err)
		}
	})
	pod.Status = corev1.PodStatus{
		Phase: corev1.PodRunning, HostIP: "192.0.2.1", PodIP: "10.0.0.1", PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}},
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionFalse}},
	}
	pod, err = c.admin.CoreV1().Pods(namespace).UpdateStatus(c.t.Context(), pod, metav1.UpdateOptions{})
	c.must(err)
	return pod
}

// as returns a client with a token of the account, bound to the pod if there is one.
func (c *cluster) as(account string, bound *corev1.Pod) kubernetes.Interface {
	c.t.Helper()
	request := &authenticationv1.TokenRequest{}
	if bound != nil {
		request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: bound.Name, UID: bound.UID}
	}
	token, err := c.admin.CoreV1().ServiceAccounts("ambientd-system").CreateToken(c.t.Context(), account, request, metav1.CreateOptions{})
	c.must(err)
	config := rest.AnonymousClientConfig(c.config)
	config.BearerToken = token.Status.Token
	config.QPS, config.Burst = 1000, 1000
	client, err := kubernetes.NewForConfig(config)
	c.must(err)
	return client
}

// agentOn returns a client with the credentials of the agent on the node.
func (c *cluster) agentOn(node string) kubernetes.Interface {
	c.t.Helper()
	return c.as(agentAccount, c.pod("ambientd-system", agentAccount, node))
}

// patch patches the pod's status, and says what became of it.
func patch(ctx context.Context, client kubernetes.Interface, pod *corev1.Pod, body string) error {
	_, err := client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.MergePatchType, []byte(body), metav1.PatchOptions{}, "status")
	return err
}

// denied says whether the error is this policy's with the reason.
func denied(err error, reason string) bool {
	return apierrors.IsForbidden(err) && strings.Contains(err.Error(), "ambientd-pod-status") && strings.Contains(err.Error(), reason)
}

// awaitPolicy waits until the API server has taken the policy up.
func (c *cluster) awaitPolicy(agent kubernetes.Interface, foreign *corev1.Pod) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), time.Minute)
	defer cancel()
	for {
		err := patch(ctx, agent, foreign, `{"metadata":{"annotations":{"example.com/probe":"1"}}}`)
		if denied(err, "") {
			return
		}
		if ctx.Err() != nil {
			c.t.Fatalf("the policy is not in force: %v", err)
		}
		time.Sleep(50 * time.Millisecond) // the API server tells nobody when it has taken a policy up
	}
}

const (
	enabled = `{"metadata":{"annotations":{"ambient.istio.io/redirection":"enabled"}}}`
	pending = `{"metadata":{"annotations":{"ambient.istio.io/redirection":"pending"}}}`
	removed = `{"metadata":{"annotations":{"ambient.istio.io/redirection":null}}}`
)

func TestAgentPatchesOnItsNode(t *testing.T) {
	c := newCluster(t)
	agent := c.agentOn("node-a")
	here, there, nowhere := c.pod(c.ns, "default", "node-a"), c.pod(c.ns, "default", "node-b"), c.pod(c.ns, "default", "")
	c.awaitPolicy(agent, there)
	for _, body := range []string{pending, enabled, enabled, removed, removed, `{}`} {
		if err := patch(t.Context(), agent, here, body); err != nil {
			t.Errorf("on its own node, %s: %v", body, err)
		}
		if err := patch(t.Context(), agent, there, body); !denied(err, "the agent on node 'node-a' may not patch pods of node 'node-b'") {
			t.Errorf("on another node, %s: %v", body, err)
		}
		if err := patch(t.Context(), agent, nowhere, body); !denied(err, "pods of node ''") {
			t.Errorf("on no node, %s: %v", body, err)
		}
	}
}

// A pod that drains is still the agent's to withdraw.
func TestAgentPatchesWhatTerminates(t *testing.T) {
	c := newCluster(t)
	agent, pod := c.agentOn("node-a"), c.pod(c.ns, "default", "node-a")
	c.awaitPolicy(agent, c.pod(c.ns, "default", "node-b"))
	c.must(patch(t.Context(), agent, pod, enabled))
	c.must(c.admin.CoreV1().Pods(c.ns).Delete(t.Context(), pod.Name, metav1.DeleteOptions{})) // a finalizer keeps it
	if err := patch(t.Context(), agent, pod, removed); err != nil {
		t.Errorf("withdrawing a pod that terminates: %v", err)
	}
	if err := patch(t.Context(), agent, pod, `{"metadata":{"finalizers":null}}`); !denied(err, "labels, finalizers or owners") {
		t.Errorf("removing its finalizer: %v", err)
	}
}

func TestAgentPatchesOneAnnotationOnly(t *testing.T) {
	c := newCluster(t)
	agent, pod := c.agentOn("node-a"), c.pod(c.ns, "default", "node-a")
	c.awaitPolicy(agent, c.pod(c.ns, "default", "node-b"))
	const (
		annotations = "no annotation but ambient.istio.io/redirection"
		value       = "enabled, pending or absent"
		metadata    = "labels, finalizers or owners"
		state       = "may not change the status"
	)
	for body, reason := range map[string]string{
		`{"metadata":{"annotations":{"example.com/kept":"no"}}}`:                                                             annotations,
		`{"metadata":{"annotations":{"example.com/kept":null}}}`:                                                             annotations,
		`{"metadata":{"annotations":{"example.com/new":"1"}}}`:                                                               annotations,
		`{"metadata":{"annotations":null}}`:                                                                                  annotations,
		`{"metadata":{"annotations":{"ambient.istio.io/redirection":"enabled","example.com/new":"1"}}}`:                      annotations,
		`{"metadata":{"annotations":{"ambient.istio.io/redirection":"disabled"}}}`:                                           value,
		`{"metadata":{"annotations":{"ambient.istio.io/redirection":""}}}`:                                                   value,
		`{"metadata":{"labels":{"app":"other"}}}`:                                                                            metadata,
		`{"metadata":{"labels":{"new":"1"}}}`:                                                                                metadata,
		`{"metadata":{"labels":null}}`:                                                                                       metadata,
		`{"metadata":{"finalizers":["example.com/other"]}}`:                                                                  metadata,
		`{"metadata":{"finalizers":null}}`:                                                                                   metadata,
		`{"status":{"phase":"Failed"}}`:                                                                                      state,
		`{"status":{"podIP":"10.0.0.2","podIPs":[{"ip":"10.0.0.2"}]}}`:                                                       state,
		`{"status":{"podIPs":[{"ip":"10.0.0.1"},{"ip":"fd00::1"}]}}`:                                                         state,
		`{"status":{"hostIP":"192.0.2.2"}}`:                                                                                  state,
		`{"status":{"conditions":[{"type":"Ready","status":"True"}]}}`:                                                       state,
		`{"status":{"conditions":[{"type":"Ready","status":"False"},{"type":"ambientd.io/x","status":"True"}]}}`:             state,
		`{"status":{"message":"x"}}`:                                                                                         state,
		`{"status":null}`:                                                                                                    state,
		`{"metadata":{"annotations":{"ambient.istio.io/redirection":"enabled"}},"status":{"reason":"Evicted"}}`:              state,
		`{"status":{"containerStatuses":[{"name":"c","ready":true,"restartCount":0,"image":"i","imageID":"i","state":{}}]}}`: state,
	} {
		if err := patch(t.Context(), agent, pod, body); !denied(err, reason) {
			t.Errorf("%s: %v, want a denial with %q", body, err, reason)
		}
	}
	// What the API server does not let pass by this way at all has no effect.
	for _, body := range []string{
		`{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Node","name":"n","uid":"u"}]}}`,
		`{"spec":{"containers":[{"name":"c","image":"other"}]}}`,
		`{"spec":{"nodeName":"node-b"}}`,
	} {
		if err := patch(t.Context(), agent, pod, body); err != nil && !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v", body, err)
		}
	}
	after, err := c.admin.CoreV1().Pods(c.ns).Get(t.Context(), pod.Name, metav1.GetOptions{})
	c.must(err)
	after.ManagedFields, pod.ManagedFields = nil, nil
	pod.ResourceVersion = after.ResourceVersion
	if got, want := fmt.Sprint(after), fmt.Sprint(pod); got != want {
		t.Errorf("the pod is now\n%s\nit was\n%s", got, want)
	}
}

// Without a node's name in the token nothing is allowed: also on a pod of no node.
func TestAgentWithoutNodeIsRefused(t *testing.T) {
	c := newCluster(t)
	here, nowhere := c.pod(c.ns, "default", "node-a"), c.pod(c.ns, "default", "")
	c.awaitPolicy(c.agentOn("node-b"), here)
	for name, agent := range map[string]kubernetes.Interface{
		"not bound":              c.as(agentAccount, nil),
		"bound to a pod nowhere": c.as(agentAccount, c.pod("ambientd-system", agentAccount, "")),
	} {
		for _, pod := range []*corev1.Pod{here, nowhere} {
			if err := patch(t.Context(), agent, pod, enabled); !denied(err, "names no node") {
				t.Errorf("token %s, pod on %q: %v", name, pod.Spec.NodeName, err)
			}
		}
	}
}

// The policy is about one account.
func TestOthersAreUnaffected(t *testing.T) {
	c := newCluster(t)
	pod := c.pod(c.ns, "default", "node-a")
	c.awaitPolicy(c.agentOn("node-b"), pod)
	c.account("ambientd-system", "other")
	_, err := c.admin.RbacV1().RoleBindings(c.ns).Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "other"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "ambientd"},
		Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: "ambientd-system", Name: "other"}},
	}, metav1.CreateOptions{})
	c.must(err)
	for name, client := range map[string]kubernetes.Interface{"administrator": c.admin, "another account": c.as("other", nil)} {
		for _, body := range []string{enabled, `{"metadata":{"annotations":{"example.com/new":"1"}}}`, `{"status":{"message":"x"}}`} {
			if err := patch(t.Context(), client, pod, body); err != nil {
				t.Errorf("%s: %s: %v", name, body, err)
			}
		}
	}
}

// What the role does not have is refused, whatever the admission policy would say.
func TestRoleHasNoMore(t *testing.T) {
	c := newCluster(t)
	agent, pod := c.agentOn("node-a"), c.pod(c.ns, "default", "node-a")
	ctx, pods := t.Context(), agent.CoreV1().Pods(c.ns)
	_, errPatch := pods.Patch(ctx, pod.Name, types.MergePatchType, []byte(enabled), metav1.PatchOptions{})
	_, errUpdate := pods.UpdateStatus(ctx, pod, metav1.UpdateOptions{})
	_, errSecrets := agent.CoreV1().Secrets(c.ns).List(ctx, metav1.ListOptions{})
	_, errNodes := agent.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	_, errToken := agent.CoreV1().ServiceAccounts(c.ns).CreateToken(ctx, "default", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	for what, err := range map[string]error{
		"patching a pod": errPatch, "replacing a status": errUpdate, "deleting a pod": pods.Delete(ctx, pod.Name, metav1.DeleteOptions{}),
		"secrets": errSecrets, "nodes": errNodes, "a token of another account": errToken,
	} {
		if !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

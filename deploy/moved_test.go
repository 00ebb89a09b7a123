// SPDX-License-Identifier: Apache-2.0

//go:build apitest

package deploy

import (
	"context"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"ambientd/nodeagent/apiserver"
	"ambientd/nodeagent/enroll"
	"ambientd/nodeagent/podstatus"
	"ambientd/nodeagent/workload"
	"ambientd/tools/apitest"
)

// writer runs what writes pods' annotations, with the credentials of the agent on the node and
// a watch that shows the pods as they are given here. end returns what it has logged.
func (c *cluster) writer(name, node string, pods ...*corev1.Pod) (w *podstatus.Writer, end func() string) {
	c.t.Helper()
	own := c.pod("ambientd-system", agentAccount, node)
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: own.Name, UID: own.UID},
	}}
	token, err := c.admin.CoreV1().ServiceAccounts("ambientd-system").CreateToken(c.t.Context(), agentAccount, request, metav1.CreateOptions{})
	c.must(err)
	client, err := apiserver.New(apiserver.Config{Kubeconfig: apitest.KubeconfigOf(c.t, token.Status.Token), UserAgent: name})
	c.must(err)
	known := func(_, _, uid string) (workload.Pod, bool) {
		for _, pod := range pods {
			if string(pod.UID) == uid {
				return workload.FromPod(pod, nil), true
			}
		}
		return workload.Pod{}, false
	}
	var log strings.Builder
	w, err = podstatus.New(podstatus.Config{
		Client: client, Node: node, Known: known, Logger: slog.New(slog.NewTextHandler(io.MultiWriter(c.t.Output(), &log), nil)),
	})
	c.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	end = sync.OnceValue(func() string {
		cancel()
		c.must(<-ended)
		return log.String()
	})
	c.t.Cleanup(func() { end() })
	return w, end
}

// named makes a pod of that name on the node.
func (c *cluster) named(name, node string) *corev1.Pod {
	c.t.Helper()
	pod, err := c.admin.CoreV1().Pods(c.ns).Create(c.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "c", Image: "localhost/testapp:dev"}}},
	}, metav1.CreateOptions{})
	c.must(err)
	return pod
}

// A StatefulSet's pod ends on one node and its successor is on another, before the agent's
// watch tells of it: that the UID is another's counts before the policy is asked, and nobody
// lacks a right.
func TestAgentPatchesWhatHasMoved(t *testing.T) {
	c := newCluster(t)
	c.awaitPolicy(c.agentOn("node-a"), c.pod(c.ns, "default", "node-b"))
	old := c.named("db-0", "node-a")
	c.must(c.admin.CoreV1().Pods(c.ns).Delete(t.Context(), old.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}))
	moved := c.named("db-0", "node-b")
	agent := "moved-" + c.ns
	w, end := c.writer(agent, "node-a", old)
	w.State(workload.FromPod(old, nil), enroll.StateEnabled)
	c.awaitAnswers(agent, 1)
	if log := end(); log != "" {
		t.Errorf("it counts as a failure: %s", log)
	}
	now, err := c.admin.CoreV1().Pods(c.ns).Get(t.Context(), moved.Name, metav1.GetOptions{})
	c.must(err)
	if got, ok := now.Annotations[workload.AnnotationRedirection]; ok {
		t.Errorf("the pod on the other node has the annotation %q", got)
	}
}

// An agent whose token is another node's than it is told: it is a pod's that is there, and whoever
// reads the log needs the policy's reason, and no advice about the role.
func TestAgentOfAnotherNodeIsTold(t *testing.T) {
	c := newCluster(t)
	there := c.pod(c.ns, "default", "node-b")
	c.awaitPolicy(c.agentOn("node-a"), there)
	agent := "told-" + c.ns
	w, end := c.writer(agent, "node-a", there)
	w.State(workload.FromPod(there, nil), enroll.StateEnabled)
	c.awaitAnswers(agent, 2)
	log := end()
	if !strings.Contains(log, "WARN") || !strings.Contains(log, "may not patch pods of node 'node-b'") || strings.Contains(log, "ClusterRole") {
		t.Errorf("it is told as %q", log)
	}
}

// awaitAnswers waits until the API server has answered so many requests of a user agent's.
func (c *cluster) awaitAnswers(agent string, want int) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		got := apitest.Requests(c.t, func(r apitest.Request) bool { return r.UserAgent == agent })
		if len(got) >= want {
			c.t.Logf("requests: %v", got)
			return
		}
		select {
		case <-ctx.Done():
			c.t.Fatalf("%d requests of %s, want %d: %v", len(got), agent, want, got)
		case <-tick.C:
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/workload"
)

func identity(namespace, account string) string {
	return "spiffe://cluster.local/ns/" + namespace + "/sa/" + account
}

func find(status admin.Status, pod *corev1.Pod) (admin.PodStatus, bool) {
	for _, known := range status.Pods {
		if known.UID == string(pod.UID) {
			return known, true
		}
	}
	return admin.PodStatus{}, false
}

// inMesh says why the pod is not wholly in the mesh, as its agent and its object show it.
func inMesh(all map[string]admin.Status, pod *corev1.Pod) error {
	known, ok := find(all[pod.Spec.NodeName], pod)
	name := pod.Namespace + "/" + pod.Name
	want := identity(pod.Namespace, pod.Spec.ServiceAccountName)
	switch {
	case !ok:
		return fmt.Errorf("pod %s is not in the status of %s", name, pod.Spec.NodeName)
	case known.State != admin.PodEnrolled || known.Proxy != admin.ProxyAcked || known.Certificate.State != admin.CertificateReady:
		return fmt.Errorf("pod %s is %s, proxy %s, certificate %s", name, known.State, known.Proxy, known.Certificate.State)
	case known.Identity != want:
		return fmt.Errorf("pod %s has the identity %s, not %s", name, known.Identity, want)
	}
	if got := pod.Annotations[workload.AnnotationRedirection]; got != "enabled" {
		return fmt.Errorf("pod %s has %q in the annotation %s", name, got, workload.AnnotationRedirection)
	}
	return nil
}

// outOfMesh says why the pod is not wholly out of it.
func outOfMesh(all map[string]admin.Status, pod *corev1.Pod) error {
	if known, ok := find(all[pod.Spec.NodeName], pod); ok {
		return fmt.Errorf("pod %s/%s is %s", pod.Namespace, pod.Name, known.State)
	}
	if got, ok := pod.Annotations[workload.AnnotationRedirection]; ok {
		return fmt.Errorf("pod %s/%s has %q in the annotation %s", pod.Namespace, pod.Name, got, workload.AnnotationRedirection)
	}
	return nil
}

// untilInMesh waits for pods to be wholly in the mesh, with rules in the kernel.
func (c *cluster) untilInMesh(t *testing.T, pods ...*corev1.Pod) {
	t.Helper()
	c.untilAll(t, "in the mesh", inMesh, pods)
	for _, pod := range pods {
		if parts := c.redirected(t, pod); len(parts) == 0 {
			t.Errorf("pod %s/%s is said to be in the mesh, and nothing of it is in the kernel", pod.Namespace, pod.Name)
		}
	}
}

// untilOutOfMesh waits for pods to be wholly out of the mesh, with nothing left in the kernel.
func (c *cluster) untilOutOfMesh(t *testing.T, pods ...*corev1.Pod) {
	t.Helper()
	c.untilAll(t, "out of the mesh", outOfMesh, pods)
	for _, pod := range pods {
		if parts := c.redirected(t, pod); len(parts) > 0 {
			t.Errorf("pod %s/%s is out of the mesh, and its netns has:\n%s", pod.Namespace, pod.Name, strings.Join(parts, "\n"))
		}
	}
}

func (c *cluster) untilAll(t *testing.T, what string, check func(map[string]admin.Status, *corev1.Pod) error, pods []*corev1.Pod) {
	t.Helper()
	c.until(t, fmt.Sprintf("%d pods of %s %s", len(pods), pods[0].Namespace, what), func() error {
		all, err := c.statuses(t.Context())
		if err != nil {
			return err
		}
		for _, pod := range pods {
			now, err := c.pod(pod.Namespace, pod.Name)
			if err != nil {
				return err
			}
			if now.UID != pod.UID {
				return fmt.Errorf("pod %s/%s is another one now", pod.Namespace, pod.Name)
			}
			if err := check(all, now); err != nil {
				return err
			}
		}
		return nil
	})
}

// redirected returns what of the redirection the kernel has for the pod.
func (c *cluster) redirected(t *testing.T, pod *corev1.Pod) []string {
	t.Helper()
	file, err := c.node(t, pod.Spec.NodeName).podNetns(pod.Status.PodIP)
	must(t, err)
	parts, err := redirected(t.Context(), file)
	must(t, err)
	return parts
}

func (c *cluster) node(t *testing.T, name string) node {
	t.Helper()
	for _, n := range c.nodes {
		if n.name == name {
			return n
		}
	}
	t.Fatalf("there is no node %q", name)
	return node{}
}

// carried says why no connection of the client to the server was in mutual TLS, between
// their identities, after the first so many that the proxy tells of.
func (c *cluster) carried(client, server *corev1.Pod, first int) error {
	from, to := identity(client.Namespace, client.Spec.ServiceAccountName), identity(server.Namespace, server.Spec.ServiceAccountName)
	target := fmt.Sprintf("%s:%d", server.Status.PodIP, appPort)
	ends := map[string]bool{}
	all := c.logs.connections(server.Spec.NodeName)
	for _, got := range all[min(first, len(all)):] {
		if got.err == "" && got.protocol == "hbone" && got.from == from && got.to == to && got.destination == target {
			ends[got.direction] = true
		}
	}
	if ends["outbound"] && ends["inbound"] {
		return nil
	}
	return fmt.Errorf("no connection from %s to %s (%s) at both ends: %v of the last %d", from, to, target, ends, len(all)-first)
}

// explain shows what an operator would look at, if the test has failed.
func (c *cluster) explain(t *testing.T, namespace string) {
	t.Helper()
	if !t.Failed() {
		return
	}
	ctx := context.WithoutCancel(t.Context())
	for _, pod := range append(c.pods(namespace), c.pods(systemNamespace)...) {
		t.Logf("pod %s/%s on %s: %s, %s=%q, %v", pod.Namespace, pod.Name, pod.Spec.NodeName, pod.Status.Phase,
			workload.AnnotationRedirection, pod.Annotations[workload.AnnotationRedirection], ready(pod))
	}
	c.explainEvents(ctx, t, namespace)
	for _, n := range c.nodes {
		n.explainStatus(ctx, t)
		for container, most := range map[string]int{"ambientd": 60, "devproxy": 20, "install": 10} {
			lines := c.logs.onNode(container, n.name)
			t.Logf("%s: the end of the log of %s:\n%s", n.name, container, strings.Join(lines[max(0, len(lines)-most):], "\n"))
		}
	}
}

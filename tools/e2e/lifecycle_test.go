// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"fmt"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// deployment makes one of servers, spread over the nodes by the scheduler.
func (c *cluster) deployment(t *testing.T, namespace string, replicas int32) {
	t.Helper()
	pod := server(namespace, "web", "").object()
	_, err := c.client.AppsV1().Deployments(namespace).Create(t.Context(), &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas,
			Selector: &metav1.LabelSelector{MatchLabels: pod.Labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: pod.Labels}, Spec: pod.Spec},
		},
	}, metav1.CreateOptions{})
	must(t, err)
}

func (c *cluster) scale(t *testing.T, namespace string, replicas int) {
	t.Helper()
	patch := fmt.Sprintf(`{"spec":{"replicas":%d}}`, replicas)
	_, err := c.client.AppsV1().Deployments(namespace).Patch(t.Context(), "web", types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	must(t, err)
}

// untilExactly waits until the namespace has so many pods, all of them ready and in the
// mesh, and the agents know no other of that namespace.
func (c *cluster) untilExactly(t *testing.T, namespace string, want int) {
	t.Helper()
	c.until(t, fmt.Sprintf("%d pods of %s in the mesh, and no others", want, namespace), func() error {
		pods := c.pods(namespace)
		if len(pods) != want {
			return fmt.Errorf("there are %d pods, not %d", len(pods), want)
		}
		all, err := c.statuses(t.Context())
		if err != nil {
			return err
		}
		for _, pod := range pods {
			if err := ready(pod); err != nil {
				return err
			}
			if err := inMesh(all, pod); err != nil {
				return err
			}
		}
		known, registered := 0, 0
		for _, status := range all {
			for _, pod := range status.Pods {
				if pod.Namespace == namespace {
					known++
				}
			}
			for _, id := range status.Identities {
				if id.ID == identity(namespace, "server") {
					registered += id.Pods
				}
			}
		}
		if known != want || registered != want {
			return fmt.Errorf("the agents know %d pods, and their identity is registered for %d; want %d", known, registered, want)
		}
		return nil
	})
}

func (c *cluster) testRollout(t *testing.T) {
	const namespace = "e2e-rollout"
	c.namespace(t, namespace, "ambient", "server")
	c.deployment(t, namespace, 3)
	for i, replicas := range []int{3, 20, 3} {
		if i > 0 {
			c.scale(t, namespace, replicas)
		}
		c.untilExactly(t, namespace, replicas)
	}
	// The template changes, so that all pods are replaced.
	_, err := c.client.AppsV1().Deployments(namespace).Patch(t.Context(), "web", types.MergePatchType,
		[]byte(`{"spec":{"template":{"metadata":{"annotations":{"round":"2"}}}}}`), metav1.PatchOptions{})
	must(t, err)
	c.until(t, "all pods replaced", func() error {
		pods := c.pods(namespace)
		for _, pod := range pods {
			if pod.Annotations["round"] != "2" || ready(pod) != nil {
				return fmt.Errorf("pod %s is of the first round or not ready", pod.Name)
			}
		}
		if len(pods) != 3 {
			return fmt.Errorf("there are %d pods", len(pods))
		}
		return nil
	})
	c.untilExactly(t, namespace, 3)
}

// A Job's pod is in the mesh while it runs, and out of it when it has ended: its object
// stays, its identity does not. Case 12 of the list.
func (c *cluster) testJob(t *testing.T) {
	const namespace = "e2e-job"
	c.namespace(t, namespace, "ambient", "server", "client")
	web := c.start(t, server(namespace, "server", c.nodes[0].name))[0]
	// It is the only pod of its identity, and ends with its first answer.
	task := client(namespace, "task", c.nodes[0].name, web.Status.PodIP)
	task.args = []string{"get", "--attempts=100", "--every=" + every.String(), task.args[len(task.args)-1]}
	spec := task.object().Spec
	spec.RestartPolicy = corev1.RestartPolicyNever
	_, err := c.client.BatchV1().Jobs(namespace).Create(t.Context(), &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Name: "task"},
		Spec: batchv1.JobSpec{Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{roleLabel: roleClient}}, Spec: spec,
		}},
	}, metav1.CreateOptions{})
	must(t, err)
	var pod *corev1.Pod
	c.until(t, "the Job's pod has succeeded", func() error {
		pods := c.pods(namespace, roleLabel, roleClient)
		if len(pods) != 1 || pods[0].Status.Phase != corev1.PodSucceeded {
			return fmt.Errorf("it has %d pods, or they have not ended", len(pods))
		}
		pod = pods[0]
		return nil
	})
	c.until(t, "the Job's connection in mutual TLS", func() error { return c.carried(pod, web, 0) })
	c.untilAll(t, "out of the mesh", outOfMesh, []*corev1.Pod{pod})
	status, err := c.nodes[0].status(t.Context())
	must(t, err)
	for _, id := range status.Identities {
		if id.ID == identity(namespace, "client") {
			t.Errorf("the identity of the pod that has ended is registered: %+v", id)
		}
	}
}

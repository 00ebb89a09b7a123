// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"ambientd/iptables/redirection"
	"ambientd/nodeagent/workload"
)

// runtimeFiles returns the files of the two directories that the plugin is installed in: what is
// in those of the configuration, and of programs only their names.
func (n node) runtimeFiles() (map[string]string, error) {
	files := map[string]string{}
	for _, dir := range []string{"etc/cni/net.d", "opt/cni/bin"} {
		entries, err := os.ReadDir(filepath.Join(n.root, dir))
		if err != nil {
			return nil, err
		}
		for _, entry := range entries {
			path := filepath.Join(dir, entry.Name())
			files[path] = ""
			if dir == "opt/cni/bin" {
				continue
			}
			content, err := os.ReadFile(filepath.Join(n.root, path))
			if err != nil {
				return nil, err
			}
			files[path] = string(content)
		}
	}
	return files, nil
}

// testRemoval takes ambientd away as deploy/README.md says, in that order. Pods that were in the
// mesh go on outside of it, others start, and the runtime's directories are as they were.
func (c *cluster) testRemoval(t *testing.T) {
	const namespace, after = "e2e-removal", "e2e-removed"
	t.Cleanup(func() { c.explain(t, systemNamespace) })
	c.namespace(t, namespace, "ambient", "server")
	var servers []app
	for _, n := range c.nodes {
		servers = append(servers, server(namespace, "server-"+n.name, n.name))
	}
	stay := c.start(t, servers...)
	c.untilInMesh(t, stay...)

	c.labelNamespace(t, namespace, "")
	c.untilOutOfMesh(t, stay...)
	must(t, c.client.AppsV1().DaemonSets(systemNamespace).Delete(t.Context(), "ambientd", metav1.DeleteOptions{}))
	for _, n := range c.nodes {
		c.uninstall(t, n)
	}
	c.until(t, "the plugin taken off all nodes", func() error { return c.uninstalled(t) })
	c.undeploy(t)
	for _, n := range c.nodes {
		now, err := n.runtimeFiles()
		must(t, err)
		if before := c.runtimeFiles[n.name]; !maps.Equal(now, before) {
			t.Errorf("%s: the runtime has\n%q\nand had before\n%q", n.name, now, before)
		}
	}

	// The label means nothing any more.
	c.namespace(t, after, "ambient", "server")
	var fresh []app
	for _, n := range c.nodes {
		fresh = append(fresh, server(after, "server-"+n.name, n.name))
	}
	all := slices.Concat(stay, c.start(t, fresh...))
	c.until(t, "ambientd's own pods gone", func() error {
		if left := c.pods(systemNamespace); len(left) > 0 {
			return fmt.Errorf("%d are there, such as %s", len(left), left[0].Name)
		}
		return nil
	})
	for _, pod := range all {
		c.checkUnmeshed(t, pod)
	}
	for _, n := range c.nodes {
		parts, err := redirected(t.Context(), n.root+"/proc/1/ns/net")
		must(t, err)
		for _, part := range parts {
			if strings.Contains(part, redirection.NFTablesTable) { // as the node's own table begins, too
				t.Errorf("%s itself still has %q", n.name, part)
			}
		}
	}
}

// checkUnmeshed looks that the pod serves, and that nothing of the mesh is left of it.
func (c *cluster) checkUnmeshed(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	now, err := c.pod(pod.Namespace, pod.Name)
	must(t, err)
	if err := ready(now); err != nil || now.UID != pod.UID {
		t.Errorf("after the removal: %v; the pod's UID was %s and is %s", err, pod.UID, now.UID)
	}
	if got, ok := now.Annotations[workload.AnnotationRedirection]; ok {
		t.Errorf("pod %s/%s has %q in the annotation %s", now.Namespace, now.Name, got, workload.AnnotationRedirection)
	}
	if parts := c.redirected(t, now); len(parts) > 0 {
		t.Errorf("the netns of pod %s/%s still has:\n%s", now.Namespace, now.Name, strings.Join(parts, "\n"))
	}
}

// uninstall creates the Job that takes the plugin off the node.
func (c *cluster) uninstall(t *testing.T, n node) {
	t.Helper()
	content, err := os.ReadFile("../../deploy/uninstall/job.yaml")
	must(t, err)
	var job batchv1.Job
	must(t, yaml.UnmarshalStrict([]byte(strings.ReplaceAll(string(content), "NODE", n.name)), &job))
	_, err = c.client.BatchV1().Jobs(job.Namespace).Create(t.Context(), &job, metav1.CreateOptions{})
	must(t, err)
}

// uninstalled says why not all Jobs of uninstall have done their work.
func (c *cluster) uninstalled(t *testing.T) error {
	t.Helper()
	jobs, err := c.client.BatchV1().Jobs(systemNamespace).List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=ambientd-uninstall"})
	if err != nil {
		return err
	}
	complete := 0
	for _, job := range jobs.Items {
		for _, condition := range job.Status.Conditions {
			switch {
			case condition.Type == batchv1.JobComplete && condition.Status == corev1.ConditionTrue:
				complete++
			case condition.Type == batchv1.JobFailed && condition.Status == corev1.ConditionTrue:
				t.Fatalf("the Job %s failed: %s", job.Name, condition.Message)
			}
		}
	}
	if complete != len(c.nodes) {
		return fmt.Errorf("%d of %d Jobs are complete", complete, len(c.nodes))
	}
	return nil
}

// undeploy deletes what deploy has applied, as `kubectl delete --ignore-not-found` does.
func (c *cluster) undeploy(t *testing.T) {
	t.Helper()
	for _, object := range c.manifests(t) {
		err := c.resource(t, object).Delete(t.Context(), object.GetName(), metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			t.Errorf("deleting %s %s: %v", object.GetKind(), object.GetName(), err)
		}
	}
}

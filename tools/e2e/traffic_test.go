// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"ambientd/iptables/redirection"
	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/workload"
)

// pair is a client and the server that it asks, on one node.
type pair struct{ client, server *corev1.Pod }

// pairs starts one on each node. Clients are in a namespace of their own if one is given.
func (c *cluster) pairs(t *testing.T, namespace, clients string) []pair {
	t.Helper()
	var servers, askers []app
	for _, n := range c.nodes {
		servers = append(servers, server(namespace, "server-"+n.name, n.name))
	}
	ready := c.start(t, servers...)
	for i, n := range c.nodes {
		askers = append(askers, client(clients, "client-"+n.name, n.name, ready[i].Status.PodIP))
	}
	var all []pair
	for i, asker := range c.start(t, askers...) {
		all = append(all, pair{client: asker, server: ready[i]})
	}
	return all
}

func pods(pairs []pair) []*corev1.Pod {
	var all []*corev1.Pod
	for _, p := range pairs {
		all = append(all, p.client, p.server)
	}
	return all
}

// Pods that start in an enrolled namespace talk in mutual TLS, each under its own identity,
// and the server still sees the client's own address.
func (c *cluster) testMutualTLS(t *testing.T) {
	const namespace = "e2e-mesh"
	c.namespace(t, namespace, "ambient", "server", "client")
	pairs := c.pairs(t, namespace, namespace)
	c.untilInMesh(t, pods(pairs)...)
	for _, p := range pairs {
		c.until(t, "mutual TLS on "+p.client.Spec.NodeName, func() error { return c.carried(p.client, p.server, 0) })
		c.until(t, "an answer on "+p.client.Spec.NodeName, func() error {
			attempts, err := c.attempts(namespace, p.client.Name, time.Time{})
			if err != nil {
				return err
			}
			for _, a := range attempts {
				if a.Answer != nil && a.Answer.Pod == p.server.Name && strings.HasPrefix(a.Answer.Peer, p.client.Status.PodIP+":") {
					return nil
				}
			}
			return fmt.Errorf("none of %d attempts has an answer of %s to %s", len(attempts), p.server.Name, p.client.Status.PodIP)
		})
	}
}

// relabels is how often the label comes and goes.
const relabels = 2

// Running pods come into the mesh and leave it with their namespace's label, any number of
// times. Cases 15 and 2 of the list are larger, in package enroll.
func (c *cluster) testRelabel(t *testing.T) {
	c.namespace(t, relabelledNamespace, "", "server", "client")
	pairs := c.pairs(t, relabelledNamespace, relabelledNamespace)
	c.untilOutOfMesh(t, pods(pairs)...)
	for range relabels {
		before := make([]int, len(pairs))
		for i, p := range pairs {
			before[i] = len(c.logs.connections(p.server.Spec.NodeName))
		}
		c.labelNamespace(t, relabelledNamespace, "ambient")
		c.untilInMesh(t, pods(pairs)...)
		for i, p := range pairs {
			c.until(t, "mutual TLS on "+p.client.Spec.NodeName, func() error { return c.carried(p.client, p.server, before[i]) })
		}
		c.labelNamespace(t, relabelledNamespace, "")
		c.untilOutOfMesh(t, pods(pairs)...)
		left := time.Now()
		for _, p := range pairs {
			c.until(t, "an answer in plaintext on "+p.client.Spec.NodeName, func() error { return c.answered(p.client, p.server, left) })
		}
	}
}

// While the proxy lets nobody through, kubelet's probes of both kinds reach the pod, and
// nobody else does: neither from inside nor from outside of the mesh.
func (c *cluster) testDenied(t *testing.T) {
	const outside = "e2e-outside"
	c.namespace(t, deniedNamespace, "ambient", "server", "client")
	c.namespace(t, outside, "", "client")
	inside := c.pairs(t, deniedNamespace, deniedNamespace)
	c.untilInMesh(t, pods(inside)...)
	var strangers []app
	for _, p := range inside {
		strangers = append(strangers, client(outside, "stranger-"+p.server.Spec.NodeName, p.server.Spec.NodeName, p.server.Status.PodIP))
	}
	askers := c.start(t, strangers...)
	for i, p := range inside {
		for _, asker := range []*corev1.Pod{p.client, askers[i]} {
			c.until(t, "four attempts of "+asker.Name+" refused", func() error { return c.refused(asker, 4) })
		}
	}
	for _, p := range inside {
		now, err := c.pod(deniedNamespace, p.server.Name)
		must(t, err)
		if err := ready(now); err != nil {
			t.Errorf("while the proxy denies everything: %v", err)
		}
		if n := now.Status.ContainerStatuses[0].RestartCount; n > 0 {
			t.Errorf("pod %s was restarted %d times: its liveness probe failed", now.Name, n)
		}
	}
}

// refused says why not so many attempts of the client have failed. One that has an answer
// is no reason to wait.
func (c *cluster) refused(client *corev1.Pod, want int) error {
	attempts, err := c.attempts(client.Namespace, client.Name, time.Time{})
	if err != nil {
		return err
	}
	for _, a := range attempts {
		if a.Answer != nil {
			return fmt.Errorf("%s/%s has an answer: %+v", client.Namespace, client.Name, *a.Answer)
		}
	}
	if len(attempts) < want {
		return fmt.Errorf("%s/%s has failed %d times, not %d", client.Namespace, client.Name, len(attempts), want)
	}
	return nil
}

// Pods of an enrolled namespace that are not to be in the mesh have nothing of it, and the
// agent says why. Case 13 of the list.
func (c *cluster) testUntouched(t *testing.T) {
	const namespace = "e2e-untouched"
	c.namespace(t, namespace, "ambient", "server", "client")
	out, sidecar, host := server(namespace, "out", c.nodes[0].name), server(namespace, "sidecar", c.nodes[0].name), server(namespace, "host", c.nodes[0].name)
	out.change = func(pod *corev1.Pod) { pod.Labels[modeLabel] = "none" }
	sidecar.change = func(pod *corev1.Pod) { pod.Annotations = map[string]string{"sidecar.istio.io/status": "{}"} }
	host.args = []string{"serve", "--listen=:18080"}
	host.change = func(pod *corev1.Pod) { pod.Spec.HostNetwork = true }
	started := c.start(t, out, sidecar, host, server(namespace, "in", c.nodes[0].name))
	c.untilInMesh(t, started[3])
	c.untilOutOfMesh(t, started[0], started[1])
	status, err := c.nodes[0].status(t.Context())
	must(t, err)
	reasons := map[string]string{}
	for _, s := range status.Skipped {
		reasons[s.Namespace+"/"+s.Name] = s.Reason
	}
	for _, pod := range started[:2] {
		if reasons[namespace+"/"+pod.Name] == "" {
			t.Errorf("the agent does not say why %s is not in the mesh: %v", pod.Name, reasons)
		}
	}
	if err := outOfMesh(map[string]admin.Status{c.nodes[0].name: status}, started[2]); err != nil {
		t.Error(err)
	}
	parts, err := redirected(t.Context(), c.nodes[0].root+"/proc/1/ns/net")
	must(t, err)
	for _, part := range parts {
		// The node has tables of kubelet, and ours of the addresses that probes go to.
		if !strings.HasPrefix(part, "table ") || strings.HasSuffix(part, " "+redirection.NFTablesTable) {
			t.Errorf("the node itself has %q", part)
		}
	}
	if got, ok := started[2].Annotations[workload.AnnotationRedirection]; ok {
		t.Errorf("the hostNetwork pod has the annotation %q", got)
	}
}

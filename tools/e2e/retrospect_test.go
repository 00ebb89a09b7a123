// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"ambientd/tools/apitest"
)

const (
	relabelledNamespace = "e2e-relabelled"
	agentUser           = "system:serviceaccount:" + systemNamespace + ":ambientd"
	// linesPerSandbox is what the agent may say of a pod, from its start to its end, for each
	// sandbox that it has had: how often the runtime tries depends on when the agent is away.
	linesPerSandbox = 5
)

// When all pods of the tests are gone, so is all that the agents had for them.
func (c *cluster) testNothingLeft(t *testing.T) {
	t.Cleanup(func() { c.explain(t, systemNamespace) })
	c.until(t, "all pods of the tests gone", func() error {
		for _, object := range c.cached.List() {
			if pod, ok := object.(*corev1.Pod); ok && strings.HasPrefix(pod.Namespace, "e2e-") {
				return fmt.Errorf("pod %s/%s is still there", pod.Namespace, pod.Name)
			}
		}
		return nil
	})
	for _, n := range c.nodes {
		c.until(t, "nothing left on "+n.name, func() error { return n.empty(t.Context()) })
	}
}

// empty says what the node's agent still has.
func (n node) empty(ctx context.Context) error {
	status, err := n.status(ctx)
	if err != nil {
		return err
	}
	if len(status.Pods)+len(status.Identities)+len(status.Skipped) > 0 {
		return fmt.Errorf("%s: the status has %d pods, %d identities, %d skipped", n.name, len(status.Pods), len(status.Identities), len(status.Skipped))
	}
	for _, what := range []string{"pods", "spool"} {
		entries, err := os.ReadDir(n.private(what))
		if err != nil {
			return err
		}
		if len(entries) > 0 {
			return fmt.Errorf("%s: %d files are left in %s, such as %s", n.name, len(entries), what, entries[0].Name())
		}
	}
	files, err := filepath.Glob(filepath.Join(n.root, "run/netns/*"))
	if err != nil {
		return err
	}
	if len(files) > 0 {
		return fmt.Errorf("%s: %d network namespaces are left", n.name, len(files))
	}
	return nil
}

// The agents were refused nothing, and asked for nothing but what their role is for.
func (c *cluster) testRequests(t *testing.T) {
	count := map[string]int{}
	for _, r := range apitest.Requests(t, isAgents) {
		what := strings.TrimSuffix(r.Verb+" "+r.ObjectRef.Resource+"/"+r.ObjectRef.Subresource, "/")
		count[what]++
		if r.Refused() {
			t.Errorf("the API server refused %s", r)
		}
	}
	for _, wanted := range []string{"list pods", "list namespaces", "patch pods/status", "create events"} {
		if count[wanted] == 0 {
			t.Errorf("no request %q among %v", wanted, count)
		}
	}
	t.Logf("requests of the agents: %v", count)
}

// isAgents tells whether an agent asked. Of one whose token is not known the audit log has no
// user.
func isAgents(r apitest.Request) bool {
	return r.User.Username == agentUser || r.User.Username == "" && strings.HasPrefix(r.UserAgent, "ambientd/")
}

// What `kubectl logs` shows of the agents is text that people and programs can read, and
// little of it.
func (c *cluster) testLog(t *testing.T) {
	for _, n := range c.nodes {
		var lines []Line
		for _, raw := range c.logs.onNode("ambientd", n.name) {
			line, err := ParseLine(raw)
			if err != nil {
				t.Errorf("%s: the agent's log has a line that cannot be read: %v: %s", n.name, err, raw)
				continue
			}
			lines = append(lines, line)
			if strings.Contains(raw, "orbidden") {
				t.Errorf("%s: the agent was refused something: %s", n.name, raw)
			}
			switch line["level"] {
			case "ERROR":
				t.Errorf("%s: an error: %s", n.name, raw)
			case "WARN":
				t.Logf("%s: %s", n.name, raw)
			}
		}
		pods := MentionsOfPods(lines)
		most := Mentions{}
		for pod, count := range pods {
			limit := linesPerSandbox * max(count.Sandboxes, 1)
			if strings.HasPrefix(pod, relabelledNamespace+"/") {
				limit += 2 * relabels // it has had as many starts and ends
			}
			if count.Lines > most.Lines {
				most = count
			}
			if count.Lines > limit {
				t.Errorf("%s: %d lines of pod %s, at most %d are wanted:\n%s", n.name, count.Lines, pod, limit, c.linesOf(n, pod))
			}
		}
		t.Logf("%s: the agent's log has %d lines, of %d pods; at most %d of one, for its %d sandboxes", n.name, len(lines), len(pods), most.Lines, most.Sandboxes)
	}
}

func (c *cluster) linesOf(n node, pod string) string {
	name, uid, _ := strings.Cut(pod, " ")
	var found []string
	for _, raw := range c.logs.onNode("ambientd", n.name) {
		if line, err := ParseLine(raw); err == nil && line["pod"] == name && line["uid"] == uid {
			found = append(found, raw)
		}
	}
	return strings.Join(found, "\n")
}

// eventOf says that the pod has no event of that reason.
func (c *cluster) eventOf(t *testing.T, pod *corev1.Pod, reason string) error {
	t.Helper()
	events, err := c.client.CoreV1().Events(pod.Namespace).List(t.Context(), metav1.ListOptions{
		FieldSelector: "involvedObject.uid=" + string(pod.UID),
	})
	must(t, err)
	for _, e := range events.Items {
		if e.Reason == reason {
			return nil
		}
	}
	return fmt.Errorf("none of its %d events has the reason %s", len(events.Items), reason)
}

// labelNodeAfter is labelNode for when the test has ended.
func (c *cluster) labelNodeAfter(t *testing.T, name, value string) {
	patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%q}}}`, AgentLabel, value)
	_, err := c.client.CoreV1().Nodes().Patch(context.WithoutCancel(t.Context()), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	if err != nil {
		t.Errorf("labelling %s: %v", name, err)
	}
}

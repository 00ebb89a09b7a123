// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"ambientd/nodeagent/podnetns/cri"
)

// What `--cri-socket` lets the agent ask, this runtime answers: of pods with a netns of their
// own its file, and then a process that is in it; of others nothing.
func (c *cluster) testRuntime(t *testing.T) {
	const namespace = "e2e-runtime"
	n := c.nodes[0]
	c.namespace(t, namespace, "", "server")
	host := server(namespace, "host", n.name)
	host.args = []string{"serve", "--listen=:18081"}
	host.change = func(pod *corev1.Pod) { pod.Spec.HostNetwork = true }
	started := c.start(t, server(namespace, "one", n.name), server(namespace, "two", n.name), host)
	runtime, err := cri.New(cri.Config{Socket: filepath.Join(n.root, "run/containerd/containerd.sock")})
	must(t, err)
	var uids []string
	for _, pod := range started {
		uids = append(uids, string(pod.UID))
	}
	paths, err := runtime.NetnsPaths(t.Context(), uids)
	must(t, err)
	for _, pod := range started[:2] {
		file, err := n.podNetns(pod.Status.PodIP)
		must(t, err)
		got := paths[string(pod.UID)]
		if len(got) != 2 || !strings.HasPrefix(got[0], "/var/run/netns/") || !strings.HasPrefix(got[1], "/proc/") {
			t.Fatalf("the netns of pod %s is said to be at %q, want a file and a process", pod.Name, got)
		}
		for _, path := range got {
			// A link of the node's at /var/run would be followed to this machine's /run.
			if err := sameFile(filepath.Join(n.root, strings.TrimPrefix(path, "/var")), file); err != nil {
				t.Errorf("pod %s: %v", pod.Name, err)
			}
		}
	}
	if got, ok := paths[string(started[2].UID)]; ok {
		t.Errorf("the pod in the node's netns is said to have one at %q", got)
	}
}

// sameFile says why the paths do not lead to the same netns.
func sameFile(a, b string) error {
	first, err := os.Stat(a)
	if err != nil {
		return err
	}
	second, err := os.Stat(b)
	if err != nil {
		return err
	}
	if !os.SameFile(first, second) {
		return fmt.Errorf("%s is not the same as %s", a, b)
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

//go:build apitest

package onkubernetes

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"ambientd/cni-plugin/podevent"
	"ambientd/nodeagent/admin"
	"ambientd/tools/netnstest"
)

// A full node, and what its agent may have. 35 MB are aimed at, and measured by `make bench`;
// two thirds are pages of the program's file, of which the kernel maps more or fewer.
const (
	cachedPods   = 400
	enrolledPods = 120
	namespaces   = 100
	maxRSS       = 38_000_000
)

// TestMemory measures the agent's own process, as it is built for use.
func TestMemory(t *testing.T) {
	c := newCluster(t)
	c.label("ambient")
	c.fill()
	agent := c.exec()
	c.await("the agent", func() bool {
		status, err := admin.Fetch(t.Context(), c.cfg.AdminSocketPath())
		return err == nil && status.Ready
	})
	c.proxy()
	pods, err := c.admin.CoreV1().Pods(c.namespace).List(t.Context(), metav1.ListOptions{Limit: enrolledPods})
	must(t, err)
	for i := range pods.Items {
		pod := &sandbox{Pod: &pods.Items[i], ns: netnstest.New(t), ip: netip.AddrFrom4([4]byte{10, 8, byte(i), 2})}
		if reply := c.call(podevent.CommandAdd, pod); reply.Result != podevent.ResultEnrolled {
			t.Fatalf("ADD: %+v", reply)
		}
	}
	c.await("all pods", func() bool { return c.enrolled() == enrolledPods })
	rss := field(t, fmt.Sprintf("/proc/%d/status", agent), "VmRSS:")
	anonymous := field(t, fmt.Sprintf("/proc/%d/status", agent), "RssAnon:")
	t.Logf("RSS %.1f MiB, of it %.1f MiB of the program's own memory, with %d pods, %d of them enrolled, and %d namespaces",
		float64(rss)/(1<<20), float64(anonymous)/(1<<20), cachedPods, enrolledPods, namespaces)
	if rss > maxRSS {
		t.Errorf("RSS is %.1f MB, want at most %.1f MB", float64(rss)/1e6, maxRSS/1e6)
	}
}

// fill makes pods as large as real ones are, on the node.
func (c *cluster) fill() {
	c.t.Helper()
	var group errgroup.Group
	group.SetLimit(8)
	ctx := c.t.Context()
	for i := range namespaces {
		group.Go(func() error {
			name := fmt.Sprintf("%s-%d", c.namespace, i)
			_, err := c.admin.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
			c.t.Cleanup(func() {
				if err := c.admin.CoreV1().Namespaces().Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
					c.t.Error(err)
				}
			})
			return err
		})
	}
	for i := range cachedPods {
		group.Go(func() error {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
				Name: fmt.Sprint("pod-", i), Labels: map[string]string{"app": "web", "pod-template-hash": "5d4f8c7b9", "version": "v1"},
				Annotations: map[string]string{"kubectl.kubernetes.io/last-applied-configuration": strings.Repeat("x", 2000)},
			}}
			pod.Spec.NodeName = c.node
			for n := range 2 {
				container := corev1.Container{Name: fmt.Sprint("app-", n), Image: "registry.example.org/shop/web:v1.2.3"}
				for v := range 20 {
					container.Env = append(container.Env, corev1.EnvVar{Name: fmt.Sprint("SETTING_", v), Value: strings.Repeat("v", 60)})
				}
				pod.Spec.Containers = append(pod.Spec.Containers, container)
			}
			_, err := c.admin.CoreV1().Pods(c.namespace).Create(ctx, pod, metav1.CreateOptions{})
			return err
		})
	}
	must(c.t, group.Wait())
	c.t.Cleanup(func() {
		must(c.t, c.admin.CoreV1().Pods(c.namespace).DeleteCollection(context.Background(), metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}, metav1.ListOptions{}))
	})
}

// exec builds and starts the program, and returns its process ID.
func (c *cluster) exec() int {
	c.t.Helper()
	var log bytes.Buffer
	cmd := c.command(c.build())
	cmd.Stderr = &log
	must(c.t, cmd.Start())
	c.t.Cleanup(func() {
		must(c.t, cmd.Process.Signal(syscall.SIGTERM))
		if err := cmd.Wait(); err != nil {
			c.t.Errorf("the agent ends with %v: %s", err, log.String())
		}
	})
	return cmd.Process.Pid
}

// build builds the program as it is for use.
func (c *cluster) build() string {
	c.t.Helper()
	program := filepath.Join(c.t.TempDir(), "ambientd")
	build := exec.CommandContext(c.t.Context(), "go", "build", "-trimpath", "-buildvcs=false", "-tags=grpcnotrace", "-ldflags=-s -w -X main.version="+c.cfg.Version, "-o", program, "ambientd/nodeagent")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		c.t.Fatalf("building the agent: %v: %s", err, out)
	}
	return program
}

// command is the program with its flags; it outlives the test's context.
func (c *cluster) command(program string) *exec.Cmd {
	return exec.CommandContext(context.Background(), program, "run", "--node-name", c.node, "--pods-from", "kubernetes",
		"--kubeconfig", c.cfg.Kubeconfig, "--run-dir", c.cfg.RunDir, "--zds-socket", c.cfg.ZDSSocket)
}

// field returns a number of KiB of the file, in bytes.
func field(t *testing.T, path, name string) int64 {
	t.Helper()
	content, err := os.ReadFile(path)
	must(t, err)
	var kib int64
	for line := range strings.Lines(string(content)) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			_, err := fmt.Sscan(rest, &kib)
			must(t, err)
			return kib << 10
		}
	}
	t.Fatalf("%s has no %s", path, name)
	return 0
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// kubectl runs kubectl as the cluster's administrator and returns what it printed.
func kubectl(t *testing.T, state *State, input string, args ...string) (string, error) {
	t.Helper()
	var out, errs bytes.Buffer
	err := state.Nodes[0].Process.InNetns(func() error {
		cmd := exec.CommandContext(t.Context(), filepath.Join(state.Programs, "kubectl"), append([]string{"--kubeconfig", state.Kubeconfig()}, args...)...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &out, &errs
		return cmd.Run()
	})
	if err != nil {
		return out.String(), fmt.Errorf("kubectl %v: %w: %s", args, err, errs.String())
	}
	return strings.TrimSpace(out.String()), nil
}

func mustKubectl(t *testing.T, state *State, input string, args ...string) string {
	t.Helper()
	out, err := kubectl(t, state, input, args...)
	if err != nil {
		t.Error(err)
		events, _ := kubectl(t, state, "", "get", "events,pods", "-A", "-o", "wide")
		t.Log(events)
		t.FailNow()
	}
	return out
}

// pod is a manifest of a pod of busybox on a node that runs a script.
func pod(name, nodeName, spec, script string) string {
	return fmt.Sprintf(`---
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  nodeSelector: {kubernetes.io/hostname: %s}
  terminationGracePeriodSeconds: 1
  %s
  containers:
  - name: main
    image: %s
    imagePullPolicy: Never
    command: [/bin/sh, -c, %q]
`, name, nodeName, spec, BusyboxImage, script)
}

const (
	serve = "echo started; mkdir -p /tmp/www; echo hello from $HOSTNAME >/tmp/www/index.html; exec httpd -f -p 8080 -h /tmp/www"
	wait  = "echo started; exec sleep 100000"
	// askAPI connects to the API server as in-cluster clients do.
	askAPI = "nc -w 5 $KUBERNETES_SERVICE_HOST $KUBERNETES_SERVICE_PORT </dev/null && echo reached"
)

// Two nodes: the scheduler places pods, they reach each other across nodes with their own
// addresses, and the API server, also from the host's network; logs and exec work; each node
// has its own directories; and when it is over nothing is left, though pods still run.
func TestTwoNodes(t *testing.T) {
	cfg := testConfig(t, 2)
	before := look(t, cfg.Dir, nil)
	state := bringUpForTest(t, cfg)
	manifests := pod("server", "node1", "", serve) + pod("client", "node2", "", wait) + pod("host", "node2", "hostNetwork: true", wait)
	mustKubectl(t, state, manifests, "apply", "-f", "-")
	started := time.Now()
	mustKubectl(t, state, "", "wait", "--for=condition=Ready", "pod", "--all", "--timeout=180s")
	t.Logf("three pods are ready after %s", time.Since(started).Round(100*time.Millisecond))

	address := mustKubectl(t, state, "", "get", "pod", "server", "-o", "jsonpath={.status.podIP}")
	client := mustKubectl(t, state, "", "get", "pod", "client", "-o", "jsonpath={.status.podIP}")
	if !strings.HasPrefix(address, "10.244.0.") || !strings.HasPrefix(client, "10.244.1.") {
		t.Errorf("the pods have addresses %s and %s, want one of each node's", address, client)
	}
	if got := mustKubectl(t, state, "", "exec", "client", "--", "wget", "-q", "-O", "-", "http://"+address+":8080/"); got != "hello from server" {
		t.Errorf("across nodes the server says %q", got)
	}
	for _, name := range []string{"server", "client", "host"} {
		if got := mustKubectl(t, state, "", "exec", name, "--", "sh", "-c", askAPI); got != "reached" {
			t.Errorf("%s does not reach the API server: %q", name, got)
		}
		if got := mustKubectl(t, state, "", "logs", name); got != "started" {
			t.Errorf("the log of %s is %q", name, got)
		}
	}
	for i, want := range []int{1, 1} { // the host's network needs no plugin
		leases, err := filepath.Glob(filepath.Join(state.NodeDir(i), "layers", "var-lib", "upper", "cni", "networks", "devcluster", "10.244.*"))
		if err != nil || len(leases) != want {
			t.Errorf("node %d has given out the addresses %v (%v), want %d", i+1, leases, err, want)
		}
	}
	during := look(t, cfg.Dir, state)
	if len(during.cgroups) < 10 || during.sysctls != before.sysctls || fmt.Sprint(during.mounts) != fmt.Sprint(before.mounts) {
		t.Errorf("the machine sees %+v, before %+v: want cgroups of pods, and no other change", during, before)
	}
	if err := Down(t.Context(), cfg.Dir); err != nil {
		t.Fatal(err)
	}
	gone(t, cfg, state, before, during)
}

// A static pod starts from a file in the node's directory; a plugin that somebody installs
// on the node is what the runtime calls, containerd 2 with STATUS too; an image from a file
// is there.
func TestNodeIsOpenForItsUsers(t *testing.T) {
	for version, verbs := range map[int][]string{1: {"ADD ", "DEL "}, 2: {"ADD ", "DEL ", "STATUS "}} {
		t.Run(fmt.Sprintf("containerd %d", version), func(t *testing.T) { openForItsUsers(t, version, verbs) })
	}
}

func openForItsUsers(t *testing.T, version int, verbs []string) {
	cfg := testConfig(t, 1)
	cfg.Containerd = version
	images := t.TempDir()
	custom, err := busyboxImage(t.Context(), "/usr/bin/busybox")
	if err != nil {
		t.Fatal(err)
	}
	custom.Name = "localhost/custom:dev"
	file, err := os.Create(filepath.Join(images, "custom.tar"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := custom.Write(file); err != nil {
		t.Fatal(err)
	}
	cfg.Images = []string{file.Name()}
	state := bringUpForTest(t, cfg)

	static := strings.Replace(pod("static", "node1", "hostNetwork: true", wait), BusyboxImage, custom.Name, 1)
	if err := os.WriteFile(filepath.Join(state.NodeDir(0), "manifests", "static.yaml"), []byte(static), 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the static pod is not ready", func() bool {
		_, err := kubectl(t, state, "", "wait", "--for=condition=Ready", "pod/static-node1", "--timeout=1s")
		return err == nil
	})

	installRecorder(t, state)
	// The runtime reads the changed file when it notices, and tells nobody: some pods may come
	// before.
	var calls, name string
	pods := 0
	eventually(t, fmt.Sprintf("the plugin was not called with all of %v", verbs), func() bool {
		pods++
		name = fmt.Sprintf("recorded-%d", pods)
		mustKubectl(t, state, pod(name, "node1", "", wait), "apply", "-f", "-")
		mustKubectl(t, state, "", "wait", "--for=condition=Ready", "pod/"+name, "--timeout=180s")
		mustKubectl(t, state, "", "delete", "pod", name, "--timeout=60s")
		content, err := os.ReadFile(filepath.Join(state.NodeDir(0), "run", "calls"))
		calls = string(content)
		return err == nil && !slices.ContainsFunc(verbs, func(verb string) bool { return !strings.Contains(calls, verb) })
	})
	t.Logf("the runtime called the plugin with pod %d", pods)
	if !strings.Contains(calls, "/var/run/netns/cni-") || !strings.Contains(calls, "K8S_POD_NAME="+name) {
		t.Errorf("the plugin was called with %q", calls)
	}
	if _, err := os.Stat("/run/calls"); err == nil {
		t.Error("what the plugin wrote is on the machine")
	}
}

// installRecorder puts a plugin that notes its calls behind the one of the node, as an
// installer does: the binary first, then the conflist, each by rename.
func installRecorder(t *testing.T, state *State) {
	t.Helper()
	put := func(path, content string, mode os.FileMode) {
		if err := os.WriteFile(path+".new", []byte(content), mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
	// It prints what it was given as prevResult, for which the JSON need not be parsed here.
	const plugin = `#!/bin/sh
echo "$CNI_COMMAND $CNI_NETNS $CNI_ARGS" >>/run/calls
[ "$CNI_COMMAND" = ADD ] || exit 0
sed 's/.*"prevResult":\({.*}\),"type".*/\1/'
`
	dir := state.NodeDir(0)
	put(filepath.Join(dir, "cni-bin", "recorder"), plugin, 0o755)
	conflist := filepath.Join(dir, "net.d", "10-devcluster.conflist")
	content, err := os.ReadFile(conflist)
	if err != nil {
		t.Fatal(err)
	}
	at := bytes.LastIndex(content, []byte("\n  ]"))
	put(conflist, string(content[:at])+`, {"type": "recorder"}`+string(content[at:]), 0o644)
}

// eventually waits for something that tells nobody when it happens.
func eventually(t *testing.T, what string, happened func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !happened(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(what)
		}
	}
}

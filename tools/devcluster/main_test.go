// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"ambientd/tools/devcluster/cluster"
	"ambientd/tools/devcluster/node"
)

// asCommand makes the test's binary devcluster itself, for tests that kill it.
const asCommand = "DEVCLUSTER_TEST_AS_COMMAND"

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == node.InitCommand || os.Getenv(asCommand) != "" {
		main()
	}
	os.Exit(m.Run())
}

func call(args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = run(context.Background(), args, streams{in: strings.NewReader(""), out: &out, err: &errs})
	return code, out.String(), errs.String()
}

func TestCommandLine(t *testing.T) {
	for _, test := range []struct {
		args           []string
		code           int
		stdout, stderr string
	}{
		{nil, 2, "", "a command is missing"},
		{[]string{"--help"}, 0, "devcluster run [FLAGS] -- COMMAND", ""},
		{[]string{"fly"}, 2, "", `unknown command "fly"`},
		{[]string{"up", "--help"}, 0, "-nodes", ""},
		{[]string{"run", "--help"}, 0, "-feature-gates", ""},
		{[]string{"down", "--help"}, 0, "-dir", ""},
		{[]string{"kubeconfig", "--help"}, 0, "-dir", ""},
		{[]string{"up", "surplus"}, 2, "", `unknown argument "surplus"`},
		{[]string{"up", "--nodes=many"}, 2, "", "nodes"},
		{[]string{"run", "--nodes=0"}, 2, "", "a command to run is missing"},
		{[]string{"stop"}, 2, "", "name of one program"},
		{[]string{"kubeconfig", "--dir=/nonexistent"}, 1, "", "no cluster in /nonexistent"},
		{[]string{"exec", "--dir=/nonexistent", "--", "true"}, 1, "", "no cluster"},
		{[]string{"down", "--dir=/nonexistent"}, 0, "", ""},
	} {
		code, stdout, stderr := call(test.args...)
		if code != test.code || !strings.Contains(stdout, test.stdout) || !strings.Contains(stderr, test.stderr) {
			t.Errorf("devcluster %v: code %d, printed %q, said %q; want %d, %q, %q", test.args, code, stdout, stderr, test.code, test.stdout, test.stderr)
		}
	}
}

// The command runs inside, knows where the cluster is, and its code is ours; then the
// cluster is gone.
func TestRun(t *testing.T) {
	code, stdout, stderr := call("run", "--nodes=0", "--", "sh", "-c", `ip -brief addr show dev node0; echo "$DEVCLUSTER_DIR"; test -s "$KUBECONFIG" && test -e "$DEVCLUSTER_AUDIT_LOG" && exit 7`)
	if code != 7 {
		t.Errorf("code %d, want the command's; it printed %s%s", code, stdout, stderr)
	}
	lines := strings.Split(strings.TrimSpace(stdout), "\n")
	if len(lines) != 2 || !strings.Contains(lines[0], "10.99.0.1/24") {
		t.Fatalf("the command did not run inside: %q", stdout)
	}
	if _, err := os.Stat(lines[1]); err == nil {
		t.Errorf("%s is still there", lines[1])
	}
	if code, _, stderr := call("run", "--nodes=0", "--", "no-such-command"); code != 1 || !strings.Contains(stderr, "no-such-command") {
		t.Errorf("a command that is not there: code %d, %s", code, stderr)
	}
	if code, _, _ := call("run", "--nodes=0", "--", "sh", "-c", "kill -9 $$"); code != 128+9 {
		t.Errorf("a command that was killed: code %d, want 137", code)
	}
}

// start starts devcluster as a process of its own, in a directory of the test.
func start(t *testing.T, dir string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), asCommand+"=yes")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if code, _, stderr := call("down", "--dir", dir); code != 0 {
			t.Errorf("down: %s", stderr)
		}
		if err := os.Remove(filepath.Dir(dir)); err != nil {
			t.Errorf("the cluster has left something: %v", err)
		}
	})
	return cmd
}

func clusterDir(t *testing.T) string {
	t.Helper()
	parent, err := os.MkdirTemp("/var/tmp", "dc-")
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(parent, "c")
}

// eventually waits for something that tells nobody when it happens.
func eventually(t *testing.T, what string, happened func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !happened(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(what)
		}
	}
}

// nodeOf returns the first node's process once it is recorded.
func nodeOf(dir string) (node.Process, bool) {
	state, err := cluster.Load(dir)
	if err != nil || len(state.Nodes) == 0 || state.Nodes[0].Process.PID == 0 {
		return node.Process{}, false
	}
	return state.Nodes[0].Process, true
}

// A `run` that is killed takes the cluster with it; what files it leaves, down removes.
func TestKilledRun(t *testing.T) {
	dir := clusterDir(t)
	begun := filepath.Join(t.TempDir(), "begun")
	cmd := start(t, dir, "run", "--dir", dir, "--", "sh", "-c", "echo $$ >"+begun+".new && mv "+begun+".new "+begun+" && exec sleep 600")
	eventually(t, "the command was not started", func() bool {
		_, err := os.Stat(begun)
		return err == nil
	})
	process, ok := nodeOf(dir)
	if !ok || !process.Alive() {
		t.Fatal("the command runs without a node")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the node has outlived devcluster run", func() bool { return !process.Alive() })
	// The command is its caller's business; here it is ours.
	content, err := os.ReadFile(begun)
	if err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Sscan(string(content), &pid); err != nil {
		t.Fatal(err)
	}
	_ = syscall.Kill(pid, syscall.SIGKILL)
}

// An `up` that is killed half-way leaves what down finds: as soon as there is a node, and
// with the runtime of a node that runs pods.
func TestKilledUp(t *testing.T) {
	for nodes, sign := range []string{"cluster.json", "nodes/node1/run/containerd/containerd.sock"} {
		t.Run(fmt.Sprintf("nodes=%d", nodes), func(t *testing.T) { killedUp(t, nodes, sign) })
	}
}

func killedUp(t *testing.T, nodes int, sign string) {
	dir := clusterDir(t)
	cmd := start(t, dir, "up", "--dir", dir, fmt.Sprintf("--nodes=%d", nodes))
	var process node.Process
	eventually(t, "no node was started", func() (ok bool) {
		process, ok = nodeOf(dir)
		_, err := os.Stat(filepath.Join(dir, sign))
		return ok && err == nil
	})
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	state, err := cluster.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	cgroups := state.Cgroups
	if (len(cgroups) > 0) != (nodes > 0) {
		t.Errorf("the state names the cgroups %v", cgroups)
	}
	if code, _, stderr := call("down", "--dir", dir); code != 0 {
		t.Fatalf("down: %s", stderr)
	}
	if process.Alive() {
		t.Error("the node is still there")
	}
	for _, path := range append(cgroups, dir) {
		if _, err := os.Stat(path); err == nil {
			t.Errorf("%s is still there", path)
		}
	}
}

// What interrupts `run` reaches the command, which may tidy up; then the cluster goes.
func TestInterruptedRun(t *testing.T) {
	dir := clusterDir(t)
	begun := filepath.Join(t.TempDir(), "begun")
	cmd := start(t, dir, "run", "--dir", dir, "--", "sh", "-c", "trap 'exit 9' TERM; touch "+begun+"; while :; do sleep 0.1; done")
	eventually(t, "the command was not started", func() bool {
		_, err := os.Stat(begun)
		return err == nil
	})
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 9 {
		t.Errorf("it ended with %v, want the command's code 9", err)
	}
	if _, err := os.Stat(dir); err == nil {
		t.Errorf("%s is still there", dir)
	}
}

// The commands for a cluster that is up: the kubeconfig, and a server that goes and comes.
func TestUpAndUse(t *testing.T) {
	dir := clusterDir(t)
	t.Cleanup(func() { os.Remove(filepath.Dir(dir)) })
	t.Cleanup(func() {
		if code, _, stderr := call("down", "--dir", dir); code != 0 {
			t.Errorf("down: %s", stderr)
		}
	})
	code, stdout, stderr := call("up", "--dir", dir)
	if code != 0 || !strings.Contains(stdout, "KUBECONFIG="+dir+"/pki/admin.kubeconfig\n") {
		t.Fatalf("up: code %d, printed %q, said %q", code, stdout, stderr)
	}
	if _, content, _ := call("kubeconfig", "--dir", dir); !strings.Contains(content, `"server": "https://10.99.0.1:443"`) {
		t.Errorf("kubeconfig printed %q", content)
	}
	const ask = "exec 3<>/dev/tcp/10.96.0.1/443"
	for _, step := range []struct {
		do     []string
		answer int
	}{
		{[]string{"exec"}, 0}, {[]string{"stop", "kube-apiserver"}, 1}, {[]string{"start", "kube-apiserver"}, 0},
	} {
		if step.do[0] != "exec" {
			if code, _, stderr := call(step.do[0], "--dir", dir, step.do[1]); code != 0 {
				t.Fatalf("%v: %s", step.do, stderr)
			}
		}
		eventually(t, fmt.Sprintf("after %v the API server's port is not as it should be", step.do), func() bool {
			code, _, _ := call("exec", "--dir", dir, "--", "bash", "-c", ask)
			return code == step.answer
		})
	}
	if code, _, stderr := call("stop", "--dir", dir, "--node=2", "kubelet"); code != 2 || !strings.Contains(stderr, "nodes 1 to 1") {
		t.Errorf("a node that is not there: code %d, %s", code, stderr)
	}
}

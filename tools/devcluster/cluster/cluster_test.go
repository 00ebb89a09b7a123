// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"ambientd/tools/devcluster/node"
	"ambientd/tools/devcluster/programs"
)

// TestMain lets the test's binary be a node's init process, as devcluster's is.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == node.InitCommand {
		fmt.Fprintln(os.Stderr, node.Init())
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// testConfig is for a cluster of that many nodes in a directory that is not there yet.
func testConfig(t *testing.T, nodes int) Config {
	t.Helper()
	// Not t.TempDir: its paths are too long for sockets.
	parent, err := os.MkdirTemp("/var/tmp", "dc-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(parent); err != nil {
			t.Errorf("the cluster has left something: %v", err)
		}
	})
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{Dir: filepath.Join(parent, "c"), Nodes: nodes, Progress: testLog{t}}
	if cfg.Checkout, err = FindCheckout(here); err != nil {
		t.Fatal(err)
	}
	if cfg.Cache, err = programs.CacheDir(); err != nil {
		t.Fatal(err)
	}
	return cfg
}

type testLog struct{ t *testing.T }

func (l testLog) Write(text []byte) (int, error) {
	l.t.Log(strings.TrimSpace(string(text)))
	return len(text), nil
}

// bringUpForTest brings a cluster up that is taken down with the test at the latest.
func bringUpForTest(t *testing.T, cfg Config) *State {
	t.Helper()
	t.Cleanup(func() {
		if err := Down(context.Background(), cfg.Dir); err != nil {
			t.Error(err)
		}
	})
	state, err := Up(t.Context(), cfg, node.UntilStopped)
	if err != nil {
		t.Fatal(err)
	}
	return state
}

// traces are what the machine shows of a cluster. Other things that happen on the machine at
// the same time are not in it.
type traces struct {
	processes, mounts, cgroups, files []string
	sysctls                           string
}

// touched are the machine's sysctls that kubelet would set.
var touched = []string{"kernel/panic", "kernel/panic_on_oops", "vm/overcommit_memory", "vm/panic_on_oom", "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"}

// outside are directories that nodes write to, each its own.
var outside = []string{
	"/etc/cni", "/opt/cni", "/etc/kubernetes", "/usr/libexec/kubernetes", "/var/lib/kubelet", "/var/lib/cni", "/run/containerd", "/var/lib/containerd/io.containerd.metadata.v1.bolt",
	"/var/log/pods", "/var/log/containers",
}

// look returns the traces of the cluster in dir; state may be nil.
func look(t *testing.T, dir string, state *State) traces {
	t.Helper()
	var seen traces
	namespaces := map[string]bool{}
	if state != nil {
		for _, n := range state.Nodes {
			for _, kind := range []string{"pid", "net", "mnt"} {
				if link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", n.Process.PID, kind)); err == nil {
					namespaces[link] = true
				}
			}
		}
	}
	pids, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, proc := range pids {
		if pid, _ := strconv.Atoi(filepath.Base(proc)); pid != os.Getpid() && belongs(proc, dir, namespaces) {
			seen.processes = append(seen.processes, proc)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, dir) || strings.Contains(line, "cni-") {
			seen.mounts = append(seen.mounts, line)
		}
	}
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() && ours(state, path) {
			seen.cgroups = append(seen.cgroups, path)
		}
		return nil
	})
	for _, path := range append([]string{dir, dir + ".lock"}, outside...) {
		if _, err := os.Lstat(path); err == nil {
			seen.files = append(seen.files, path)
		}
	}
	for _, name := range touched {
		value, err := os.ReadFile("/proc/sys/" + name)
		if err != nil {
			t.Fatal(err)
		}
		seen.sysctls += name + "=" + string(value)
	}
	return seen
}

// belongs says whether a process is in one of the namespaces or knows of the directory.
func belongs(proc, dir string, namespaces map[string]bool) bool {
	for _, kind := range []string{"pid", "net", "mnt"} {
		if link, err := os.Readlink(proc + "/ns/" + kind); err == nil && namespaces[link] {
			return true
		}
	}
	cmdline, err := os.ReadFile(proc + "/cmdline")
	return err == nil && bytes.Contains(cmdline, []byte(dir+"/"))
}

// ours says whether a cgroup is one of the cluster, or below one.
func ours(state *State, path string) bool {
	return state != nil && slices.ContainsFunc(state.Cgroups, func(root string) bool {
		return path == root || strings.HasPrefix(path, root+"/")
	})
}

// gone fails the test if anything that was not there before is left. Namespaces are known by
// processes that were in them, so those of before are looked for by pid.
func gone(t *testing.T, cfg Config, state *State, before, during traces) {
	t.Helper()
	after := look(t, cfg.Dir, nil)
	if state != nil {
		after.cgroups = look(t, cfg.Dir, state).cgroups
	}
	for _, proc := range during.processes {
		if stat, err := os.ReadFile(proc + "/stat"); err == nil && !bytes.Contains(stat, []byte(") Z ")) {
			after.processes = append(after.processes, proc)
		}
	}
	if got, want := fmt.Sprintf("%+v", after), fmt.Sprintf("%+v", before); got != want {
		t.Errorf("left behind:\n%s\nbefore there was:\n%s", got, want)
	}
}

// An API server alone: it comes up, is reached from its own network namespace only, and
// leaves nothing.
func TestAPIServerOnly(t *testing.T) {
	cfg := testConfig(t, 0)
	before := look(t, cfg.Dir, nil)
	state := bringUpForTest(t, cfg)
	client, err := newAPI(state)
	if err != nil {
		t.Fatal(err)
	}
	var namespaces struct {
		Items []struct{ Metadata struct{ Name string } }
	}
	if err := client.get(t.Context(), "/api/v1/namespaces", &namespaces); err != nil || len(namespaces.Items) == 0 {
		t.Errorf("the API server has namespaces %v, %v", namespaces, err)
	}
	audit, err := os.ReadFile(cfg.Dir + "/audit.log")
	if err != nil || !bytes.Contains(audit, []byte(`"requestURI":"/api/v1/namespaces"`)) {
		t.Errorf("the audit log does not have the request (%v)", err)
	}
	if _, err := Up(t.Context(), cfg, node.UntilStopped); err == nil || !strings.Contains(err.Error(), "already") {
		t.Errorf("a second cluster in the same directory: %v", err)
	}
	during := look(t, cfg.Dir, state)
	if len(during.processes) < 3 {
		t.Errorf("the cluster has processes %v, want at least init, etcd and kube-apiserver", during.processes)
	}
	if during.sysctls != before.sysctls || len(during.mounts) != len(before.mounts) {
		t.Errorf("the machine has changed: %+v, before %+v", during, before)
	}
	if err := Down(t.Context(), cfg.Dir); err != nil {
		t.Fatal(err)
	}
	gone(t, cfg, state, before, during)
	if err := Down(t.Context(), cfg.Dir); err != nil {
		t.Errorf("taking down what is not there: %v", err)
	}
}

// What the API server does not accept ends the start at once, with its own words, and
// nothing stays, also of what was started beside it.
func TestFailedStartLeavesNothing(t *testing.T) {
	for nodes := range MaxNodes + 1 {
		cfg := testConfig(t, nodes)
		cfg.APIServerFlags = []string{"--no-such-flag=1"}
		before := look(t, cfg.Dir, nil)
		started := time.Now()
		_, err := Up(t.Context(), cfg, node.UntilStopped)
		if err == nil || !strings.Contains(err.Error(), "unknown flag: --no-such-flag") {
			t.Errorf("%d nodes: got %v, want kube-apiserver's own words", nodes, err)
		}
		if took := time.Since(started); took > apiDeadline/2 {
			t.Errorf("%d nodes: it took %s to notice", nodes, took)
		}
		gone(t, cfg, nil, before, traces{})
	}
}

// An interrupt at any time leaves nothing.
func TestInterruptedStartLeavesNothing(t *testing.T) {
	for _, after := range []time.Duration{0, 20 * time.Millisecond, 100 * time.Millisecond, time.Second} {
		cfg := testConfig(t, 0)
		before := look(t, cfg.Dir, nil)
		ctx, cancel := context.WithTimeout(t.Context(), after)
		if _, err := Up(ctx, cfg, node.UntilStopped); err == nil {
			t.Errorf("it was up after %s", after)
		}
		cancel()
		gone(t, cfg, nil, before, traces{})
	}
}

func TestConfigCheck(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*Config)
		want   string
	}{
		{"too many nodes", func(c *Config) { c.Nodes = 3 }, "--nodes=3"},
		{"a directory for whose sockets there is no room", func(c *Config) { c.Dir = "/" + strings.Repeat("x", 80) }, "short paths"},
		{"a directory that nodes do not see", func(c *Config) { c.Dir = "/var/lib/x" }, "/var/lib"},
		{"a gate without a value", func(c *Config) { c.FeatureGates = []string{"Foo"} }, "Foo"},
		{"a flag that is none", func(c *Config) { c.APIServerFlags = []string{"v=4"} }, "v=4"},
		{"fine", func(*Config) {}, ""},
	} {
		cfg := Config{Dir: "/var/tmp/x"}
		test.change(&cfg)
		err := cfg.check()
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q in it", test.name, err, test.want)
		}
	}
}

func TestClaim(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	if err := claim(dir); err != nil {
		t.Fatal(err)
	}
	if err := claim(dir); err != nil {
		t.Errorf("an empty directory: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := claim(dir); err == nil || !strings.Contains(err.Error(), "not empty") {
		t.Errorf("a directory with somebody's file: %v", err)
	}
}

func TestStateIsKept(t *testing.T) {
	dir := t.TempDir()
	if _, err := Load(dir); !errors.Is(err, ErrNone) {
		t.Errorf("an empty directory: %v", err)
	}
	state := &State{Dir: dir, Workers: 1, Nodes: []NodeState{{Name: "node1", Process: node.Process{PID: 7, Start: 8, Boot: "b"}}}, Cgroups: []string{"/sys/fs/cgroup/x"}}
	if err := state.save(); err != nil {
		t.Fatal(err)
	}
	got, err := Load(dir)
	if err != nil || fmt.Sprint(got) != fmt.Sprint(state) {
		t.Errorf("got %v, %v, want %v", got, err, state)
	}
}

func TestLockDir(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "c")
	unlock, err := lockDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := lockDir(dir); err == nil {
		t.Error("two have the lock")
	}
	unlock()
	unlock, err = lockDir(dir)
	if err != nil {
		t.Fatalf("after it was given back: %v", err)
	}
	unlock()
}

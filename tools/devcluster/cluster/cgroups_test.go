// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestFindCgroups(t *testing.T) {
	const v2 = "35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
	const v1 = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n" +
		"33 31 0:30 / /sys/fs/cgroup/memory rw,relatime shared:4 - cgroup cgroup rw,memory\n"
	const hybrid = v1 + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
	// Somebody's container: a part of a hierarchy, seen at another place.
	const part = "77 31 0:29 /some/container /run/x/cpu rw,relatime - cgroup cgroup rw,cpu\n"
	for _, test := range []struct{ name, mountinfo, want string }{
		{"version 2", "22 27 0:21 / /proc rw - proc proc rw\n" + v2, "{[] /sys/fs/cgroup}"},
		{"version 1", v1 + part, "{[/sys/fs/cgroup/cpu /sys/fs/cgroup/memory] }"},
		{"both", hybrid, "{[/sys/fs/cgroup/cpu /sys/fs/cgroup/memory] /sys/fs/cgroup/unified}"},
		{"none", part, "{[] }"},
	} {
		path := filepath.Join(t.TempDir(), "mountinfo")
		if err := os.WriteFile(path, []byte(test.mountinfo), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := findCgroups(path)
		if fmt.Sprint(got) != test.want || (err != nil) != (test.name == "none") {
			t.Errorf("%s: %v, %v, want %s", test.name, got, err, test.want)
		}
	}
}

// With version 2 the root passes on what kubelet needs, and afterwards what it passed on
// before. The files here are ordinary ones, which keep what was written last.
func TestDelegation(t *testing.T) {
	root := t.TempDir()
	for name, content := range map[string]string{"cgroup.controllers": "cpuset cpu io memory hugetlb pids", "cgroup.subtree_control": "cpu memory pids"} {
		if err := os.WriteFile(filepath.Join(root, name), []byte(content+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	missing, err := notDelegated(root)
	if err != nil || strings.Join(missing, " ") != "cpuset io" {
		t.Fatalf("not passed on: %v, %v, want cpuset and io", missing, err)
	}
	for sign, want := range map[string]string{"+": "+io", "-": "-io"} {
		if err := (Delegation{Cgroup: root, Controllers: missing}).write(sign); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(filepath.Join(root, "cgroup.subtree_control")); err != nil || string(got) != want {
			t.Errorf("%s: wrote %q, %v, want %q last", sign, got, err, want)
		}
	}
}

// The machine's own cgroups: each node gets one in every hierarchy, into which a process can
// be put, and all go again, with what was made below.
func TestCgroupsOfTheMachine(t *testing.T) {
	mounts, err := findCgroups("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	state := &State{Dir: t.TempDir(), Nodes: []NodeState{{Name: "node1"}, {Name: "node2"}}}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := removeCgroups(ctx, state); err != nil {
			t.Error(err)
		}
	})
	if err := makeCgroups(state, mounts); err != nil {
		t.Fatal(err)
	}
	recorded, err := Load(state.Dir)
	if err != nil || fmt.Sprint(recorded.Cgroups) != fmt.Sprint(state.Cgroups) || len(state.Cgroups) < 2 {
		t.Fatalf("recorded are %v (%v), made %v", recorded, err, state.Cgroups)
	}
	for _, dir := range state.Cgroups {
		below := filepath.Join(dir, "pod")
		if err := os.Mkdir(below, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := inheritCpuset(below); err != nil {
			t.Fatal(err)
		}
	}
	if err := removeCgroups(t.Context(), state); err != nil {
		t.Fatal(err)
	}
	for _, dir := range state.Cgroups {
		if _, err := os.Stat(dir); err == nil {
			t.Errorf("%s is still there", dir)
		}
	}
}

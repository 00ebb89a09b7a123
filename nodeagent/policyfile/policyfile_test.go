// SPDX-License-Identifier: Apache-2.0

package policyfile_test

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ambientd/cni-plugin/podevent"
	"ambientd/nodeagent/policyfile"
	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }

// patience bounds what a test awaits; nothing takes this long.
const patience = 30 * time.Second

// cluster is a pod source's namespaces, each with the label "in" or without.
type cluster struct {
	mu       sync.Mutex
	in       map[string]bool
	complete bool
}

func (c *cluster) Namespaces() (labels map[string]map[string]string, complete bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	labels = map[string]map[string]string{}
	for name, in := range c.in {
		labels[name] = map[string]string{"in": strings.Repeat("x", map[bool]int{true: 1}[in])}
	}
	return labels, c.complete
}

func (c *cluster) set(in map[string]bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.in = in
}

func out(_ string, labels map[string]string) bool { return labels["in"] == "" }

func bootID(t *testing.T) string {
	t.Helper()
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	must(t, err)
	return string(bytes.TrimSpace(id))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T, dir string, c *cluster) (f *policyfile.File, path string) {
	t.Helper()
	path = filepath.Join(dir, "policy.json")
	f, err := policyfile.New(policyfile.Config{
		Path: path, BootID: bootID(t), Namespaces: c, Out: out, Logger: slog.New(slog.DiscardHandler), Poll: time.Millisecond,
		Exclusions: podevent.Exclusions{AgentNamespace: "mesh", OwnPods: []string{"proxy-*"}, ExcludeNamespaces: []string{"infra"}},
	})
	must(t, err)
	return f, path
}

func wantOut(t *testing.T, path string, want ...string) {
	t.Helper()
	p, err := podevent.ReadPolicy(path)
	if err != nil {
		t.Error(err)
	}
	if !slices.Equal(p.OutOfMesh, want) {
		t.Errorf("out of the mesh: %q, want %q", p.OutOfMesh, want)
	}
}

func TestFileSaysWhatIsOut(t *testing.T) {
	c := &cluster{in: map[string]bool{"z": false, "shop": true, "a": false}, complete: true}
	f, path := open(t, t.TempDir(), c)
	must(t, f.Update())
	wantOut(t, path, "a", "z")
	p, err := podevent.ReadPolicy(path)
	must(t, err)
	if _, own := p.Match(podevent.Pod{Namespace: "mesh", Name: "proxy-1"}); !own {
		t.Error("own pods are missing")
	}
	if _, excluded := p.Match(podevent.Pod{Namespace: "infra", Name: "x"}); !excluded {
		t.Error("excluded namespaces are missing")
	}
	if info, err := os.Lstat(path); err != nil || info.Mode() != 0o600 {
		t.Errorf("the file: %v, %v", info.Mode(), err)
	}
	c.set(map[string]bool{"z": true, "shop": false})
	must(t, f.Update())
	wantOut(t, path, "shop")
}

// What says the same is not written again, under however many looks.
func TestWrittenOnChangeOnly(t *testing.T) {
	c := &cluster{in: map[string]bool{"a": false, "b": false, "c": false, "d": false}, complete: true}
	f, path := open(t, t.TempDir(), c)
	must(t, f.Update())
	before, err := os.Lstat(path)
	must(t, err)
	for range 20 {
		must(t, f.Update())
	}
	if after, err := os.Lstat(path); err != nil || !os.SameFile(before, after) {
		t.Errorf("written again, %v", err)
	}
}

// A list that is not complete takes nothing back but what it knows better, also after a
// restart: an agent that starts while the API server is away forgets nothing.
func TestIncompleteList(t *testing.T) {
	dir := t.TempDir()
	c := &cluster{in: map[string]bool{"a": false, "b": false}, complete: true}
	f, path := open(t, dir, c)
	must(t, f.Update())
	later := &cluster{in: map[string]bool{"b": true, "c": false}}
	f, _ = open(t, dir, later)
	must(t, f.Update())
	wantOut(t, path, "a", "c")
	later.complete = true
	must(t, f.Update())
	wantOut(t, path, "c")
}

// What an earlier agent left counts only if it can be read, and is of this boot.
func TestUselessEarlierFile(t *testing.T) {
	other, err := podevent.Policy{BootID: "another", OutOfMesh: []string{"old"}}.Encode()
	must(t, err)
	for _, content := range []string{string(other), "{", ""} {
		dir := t.TempDir()
		must(t, os.WriteFile(filepath.Join(dir, "policy.json"), []byte(content), 0o600))
		f, path := open(t, dir, &cluster{in: map[string]bool{"a": false}})
		must(t, f.Update())
		wantOut(t, path, "a")
	}
}

// A disk that is full: the earlier file is not left to say what is not so any more, no
// unfinished one is left, and it is written when there is room.
func TestFullDisk(t *testing.T) {
	netnstest.Require(t)
	dir := t.TempDir()
	must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"))
	t.Cleanup(func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	c := &cluster{in: map[string]bool{"a": false}, complete: true}
	f, path := open(t, dir, c)
	must(t, f.Update())
	filler := filepath.Join(dir, "filler")
	if err := os.WriteFile(filler, make([]byte, 1<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("filling the disk: %v", err)
	}
	c.set(map[string]bool{"a": true, "b": false})
	if err := f.Update(); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("error: %v", err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("left: %v, %v", entries, err)
	}
	must(t, os.Remove(filler))
	must(t, f.Update())
	wantOut(t, path, "b")
}

func TestRun(t *testing.T) {
	c := &cluster{complete: true}
	f, path := open(t, t.TempDir(), c)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- f.Run(ctx) }()
	for _, name := range []string{"a", "b"} {
		c.set(map[string]bool{name: false})
		await(t, func() bool {
			p, err := podevent.ReadPolicy(path)
			return err == nil && slices.Equal(p.OutOfMesh, []string{name})
		})
	}
	must(t, os.RemoveAll(filepath.Dir(path))) // cannot be written, which is no reason to end
	c.set(map[string]bool{"c": false})
	await(t, func() bool {
		_, err := os.Lstat(path)
		return errors.Is(err, fs.ErrNotExist)
	})
	must(t, os.Mkdir(filepath.Dir(path), 0o700))
	cancel()
	must(t, <-ended)
	wantOut(t, path, "c") // at the end, at the latest
}

func await(t *testing.T, done func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); !done(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatal("it does not happen")
		}
	}
}

func TestNewRefuses(t *testing.T) {
	if _, err := policyfile.New(policyfile.Config{Path: "/p"}); err == nil || !strings.Contains(err.Error(), "are needed") {
		t.Errorf("error: %v", err)
	}
}

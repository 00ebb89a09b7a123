// SPDX-License-Identifier: Apache-2.0

package programs

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// module writes a module with a program that prints what its main.text is, and one that does
// not compile.
func module(t *testing.T) Module {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "greeting")
	for name, content := range map[string]string{
		"go.mod":          "module greeting\n\ngo 1.26.0\n",
		"go.sum":          "",
		"hello/main.go":   "package main\n\nvar text string\n\nfunc main() { print(text) }\n",
		"broken/main.go":  "package main\n\nfunc main() { nonsense }\n",
		"another/main.go": "package main\n\nfunc main() {}\n",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return Module{Dir: dir, Flags: []string{"-ldflags", "-X main.text=first"}}
}

func TestBuildOnce(t *testing.T) {
	m := module(t)
	var progress bytes.Buffer
	b := Builder{Cache: t.TempDir(), Progress: &progress}
	dir, err := b.Build(t.Context(), m, []string{"greeting/hello"})
	if err != nil {
		t.Fatal(err)
	}
	said, err := exec.CommandContext(t.Context(), filepath.Join(dir, "hello")).CombinedOutput()
	if err != nil || string(said) != "first" {
		t.Errorf("the program says %q, %v; it was not built with the module's flags", said, err)
	}
	if !strings.Contains(progress.String(), "first time only") {
		t.Errorf("nobody is told that a build takes long: %q", progress.String())
	}

	// From now on go must not be needed for it: without sources it could not build.
	progress.Reset()
	if err := os.RemoveAll(filepath.Join(m.Dir, "hello")); err != nil {
		t.Fatal(err)
	}
	again, err := b.Build(t.Context(), m, []string{"greeting/hello"})
	if err != nil || again != dir || progress.Len() > 0 {
		t.Errorf("second time: %s, %v, said %q; want %s at once", again, err, progress.String(), dir)
	}
	m.Flags = []string{"-ldflags", "-X main.text=second"}
	if other, err := b.Build(t.Context(), m, nil); err != nil || other == dir {
		t.Errorf("other flags give the same directory %s (%v)", other, err)
	}
}

// What fails, or is interrupted, leaves nothing that looks like a program, and the next
// build removes what it left.
func TestBuildFails(t *testing.T) {
	m := module(t)
	b := Builder{Cache: t.TempDir(), Progress: new(bytes.Buffer)}
	if _, err := b.Build(t.Context(), m, []string{"greeting/another", "greeting/broken"}); err == nil {
		t.Fatal("a program that does not compile was built")
	}
	dir, err := b.dir(t.Context(), m)
	if err != nil {
		t.Fatal(err)
	}
	left := filepath.Join(dir, unfinished+"hello")
	if err := os.WriteFile(left, []byte("half a program"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Build(t.Context(), m, []string{"greeting/hello"}); err != nil {
		t.Fatal(err)
	}
	var names []string
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	if got := strings.Join(names, " "); got != ".lock another hello" {
		t.Errorf("the cache holds %q, want what was built and the lock", got)
	}
}

// Of several at the same time one builds, the others wait for it; who is told to stop does.
func TestBuildAtTheSameTime(t *testing.T) {
	m := module(t)
	cache := t.TempDir()
	var group sync.WaitGroup
	built := make(chan string, 4)
	for range cap(built) {
		group.Go(func() {
			var progress bytes.Buffer
			if _, err := (Builder{Cache: cache, Progress: &progress}).Build(t.Context(), m, []string{"greeting/hello"}); err != nil {
				t.Error(err)
			}
			if strings.Contains(progress.String(), "building hello") {
				built <- progress.String()
			}
		})
	}
	group.Wait()
	if len(built) != 1 {
		t.Errorf("it was built %d times, want once", len(built))
	}

	dir, err := Builder{Cache: cache}.dir(t.Context(), m)
	if err != nil {
		t.Fatal(err)
	}
	unlock, err := lock(t.Context(), filepath.Join(dir, ".lock"), func() { t.Error("nobody holds the lock") })
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = Builder{Cache: cache, Progress: new(bytes.Buffer)}.Build(ctx, m, []string{"greeting/another"})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("waiting for another build ended with %v, want the deadline", err)
	}
}

func TestDebian(t *testing.T) {
	if path, err := Debian("cat", "coreutils"); err != nil || filepath.Base(path) != "cat" {
		t.Errorf("cat is at %q, %v", path, err)
	}
	_, err := Debian("no-such-program", "its-package")
	if err == nil || !strings.Contains(err.Error(), "apt-get install its-package") {
		t.Errorf("a program that is missing: %v; want to be told what to install", err)
	}
}

// The same place as that of the tools that common.sh builds.
func TestCacheDir(t *testing.T) {
	for _, test := range []struct{ xdg, home, want string }{
		{"/x", "/h", "/x/ambientd"},
		{"", "/h", "/h/.cache/ambientd"},
		{"", "", ""},
	} {
		t.Setenv("XDG_CACHE_HOME", test.xdg)
		t.Setenv("HOME", test.home)
		if got, err := CacheDir(); got != test.want || (err == nil) != (test.want != "") {
			t.Errorf("XDG_CACHE_HOME=%q HOME=%q: %q, %v, want %q", test.xdg, test.home, got, err, test.want)
		}
	}
}

// The version that is stamped into the programs is the one that is built.
func TestKubernetesVersion(t *testing.T) {
	m := Kubernetes("../../..", "v1.36.3")
	content, err := os.ReadFile(filepath.Join(m.Dir, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(content), "k8s.io/kubernetes v1.36.3 ") {
		t.Errorf("%s/go.mod requires another version of k8s.io/kubernetes than the one that is stamped", m.Dir)
	}
	if got := strings.Join(m.Flags, " "); !strings.Contains(got, "gitMinor=36") {
		t.Errorf("flags %q lack the minor version", got)
	}
}

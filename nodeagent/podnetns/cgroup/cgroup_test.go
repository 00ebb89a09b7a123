// SPDX-License-Identifier: Apache-2.0

package cgroup_test

import (
	"bytes"
	"os"
	"path"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"

	"ambientd/nodeagent/podnetns/cgroup"
)

// none is a corpus file's last element when it shows no pod.
const none = "none"

func corpus(tb testing.TB) []txtar.File {
	tb.Helper()
	archive, err := txtar.ParseFile("testdata/corpus.txtar")
	if err != nil {
		tb.Fatal(err)
	}
	return archive.Files
}

func TestCorpus(t *testing.T) {
	seen := map[string]bool{}
	for _, file := range corpus(t) {
		name, want := path.Split(file.Name)
		t.Run(name, func(t *testing.T) {
			if seen[name] {
				t.Fatal("twice in the corpus")
			}
			seen[name] = true
			check(t, file.Data, want)
			// The same without the last newline, and with what a reader may have before and after it.
			check(t, bytes.TrimSuffix(file.Data, []byte("\n")), want)
			check(t, append([]byte("\n0::/\n"), file.Data...), want)
		})
	}
	if len(seen) < 100 {
		t.Errorf("the corpus has %d cases", len(seen))
	}
}

func check(t *testing.T, content []byte, want string) {
	t.Helper()
	got, ok := cgroup.PodUID(content)
	if ok != (want != none) || ok && got != want || !ok && got != "" {
		t.Errorf("got %q, %v; want %s for\n%s", got, ok, want, content)
	}
}

// The kernel that runs this test may be older or newer than those of the corpus.
func TestOwn(t *testing.T) {
	content, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	if uid, ok := cgroup.PodUID(content); ok && !bytes.Contains(content, []byte("kubepods")) {
		t.Errorf("pod %s from\n%s", uid, content)
	}
}

func FuzzPodUID(f *testing.F) {
	for _, file := range corpus(f) {
		f.Add(file.Data)
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		uid, ok := cgroup.PodUID(content)
		if !ok {
			if uid != "" {
				t.Errorf("no pod, but the UID %q", uid)
			}
			return
		}
		if len(uid) == 0 || len(uid) > 128 || strings.Trim(uid, "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-") != "" {
			t.Errorf("UID %q", uid)
		}
		if !bytes.Contains(bytes.ReplaceAll(content, []byte("_"), []byte("-")), []byte("pod"+uid)) {
			t.Errorf("UID %q is not in %q", uid, content)
		}
		// Whatever a pod makes below its own cgroup, it stays the pod.
		below := append(bytes.Clone(content), "/kubepods/pod00000000-0000-4000-8000-000000000000"...)
		if bytes.Count(content, []byte("\n")) == 0 {
			if again, _ := cgroup.PodUID(below); again != uid {
				t.Errorf("UID %q, with more below %q", uid, again)
			}
		}
		// Hierarchies that name nobody change nothing, and another pod's makes it nobody's.
		if again, _ := cgroup.PodUID(append([]byte("9:cpuset:/\n"), content...)); again != uid {
			t.Errorf("UID %q, with a line for the root %q", uid, again)
		}
		if other, ok := cgroup.PodUID(append([]byte("9:cpuset:/kubepods/pod1\n"), content...)); ok && uid != "1" {
			t.Errorf("UID %q although another hierarchy says %q", other, uid)
		}
	})
}

func BenchmarkPodUID(b *testing.B) {
	for _, file := range corpus(b) {
		switch name := path.Dir(file.Name); name {
		case "v2/containerd/systemd/burstable", "v1/containerd/systemd", "none/v2/containerd-and-its-shims":
			b.Run(name, func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					cgroup.PodUID(file.Data)
				}
			})
		}
	}
}

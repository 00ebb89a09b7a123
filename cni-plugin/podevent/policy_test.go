// SPDX-License-Identifier: Apache-2.0

package podevent

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// thisBoot is a policy that counts.
func thisBoot(tb testing.TB, out ...string) Policy {
	tb.Helper()
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		tb.Fatal(err)
	}
	return Policy{
		BootID: string(bytes.TrimSpace(boot)), OutOfMesh: out,
		Exclusions: Exclusions{AgentNamespace: "mesh", OwnPods: []string{"proxy-*"}, ExcludeNamespaces: []string{"infra"}},
	}
}

func TestPolicyThereAndBack(t *testing.T) {
	p := thisBoot(t, "z", "a", "m")
	content, err := p.Encode()
	must(t, err)
	path := filepath.Join(t.TempDir(), "policy.json")
	must(t, os.WriteFile(path, content, 0o600))
	got, err := ReadPolicy(path)
	must(t, err)
	p.Version, p.OutOfMesh = PolicyVersion, []string{"a", "m", "z"}
	if diff := cmp.Diff(p, got); diff != "" {
		t.Error(diff)
	}
	content, err = Policy{BootID: "b"}.Encode()
	if want := `{"version":1,"bootID":"b","outOfMesh":[]}` + "\n"; err != nil || string(content) != want {
		t.Errorf("the least policy: %s, %v", content, err)
	}
}

// TestReadPolicyRefuses what nobody can rely upon.
func TestReadPolicyRefuses(t *testing.T) {
	good, err := thisBoot(t, "a").Encode()
	must(t, err)
	write := func(content string) func(*testing.T, string) {
		return func(t *testing.T, path string) { must(t, os.WriteFile(path, []byte(content), 0o600)) }
	}
	for _, c := range []struct {
		name    string
		prepare func(t *testing.T, path string)
		text    string
	}{
		{"none", func(*testing.T, string) {}, "no such file"},
		{"a link", func(t *testing.T, path string) {
			must(t, errors.Join(os.WriteFile(path+"2", good, 0o600), os.Symlink(path+"2", path)))
		}, "symbolic links"},
		{"a pipe", func(t *testing.T, path string) { must(t, syscall.Mkfifo(path, 0o600)) }, "not a regular file"},
		{"a directory", func(t *testing.T, path string) { must(t, os.Mkdir(path, 0o700)) }, "not a regular file"},
		{"others may write", func(t *testing.T, path string) {
			must(t, errors.Join(os.WriteFile(path, good, 0o600), os.Chmod(path, 0o620)))
		}, "others may write"},
		{"too long", write(strings.Repeat(" ", MaxPolicy) + string(good)), "more than"},
		{"torn", write(string(good[:len(good)/2])), "malformed"},
		{"empty", write(""), "malformed"},
		{"another version", write(`{"version":2}`), "version 2"},
		{"no boot", write(`{"version":1}`), "no boot ID"},
		{"another boot", write(`{"version":1,"bootID":"x"}`), "another boot"},
		{"names that are none", write(`{"version":1,"bootID":"x","outOfMesh":[1]}`), "malformed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "policy.json")
			c.prepare(t, path)
			p, err := ReadPolicy(path)
			if err == nil || !strings.Contains(err.Error(), c.text) {
				t.Errorf("error: %v, want %q", err, c.text)
			}
			if diff := cmp.Diff(Policy{}, p); diff != "" {
				t.Errorf("a policy along with an error: %s", diff)
			}
		})
	}
}

// TestPolicyIsBounded: what the plugin would not read is not written.
func TestPolicyIsBounded(t *testing.T) {
	p := thisBoot(t)
	for i := range 50000 {
		p.OutOfMesh = append(p.OutOfMesh, fmt.Sprintf("%063d", i))
	}
	content, err := p.Encode()
	must(t, err)
	if _, err := DecodePolicy(content); err != nil {
		t.Errorf("a large cluster's: %v", err)
	}
	p.OutOfMesh = append(p.OutOfMesh, strings.Repeat("x", MaxPolicy-len(content)))
	if _, err := p.Encode(); err == nil || !strings.Contains(err.Error(), "are allowed") {
		t.Errorf("error: %v", err)
	}
}

// FuzzDecodePolicy: whatever the file holds, it is a policy that can be written again, or an error
// that says what it is.
func FuzzDecodePolicy(f *testing.F) {
	good, err := thisBoot(f, "a", "b").Encode()
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range []string{
		string(good), "", "{}", "null", "[]", `{"version":1,"bootID":"b"}`, `{"version":1e0,"bootID":"b","outOfMesh":null}`, `{"version":2,"bootID":[]}`,
		`{"version":1,"bootID":"b","outOfMesh":["b","a","a"]}`, `{"Version":1,"BOOTID":"b","ownPods":["["]}`, string(good[:40]),
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		p, err := DecodePolicy(content)
		if err != nil {
			if !errors.Is(err, ErrMalformed) && !isVersionError(err) {
				t.Errorf("error of another kind: %v", err)
			}
			return
		}
		p.Match(Pod{Namespace: p.AgentNamespace, Name: "p"})
		again, err := p.Encode()
		if err != nil {
			return // longer when it is escaped
		}
		same, err := DecodePolicy(again)
		if err != nil || same.BootID != p.BootID || !slices.IsSorted(same.OutOfMesh) || len(same.OutOfMesh) != len(p.OutOfMesh) {
			t.Errorf("%+v became %+v, %v", p, same, err)
		}
	})
}

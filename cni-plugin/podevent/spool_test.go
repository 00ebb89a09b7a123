// SPDX-License-Identifier: Apache-2.0

package podevent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func delRequest(container string) Request {
	return Request{
		Command: CommandDel, Network: "n", ContainerID: container, IfName: "eth0",
		Pod: Pod{Namespace: "shop", Name: "cart-0", UID: "u1"},
	}
}

// private makes the directory that the agent makes, and returns the spool's path in it.
func private(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "private")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "spool")
}

func namesIn(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

// TestSpool: one file for each event, whole, in the order of time, in a directory for root only.
func TestSpool(t *testing.T) {
	dir := private(t)
	var want []Request
	for i := range 5 {
		req := delRequest(fmt.Sprint("c", i))
		if err := Spool(dir, req); err != nil {
			t.Fatal(err)
		}
		req.Version = Version
		want = append(want, req)
	}
	var got []Request
	for _, name := range namesIn(t, dir) {
		content, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		req, err := DecodeSpooled(content)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		got = append(got, req)
		if info, err := os.Lstat(filepath.Join(dir, name)); err != nil || info.Mode() != 0o600 {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
	if diff := cmp.Diff(want, got, compareAddrs()); diff != "" {
		t.Error(diff)
	}
	if info, err := os.Lstat(dir); err != nil || info.Mode() != os.ModeDir|0o700 {
		t.Errorf("the spool: %v, %v", info.Mode(), err)
	}
}

// TestSpoolRefuses leaves nothing, anywhere.
func TestSpoolRefuses(t *testing.T) {
	add := addRequest()
	long := delRequest("c1")
	long.Pod = Pod{Namespace: strings.Repeat("\x01", 512), Name: strings.Repeat("\x01", 512), UID: strings.Repeat("\x01", 512)}
	for _, c := range []struct {
		name    string
		prepare func(t *testing.T, dir string)
		req     Request
		text    string
	}{
		{"no DEL", nil, add, "holds DEL only"},
		{"no attachment", nil, delRequest(""), "without containerID"},
		{"too long", nil, long, "the spool takes 8192"},
		{"no agent ever ran", func(t *testing.T, dir string) { must(t, os.Remove(filepath.Dir(dir))) }, delRequest("c1"), "no such file"},
		{"a link", func(t *testing.T, dir string) { must(t, os.Symlink(t.TempDir(), dir)) }, delRequest("c1"), "symbolic link"},
		{"a link above", func(t *testing.T, dir string) {
			must(t, errors.Join(os.Remove(filepath.Dir(dir)), os.Symlink(t.TempDir(), filepath.Dir(dir))))
		}, delRequest("c1"), "symbolic link"},
		{"a file in its place", func(t *testing.T, dir string) { must(t, os.WriteFile(dir, nil, 0o600)) }, delRequest("c1"), "not a directory"},
		{"others may write", func(t *testing.T, dir string) { must(t, errors.Join(os.Mkdir(dir, 0o700), os.Chmod(dir, 0o777))) }, delRequest("c1"), "others may write"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := private(t)
			if c.prepare != nil {
				c.prepare(t, dir)
			}
			if err := Spool(dir, c.req); err == nil || !strings.Contains(err.Error(), c.text) {
				t.Errorf("error: %v, want %q", err, c.text)
			}
			if entries, err := os.ReadDir(dir); err == nil && len(entries) > 0 {
				t.Errorf("the spool holds %v", entries)
			}
		})
	}
}

// TestSpoolIsBounded: a spool that nobody drains does not fill the memory that it is in.
func TestSpoolIsBounded(t *testing.T) {
	dir := private(t)
	must(t, os.Mkdir(dir, 0o700))
	for i := range MaxSpooled - 1 {
		must(t, os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), nil, 0o600))
	}
	must(t, Spool(dir, delRequest("last")))
	if err := Spool(dir, delRequest("more")); err == nil || !strings.Contains(err.Error(), "is full") {
		t.Errorf("error: %v", err)
	}
	if n := len(namesIn(t, dir)); n != MaxSpooled {
		t.Errorf("the spool holds %d files", n)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// FuzzDecodeSpooled: whatever a file holds, it is an event that can be written again, or an error
// that says what it is.
func FuzzDecodeSpooled(f *testing.F) {
	good, err := encodeSpooled(delRequest("c1"))
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range []string{
		string(good), "", "{}", `{"version":1}`, `{"version":2,"command":7}`, `{"version":1,"command":"ADD","network":"n"}`,
		`{"version":1,"command":"DEL","network":"n","containerID":"c","ifName":"e","validAttachments":[{}]}`, string(good[:len(good)-1]),
		`{"version":1,"command":"DEL","network":"n","containerID":"c","ifName":"e","ips":["10.0.0.1"]}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		req, err := DecodeSpooled(content)
		if err != nil {
			if !errors.Is(err, ErrMalformed) && !isVersionError(err) {
				t.Errorf("error of another kind: %v", err)
			}
			return
		}
		again, err := encodeSpooled(req)
		if err != nil {
			if strings.Contains(err.Error(), "the spool takes") {
				return // escaped otherwise
			}
			t.Fatal(err)
		}
		same, err := DecodeSpooled(again)
		if err != nil || !slices.Equal(same.IPs, req.IPs) || same.Attachment() != req.Attachment() || same.Command != CommandDel {
			t.Errorf("%+v became %+v, %v", req, same, err)
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
)

// Events as the kernel makes them: what was renamed within the directory is read soon,
// what is written in place later, and nothing while something is half written.
func TestPace(t *testing.T) {
	write := func(dir, name string) error {
		return os.WriteFile(filepath.Join(dir, name), []byte("# nothing\n"), 0o600)
	}
	replace := func(dir, from, to string) error {
		if err := write(dir, from); err != nil {
			return err
		}
		return os.Rename(filepath.Join(dir, from), filepath.Join(dir, to))
	}
	for name, c := range map[string]struct {
		change func(dir string) error
		soon   bool
	}{
		"hidden, then renamed":          {func(dir string) error { return replace(dir, ".a.yaml", "a.yaml") }, true},
		"a link that is replaced":       {func(dir string) error { return replace(dir, "..data_tmp", "..data") }, true},
		"with an arrow in its name":     {func(dir string) error { return replace(dir, ".←.yaml", "←.yaml") }, false},
		"written in place":              {func(dir string) error { return write(dir, "a.yaml") }, false},
		"a manifest's name changes":     {func(dir string) error { return replace(dir, "b.yaml", "a.yaml") }, false},
		"renamed while another is open": {func(dir string) error { return first(write(dir, "b.yaml"), replace(dir, ".a.yaml", "a.yaml")) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			watcher, err := fsnotify.NewWatcher()
			if err == nil {
				err = watcher.Add(dir)
			}
			if err != nil {
				t.Fatal(err)
			}
			defer watcher.Close()
			if err := first(c.change(dir), write(dir, ".last")); err != nil {
				t.Fatal(err)
			}
			p := newPace()
			defer p.stop()
			<-p.quiet.C
			now := time.Now()
			for e := range watcher.Events {
				if filepath.Base(e.Name) == ".last" {
					break
				}
				p.note(e, now)
			}
			select {
			case <-p.soon.C:
				if !c.soon {
					t.Error("the directory is read at once")
				}
			case <-p.quiet.C:
				if c.soon {
					t.Error("the directory is read after the quiet time only")
				}
			case <-time.After(10 * time.Second):
				t.Error("the directory is not read")
			}
		})
	}
}

func first(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// What is decoded side by side is in order, and the first document that is wrong is the
// one that is told.
func TestDecodeManyDocuments(t *testing.T) {
	var text string
	for i := range 100 {
		text += fmt.Sprintf("---\napiVersion: v1\nkind: Pod\nmetadata: {name: p%d, namespace: shop}\n", i)
	}
	got, err := decode([]byte(text))
	if err != nil || len(got.pods) != 100 {
		t.Fatalf("%d pods, %v", len(got.pods), err)
	}
	for i, pod := range got.pods {
		if pod.Name != fmt.Sprintf("p%d", i) {
			t.Errorf("pod %d is %s", i, pod)
		}
	}
	wrong := text + "---\nkind: Service\napiVersion: v1\n---\nnot: [closed\n"
	if _, err := decode([]byte(wrong)); err == nil || err.Error()[:14] != "document 101: " {
		t.Errorf("error %v, want one of document 101", err)
	}
}

// A file that is read again and says the same is no change, though its stamp could not be
// believed yet.
func TestTheSameAgainIsNoChange(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a.yaml")
	write := func(label string) {
		t.Helper()
		text := "apiVersion: v1\nkind: Namespace\nmetadata: {name: shop, labels: {a: " + label + "}}\n"
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	read := func(before *snapshot) *snapshot {
		t.Helper()
		s, err := load(dir, before)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	write("one")
	one := read(&snapshot{})
	if again := read(one); !again.same(one) {
		t.Error("the same file is a change")
	}
	write("two")
	if two := read(one); two.same(one) {
		t.Error("another file is no change")
	}
}

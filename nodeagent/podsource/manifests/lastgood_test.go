// SPDX-License-Identifier: Apache-2.0

package manifests_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ambientd/nodeagent/podsource"
	"ambientd/nodeagent/podsource/manifests"
)

// refresh has s read the directory: a pod that is not there is looked for in all of it.
func refresh(t *testing.T, s *manifests.Source) {
	t.Helper()
	_, err := s.Lookup(t.Context(), "nowhere", "nobody", "")
	wantError(t, err, podsource.ErrNotFound)
}

// wantListed compares the names of the pods that are listed, each with "+" if its
// namespace puts it in the mesh.
func wantListed(t *testing.T, s *manifests.Source, want []string, complete bool) {
	t.Helper()
	refresh(t, s)
	pods, whole := s.List()
	got := []string{}
	for _, p := range pods {
		name := p.Name
		if p.NamespaceLabels["istio.io/dataplane-mode"] == "ambient" {
			name += "+"
		}
		got = append(got, name)
	}
	slices.Sort(got)
	if !slices.Equal(got, want) || whole != complete {
		t.Errorf("%q are listed, complete: %v; want %q, complete: %v", got, whole, want, complete)
	}
}

// Whatever makes a file unreadable, what is known of its pods and of its namespace's stays, and
// an operator is told.
func TestLastGoodVersionStays(t *testing.T) {
	content := shopNamespace + "---\n" + pod("a", "v: one")
	for _, test := range []struct{ name, content string }{
		{"slip", content + "  bad: ["},
		{"half written", content[:len(content)-8]},
		{"emptied", ""},
		{"unknown field", content + "Spec: {}"},
		{"too large", content + strings.Repeat("#", 2<<20)},
	} {
		t.Run(test.name, func(t *testing.T) {
			d := newDirectory(t)
			d.put("shop.yaml", content)
			d.put("web.yaml", webPod)
			s := d.open()
			for range 2 { // the last good version is not the last but one
				d.put("shop.yaml", test.content)
				wantListed(t, s, []string{"a+", "web+"}, false)
			}
			if got := lookup(t, s, "a", "").Labels["v"]; got != "one" {
				t.Errorf("the pod's label is %q, want that of the last good version", got)
			}
			if labels, complete := s.Namespaces(); complete || labels["shop"]["istio.io/dataplane-mode"] != "ambient" {
				t.Errorf("namespaces %v, complete: %v; want the label of the last good version, not complete", labels, complete)
			}
			want := []string{filepath.Join(d.path, "shop.yaml"), "its last good version is in use"}
			if problems := s.Problems(); len(problems) != 1 || !containsAll(problems[0], want) {
				t.Errorf("problems are %q; want one with %q", problems, want)
			}
			if lines := d.logged(); len(lines) == 0 || !containsAll(lines[0], append(want, "manifest is not in use")) {
				t.Errorf("logged %q; want %q", lines, want)
			}

			d.put("shop.yaml", strings.ReplaceAll(content, "ambient", "none"))
			wantListed(t, s, []string{"a", "web"}, true)
			if problems := s.Problems(); len(problems) > 0 {
				t.Errorf("once it was put right the problems are %q", problems)
			}
		})
	}
}

// Once everything has settled too, where stamps alone tell what has changed.
func TestLastGoodVersionStaysWhenSettled(t *testing.T) {
	d := newDirectory(t)
	d.put("shop.yaml", shopNamespace)
	d.put("web.yaml", webPod)
	s := d.open()
	d.put("shop.yaml", "kind: [")
	for range 2 {
		settle(t, d.path)
		wantListed(t, s, []string{"web+"}, false)
		lookup(t, s, "web", "")
	}
}

// A link that leads nowhere is there as much as any broken file, until it is removed.
func TestLastGoodVersionOfAnEntry(t *testing.T) {
	d := newDirectory(t)
	at := filepath.Join(d.path, "shop.yaml")
	content := filepath.Join(t.TempDir(), "content")
	if err := errors.Join(os.WriteFile(content, []byte(shopNamespace), 0o600), os.Symlink(content, at)); err != nil {
		t.Fatal(err)
	}
	d.put("web.yaml", webPod)
	s := d.open()
	if err := os.Remove(content); err != nil {
		t.Fatal(err)
	}
	wantListed(t, s, []string{"web+"}, false)
	if err := errors.Join(os.Mkdir(at+".new", 0o700), os.Remove(at), os.Rename(at+".new", at)); err != nil {
		t.Fatal(err)
	}
	wantListed(t, s, []string{"web+"}, false)
	d.remove("shop.yaml")
	wantListed(t, s, []string{"web"}, true)
}

// A broken file keeps what it held last, not what it ever held, and nothing once it is gone.
func TestLastGoodVersionIsLetGo(t *testing.T) {
	d := newDirectory(t)
	d.put("shop.yaml", shopNamespace)
	d.put("pods.yaml", pod("a", "")+"---\n"+pod("b", ""))
	s := d.open()
	wantListed(t, s, []string{"a+", "b+"}, true)
	d.put("pods.yaml", "kind: [")
	wantListed(t, s, []string{"a+", "b+"}, false)
	d.put("pods.yaml", pod("b", ""))
	wantListed(t, s, []string{"b+"}, true)
	d.put("pods.yaml", "kind: [Pod")
	wantListed(t, s, []string{"b+"}, false)
	d.put("pods.yaml", "# none any more\n")
	wantListed(t, s, []string{}, true)
	d.put("pods.yaml", "kind: [")
	wantListed(t, s, []string{}, false)

	d.put("pods.yaml", pod("b", ""))
	wantListed(t, s, []string{"b+"}, true)
	d.put("pods.yaml", "kind: [")
	wantListed(t, s, []string{"b+"}, false)
	d.remove("pods.yaml")
	wantListed(t, s, []string{}, true)
	d.put("pods.yaml", "kind: [") // another file of that name
	wantListed(t, s, []string{}, false)
}

// A broken file stays in its place: a document that was ignored for its sake does not
// count all of a sudden.
func TestLastGoodVersionComesFirst(t *testing.T) {
	d := newDirectory(t)
	d.put("a.yaml", shopNamespace+"---"+shopNamespace)
	d.put("b.yaml", strings.ReplaceAll(shopNamespace, "ambient", "none"))
	d.put("web.yaml", webPod)
	s := d.open()
	d.put("a.yaml", "kind: [")
	wantListed(t, s, []string{"web+"}, false)
	want := []string{"a.yaml: document 1", "a.yaml: namespace shop: a.yaml has it too", "b.yaml: namespace shop: a.yaml has it too"}
	problems := s.Problems()
	if !slices.EqualFunc(problems, want, strings.Contains) {
		t.Errorf("problems are %q; want %q", problems, want)
	}
	_, err := s.Lookup(t.Context(), "shop", "web", "another")
	wantError(t, err, podsource.ErrUIDMismatch, "web.yaml", "files that cannot be read: a.yaml")
	if strings.Contains(err.Error(), "has it too") {
		t.Errorf("the error tells of documents, not only of files: %v", err)
	}
}

// A file of which there is no good version may hold any namespace: of one that has no
// manifest nobody can say then that it is outside the mesh.
func TestUnknownNamespaces(t *testing.T) {
	for _, test := range []struct{ name, content string }{
		{"slip", "kind: ["},
		{"empty", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			d := newDirectory(t)
			d.put("bad.yaml", test.content)
			d.put("other.yaml", "apiVersion: v1\nkind: Namespace\nmetadata: {name: other}\n---\napiVersion: v1\nkind: Pod\nmetadata: {name: o, namespace: other}\n")
			d.put("web.yaml", webPod)
			s := d.open()
			wantListed(t, s, []string{"o"}, false)
			_, err := s.Lookup(t.Context(), "shop", "web", "")
			if err == nil || errors.Is(err, podsource.ErrNotFound) || !containsAll(err.Error(), []string{"shop/web", "not known", "bad.yaml"}) {
				t.Errorf("error %v, want one that says that the namespace is not known, and names the file", err)
			}
			d.put("bad.yaml", "# nothing\n")
			wantListed(t, s, []string{"o", "web"}, true)
			d.put("bad.yaml", test.content) // again, but nothing of it is known now
			wantListed(t, s, []string{"o", "web"}, false)
			lookup(t, s, "web", "")
			d.put("shop.yaml", "kind: [") // a new one
			wantListed(t, s, []string{"o"}, false)
			d.put("shop.yaml", shopNamespace)
			wantListed(t, s, []string{"o", "web+"}, false)
		})
	}
}

// A file is empty for a moment when it is made. That says nothing of any namespace.
func TestFilesThatWereJustMade(t *testing.T) {
	d := newDirectory(t)
	d.put("web.yaml", webPod)
	s := d.open()
	d.put("shop.yaml", "")
	wantListed(t, s, []string{"web"}, true)
	d.put("shop.yaml", shopNamespace)
	wantListed(t, s, []string{"web+"}, true)
}

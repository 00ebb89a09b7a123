// SPDX-License-Identifier: Apache-2.0

package manifests_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"ambientd/nodeagent/podsource"
	"ambientd/nodeagent/podsource/manifests"
	"ambientd/nodeagent/workload"
)

// directory is a manifest directory with the log of what its Source says.
type directory struct {
	tb   testing.TB
	path string
	logs chan string
}

func newDirectory(tb testing.TB) *directory {
	tb.Helper()
	return &directory{tb: tb, path: tb.TempDir(), logs: make(chan string, 100)}
}

// Write is the io.Writer of the Source's log.
func (d *directory) Write(line []byte) (int, error) {
	d.logs <- strings.TrimSpace(string(line))
	return len(line), nil
}

func (d *directory) put(name, content string) {
	d.tb.Helper()
	if err := os.WriteFile(filepath.Join(d.path, name), []byte(content), 0o600); err != nil {
		d.tb.Fatal(err)
	}
}

func (d *directory) remove(name string) {
	d.tb.Helper()
	if err := os.Remove(filepath.Join(d.path, name)); err != nil {
		d.tb.Fatal(err)
	}
}

func (d *directory) open() *manifests.Source {
	d.tb.Helper()
	s, err := manifests.New(manifests.Config{
		Dir: d.path, Poll: 10 * time.Millisecond, Logger: slog.New(slog.NewTextHandler(d, nil)),
	})
	if err != nil {
		d.tb.Fatal(err)
	}
	return s
}

// logged returns what was logged and not taken yet.
func (d *directory) logged() []string {
	var lines []string
	for {
		select {
		case line := <-d.logs:
			lines = append(lines, line)
		default:
			return lines
		}
	}
}

// await waits for a line of the log with all parts.
func (d *directory) await(parts ...string) {
	d.tb.Helper()
	deadline := time.After(10 * time.Second)
	for {
		select {
		case line := <-d.logs:
			if containsAll(line, parts) {
				return
			}
		case <-deadline:
			d.tb.Fatalf("nothing was logged with %q", parts)
		}
	}
}

func containsAll(text string, parts []string) bool {
	for _, part := range parts {
		if !strings.Contains(text, part) {
			return false
		}
	}
	return true
}

func lookup(tb testing.TB, s *manifests.Source, name, uid string) workload.Pod {
	tb.Helper()
	pod, err := s.Lookup(tb.Context(), "shop", name, uid)
	if err != nil {
		tb.Fatal(err)
	}
	return pod
}

func wantError(tb testing.TB, err, want error, parts ...string) {
	tb.Helper()
	if !errors.Is(err, want) || !containsAll(err.Error(), parts) {
		tb.Errorf("got %v; want an error that wraps %q and says %q", err, want, parts)
	}
}

const (
	webPod = `
apiVersion: v1
kind: Pod
metadata:
  name: web
  namespace: shop
  uid: 6c1f2f9e-0000-4000-8000-000000000001
  labels: {app: web}
spec:
  serviceAccountName: web-account
  nodeName: another-node
  containers: [{name: c, image: i}]
`
	shopNamespace = `
apiVersion: v1
kind: Namespace
metadata:
  name: shop
  labels: {istio.io/dataplane-mode: ambient}
`
)

func pod(name, labels string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: %s, namespace: shop, labels: {%s}}\n", name, labels)
}

func TestLookup(t *testing.T) {
	d := newDirectory(t)
	d.put("web.yaml", webPod)
	d.put("shop.yml", shopNamespace)
	d.put("db.json", `{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "db", "namespace": "shop"}, "spec": {"hostNetwork": true}}`)
	d.put("notes.txt", "not: [a manifest")
	d.put(".web.yaml", "an editor's: [file")
	s := d.open()

	want := workload.Pod{
		UID: "6c1f2f9e-0000-4000-8000-000000000001", Namespace: "shop", Name: "web", ServiceAccount: "web-account",
		Labels: map[string]string{"app": "web"}, NamespaceLabels: map[string]string{"istio.io/dataplane-mode": "ambient"},
	}
	for _, uid := range []string{"", want.UID} {
		if diff := cmp.Diff(want, lookup(t, s, "web", uid)); diff != "" {
			t.Errorf("UID %q given (-want +got)\n%s", uid, diff)
		}
	}
	db := lookup(t, s, "db", "")
	if !db.HostNetwork || db.ServiceAccount != "default" || db.UID != manifests.DerivedUID("shop", "db") {
		t.Errorf("got %+v; want host network, the default service account and a derived UID", db)
	}
	if lines := d.logged(); len(lines) > 0 {
		t.Errorf("logged %q", lines)
	}
}

func TestNamespaces(t *testing.T) {
	d := newDirectory(t)
	d.put("a.yaml", shopNamespace)
	d.put("b.yaml", "apiVersion: v1\nkind: Pod\nmetadata: {name: p, namespace: plain}\n")
	s := d.open()
	check := func(want map[string]map[string]string, complete bool) {
		t.Helper()
		got, whole := s.Namespaces()
		if diff := cmp.Diff(want, got); diff != "" || whole != complete {
			t.Errorf("complete: %v\n%s", whole, diff)
		}
		got["mine"] = nil // the caller's
	}
	shop := map[string]string{"istio.io/dataplane-mode": "ambient"}
	check(map[string]map[string]string{"shop": shop, "plain": nil}, true)
	d.put("c.yaml", "{") // may describe namespace plain
	_, err := s.Lookup(t.Context(), "shop", "none", "")
	wantError(t, err, podsource.ErrNotFound)
	check(map[string]map[string]string{"shop": shop}, false)
}

func TestDefaults(t *testing.T) {
	d := newDirectory(t)
	d.put("a.yaml", "# leading comment\n---\napiVersion: v1\nkind: Pod\nmetadata: {name: a}\n---\n# nothing\n---\n")
	d.put("static.yaml", "apiVersion: v1\nkind: Pod\nmetadata: {name: st, namespace: shop, uid: object, annotations: {kubernetes.io/config.hash: h4sh}}\n")
	s := d.open()
	a, err := s.Lookup(t.Context(), "default", "a", "")
	if err != nil {
		t.Fatal(err)
	}
	if a.NamespaceLabels != nil || a.ServiceAccount != "default" {
		t.Errorf("got %+v; want no namespace labels and the default service account", a)
	}
	// A static pod is known to the runtime by its hash, and has no service account.
	if st := lookup(t, s, "st", "h4sh"); !st.Static || st.ServiceAccount != "" {
		t.Errorf("got %+v; want a static pod without a service account", st)
	}
	if lines := d.logged(); len(lines) > 0 {
		t.Errorf("logged %q", lines)
	}
}

func TestDerivedUID(t *testing.T) {
	// python3 -c 'import uuid; print(uuid.uuid5(uuid.NAMESPACE_URL, "shop/web-0"))'
	if got, want := manifests.DerivedUID("shop", "web-0"), "df2a91ee-0a4f-505d-a9fc-85394c157252"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestLookupRefuses(t *testing.T) {
	d := newDirectory(t)
	d.put("web.yaml", webPod)
	d.put("broken.yaml", "kind: [Pod")
	s := d.open()
	_, err := s.Lookup(t.Context(), "shop", "gone", "")
	wantError(t, err, podsource.ErrNotFound, "shop/gone", d.path, "broken.yaml")
	_, err = s.Lookup(t.Context(), "other", "web", "")
	wantError(t, err, podsource.ErrNotFound, "other/web")
	_, err = s.Lookup(t.Context(), "shop", "web", "another")
	wantError(t, err, podsource.ErrUIDMismatch, "shop/web", "6c1f2f9e-0000-4000-8000-000000000001", "another", "web.yaml")

	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = s.Lookup(ended, "shop", "gone", "")
	wantError(t, err, context.Canceled, "shop/gone")
}

// What was written before the call counts, without anybody following changes.
func TestLookupSeesWhatWasWrittenBefore(t *testing.T) {
	d := newDirectory(t)
	s := d.open()
	for round := range 50 {
		// New, changed in place to the same size, and gone: the kernel's clock for
		// files ticks only now and then, so some of these share their times.
		label := fmt.Sprintf("v: v%02d", round)
		d.put("a.yaml", pod("a", label))
		if got := lookup(t, s, "a", "").Labels["v"]; "v: "+got != label {
			t.Fatalf("round %d: the pod's label is %q", round, got)
		}
		d.put("shop.yaml", "apiVersion: v1\nkind: Namespace\nmetadata: {name: shop, labels: {"+label+"}}\n")
		if got := lookup(t, s, "a", "").NamespaceLabels["v"]; "v: "+got != label {
			t.Fatalf("round %d: the namespace's label is %q", round, got)
		}
		if round%2 == 0 {
			d.remove("a.yaml")
			_, err := s.Lookup(t.Context(), "shop", "a", "")
			wantError(t, err, podsource.ErrNotFound)
		}
	}
}

// The same, once everything has settled and the stamps alone tell.
func TestLookupSeesChangesOfOldFiles(t *testing.T) {
	d := newDirectory(t)
	d.put("a.yaml", pod("a", "v: one"))
	d.put("shop.yaml", shopNamespace)
	s := d.open()
	settle(t, d.path)
	lookup(t, s, "a", "") // reads again, now settled
	d.put("a.yaml", pod("a", "v: two"))
	if got := lookup(t, s, "a", "").Labels["v"]; got != "two" {
		t.Errorf("the pod's label is %q, want two", got)
	}
	settle(t, d.path)
	lookup(t, s, "a", "")
	d.put("new.yaml", "apiVersion: v1\nkind: Namespace\nmetadata: {name: aaa}\n")
	d.remove("shop.yaml")
	if got := lookup(t, s, "a", "").NamespaceLabels; got != nil {
		t.Errorf("the namespace's labels are %v, its manifest is gone", got)
	}
}

// A file that is new may change what an old one means.
func TestLookupSeesNewFiles(t *testing.T) {
	d := newDirectory(t)
	d.put("web.yaml", webPod)
	s := d.open()
	settle(t, d.path)
	if got := lookup(t, s, "web", "").NamespaceLabels; got != nil {
		t.Errorf("the namespace's labels are %v, it has no manifest", got)
	}
	d.put("shop.yaml", shopNamespace)
	if got := lookup(t, s, "web", "").NamespaceLabels["istio.io/dataplane-mode"]; got != "ambient" {
		t.Errorf("the namespace's label is %q, want ambient", got)
	}
}

// settle waits until the directory and all in it are old enough for their stamps
// to be trusted. Only the clock makes them so.
func settle(tb testing.TB, dir string) {
	tb.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	var newest time.Time
	for _, path := range append(glob(tb, dir), dir) {
		info, err := os.Stat(path)
		if err != nil {
			tb.Fatal(err)
		}
		if info.ModTime().After(newest) {
			newest = info.ModTime()
		}
	}
	for time.Since(newest) <= 150*time.Millisecond {
		<-tick.C
	}
}

func glob(tb testing.TB, dir string) []string {
	tb.Helper()
	paths, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		tb.Fatal(err)
	}
	return paths
}

// A pod that was made anew under the same name has another UID.
func TestRecreatedUnderTheSameName(t *testing.T) {
	d := newDirectory(t)
	d.put("web.yaml", webPod)
	s := d.open()
	settle(t, d.path)
	lookup(t, s, "web", "")
	d.put("web.yaml", strings.ReplaceAll(webPod, "000001", "000002"))
	lookup(t, s, "web", "6c1f2f9e-0000-4000-8000-000000000002")
	_, err := s.Lookup(t.Context(), "shop", "web", "6c1f2f9e-0000-4000-8000-000000000001")
	wantError(t, err, podsource.ErrUIDMismatch)
}

// copies is the inside of a YAML mapping with so many values that are all the same.
func copies(value string, n int) string {
	var text strings.Builder
	for i := range n {
		fmt.Fprintf(&text, "k%d: %s, ", i, value)
	}
	return text.String()
}

func TestAliases(t *testing.T) {
	d := newDirectory(t)
	d.put("a.yaml", "apiVersion: v1\nkind: Pod\nmetadata: {name: a, namespace: shop, labels: &l {k: v}, annotations: *l}\n")
	if got := lookup(t, d.open(), "a", ""); got.Annotations["k"] != "v" {
		t.Errorf("annotations %v, want those of the alias", got.Annotations)
	}
}

func TestUnreadableFiles(t *testing.T) {
	good := pod("a", "")
	for _, test := range []struct {
		name, content string
		want          []string
	}{
		{"syntax", "kind: [Pod", []string{"document 1", "yaml"}},
		{"second document", good + "---\nkind: [Pod", []string{"document 2"}},
		{"unknown field", good + "spec: {hostNetworking: true}", []string{`unknown field \"spec.hostNetworking\"`}},
		{"case of a field", good + "Spec: {}", []string{`unknown field \"Spec\"`}},
		{"field twice", good + "kind: Pod", []string{"kind", "already"}},
		{"type", good + "spec: {hostNetwork: sometimes}", []string{"hostNetwork"}},
		{"kind", "apiVersion: apps/v1\nkind: Deployment", []string{"Deployment", "apps/v1", "only Pod and Namespace"}},
		{"no kind", "metadata: {name: a}", []string{"only Pod and Namespace"}},
		{"no object", "[1, 2]", []string{"not a Kubernetes object"}},
		{"no name", "apiVersion: v1\nkind: Pod\nmetadata: {namespace: shop}", []string{"metadata.name"}},
		{"name", strings.Replace(good, "name: a", "name: A_b", 1), []string{"metadata.name", "A_b"}},
		{"namespace", strings.Replace(good, "shop", "a.b", 1), []string{"metadata.namespace", "a.b"}},
		{"name of a namespace", "apiVersion: v1\nkind: Namespace\nmetadata: {name: a.b}", []string{"metadata.name", "a.b"}},
		{"service account", good + "spec: {serviceAccountName: a/b}", []string{"spec.serviceAccountName", "a/b"}},
		{"UID with a space", strings.Replace(good, "name: a", "name: a, uid: a b", 1), []string{"UID", "a b"}},
		{"UID too long", strings.Replace(good, "name: a", "name: a, uid: "+strings.Repeat("u", 129), 1), []string{"UID", "128"}},
		{"too large", good + strings.Repeat("#", 2<<20), []string{"larger than"}},
		{"too large with its aliases", good + "spec: {nodeName: &long " + strings.Repeat("x", 1000) + ", nodeSelector: {" + copies("*long", 3000) + "}}", []string{"larger than", "aliases"}},
		{"separator", "--- x\n" + good, []string{"separator"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			d := newDirectory(t)
			d.put("bad.yaml", test.content)
			d.put("good.yaml", pod("ok", "")+"---"+shopNamespace)
			s := d.open()
			lookup(t, s, "ok", "")
			_, err := s.Lookup(t.Context(), "shop", "a", "")
			wantError(t, err, podsource.ErrNotFound, "bad.yaml")
			lines := d.logged()
			if len(lines) != 1 || !containsAll(lines[0], append(test.want, "manifest is not in use", filepath.Join(d.path, "bad.yaml"))) {
				t.Errorf("logged %q; want one line with %q", lines, test.want)
			}
			if problems := s.Problems(); len(problems) != 1 || !containsAll(strconv.Quote(problems[0]), append(test.want, filepath.Join(d.path, "bad.yaml")+": ")) {
				t.Errorf("problems are %q; want one with %q", problems, test.want)
			}
		})
	}
}

func TestProblemsAreBounded(t *testing.T) {
	d := newDirectory(t)
	for i := range 25 {
		d.put(fmt.Sprintf("bad-%02d.yaml", i), "kind: x")
	}
	s := d.open()
	if problems := s.Problems(); len(problems) != 21 || problems[20] != "and 5 more" {
		t.Errorf("%d problems: %q; want 20, and how many more", len(problems), problems)
	}
	for i := range 25 {
		d.remove(fmt.Sprintf("bad-%02d.yaml", i))
	}
	if _, err := s.Lookup(t.Context(), "shop", "a", ""); err == nil {
		t.Error("a pod without a manifest is found")
	}
	if problems := s.Problems(); len(problems) != 0 {
		t.Errorf("without files the problems are %q", problems)
	}
}

func TestUnreadableEntries(t *testing.T) {
	d := newDirectory(t)
	d.put("ok.yaml", pod("ok", "")+"---"+shopNamespace)
	at := func(name string) string { return filepath.Join(d.path, name) }
	if err := errors.Join(
		os.Mkdir(at("dir.yaml"), 0o700),
		os.Symlink(at("nowhere"), at("dangling.yaml")),
		os.Symlink("/dev/zero", at("endless.yaml")),
		os.Symlink(at("ok.yaml"), at("zz-link.yaml")),
	); err != nil {
		t.Fatal(err)
	}
	s := d.open()
	lookup(t, s, "ok", "")
	lines := strings.Join(d.logged(), "\n")
	for _, want := range []string{"dir.yaml", "dangling.yaml", "endless.yaml", "zz-link.yaml"} {
		if !strings.Contains(lines, want) {
			t.Errorf("nothing about %s in\n%s", want, lines)
		}
	}
}

// However many files cannot be read, the error about a pod stays readable.
func TestManyUnreadableFiles(t *testing.T) {
	d := newDirectory(t)
	d.logs = make(chan string, 1000)
	for i := range 500 {
		d.put(fmt.Sprintf("bad%03d.yaml", i), "kind: [Pod")
	}
	_, err := d.open().Lookup(t.Context(), "shop", "a", "")
	wantError(t, err, podsource.ErrNotFound, "bad000.yaml", "495 more")
	if n := len(err.Error()); n > 2000 {
		t.Errorf("the error has %d bytes", n)
	}
}

// Once per change of the file, however often it is read.
func TestUnreadableFileIsLoggedOncePerChange(t *testing.T) {
	d := newDirectory(t)
	d.put("bad.yaml", "kind: [Pod")
	s := d.open()
	for range 5 {
		if _, err := s.Lookup(t.Context(), "shop", "a", ""); err == nil {
			t.Fatal("found")
		}
	}
	if lines := d.logged(); len(lines) != 1 {
		t.Errorf("logged %q, want one line", lines)
	}
	d.put("bad.yaml", "kind: [Pod, again")
	if _, err := s.Lookup(t.Context(), "shop", "a", ""); err == nil {
		t.Fatal("found")
	}
	if lines := d.logged(); len(lines) != 1 {
		t.Errorf("after a change: logged %q, want one line", lines)
	}
	d.put("bad.yaml", pod("a", ""))
	lookup(t, s, "a", "")
	if lines := d.logged(); len(lines) != 0 {
		t.Errorf("after it was put right: logged %q", lines)
	}
}

func TestDuplicates(t *testing.T) {
	d := newDirectory(t)
	d.put("b.yaml", pod("a", "from: b")+"---\n"+pod("b", ""))
	d.put("a.yaml", pod("a", "from: a"))
	d.put("c.yaml", pod("c", "from: c")+"---\n"+pod("c", "from: second"))
	d.put("n1.yaml", shopNamespace)
	d.put("n2.yaml", strings.ReplaceAll(shopNamespace, "ambient", "none"))
	d.put("uid.yaml", strings.ReplaceAll(pod("thief", ""), "name: thief", "name: thief, uid: "+manifests.DerivedUID("shop", "a")))
	s := d.open()
	a := lookup(t, s, "a", "")
	if a.Labels["from"] != "a" || a.NamespaceLabels["istio.io/dataplane-mode"] != "ambient" {
		t.Errorf("got %+v; want the first file's", a)
	}
	if c := lookup(t, s, "c", ""); c.Labels["from"] != "c" {
		t.Errorf("got %+v; want the first document's", c)
	}
	lookup(t, s, "b", "") // beside the document that is ignored
	_, err := s.Lookup(t.Context(), "shop", "thief", "")
	wantError(t, err, podsource.ErrNotFound)
	lines := d.logged()
	for i, want := range [][]string{
		{"document is ignored", "/b.yaml", "pod shop/a: a.yaml has it too"},
		{"document is ignored", "/c.yaml", "pod shop/c: c.yaml has it too"},
		{"document is ignored", "/n2.yaml", "namespace shop: n1.yaml has it too"},
		{"document is ignored", "/uid.yaml", "pod shop/thief: pod shop/a has the same UID"},
	} {
		if i >= len(lines) || !containsAll(lines[i], want) {
			t.Fatalf("logged %q; want %q in line %d", lines, want, i+1)
		}
	}
}

func TestNewRefuses(t *testing.T) {
	d := newDirectory(t)
	missing := filepath.Join(d.path, "missing")
	_, err := manifests.New(manifests.Config{Dir: missing, Logger: slog.New(slog.DiscardHandler)})
	if err == nil || !containsAll(err.Error(), []string{missing, "does not exist", "create it"}) {
		t.Errorf("missing directory: %v", err)
	}
	d.put("file", "")
	_, err = manifests.New(manifests.Config{Dir: filepath.Join(d.path, "file"), Logger: slog.New(slog.DiscardHandler)})
	if err == nil || !strings.Contains(err.Error(), "not a directory") {
		t.Errorf("a file: %v", err)
	}
	if _, err := manifests.New(manifests.Config{Dir: d.path}); err == nil {
		t.Error("no logger: no error")
	}
}

// run runs s until the test ends.
func run(t *testing.T, s *manifests.Source) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := s.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(func() { cancel(); running.Wait() })
}

func TestRunFollowsChanges(t *testing.T) {
	d := newDirectory(t)
	run(t, d.open())
	d.put("bad.yaml", "kind: [Pod")
	d.await("bad.yaml", "not in use")
}

func TestRunSurvivesWithoutTheDirectory(t *testing.T) {
	d := newDirectory(t)
	s := d.open()
	run(t, s)
	away := d.path + "-away"
	if err := os.Rename(d.path, away); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(away) })
	d.await("cannot be read", d.path)
	if _, err := s.Lookup(t.Context(), "shop", "a", ""); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Lookup without the directory: %v, want %v", err, os.ErrNotExist)
	}
	if err := os.Mkdir(d.path, 0o700); err != nil {
		t.Fatal(err)
	}
	d.put("a.yaml", pod("a", ""))
	lookup(t, s, "a", "")
	d.put("bad.yaml", "kind: [Pod")
	d.await("bad.yaml", "not in use")
}

func TestLookupWhileFilesChange(t *testing.T) {
	d := newDirectory(t)
	d.put("a.yaml", pod("a", ""))
	s := d.open()
	run(t, s)
	var lookers sync.WaitGroup
	for range 4 {
		lookers.Go(func() {
			for range 50 {
				if _, err := s.Lookup(t.Context(), "shop", "a", ""); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for i := range 50 {
		d.put(fmt.Sprintf("p%d.yaml", i), pod(fmt.Sprintf("p%d", i), ""))
	}
	lookers.Wait()
}

func BenchmarkLookup(b *testing.B) {
	d := newDirectory(b)
	for i := range 1000 {
		d.put(fmt.Sprintf("p%d.yaml", i), pod(fmt.Sprintf("p%d", i), ""))
	}
	d.put("shop.yaml", shopNamespace)
	s := d.open()
	settle(b, d.path)
	lookup(b, s, "p500", "")
	b.Run("hit", func(b *testing.B) {
		for b.Loop() {
			lookup(b, s, "p500", "")
		}
	})
	b.Run("miss", func(b *testing.B) {
		for b.Loop() {
			if _, err := s.Lookup(b.Context(), "shop", "none", ""); err == nil {
				b.Fatal("found")
			}
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package records_test

import (
	"bufio"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/records"
	"ambientd/tools/netnstest"
)

// writerEnv names the directory in which the process, instead of testing, puts records
// until it is killed.
const writerEnv = "AMBIENTD_RECORDS_WRITER"

func TestMain(m *testing.M) {
	if dir := os.Getenv(writerEnv); dir != "" {
		fmt.Fprintln(os.Stderr, writeForever(dir))
		os.Exit(1)
	}
	os.Exit(netnstest.Main(m))
}

func open(tb testing.TB, dir string) *records.Store {
	tb.Helper()
	s, err := records.Open(dir)
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

// record is a record with everything in it.
func record(uid string) records.Record {
	return records.Record{
		UID: uid, Namespace: "shop", Name: "cart-7d9f", NetnsPath: "/var/run/netns/cni-1f0c",
		Key:      podnetns.Key{BootID: "b0a1e5d2-8a53-4a8a-93a6-0c6f1f3a9b11", Cookie: 1<<63 + 7}, // no float64
		IPs:      []netip.Addr{netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::2")},
		Families: "ipv4,ipv6", Backend: "nftables",
		Seen:        redirection.Sighting{Generation: 7, Rules: "which", Numbered: true},
		Attachments: []records.Attachment{{Network: "k8s", ContainerID: "c1", IfName: "eth0"}, {Network: "k8s", ContainerID: "c1", IfName: "net1"}},
	}
}

// put is what All returns of r.
func put(r records.Record) records.Record {
	r.Version = records.Version
	return r
}

// all reads a store that must hold nothing but records.
func all(tb testing.TB, s *records.Store) []records.Record {
	tb.Helper()
	got, bad, err := s.All()
	if err != nil {
		tb.Fatal(err)
	}
	for _, err := range bad {
		tb.Error(err)
	}
	slices.SortFunc(got, func(a, b records.Record) int { return strings.Compare(a.UID, b.UID) })
	return got
}

func compareAddrs() cmp.Option { return cmp.Comparer(func(a, b netip.Addr) bool { return a == b }) }

func TestPutAllDelete(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pods")
	s := open(t, dir)
	if got := all(t, s); len(got) != 0 {
		t.Fatalf("a new store holds %v", got)
	}
	enrolled := record("0b0e6fd2-5f0c-4f0e-9f55-9a8d0d1c2b3a")
	skipped := records.Record{UID: "1b0e6fd2", Namespace: "shop", Name: "debug", Skipped: "the pod has label istio.io/dataplane-mode=none"}
	for _, r := range []records.Record{enrolled, skipped} {
		if err := s.Put(r); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff([]records.Record{put(enrolled), put(skipped)}, all(t, s), compareAddrs()); diff != "" {
		t.Error(diff)
	}
	enrolled.Attachments = enrolled.Attachments[:1]
	if err := s.Put(enrolled); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time there is none
		if err := s.Delete(skipped.UID); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff([]records.Record{put(enrolled)}, all(t, open(t, dir)), compareAddrs()); diff != "" {
		t.Error(diff)
	}
}

func TestModes(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pods")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	s := open(t, dir)
	if err := s.Put(record("uid")); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]os.FileMode{dir: os.ModeDir | 0o700, filepath.Join(dir, "uid.json"): 0o600} {
		if info, err := os.Stat(path); err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v; want mode %v", path, info.Mode(), err, want)
		}
	}
}

// Whatever a manifest says the UID is, the record is one file in the directory, and
// another one for each UID.
func TestFileNames(t *testing.T) {
	parent := t.TempDir()
	dir := filepath.Join(parent, "pods")
	s := open(t, dir)
	uids := []string{
		"0b0e6fd2-5f0c-4f0e-9f55-9a8d0d1c2b3a", "0B0E6FD2-5F0C-4F0E-9F55-9A8D0D1C2B3A",
		"a.json", "a", ".", "..", "../../etc/cron.d/x", "/etc/passwd", "a/b", "a\x00b", ".new-1", "~", "-", "with space", "ö", "\n",
		strings.Repeat("x", 128), strings.Repeat("x", 129), strings.Repeat("/", 5000),
	}
	for _, uid := range uids {
		if err := s.Put(record(uid)); err != nil {
			t.Errorf("%q: %v", uid, err)
		}
	}
	got := map[string]bool{}
	for _, r := range all(t, s) {
		got[r.UID] = true
	}
	for _, uid := range uids {
		if !got[uid] {
			t.Errorf("%.40q is not there", uid)
		}
	}
	if len(got) != len(uids) {
		t.Errorf("%d records of %d UIDs", len(got), len(uids))
	}
	// A UID that is the name of another one's file is still another pod.
	for _, name := range names(t, dir) {
		uid := strings.TrimSuffix(name, ".json")
		if got[uid] {
			continue
		}
		if err := s.Delete(uid); err != nil {
			t.Error(err)
		}
	}
	if n := len(names(t, dir)); n != len(uids) {
		t.Errorf("%d files left of %d", n, len(uids))
	}
	for _, uid := range uids {
		if err := s.Delete(uid); err != nil {
			t.Errorf("%.40q: %v", uid, err)
		}
	}
	if left := names(t, dir); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	if beside := names(t, parent); len(beside) != 1 {
		t.Errorf("beside the directory: %q", beside)
	}
}

func names(tb testing.TB, dir string) []string {
	tb.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		tb.Fatal(err)
	}
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

func TestPutRefuses(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	for name, spoil := range map[string]func(*records.Record){
		"names no pod UID": func(r *records.Record) { r.UID = "" },
		"not UTF-8":        func(r *records.Record) { r.UID = "a\xff" },
		"half empty":       func(r *records.Record) { r.Key.BootID = "" },
		"no netns key":     func(r *records.Record) { r.Key = podnetns.Key{} },
		"addresses":        func(r *records.Record) { r.IPs = append(r.IPs, netip.Addr{}) },
		"bytes":            func(r *records.Record) { r.NetnsPath = strings.Repeat("x", 64<<10) },
	} {
		r := record("uid")
		spoil(&r)
		if err := s.Put(r); err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "shop/cart-7d9f") {
			t.Errorf("%s: error %v", name, err)
		}
	}
	if left := names(t, dir); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func TestBadFiles(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	if err := s.Put(record("good")); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(filepath.Join(dir, "good.json"))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		"torn.json":       "unexpected end of JSON input",
		"empty.json":      "unexpected end of JSON input",
		"zeroes.json":     "invalid character",
		"trailing.json":   "after top-level value",
		"newer.json":      "version 2, this agent knows version 1 only",
		"other-form.json": "version 3, this agent knows version 1 only",
		"nothing.json":    "version 0",
		"address.json":    "ParseAddr",
		"copied.json":     "belongs into good.json",
		"good.json.bak":   "belongs into good.json",
		"large.json":      "larger than 65536 bytes",
		"link.json":       "too many levels of symbolic links",
		"pipe.json":       "not a regular file",
		"directory.json":  "not a regular file",
	}
	for name, content := range map[string][]byte{
		"torn.json":       whole[:len(whole)/2],
		"empty.json":      nil,
		"zeroes.json":     make([]byte, 4096),
		"trailing.json":   append(slices.Clone(whole), whole...),
		"newer.json":      []byte(`{"version":2,"uid":"newer"}`),
		"other-form.json": []byte(`{"version":3,"uid":{"of":"another form"}}`),
		"nothing.json":    []byte(`{}`),
		"address.json":    []byte(`{"version":1,"uid":"address","skipped":"x","ips":["10.0.0.300"]}`),
		"copied.json":     whole,
		"good.json.bak":   whole,
		"large.json":      append(slices.Clone(whole), make([]byte, 64<<10)...),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(
		os.Symlink("good.json", filepath.Join(dir, "link.json")),
		unix.Mkfifo(filepath.Join(dir, "pipe.json"), 0o600),
		os.Mkdir(filepath.Join(dir, "directory.json"), 0o700),
	); err != nil {
		t.Fatal(err)
	}
	got, bad, err := s.All()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]records.Record{put(record("good"))}, got, compareAddrs()); diff != "" {
		t.Error(diff)
	}
	for _, err := range bad {
		name := filepath.Base(err.Path)
		if cause, ok := want[name]; !ok || !strings.Contains(err.Error(), cause) || strings.Count(err.Error(), err.Path) != 1 {
			t.Errorf("%v; want %q", err, want[name])
		}
		delete(want, name)
	}
	for name := range want {
		t.Errorf("%s was not reported", name)
	}
	// They are left alone.
	if n := len(names(t, dir)); n != 15 {
		t.Errorf("%d files are left of 15", n)
	}
}

func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Symlink(t.TempDir(), filepath.Join(dir, "link"))); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, filepath.Join(dir, "link"), filepath.Join(dir, "none", "pods")} {
		if s, err := records.Open(path); err == nil {
			t.Errorf("%s: got %v", path, s)
		}
	}
}

func TestDirectoryGone(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pods")
	s := open(t, dir)
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	_, _, allErr := s.All()
	for what, err := range map[string]error{"Put": s.Put(record("uid")), "All": allErr} {
		if !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v, want %v", what, err, os.ErrNotExist)
		}
	}
	if err := s.Delete("uid"); err != nil {
		t.Errorf("Delete: %v", err)
	}
}

// A record that does not fit leaves the older one as it is, and nothing else behind.
func TestDiskFull(t *testing.T) {
	netnstest.Require(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=128k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	s := open(t, filepath.Join(dir, "pods"))
	if err := s.Put(record("uid")); err != nil {
		t.Fatal(err)
	}
	ballast := filepath.Join(dir, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 256<<10), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("filling the disk: %v", err)
	}
	larger := record("uid")
	larger.Name = strings.Repeat("n", 200)
	for _, r := range []records.Record{larger, record("other")} {
		err := s.Put(r)
		if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "no room in "+dir) {
			t.Errorf("Put on a full disk: %v", err)
		}
	}
	if diff := cmp.Diff([]records.Record{put(record("uid"))}, all(t, s), compareAddrs()); diff != "" {
		t.Error(diff)
	}
	if got := names(t, filepath.Join(dir, "pods")); !slices.Equal(got, []string{"uid.json"}) {
		t.Errorf("files %q", got)
	}
	// Deleting needs no room.
	if err := s.Delete("uid"); err != nil {
		t.Error(err)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	if err := s.Put(larger); err != nil {
		t.Errorf("with room again: %v", err)
	}
}

// What is on disk already is not written again, whoever wrote it; what is not there any
// more is.
func TestPutUnchanged(t *testing.T) {
	dir := t.TempDir()
	inode := func() uint64 {
		t.Helper()
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(dir, "uid.json"), &st); err != nil {
			t.Fatal(err)
		}
		return st.Ino
	}
	put := func(s *records.Store, r records.Record) uint64 {
		t.Helper()
		if err := s.Put(r); err != nil {
			t.Fatal(err)
		}
		if got := all(t, open(t, dir)); len(got) != 1 || got[0].Name != r.Name {
			t.Errorf("on disk is %v, want %v", got, r)
		}
		return inode()
	}
	s := open(t, dir)
	other := record("uid")
	other.Name = "other"
	first := put(s, record("uid"))
	if again := put(s, record("uid")); again != first {
		t.Error("the same record is written again")
	}
	next := open(t, dir)
	all(t, next)
	if again := put(next, record("uid")); again != first {
		t.Error("the record of an earlier store is written again")
	}
	if changed := put(s, other); changed == first {
		t.Error("another record is not written")
	}
	put(s, record("uid"))
	if err := os.Remove(filepath.Join(dir, "uid.json")); err != nil {
		t.Fatal(err)
	}
	put(s, record("uid"))
	if err := s.Delete("uid"); err != nil {
		t.Fatal(err)
	}
	put(s, record("uid"))
}

// Readers meet whole records only, whatever is being put.
func TestConcurrently(t *testing.T) {
	s := open(t, t.TempDir())
	if err := s.Put(record("steady")); err != nil {
		t.Fatal(err)
	}
	var pods sync.WaitGroup
	for i := range 4 {
		pods.Go(func() {
			r := record(fmt.Sprint("uid-", i))
			for round := range 50 {
				r.Name = strings.Repeat("n", round)
				err := errors.Join(s.Put(r), s.Put(record("steady")))
				if round%10 == 0 {
					err = errors.Join(err, s.Delete(r.UID))
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for range 50 {
		if got := all(t, s); len(got) < 1 || got[0].UID != "steady" {
			t.Errorf("got %v, want steady among them", got)
		}
	}
	pods.Wait()
	if got := all(t, s); len(got) != 5 {
		t.Errorf("%d records, want 5", len(got))
	}
}

// writeForever puts large and small records over each other and says of each that it
// is done.
func writeForever(dir string) error {
	s, err := records.Open(dir)
	if err != nil {
		return err
	}
	for i := 0; ; i++ {
		r := record(fmt.Sprint("uid-", i%3))
		r.NetnsPath = strings.Repeat("x", i*4096%60000)
		if err := s.Put(r); err != nil {
			return err
		}
		fmt.Println(i)
	}
}

// An agent that is killed in the middle of a Put leaves the older record or the newer
// one, and what else it left is gone once the next agent has started.
func TestKilledWhileWriting(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pods")
	for round := range 10 {
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
		cmd.Env = append(os.Environ(), writerEnv+"="+dir)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for n := 0; n < 5+round && lines.Scan(); n++ {
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); !cmd.ProcessState.Sys().(syscall.WaitStatus).Signaled() {
			t.Fatalf("the writer ended by itself: %v", err)
		}
		if got := all(t, open(t, dir)); len(got) != 3 {
			t.Fatalf("round %d: %d records, want 3", round, len(got))
		}
		for _, name := range names(t, dir) {
			if strings.HasPrefix(name, ".") {
				t.Errorf("round %d: left %s", round, name)
			}
		}
	}
}

// What an unfinished Put leaves is no record, and Open removes it.
func TestUnfinished(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	if err := os.WriteFile(filepath.Join(dir, ".new-123"), []byte(`{"vers`), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := all(t, s); len(got) != 0 {
		t.Errorf("got %v", got)
	}
	open(t, dir)
	if left := names(t, dir); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func TestDescriptorsStayFlat(t *testing.T) {
	s := open(t, t.TempDir())
	count := func() int { return len(names(t, "/proc/self/fd")) }
	round := func() {
		if err := s.Put(record("uid")); err != nil {
			t.Fatal(err)
		}
		all(t, s)
		if err := s.Delete("uid"); err != nil {
			t.Fatal(err)
		}
	}
	round()
	before := count()
	for range 100 {
		round()
	}
	if after := count(); after != before {
		t.Errorf("%d descriptors before 100 rounds, %d after", before, after)
	}
}

// On the tmpfs that the run directory is on, where flushing costs next to nothing.
func BenchmarkPut(b *testing.B) {
	netnstest.Require(b)
	for name, parent := range map[string]string{"tmpfs": "/run", "disk": b.TempDir()} {
		b.Run(name, func(b *testing.B) {
			s := open(b, filepath.Join(parent, "records-bench"))
			r := record("uid")
			b.ReportAllocs()
			for b.Loop() {
				r.Key.Cookie++ // else there is nothing to write
				if err := s.Put(r); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkAll(b *testing.B) {
	netnstest.Require(b)
	s := open(b, "/run/records-bench-all")
	for i := range 250 {
		if err := s.Put(record(fmt.Sprint("uid-", i))); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportAllocs()
	for b.Loop() {
		if got := all(b, s); len(got) != 250 {
			b.Fatal(len(got))
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

// here runs fn where the test is.
func here(fn func() error) error { return fn() }

// program writes a shell script that stands for a program that misbehaves.
func program(t *testing.T, name, script string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestChildHangs: a child that does not end is ended with the caller's deadline,
// also if a child of its own keeps the pipes open.
func TestChildHangs(t *testing.T) {
	path := program(t, "iptables-restore", "echo waiting for Godot >&2\nread line\nsleep 600 & echo $! >$0.pid\nwait\n")
	started := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		defer close(started)
		if waitForFile(t.Context(), path+".pid") == nil {
			cancel()
		}
	}()
	err := programs{restorePath: path}.restore(ctx, here, "*nat\nCOMMIT\n")
	<-started
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got the error %v, want it to be %v", err, context.Canceled)
	}
	for _, want := range []string{"running iptables-restore: ", "waiting for Godot"} {
		if !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("the error %q does not hold %q", err, want)
		}
	}
	endOrphan(t, path+".pid")
}

// waitForFile waits until path holds a line, by inotify.
func waitForFile(ctx context.Context, path string) error {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return err
	}
	events := os.NewFile(uintptr(fd), "inotify")
	defer events.Close()
	if _, err := unix.InotifyAddWatch(fd, filepath.Dir(path), unix.IN_CLOSE_WRITE); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { events.Close() })
	defer stop()
	buf := make([]byte, 4096)
	for {
		if text, err := os.ReadFile(path); err == nil && strings.Contains(string(text), "\n") {
			return nil
		}
		if _, err := events.Read(buf); err != nil {
			return err
		}
	}
}

// endOrphan ends the script's own child, whose number it wrote down.
func endOrphan(t *testing.T, path string) {
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Sscan(string(text), &pid); err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// TestChildFails: the error holds what the child said, in one line and bounded.
func TestChildFails(t *testing.T) {
	path := program(t, "ip6tables-save", "echo 'no  such\ntable' >&2; head -c 1000000 /dev/zero | tr '\\0' x >&2; exit 3\n")
	_, err := programs{savePath: path}.save(t.Context(), here)
	if err == nil || !strings.HasPrefix(err.Error(), "running ip6tables-save: exit status 3: no such table x") {
		t.Fatalf("got the error %.100v", err)
	}
	if n := len(err.Error()); n > maxStderr+100 {
		t.Errorf("the error has %d bytes", n)
	}
	if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) {
		t.Error("the error does not wrap the exit status")
	}
}

func TestSaveIsBounded(t *testing.T) {
	path := program(t, "iptables-save", "echo '*nat'; yes -- '-A OUTPUT -j ACCEPT' | head -c 5000000\n")
	_, err := programs{savePath: path}.save(t.Context(), here)
	if err == nil || !strings.Contains(err.Error(), "more than 4194304 bytes of rules") {
		t.Errorf("got the error %v", err)
	}
}

// TestLockIsPrivate: somebody who holds the host's lock of x_tables does not hold
// up a pod's rules.
func TestLockIsPrivate(t *testing.T) {
	ns := netnstest.New(t)
	b, err := New(t.Context(), Legacy)
	if err != nil {
		t.Skip(err)
	}
	lock, err := os.OpenFile("/run/xtables.lock", os.O_CREATE|os.O_RDONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	t.Setenv("XTABLES_LOCKFILE", lock.Name())
	apply(t, b, ns, redirection.DefaultOptions(), redirection.DualStack)
	remove(t, b, ns)
}

// TestChildren counts the children of each operation: that is its cost.
func TestChildren(t *testing.T) {
	for _, variant := range []Variant{NFTables, Legacy} {
		t.Run(string(variant), func(t *testing.T) {
			ns := netnstest.New(t)
			if _, err := New(t.Context(), variant); err != nil {
				t.Skip(err)
			}
			record := wrapPrograms(t, variant)
			b, err := New(t.Context(), variant)
			if err != nil {
				t.Fatal(err)
			}
			run, opts := ns.Runner(), redirection.DefaultOptions()
			restores, saves := "iptables-restore ip6tables-restore", "iptables-save ip6tables-save"
			replaces := "iptables-restore iptables-save iptables-restore ip6tables-restore ip6tables-save ip6tables-restore"
			removes := "iptables-save iptables-restore ip6tables-save ip6tables-restore"
			nothing := saves
			if variant == Legacy {
				nothing = "" // the kernel's list of tables says enough
			}
			for _, step := range []struct {
				name string
				call func() error
				want string
			}{
				{"remove nothing", func() error { return b.Remove(within(t), run) }, nothing},
				{"apply", func() error { _, err := b.Apply(within(t), run, opts); return err }, restores},
				{"verify", func() error { _, _, err := b.Verify(within(t), run, opts); return err }, saves},
				{"apply again", func() error { _, err := b.Apply(within(t), run, opts); return err }, replaces},
				{"remove", func() error { return b.Remove(within(t), run) }, removes},
			} {
				if err := step.call(); err != nil {
					t.Fatalf("%s: %v", step.name, err)
				}
				text, err := os.ReadFile(record)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.Truncate(record, 0); err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(step.want, strings.Join(strings.Fields(string(text)), " ")); diff != "" {
					t.Errorf("%s: children (-want +got):\n%s", step.name, diff)
				}
			}
		})
	}
}

// wrapPrograms puts scripts in front of the real programs that note down their
// names, without the variant, in the file returned.
func wrapPrograms(t *testing.T, variant Variant) string {
	t.Helper()
	dir := t.TempDir()
	record := filepath.Join(dir, "record")
	if err := os.WriteFile(record, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, prefix := range []string{"iptables-", "ip6tables-"} {
		for _, what := range []string{"restore", "save"} {
			name := prefix + string(variant) + "-" + what
			path, err := find(name)
			if err != nil {
				t.Fatal(err)
			}
			script := fmt.Sprintf("#!/bin/sh\necho %s >>%s\nexec %s \"$@\"\n", prefix+what, record, path)
			if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Setenv("PATH", dir+string(os.PathListSeparator)+os.Getenv("PATH"))
	return record
}

// TestFindPrograms: which programs a variant is, by what is installed.
func TestFindPrograms(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	for _, name := range []string{"iptables-restore", "iptables-save", "ip6tables-restore", "ip6tables-save"} {
		version := "iptables-restore v1.8.9 (nf_tables)"
		if strings.HasPrefix(name, "ip6") {
			version = "ip6tables-restore v1.4.21"
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\necho '"+version+"'\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	b, err := New(t.Context(), Plain)
	if err != nil {
		t.Fatal(err)
	}
	for family, legacy := range map[redirection.Families]bool{redirection.IPv4: false, redirection.IPv6: true} {
		if p := b.programs[family]; p.legacy != legacy || filepath.Dir(p.restorePath) != dir {
			t.Errorf("%s: %s, legacy %t", family, p.restorePath, p.legacy)
		}
	}
	if _, err := New(t.Context(), "none-such"); !errors.Is(err, exec.ErrNotFound) || !strings.Contains(err.Error(), "tables-none-such-restore is neither in PATH") {
		t.Errorf("got the error %v", err)
	}
}

// TestDetectSaysWhy: with programs that fail, the error names every variant's
// cause.
func TestDetectSaysWhy(t *testing.T) {
	ns := netnstest.New(t)
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	for _, infix := range []string{"", "nft-", "legacy-"} {
		for _, prefix := range []string{"iptables-", "ip6tables-"} {
			script := "#!/bin/sh\necho \"$0: Could not fetch rule set generation id\" >&2\nexit 4\n"
			for _, what := range []string{"restore", "save"} {
				if err := os.WriteFile(filepath.Join(dir, prefix+infix+what), []byte(script), 0o755); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	_, err := Detect(ctx, ns.Runner())
	for _, want := range []string{"no variant of iptables works here", "variant nft: ", "variant plain: ", "variant legacy: ", "Could not fetch rule set generation id"} {
		if !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("the error %v does not hold %q", err, want)
		}
	}
}

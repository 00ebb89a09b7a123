// SPDX-License-Identifier: Apache-2.0

package xtables

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }

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
	err := Programs{restore: path}.Restore(ctx, here, "*nat\nCOMMIT\n")
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
	_, err := Programs{save: path}.Save(t.Context(), here)
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
	_, err := Programs{save: path}.Save(t.Context(), here)
	if err == nil || !strings.Contains(err.Error(), "more than 4194304 bytes of rules") {
		t.Errorf("got the error %v", err)
	}
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
	for family, legacy := range map[redirection.Families]bool{redirection.IPv4: false, redirection.IPv6: true} {
		p, err := Find(t.Context(), Plain, family)
		if err != nil {
			t.Fatal(err)
		}
		if p.Legacy() != legacy || filepath.Dir(p.restore) != dir {
			t.Errorf("%s: %s, legacy %t", family, p.restore, p.Legacy())
		}
	}
	_, err := Find(t.Context(), "none-such", redirection.IPv6)
	if !errors.Is(err, exec.ErrNotFound) || !strings.Contains(err.Error(), "ip6tables-none-such-restore is neither in PATH") {
		t.Errorf("got the error %v", err)
	}
}

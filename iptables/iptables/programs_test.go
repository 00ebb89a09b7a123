// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
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

// TestLockIsPrivate: somebody who holds the host's lock of x_tables does not hold
// up a pod's rules.
func TestLockIsPrivate(t *testing.T) {
	ns := netnstest.New(t)
	b, err := New(t.Context(), Config{Variant: Legacy})
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
			if _, err := New(t.Context(), Config{Variant: variant}); err != nil {
				t.Skip(err)
			}
			record := wrapPrograms(t, variant)
			b, err := New(t.Context(), Config{Variant: variant})
			if err != nil {
				t.Fatal(err)
			}
			run, opts := ns.Runner(), redirection.DefaultOptions()
			restores, saves := "iptables-restore ip6tables-restore", "iptables-save ip6tables-save"
			replaces := "iptables-save iptables-restore ip6tables-save ip6tables-restore"
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
				{"remove", func() error { return b.Remove(within(t), run) }, replaces},
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
			path, err := exec.LookPath(filepath.Join("/usr/sbin", name))
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
	_, err := Detect(ctx, ns.Runner(), Config{})
	for _, want := range []string{"no variant of iptables works here", "variant nft: ", "variant plain: ", "variant legacy: ", "Could not fetch rule set generation id"} {
		if !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("the error %v does not hold %q", err, want)
		}
	}
}

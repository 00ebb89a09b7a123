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
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

// TestLockIsPrivate: somebody who holds the host's lock of x_tables does not hold
// up the rules of pods: 50 are enrolled, verified, taken over and withdrawn.
func TestLockIsPrivate(t *testing.T) {
	eachVariant(t, func(t *testing.T, b *Backend) {
		holdHostsLock(t)
		t.Setenv("XTABLES_LOCKFILE", "/run/xtables.lock")
		work := make(chan *netnstest.NS)
		var workers sync.WaitGroup
		for range 4 {
			workers.Go(func() {
				for ns := range work {
					if err := live(within(t), b, ns.Runner()); err != nil {
						t.Error(err)
					}
				}
			})
		}
		for range 50 {
			work <- netnstest.New(t)
		}
		close(work)
		workers.Wait()
	})
}

// live takes a pod through its life.
func live(ctx context.Context, b *Backend, run redirection.Runner) error {
	opts := redirection.DefaultOptions()
	first := opts
	first.InboundBypass = true
	_, applyErr := b.Apply(ctx, run, first)
	_, replaceErr := b.Apply(ctx, run, opts)
	_, differences, verifyErr := b.Verify(ctx, run, opts)
	_, foreignErr := b.RemoveForeign(ctx, run)
	_, otherErr := b.RemoveOther(ctx, run)
	removeErr := b.Remove(ctx, run)
	err := errors.Join(applyErr, replaceErr, verifyErr, foreignErr, otherErr, removeErr)
	if err == nil && len(differences) > 0 {
		err = fmt.Errorf("%d differences: %s", len(differences), differences[0])
	}
	return err
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
			nothing, removes := "", "" // over netlink
			if variant == Legacy {
				removes = replaces // and the kernel's list of tables says that there are none
			}
			other := opts
			other.InboundBypass = true
			for _, step := range []struct {
				name string
				call func() error
				want string
			}{
				{"remove nothing", func() error { return b.Remove(within(t), run) }, nothing},
				{"apply", func() error { _, err := b.Apply(within(t), run, opts); return err }, restores},
				{"verify", func() error { _, _, err := b.Verify(within(t), run, opts); return err }, saves},
				{"apply again", func() error { _, err := b.Apply(within(t), run, opts); return err }, saves},
				{"apply other options", func() error { _, err := b.Apply(within(t), run, other); return err }, replaces},
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
	record := filepath.Join(t.TempDir(), "record")
	if err := os.WriteFile(record, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	putInFront(t, variant, func(name, path string) string {
		return fmt.Sprintf("echo %s >>%s\nexec %s \"$@\"\n", name, record, path)
	})
	return record
}

// putInFront makes a script for each of a variant's programs that [New] then
// finds. It gets the program's name without the variant, and its path.
func putInFront(t *testing.T, variant Variant, script func(name, path string) string) {
	t.Helper()
	dir := t.TempDir()
	for _, prefix := range []string{"iptables-", "ip6tables-"} {
		for _, what := range []string{"restore", "save"} {
			name := prefix + string(variant) + "-" + what
			path, err := exec.LookPath(filepath.Join("/usr/sbin", name))
			if err != nil {
				t.Skip(err)
			}
			if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script(prefix+what, path)), 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Setenv("PATH", dir+string(os.PathListSeparator)+os.Getenv("PATH"))
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

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/iptables/iptables"
)

// countEnv names the file that counted children leave a mark in, realPathEnv the PATH
// on which the programs themselves are.
const (
	countEnv    = "AMBIENTD_BENCH_COUNT"
	realPathEnv = "AMBIENTD_BENCH_PATH"
)

// countedPrograms are those that the iptables backend may start.
func countedPrograms() []string {
	var names []string
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, variant := range []string{"", "-nft", "-legacy"} {
			for _, use := range []string{"", "-restore", "-save"} {
				names = append(names, family+variant+use)
			}
		}
	}
	return append(names, "xtables-nft-multi", "xtables-legacy-multi", "nft")
}

func isCounted(program string) bool { return slices.Contains(countedPrograms(), program) }

// countedChild is what runs when this program is called by the name of one that is
// counted: it leaves a mark and becomes that program. It returns only errors.
func countedChild(program string) error {
	file, err := os.OpenFile(os.Getenv(countEnv), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return fmt.Errorf("opening the file of marks: %w", err)
	}
	if _, err := file.WriteString(program + "\n"); err != nil {
		return fmt.Errorf("leaving a mark: %w", err)
	}
	if err := os.Setenv("PATH", os.Getenv(realPathEnv)); err != nil {
		return fmt.Errorf("restoring PATH: %w", err)
	}
	path, err := exec.LookPath(program)
	if err != nil {
		return fmt.Errorf("finding the program itself: %w", err)
	}
	return unix.Exec(path, os.Args, os.Environ())
}

// counter counts child processes by standing in for the programs that are started:
// a directory with links to this program, first on PATH.
type counter struct {
	dir, marks string
}

func newCounter(dir string) (*counter, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("finding this program: %w", err)
	}
	if dir, err = os.MkdirTemp(dir, "counted-"); err != nil {
		return nil, fmt.Errorf("making a directory for counting: %w", err)
	}
	c := &counter{dir: dir, marks: filepath.Join(dir, "marks")}
	for _, program := range countedPrograms() {
		// What is not installed must go on missing.
		if _, err := exec.LookPath(program); errors.Is(err, exec.ErrNotFound) {
			continue
		}
		if err := os.Symlink(self, filepath.Join(c.dir, program)); err != nil {
			return nil, fmt.Errorf("standing in for %s: %w", program, err)
		}
	}
	return c, nil
}

// env is the environment of a process whose children are to be counted.
func (c *counter) env() []string {
	path := os.Getenv("PATH")
	return []string{countEnv + "=" + c.marks, realPathEnv + "=" + path, "PATH=" + c.dir + ":" + path}
}

// backend returns an iptables backend whose children are counted. PATH is ours only
// while it looks for its programs.
func (c *counter) backend(ctx context.Context) (_ *iptables.Backend, err error) {
	path := os.Getenv("PATH")
	for _, setting := range c.env() {
		name, value, _ := strings.Cut(setting, "=")
		if err := os.Setenv(name, value); err != nil {
			return nil, fmt.Errorf("setting %s: %w", name, err)
		}
	}
	defer func() { err = errors.Join(err, os.Setenv("PATH", path)) }()
	if err := os.WriteFile(c.marks, nil, 0o600); err != nil {
		return nil, fmt.Errorf("making the file of marks: %w", err)
	}
	return iptables.New(ctx, iptables.Config{Variant: iptables.NFTables})
}

// count returns how many children fn starts.
func (c *counter) count(fn func() error) (int, error) {
	if err := os.WriteFile(c.marks, nil, 0o600); err != nil {
		return 0, fmt.Errorf("emptying the file of marks: %w", err)
	}
	if err := fn(); err != nil {
		return 0, err
	}
	marks, err := os.ReadFile(c.marks)
	if err != nil {
		return 0, fmt.Errorf("reading the marks: %w", err)
	}
	return strings.Count(string(marks), "\n"), nil
}

// loopbackUp sets lo up in the netns of the calling thread.
func loopbackUp() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("looking up lo: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("setting lo up: %w", err)
	}
	return nil
}

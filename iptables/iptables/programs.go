// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
)

const (
	// maxRun ends a child that hangs even if the caller set no deadline. A run
	// takes some 10 ms; a node under load may need a hundred times that.
	maxRun = 30 * time.Second
	// maxSave bounds what a pod can make the agent hold: a privileged pod may have
	// any number of rules of its own.
	maxSave = 4 << 20
	// maxStderr is what an error carries of a child's complaints.
	maxStderr = 2 << 10
)

// programs are the two programs of one variant and family.
type programs struct {
	restorePath, savePath string
	family                redirection.Families
	legacy                bool // they speak to x_tables
}

// Files that show the netns of the thread that reads them; those of /proc/net
// show the main thread's.
const (
	// ipv6Addresses exists with IPv6 in the kernel.
	ipv6Addresses = "/proc/thread-self/net/if_inet6"
	// Each lists the tables that x_tables has for one family, and exists once the
	// kernel module is there.
	legacyTables4 = "/proc/thread-self/net/ip_tables_names"
	legacyTables6 = "/proc/thread-self/net/ip6_tables_names"
)

// restore applies a script; other chains and rules stay (--noflush).
func (p programs) restore(ctx context.Context, run redirection.Runner, script string) error {
	if script == "" {
		return nil
	}
	stdin, err := memfd(script)
	if err != nil {
		return fmt.Errorf("writing the script for %s: %w", filepath.Base(p.restorePath), err)
	}
	return errors.Join(runChild(ctx, run, stdin, io.Discard, p.restorePath, "--noflush"), stdin.Close())
}

// save reads the rules of all tables. It makes none: x_tables would register an
// empty table just for being asked about it, which costs every packet of the pod
// and misleads whoever later looks for the variant in use. So it asks only where
// tables are.
func (p programs) save(ctx context.Context, run redirection.Runner) (saved, error) {
	present, err := p.present(run)
	if err != nil || !present {
		return saved{}, err
	}
	out := &bounded{limit: maxSave}
	if err := runChild(ctx, run, nil, out, p.savePath); err != nil {
		return nil, err
	}
	if out.exceeded {
		return nil, fmt.Errorf("running %s: more than %d bytes of rules", filepath.Base(p.savePath), maxSave)
	}
	return parseSave(out.kept.String())
}

// present reports, without a child process, whether the netns can have rules
// that savePath would show.
func (p programs) present(run redirection.Runner) (bool, error) {
	present := true
	err := run(func() (err error) {
		if p.family == redirection.IPv6 {
			if present, err = exists(ipv6Addresses); err != nil || !present {
				return err
			}
		}
		if p.legacy {
			names := legacyTables4
			if p.family == redirection.IPv6 {
				names = legacyTables6
			}
			present, err = hasContent(names)
		}
		return err
	})
	if err != nil {
		return false, fmt.Errorf("looking for tables of %s: %w", p.family, err)
	}
	return present, nil
}

// hasIPv6 reports whether the kernel has IPv6 for the netns, on or off.
func hasIPv6(run redirection.Runner) (has bool, err error) {
	err = run(func() (err error) {
		has, err = exists(ipv6Addresses)
		return err
	})
	return has, err
}

func exists(path string) (bool, error) {
	_, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

func hasContent(path string) (bool, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return len(text) > 0, err
}

// memfd returns a file in memory that holds text, read from its start.
func memfd(text string) (*os.File, error) {
	fd, err := unix.MemfdCreate("iptables-restore", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("creating a memfd: %w", err)
	}
	f := os.NewFile(uintptr(fd), "iptables-restore")
	_, err = f.WriteString(text)
	if err == nil {
		_, err = f.Seek(0, io.SeekStart)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// runChild runs one program in the netns until it ends or ctx does. The thread
// waits inside: the child's death signal is bound to the thread that started it,
// and what a Runner does with its thread afterwards is its own affair.
func runChild(ctx context.Context, run redirection.Runner, stdin *os.File, stdout io.Writer, path string, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, maxRun)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	if stdin != nil {
		cmd.Stdin = stdin // a file, so that no goroutine has to copy
	}
	stderr := &bounded{limit: maxStderr}
	cmd.Stdout, cmd.Stderr = stdout, stderr
	// The lock of x_tables guards the tables of one netns, but its file is the
	// host's: a run there that holds it would block all pods, and ours the host's.
	// The child's own standard input is a file that nobody else locks. The
	// nf_tables variant takes no lock.
	cmd.Env = append(cmd.Environ(), "XTABLES_LOCKFILE=/proc/self/fd/0", "LC_ALL=C")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = time.Second // a killed child's own children may keep its pipes open
	err := run(cmd.Run)
	if err == nil {
		return nil
	}
	// A child that ctx killed reports the signal, which says nothing of the cause.
	if ctxErr := context.Cause(ctx); ctxErr != nil && !errors.Is(err, ctxErr) {
		err = fmt.Errorf("%w: %w", ctxErr, err)
	}
	if text := strings.Join(strings.Fields(stderr.kept.String()), " "); text != "" {
		return fmt.Errorf("running %s: %w: %s", filepath.Base(path), err, text)
	}
	return fmt.Errorf("running %s: %w", filepath.Base(path), err)
}

// bounded keeps the first bytes written to it and takes, but drops, the rest: a
// writer that failed would end the child by SIGPIPE instead of letting it finish.
type bounded struct {
	kept     bytes.Buffer
	limit    int
	exceeded bool
}

func (b *bounded) Write(p []byte) (int, error) {
	keep := min(len(p), b.limit-b.kept.Len())
	if keep < len(p) {
		b.exceeded = true
	}
	b.kept.Write(p[:keep]) // never fails
	return len(p), nil
}

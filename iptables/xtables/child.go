// SPDX-License-Identifier: Apache-2.0

package xtables

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
	// maxStderr is what an error carries of a child's complaints.
	maxStderr = 2 << 10
)

// lock is the environment setting that chooses the file by which runs of the
// x_tables programs exclude each other. It guards the tables of one netns, but by
// default its file is the host's: a run inside a pod that holds it would block all
// pods, and the host's would block ours. The nf_tables programs take no lock.
type lock string

const (
	// privateLock is the child's own standard input, a file that nobody else locks.
	privateLock lock = "XTABLES_LOCKFILE=/proc/self/fd/0"
	// hostsLock is the default, whatever that is here.
	hostsLock lock = ""
)

// child is one run of a program.
type child struct {
	path   string
	args   []string
	stdin  *os.File // a file, so that no goroutine has to copy; nil: /dev/null
	stdout io.Writer
	lock   lock
}

// run runs the program in the netns until it ends or ctx does. The thread waits
// inside: the child's death signal is bound to the thread that started it, and
// what a Runner does with its thread afterwards is its own affair.
func (c child) run(ctx context.Context, run redirection.Runner) error {
	ctx, cancel := context.WithTimeout(ctx, maxRun)
	defer cancel()
	cmd := exec.CommandContext(ctx, c.path, c.args...)
	if c.stdin != nil {
		cmd.Stdin = c.stdin
	}
	stderr := &bounded{limit: maxStderr}
	cmd.Stdout, cmd.Stderr = c.stdout, stderr
	cmd.Env = append(cmd.Environ(), "LC_ALL=C")
	if c.lock != hostsLock {
		cmd.Env = append(cmd.Env, string(c.lock))
	}
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
		return fmt.Errorf("running %s: %w: %s", filepath.Base(c.path), err, text)
	}
	return fmt.Errorf("running %s: %w", filepath.Base(c.path), err)
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

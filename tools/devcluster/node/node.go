// SPDX-License-Identifier: Apache-2.0

// Package node makes what a cluster takes for a machine: network, mount, process, UTS and
// IPC namespaces with an init process of ours, which starts the node's programs and reaps
// what they leave. All that runs on the node is in its process namespace, so the kernel ends
// all of it with the init process, and the mounts and links with it.
//
// It owns the namespaces and the processes. It refuses to know what the programs are.
package node

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// InitCommand is the argument by which this program knows that it is to be a node's init
// process.
const InitCommand = "node-init"

// Config says what a node's init process prepares.
type Config struct {
	// Hostname is the node's name.
	Hostname string
	// Control is the path of the socket on which the init process takes orders.
	Control string
	// Binds are mounted in order, before any program starts.
	Binds []Bind
	// Overlays are directories of the machine to which the node writes into a layer of its own.
	Overlays []Overlay
}

// Bind shows a file or directory of the cluster at a path of the node.
type Bind struct{ Source, Target string }

// Overlay puts a layer at Upper (with Work for the kernel) over the directory Target.
type Overlay struct{ Target, Upper, Work string }

// Process names a process for good: a pid alone is used again.
type Process struct {
	PID int `json:"pid"`
	// Start is the time of its start, in the kernel's ticks after Boot.
	Start uint64 `json:"start"`
	Boot  string `json:"boot"`
}

// Lifetime says what a node's init process does when the process that started it ends.
type Lifetime int

const (
	// UntilStopped is for a node that goes on.
	UntilStopped Lifetime = iota
	// WithParent is for a node that ends with the thread that started it.
	WithParent
)

// Start starts a node. record is called with its process before that does anything: if this
// process ends before record has returned, so does the node. The caller's thread must be
// locked if the lifetime is WithParent.
func Start(ctx context.Context, cfg Config, life Lifetime, log *os.File, record func(Process) error) (Process, error) {
	orders, send, err := os.Pipe()
	if err != nil {
		return Process{}, fmt.Errorf("making a pipe: %w", err)
	}
	defer send.Close()
	report, answer, err := os.Pipe()
	if err != nil {
		orders.Close()
		return Process{}, fmt.Errorf("making a pipe: %w", err)
	}
	defer report.Close()
	cmd := initProcess(life, log, orders, answer)
	err = cmd.Start()
	orders.Close()
	answer.Close()
	if err != nil {
		return Process{}, fmt.Errorf("starting a process in namespaces of its own (this needs root): %w", err)
	}
	go func() {
		_ = cmd.Wait() // only to reap it: how it ended is in its log, and Stop sees that it did
	}()
	process, err := Identify(cmd.Process.Pid)
	if err != nil {
		return Process{}, err
	}
	if err := record(process); err != nil {
		return Process{}, err
	}
	if err := json.NewEncoder(send).Encode(cfg); err != nil {
		return process, fmt.Errorf("telling the node's init process what to do: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { report.Close() })
	defer stop()
	said, err := io.ReadAll(report)
	if err != nil {
		return process, fmt.Errorf("waiting for the node's init process: %w", errors.Join(ctx.Err(), err))
	}
	if text := strings.TrimSpace(string(said)); text != ready {
		return process, fmt.Errorf("preparing node %s: %s (see %s)", cfg.Hostname, text, log.Name())
	}
	return process, nil
}

func initProcess(life Lifetime, log, orders, answer *os.File) *exec.Cmd {
	// Not CommandContext: the node outlives the call, and whoever has its Process ends it.
	cmd := exec.Command("/proc/self/exe", InitCommand) //nolint:noctx // see above
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{orders, answer}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC,
		Setsid:     true,
	}
	if life == WithParent {
		cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	}
	return cmd
}

// Identify returns the process that has the pid now.
func Identify(pid int) (Process, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return Process{}, fmt.Errorf("looking at process %d: %w", pid, err)
	}
	// The command's name is in parentheses and may hold anything; starttime is field 22.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(fields) < 20 {
		return Process{}, fmt.Errorf("looking at process %d: its stat has %d fields", pid, len(fields))
	}
	start, err := strconv.ParseUint(fields[19], 10, 64)
	if err != nil {
		return Process{}, fmt.Errorf("looking at process %d: %w", pid, err)
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return Process{}, fmt.Errorf("reading the boot ID: %w", err)
	}
	return Process{PID: pid, Start: start, Boot: strings.TrimSpace(string(boot))}, nil
}

// Stop kills the node, with all that runs on it, and returns when it is gone. A pid that is
// another process' by now is left alone.
func (p Process) Stop(ctx context.Context) error {
	fd, err := p.open()
	if err != nil || fd < 0 {
		return err
	}
	defer unix.Close(fd)
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("killing process %d: %w", p.PID, err)
	}
	for {
		timeout := 200 // milliseconds, so that ctx is looked at
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, timeout)
		switch {
		case n > 0:
			return nil
		case err != nil && !errors.Is(err, unix.EINTR):
			return fmt.Errorf("waiting for process %d: %w", p.PID, err)
		case ctx.Err() != nil:
			return fmt.Errorf("waiting for process %d to end: %w", p.PID, ctx.Err())
		}
	}
}

// Alive says whether the process is still there.
func (p Process) Alive() bool {
	fd, err := p.open()
	if err != nil || fd < 0 {
		return false
	}
	defer unix.Close(fd)
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	return n == 0 && err == nil
}

// open returns a pidfd of the process, or -1 if it is gone.
func (p Process) open() (int, error) {
	fd, err := unix.PidfdOpen(p.PID, 0)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
		return -1, nil
	}
	if err != nil {
		return -1, fmt.Errorf("opening process %d: %w", p.PID, err)
	}
	// Only now that the pid cannot change hands any more is it worth comparing.
	if !p.holdsPID() {
		unix.Close(fd)
		return -1, nil
	}
	return fd, nil
}

// holdsPID says whether the pid is still this process'.
func (p Process) holdsPID() bool {
	now, err := Identify(p.PID)
	return err == nil && now == p
}

// InNetns calls f on a thread in the node's network namespace, and ends that thread after.
// Sockets opened by f, and processes started by it, stay in there.
func (p Process) InNetns(f func() error) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		fd, err := unix.Open(fmt.Sprintf("/proc/%d/ns/net", p.PID), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			result <- fmt.Errorf("opening the network namespace of process %d: %w", p.PID, err)
			return
		}
		defer unix.Close(fd)
		if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
			result <- fmt.Errorf("entering the network namespace of process %d: %w", p.PID, err)
			return
		}
		result <- f()
	}()
	return <-result
}

// tail returns the last lines of a log, for an error.
func tail(path string, lines int) string {
	file, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer file.Close()
	var last []string
	scanner := bufio.NewScanner(file)
	scanner.Buffer(nil, 1<<20)
	for scanner.Scan() {
		if last = append(last, scanner.Text()); len(last) > lines {
			last = last[1:]
		}
	}
	return strings.Join(last, "\n")
}

// stopDeadline bounds how long a program may take for its end after SIGTERM.
const stopDeadline = 10 * time.Second

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"ambientd/tools/enclave"
)

const (
	zdsSocket    = "/var/run/ztunnel/ztunnel.sock"
	startTimeout = 30 * time.Second
	// connectPause is between two attempts of the node proxy to connect.
	connectPause = time.Millisecond
)

// agentCommand says how to start ambientd.
type agentCommand struct {
	redirection, podsFrom string
	args                  []string // further ones
	env                   []string
}

// node is the real agent, and a node proxy that acks at once.
type node struct {
	agent *enclave.Process
	proxy *ackingProxy
	// ready is how long it took from the start of the agent until it was ready and the
	// node proxy had acked all pods.
	ready time.Duration
}

// startNode starts ambientd and connects a node proxy, and waits until the agent is
// ready and the proxy has what there is.
func (b *bench) startNode(ctx context.Context, c agentCommand) (_ *node, err error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	began := time.Now()
	n := &node{}
	n.agent, err = b.starter.Start(enclave.Command{
		Name: "ambientd", Path: filepath.Join(b.cfg.bin, "ambientd"), LogFile: filepath.Join(b.dir, "ambientd.log"), Env: c.env,
		Args: slices.Concat([]string{
			"run", "--pods-from=" + c.podsFrom, "--node-name=" + benchNode, "--redirection=" + c.redirection, "--log-format=json",
		}, c.args),
	})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("%w; ambientd's log ends with:\n%s", err, n.agent.Log().Tail(10)), n.stop())
		}
	}()
	if n.proxy, err = connectProxy(ctx, n.agent); err != nil {
		return nil, err
	}
	if err := n.proxy.awaitReady(ctx); err != nil {
		return nil, err
	}
	acked := time.Since(began)
	line, err := n.agent.Log().Await(ctx, 0, says("ready"))
	if err != nil {
		return nil, fmt.Errorf("waiting for ambientd to be ready: %w", err)
	}
	n.ready = max(acked, line.Time().Sub(began))
	return n, nil
}

// connectProxy connects as soon as the agent listens.
func connectProxy(ctx context.Context, agent *enclave.Process) (*ackingProxy, error) {
	for {
		proxy, err := dialProxy(zdsSocket)
		switch {
		case err == nil:
			return proxy, nil
		case !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ECONNREFUSED):
			return nil, err
		}
		select {
		case <-time.After(connectPause):
		case <-agent.Ended():
			return nil, enclave.ErrEnded
		case <-ctx.Done():
			return nil, fmt.Errorf("connecting to ambientd as a node proxy: %w", ctx.Err())
		}
	}
}

// stop ends both.
func (n *node) stop() error {
	var err error
	if n.proxy != nil {
		err = n.proxy.close()
	}
	return errors.Join(err, n.agent.Stop())
}

// says matches the lines of a log with that message.
func says(message string) func(enclave.Line) bool {
	return func(l enclave.Line) bool { return l.Field("msg") == message }
}

// idle waits until the agent has nothing to do any more, such as closing the sockets of
// earlier removals, and returns its CPU time.
func idle(ctx context.Context, agent *enclave.Process) (time.Duration, error) {
	const (
		look  = 50 * time.Millisecond
		quiet = time.Millisecond // of CPU between two looks: timers of the runtime
	)
	last, err := cpuTime(agent.Pid())
	for err == nil {
		select {
		case <-time.After(look):
		case <-ctx.Done():
			return 0, ctx.Err()
		}
		var now time.Duration
		now, err = cpuTime(agent.Pid())
		if err == nil && now-last < quiet {
			return now, nil
		}
		last = now
	}
	return 0, err
}

// cpuTime returns the CPU time that a process has used so far, ended threads included,
// to the nanosecond: /proc counts in hundredths of a second.
func cpuTime(pid int) (time.Duration, error) {
	// The clock of a process (clock_getcpuclockid(3)): the complement of its ID, and
	// CPUCLOCK_SCHED in the lowest bits.
	const cpuClockSched = 2
	clock := int32(^pid)<<3 | cpuClockSched
	var t unix.Timespec
	if err := unix.ClockGettime(clock, &t); err != nil {
		return 0, fmt.Errorf("reading the CPU time of process %d: %w", pid, err)
	}
	return time.Duration(t.Nano()), nil
}

// hadChildren tells whether a process has, or has had, child processes, by the kernel's
// own account. Whatever is executed makes page faults, which are added to the parent's
// account of ended children (cminflt of proc_pid_stat(5)); a child that has not been
// waited for is still there.
func hadChildren(pid int) (bool, error) {
	const ppid, cminflt = 4, 11 // fields, from 1
	own, err := statFields(strconv.Itoa(pid))
	if err != nil {
		return false, err
	}
	if own[cminflt-1] != "0" {
		return true, nil
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return false, fmt.Errorf("listing processes: %w", err)
	}
	for _, entry := range entries {
		if _, err := strconv.Atoi(entry.Name()); err != nil {
			continue
		}
		// One that has ended meanwhile has been waited for by nobody but its parent.
		if fields, err := statFields(entry.Name()); err == nil && fields[ppid-1] == strconv.Itoa(pid) {
			return true, nil
		}
	}
	return false, nil
}

// statFields returns the fields of /proc/PID/stat.
func statFields(pid string) ([]string, error) {
	text, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return nil, fmt.Errorf("reading about process %s: %w", pid, err)
	}
	// The second one is a name in brackets, and may hold spaces and brackets.
	end := bytes.LastIndexByte(text, ')')
	if end < 0 {
		return nil, fmt.Errorf("reading about process %s: no name in %q", pid, text)
	}
	fields := append([]string{pid, ""}, strings.Fields(string(text[end+1:]))...)
	if len(fields) < 20 {
		return nil, fmt.Errorf("reading about process %s: only %d fields", pid, len(fields))
	}
	return fields, nil
}

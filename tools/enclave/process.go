// SPDX-License-Identifier: Apache-2.0

package enclave

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// stopPatience is how long Stop waits for a process to end by itself.
const stopPatience = 5 * time.Second

// Starter starts processes that end with this one, even if this one is killed. Its
// methods are safe for concurrent use.
type Starter struct {
	work chan func() error
	done chan error
	home *os.File
}

// NewStarter returns a Starter whose processes start in the network namespace of
// now. It lives as long as the program.
func NewStarter() (*Starter, error) {
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("opening our network namespace: %w", err)
	}
	s := &Starter{work: make(chan func() error), done: make(chan error), home: home}
	go func() {
		// One thread for all: the death signal of a child is bound to the thread that
		// forked it, and a child starts in the network namespace of that thread.
		runtime.LockOSThread()
		for fn := range s.work {
			s.done <- fn()
		}
	}()
	return s, nil
}

// Command says what to start.
type Command struct {
	// Name is what messages call the process.
	Name string
	// Path is the program, Args its arguments without the program's name.
	Path string
	Args []string
	// Env is added to our own environment.
	Env []string
	// Netns is the network namespace to start in; nil is our own.
	Netns *Netns
	// LogFile takes what the process writes to standard output and error. Empty: only
	// the Log in memory has it.
	LogFile string
}

// Process is a running program.
type Process struct {
	name  string
	cmd   *exec.Cmd
	log   *Log
	ended chan struct{}
	err   error // of Wait; valid once ended is closed
}

// Start starts a process. It gets no signals of our terminal: it is ended by Stop.
func (s *Starter) Start(c Command) (*Process, error) {
	log, err := newLog(c.LogFile)
	if err != nil {
		return nil, err
	}
	read, write, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("making a pipe: %w", err), log.close())
	}
	//nolint:noctx // ended by Stop, in the order that its user wants
	cmd := exec.Command(c.Path, c.Args...)
	cmd.Env = append(os.Environ(), c.Env...)
	cmd.Stdout, cmd.Stderr = write, write
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	err = s.start(cmd, c.Netns)
	write.Close()
	if err != nil {
		read.Close()
		return nil, errors.Join(fmt.Errorf("starting %s: %w", c.Name, err), log.close())
	}

	p := &Process{name: c.Name, cmd: cmd, log: log, ended: make(chan struct{})}
	go func() {
		readErr := log.follow(read)
		read.Close()
		p.err = errors.Join(cmd.Wait(), readErr, log.close())
		close(p.ended)
	}()
	return p, nil
}

// start runs cmd.Start on the Starter's thread, inside netns if there is one.
func (s *Starter) start(cmd *exec.Cmd, netns *Netns) error {
	s.work <- func() error {
		if netns == nil {
			return cmd.Start()
		}
		f, err := os.Open(netns.path)
		if err != nil {
			return fmt.Errorf("opening a network namespace: %w", err)
		}
		defer f.Close()
		if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("entering %s: %w", netns.path, err)
		}
		err = cmd.Start()
		if back := unix.Setns(int(s.home.Fd()), unix.CLONE_NEWNET); back != nil {
			// Everything started later would be in the wrong namespace.
			panic(fmt.Sprintf("enclave: returning from %s: %v", netns.path, back))
		}
		return err
	}
	return <-s.done
}

// Pid returns the process' ID.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Log returns what the process writes.
func (p *Process) Log() *Log { return p.log }

// Ended is closed when the process has ended and its log is complete.
func (p *Process) Ended() <-chan struct{} { return p.ended }

// Wait waits for the process' end, and returns an error if it was not an exit with
// code 0, or if ctx ended first.
func (p *Process) Wait(ctx context.Context) error {
	select {
	case <-p.ended:
		if p.err != nil {
			return fmt.Errorf("%s: %w", p.name, p.err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("waiting for %s: %w", p.name, ctx.Err())
	}
}

// Usage returns the CPU time, user and system, that the ended process took.
func (p *Process) Usage() time.Duration {
	<-p.ended
	return p.cmd.ProcessState.UserTime() + p.cmd.ProcessState.SystemTime()
}

// Stop asks the process to end, waits, and kills it if it does not. The error says
// how it ended, unless that was with code 0 or by the signal.
func (p *Process) Stop() error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stopping %s: %w", p.name, err)
	}
	patience := time.NewTimer(stopPatience)
	defer patience.Stop()
	select {
	case <-p.ended:
	case <-patience.C:
		if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return fmt.Errorf("killing %s: %w", p.name, err)
		}
		<-p.ended
		return fmt.Errorf("%s did not end within %v of SIGTERM and was killed", p.name, stopPatience)
	}
	var exit *exec.ExitError
	if errors.As(p.err, &exit) {
		if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() && status.Signal() == syscall.SIGTERM {
			return nil
		}
	}
	if p.err != nil {
		return fmt.Errorf("%s: %w", p.name, p.err)
	}
	return nil
}

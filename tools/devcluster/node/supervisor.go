// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
)

// supervisor is what the init process knows of the programs that it has started.
type supervisor struct {
	// mu is held from before a fork until the program is noted, so that no end of a process
	// is looked up before.
	mu       sync.Mutex
	programs []*program
}

type program struct {
	Program
	pid   int
	ended chan struct{} // closed when it has
	how   string
}

func (s *supervisor) start(p Program) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if old := s.find(p.Name); old != nil && old.how == "" {
		return fmt.Errorf("%s runs already", p.Name)
	}
	log, err := os.OpenFile(p.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("opening the log of %s: %w", p.Name, err)
	}
	defer log.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return fmt.Errorf("starting %s: %w", p.Name, err)
	}
	defer null.Close()
	// Not os/exec: it waits for its children by itself, and the one wait for all would take
	// their ends away from it.
	pid, err := syscall.ForkExec(p.Args[0], p.Args, &syscall.ProcAttr{
		Dir: "/", Env: p.Env,
		Files: []uintptr{null.Fd(), log.Fd(), log.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return fmt.Errorf("starting %s: %w", p.Args[0], err)
	}
	s.programs = slices.DeleteFunc(s.programs, func(old *program) bool { return old.Name == p.Name })
	s.programs = append(s.programs, &program{Program: p, pid: pid, ended: make(chan struct{})})
	return nil
}

func (s *supervisor) restart(name string) error {
	s.mu.Lock()
	p := s.find(name)
	s.mu.Unlock()
	if p == nil {
		return fmt.Errorf("%s was never started here", name)
	}
	return s.start(p.Program)
}

func (s *supervisor) stop(name string) error {
	s.mu.Lock()
	p := s.find(name)
	if p == nil {
		s.mu.Unlock()
		return fmt.Errorf("%s was never started here", name)
	}
	var err error
	if p.how == "" { // so its pid is still its own
		err = syscall.Kill(p.pid, syscall.SIGTERM)
	}
	s.mu.Unlock()
	if err != nil {
		return fmt.Errorf("ending %s: %w", name, err)
	}
	select {
	case <-p.ended:
		return nil
	case <-time.After(stopDeadline):
	}
	s.mu.Lock()
	if p.how == "" {
		err = syscall.Kill(p.pid, syscall.SIGKILL)
	}
	s.mu.Unlock()
	if err != nil {
		return fmt.Errorf("killing %s: %w", name, err)
	}
	<-p.ended
	return nil
}

func (s *supervisor) list() []Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []Status
	for _, p := range s.programs {
		all = append(all, Status{Name: p.Name, PID: p.pid, Ended: p.how, Log: p.Log})
	}
	return all
}

// find returns the program of that name; the caller holds the lock.
func (s *supervisor) find(name string) *program {
	for _, p := range s.programs {
		if p.Name == name {
			return p
		}
	}
	return nil
}

// reap takes note of every process that has ended, ours and those that were left to the
// init process.
func (s *supervisor) reap() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		for _, p := range s.programs {
			if p.pid == pid && p.how == "" {
				p.how = describe(status)
				close(p.ended)
			}
		}
	}
}

func describe(status syscall.WaitStatus) string {
	if status.Signaled() {
		return "killed by " + status.Signal().String()
	}
	return fmt.Sprintf("exit code %d", status.ExitStatus())
}

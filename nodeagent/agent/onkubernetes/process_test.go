// SPDX-License-Identifier: Apache-2.0

//go:build apitest

package onkubernetes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// process is an agent in a process of its own.
type process struct {
	t       *testing.T
	cmd     *exec.Cmd
	log     string // file
	takenUp int    // pods that it had when it was ready
}

// spawn starts the agent and waits until it is ready.
func (s *soak) spawn() *process {
	s.t.Helper()
	p := &process{t: s.t, log: filepath.Join(s.t.TempDir(), "log")}
	log, err := os.Create(p.log)
	must(s.t, err)
	defer log.Close()
	p.cmd = s.command(s.program)
	p.cmd.Stderr = log
	p.cmd.Env = append(os.Environ(), "GOTRACEBACK=all")
	must(s.t, p.cmd.Start())
	s.t.Cleanup(func() {
		if p.cmd.ProcessState == nil {
			p.kill()
		}
	})
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); pause(context.Background(), 10*time.Millisecond) {
		if status, err := s.status(); err == nil && status.Ready {
			p.takenUp = len(status.Pods)
			return p
		}
	}
	s.t.Fatalf("the agent is not ready after %s; its log ends with:\n%s", patience, p.tail())
	return nil
}

// kill kills it.
func (p *process) kill() {
	if err := p.cmd.Process.Kill(); err != nil {
		p.t.Error(err)
	}
	_ = p.cmd.Wait() // it says that it was killed
}

// quit ends it by SIGQUIT, which has Go write all goroutines to the log, and returns their
// number.
func (p *process) quit() int {
	p.t.Helper()
	must(p.t, p.cmd.Process.Signal(syscall.SIGQUIT))
	_ = p.cmd.Wait() // it says that it was killed
	content, err := os.ReadFile(p.log)
	must(p.t, err)
	count := bytes.Count(content, []byte("\ngoroutine "))
	if count == 0 {
		p.t.Errorf("the agent wrote no goroutines on SIGQUIT: %s", p.tail())
	}
	return count
}

func (p *process) tail() string {
	content, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(string(content), "\n")
	return strings.Join(lines[max(0, len(lines)-40):], "\n")
}

// footprint is what a process holds.
type footprint struct {
	files, netns, threads int
	memory                int64 // its own, without pages of files, in bytes
}

func (f footprint) String() string {
	return fmt.Sprintf("%d files (%d network namespaces), %d threads, %.1f MiB of its own memory", f.files, f.netns, f.threads, float64(f.memory)/(1<<20))
}

func (p *process) footprint() footprint {
	p.t.Helper()
	proc := fmt.Sprintf("/proc/%d/", p.cmd.Process.Pid)
	entries, err := os.ReadDir(proc + "fd")
	must(p.t, err)
	f := footprint{files: len(entries), memory: field(p.t, proc+"status", "RssAnon:")}
	for _, entry := range entries {
		target, err := os.Readlink(proc + "fd/" + entry.Name())
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			p.t.Error(err)
		}
		if strings.HasPrefix(target, "net:[") {
			f.netns++
		}
	}
	tasks, err := os.ReadDir(proc + "task")
	must(p.t, err)
	f.threads = len(tasks)
	return f
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"ambientd/tools/netnstest"
)

// patience bounds what a script awaits; nothing takes this long.
const patience = 30 * time.Second

func TestMain(m *testing.M) {
	testscript.Main(inNamespaces{m}, map[string]func(){"ambientd": main})
}

// inNamespaces runs the scripts, and what they start, in namespaces of their own.
type inNamespaces struct{ m *testing.M }

func (n inNamespaces) Run() int { return netnstest.Main(n.m) }

// TestScripts runs the real main as far as it needs no privilege.
func TestScripts(t *testing.T) { runScripts(t, "testdata/script") }

// TestAgentScripts runs whole agents.
func TestAgentScripts(t *testing.T) {
	netnstest.Require(t)
	runScripts(t, "testdata/agent")
}

func runScripts(t *testing.T, dir string) {
	t.Helper()
	testscript.Run(t, testscript.Params{
		Dir:  dir,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"start-agent": startAgent},
		Setup: func(env *testscript.Env) error {
			// A socket's path has room for 107 bytes, which $WORK may fill.
			run, err := os.MkdirTemp("", "ambientd")
			if err != nil {
				return err
			}
			env.Defer(func() { os.RemoveAll(run) })
			env.Setenv("RUN", run)
			// With the race detector a process sleeps a second before it exits.
			env.Setenv("GORACE", "atexit_sleep_ms=0")
			return nil
		},
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
	})
}

// startAgent is the script command "start-agent FLAGS...": it runs ambientd in the
// background, returns once it is ready, and ends it after the script, by SIGTERM.
func startAgent(ts *testscript.TestScript, neg bool, args []string) {
	if neg {
		ts.Fatalf("start-agent cannot be negated")
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	ambientd, err := lookPath(ts.Getenv("PATH"))
	ts.Check(err)
	cmd := exec.CommandContext(ctx, ambientd, append([]string{"run", "--log-format=json"}, args...)...)
	cmd.Env = append(os.Environ(), "PATH="+ts.Getenv("PATH"), "GORACE="+ts.Getenv("GORACE"))
	cmd.Dir = ts.Getenv("WORK")
	log, err := cmd.StderrPipe()
	ts.Check(err)
	ts.Check(cmd.Start())
	lines := bufio.NewReader(log)
	ts.Defer(func() {
		defer cancel()
		err := cmd.Process.Signal(syscall.SIGTERM)
		rest, readErr := io.ReadAll(lines)
		if err := errors.Join(err, readErr, cmd.Wait()); err != nil {
			ts.Fatalf("the agent did not end cleanly: %v\n%s", err, rest)
		}
	})
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			ts.Fatalf("the agent ended before it was ready: %v", err)
		}
		ts.Logf("agent: %s", line)
		if strings.Contains(line, `"msg":"ready"`) {
			return
		}
	}
}

// lookPath finds the ambientd that testscript made of this test binary.
func lookPath(path string) (string, error) {
	for _, dir := range filepath.SplitList(path) {
		file := filepath.Join(dir, "ambientd")
		if info, err := os.Stat(file); err == nil && info.Mode()&0o111 != 0 {
			return file, nil
		}
	}
	return "", errors.New("no ambientd in PATH")
}

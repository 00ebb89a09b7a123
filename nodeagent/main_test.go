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

	"ambientd/cni-plugin/podevent"
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

// TestLogReaderGoes: the agent outlives whoever reads its log.
func TestLogReaderGoes(t *testing.T) {
	netnstest.Require(t)
	dir, err := os.MkdirTemp("", "ambientd") // short, for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	// Called by this name the test binary is ambientd.
	agent := exec.CommandContext(t.Context(), "/proc/self/exe", "run", "--log-format=json", "--node-name=n",
		"--run-dir="+dir+"/run", "--zds-socket="+dir+"/zds.sock", "--pods-from=manifests="+dir)
	agent.Args[0] = "ambientd"
	agent.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0")
	log, err := agent.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := agent.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(log)
	for lines.Scan() && !strings.Contains(lines.Text(), `"msg":"ready"`) {
		continue
	}
	if err := log.Close(); err != nil {
		t.Fatal(err)
	}
	for i := range 3 { // each makes a line in the log
		req := podevent.Request{Command: podevent.CommandDel, Network: "net", ContainerID: "c1", IfName: "eth0"}
		if _, err := podevent.Call(t.Context(), dir+"/run/private/cni.sock", req, nil); err != nil {
			t.Fatalf("call %d: %v", i, err)
		}
	}
	if err := agent.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := agent.Wait(); err != nil {
		t.Errorf("the agent ended with %v", err)
	}
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

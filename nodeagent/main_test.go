// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"

	"ambientd/cni-plugin/podevent"
	"ambientd/nodeagent/zds/zdstest"
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
func TestScripts(t *testing.T) { runScripts(t, scripts(t, "testdata/script")...) }

// TestAgentScripts runs whole agents, one after the other: each takes the host's rule for
// its own.
func TestAgentScripts(t *testing.T) {
	netnstest.Require(t)
	for _, script := range scripts(t, "testdata/agent") {
		t.Run(filepath.Base(script), func(t *testing.T) { runScripts(t, script) })
	}
}

func scripts(t *testing.T, dir string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.txtar"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts in %s (%v)", dir, err)
	}
	return files
}

func runScripts(t *testing.T, files ...string) {
	t.Helper()
	testscript.Run(t, testscript.Params{
		Files: files,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"start-agent": startAgent,
			"start-proxy": startProxy,
			"add-pod":     func(ts *testscript.TestScript, neg bool, args []string) { addPod(t, ts, neg, args) },
		},
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
		ts.Logf("agent, from then on:\n%s", rest)
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

// startProxy is the script command "start-proxy SOCKET": a node proxy that acks
// everything connects, until the script ends.
func startProxy(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: start-proxy SOCKET")
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	peer, err := zdstest.Dial(ctx, args[0], zdstest.AckAll)
	ts.Check(err)
	ts.Defer(func() { peer.Close() })
	ts.Check(peer.AwaitReady(ctx))
}

// addPod is the script command "add-pod RUNDIR NAMESPACE NAME NUMBER": it makes a sandbox
// that is connected to the host, its netns at /run/netns/NAME, and sends what the plugin
// would. NUMBER makes its address, 10.1.NUMBER.2.
func addPod(t *testing.T, ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 4 {
		ts.Fatalf("usage: add-pod RUNDIR NAMESPACE NAME NUMBER")
	}
	runDir, namespace, name := args[0], args[1], args[2]
	number, err := strconv.ParseUint(args[3], 10, 8)
	ts.Check(err)
	ns, path := netnstest.New(t), filepath.Join("/run/netns", name)
	gateway, ip := netip.AddrFrom4([4]byte{10, 1, byte(number), 1}), netip.AddrFrom4([4]byte{10, 1, byte(number), 2})
	netnstest.Connect(t,
		netnstest.Port{NS: netnstest.Self(t), Name: "veth" + args[3], Addrs: []netip.Prefix{netip.PrefixFrom(gateway, 24)}},
		netnstest.Port{NS: ns, Name: "eth0", Addrs: []netip.Prefix{netip.PrefixFrom(ip, 24)}, Gateways: []netip.Addr{gateway}})
	ts.Check(os.MkdirAll("/run/netns", 0o755))
	ts.Check(os.WriteFile(path, nil, 0o600))
	ts.Check(unix.Mount(fmt.Sprintf("/proc/self/fd/%d", ns.File().Fd()), path, "", unix.MS_BIND, ""))
	ts.Defer(func() { ts.Check(errors.Join(unix.Unmount(path, unix.MNT_DETACH), os.Remove(path))) })

	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	reply, err := podevent.Call(ctx, filepath.Join(runDir, "private", "cni.sock"), podevent.Request{
		Command: podevent.CommandAdd, Network: "net", ContainerID: "sandbox-of-" + name, IfName: "eth0", NetnsPath: path,
		Pod: podevent.Pod{Namespace: namespace, Name: name}, IPs: []netip.Addr{ip},
	}, ns.File())
	ts.Check(err)
	if reply.Error != nil {
		ts.Fatalf("ADD: %v", reply.Error)
	}
}

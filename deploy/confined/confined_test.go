// SPDX-License-Identifier: Apache-2.0

// Package confined has no code of its own: its tests run the agent with the capabilities
// of the DaemonSet, and without each of them, so that none is granted without a reason.
package confined

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"ambientd/nodeagent/podnetns"
	"ambientd/tools/netnstest"
)

const (
	// confinedEnv has the names of capabilities, for the process that becomes the agent.
	confinedEnv = "DEPLOY_CONFINED"
	// findEnv has the root of a proc file system, for a process that only looks for the pod.
	findEnv = "DEPLOY_FIND"
)

func TestMain(m *testing.M) {
	if names, ok := os.LookupEnv(confinedEnv); ok {
		fmt.Fprintln(os.Stderr, "confined:", become(strings.Split(names, ","), os.Args[1:]))
		os.Exit(1)
	}
	if root, ok := os.LookupEnv(findEnv); ok {
		fmt.Fprintln(os.Stderr, find(root))
		os.Exit(0)
	}
	os.Exit(netnstest.Main(m))
}

// numbers are those of the capabilities that the DaemonSet may name.
func numbers() map[corev1.Capability]uintptr {
	return map[corev1.Capability]uintptr{
		"NET_ADMIN": unix.CAP_NET_ADMIN, "SYS_ADMIN": unix.CAP_SYS_ADMIN,
		"SYS_PTRACE": unix.CAP_SYS_PTRACE, "NET_BROADCAST": unix.CAP_NET_BROADCAST,
	}
}

// become replaces the process by the program, as a runtime starts a container's: with the
// named capabilities, and without a way to more.
func become(names []string, program []string) error {
	runtime.LockOSThread()
	var kept []uintptr
	for _, name := range names {
		kept = append(kept, numbers()[corev1.Capability(name)])
	}
	for number := range uintptr(unix.CAP_LAST_CAP + 1) {
		if slices.Contains(kept, number) {
			continue
		}
		// Root gets at exec what the bounding set has.
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, number, 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("dropping capability %d: %w", number, err)
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	env := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, confinedEnv+"=") })
	return unix.Exec(program[0], program, env)
}

// find looks for the pod as the agent does, and says what came of it.
func find(procRoot string) string {
	host, err := podnetns.OpenHost()
	if err != nil {
		return err.Error()
	}
	finder, err := podnetns.NewFinder(podnetns.FinderConfig{Host: host, Holders: podnetns.NewPins(), ProcRoot: procRoot, NetnsDirs: []string{}})
	if err != nil {
		return err.Error()
	}
	got, missing := finder.Find(context.Background(), []podnetns.Wanted{{UID: uid, IPs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}}})
	if got[uid] != nil {
		return "found"
	}
	return missing[uid].Error()
}

// granted are the capabilities of the DaemonSet's agent.
func granted(t *testing.T) []string {
	t.Helper()
	content, err := os.ReadFile("../manifests/30-daemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var set appsv1.DaemonSet
	if err := yaml.UnmarshalStrict(content, &set); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, c := range set.Spec.Template.Spec.Containers[0].SecurityContext.Capabilities.Add {
		if _, known := numbers()[c]; !known {
			t.Fatalf("this test does not know the number of %s", c)
		}
		names = append(names, string(c))
	}
	return names
}

func build(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "ambientd")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", program, "../../nodeagent")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building the agent: %v: %s", err, out)
	}
	return program
}

// node has one pod of the mesh, which runs already, with a process of more capabilities
// than the agent has.
type node struct{ manifests, proc string }

const uid = "2d626580-270d-4ff0-9c8b-12b960e669c6"

func newNode(t *testing.T) node {
	t.Helper()
	n := node{manifests: t.TempDir(), proc: t.TempDir()}
	write := func(path, text string) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(n.manifests, "pod.yaml"), `apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {istio.io/dataplane-mode: ambient}}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, uid: `+uid+`}
status: {phase: Running, podIPs: [{ip: 10.0.0.1}]}
`)
	ns := netnstest.New(t)
	netnstest.Connect(t, netnstest.Port{NS: ns, Name: "eth0", Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/32")}},
		netnstest.Port{NS: ns, Name: "peer"})
	resident := exec.Command("cat")
	alive, err := resident.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	ns.Do(t, resident.Start)
	t.Cleanup(func() {
		if err := errors.Join(alive.Close(), resident.Wait()); err != nil {
			t.Error(err)
		}
	})
	// The cgroup is made up; whether the netns may be looked at is the kernel's answer.
	pid := strconv.Itoa(resident.Process.Pid)
	write(filepath.Join(n.proc, pid, "cgroup"), "0::/kubepods/besteffort/pod"+uid+"/771dc945d8ef\n")
	if err := os.Symlink("/proc/"+pid+"/ns", filepath.Join(n.proc, pid, "ns")); err != nil {
		t.Fatal(err)
	}
	return n
}

// agent is the command that runs the agent.
func (n node) agent(t *testing.T, program string) []string {
	t.Helper()
	dir := t.TempDir()
	return []string{
		program, "run", "--pods-from=manifests=" + n.manifests, "--node-name=n", "--run-dir=" + dir + "/run",
		"--zds-socket=" + dir + "/z/z.sock", "--proc-root=" + n.proc, "--redirection=nftables", "--proxy-timeout=10ms",
	}
}

// run runs the command with the capabilities until its log has the text, or it ends. It
// returns what it logged, and its exit code, -1 if it had to be killed.
func run(t *testing.T, capabilities []string, until string, env string, command ...string) (string, int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", command...)
	cmd.Env = append(os.Environ(), confinedEnv+"="+strings.Join(capabilities, ","))
	if env != "" {
		cmd.Env = append(cmd.Env, env)
	}
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	ended := false
	for lines := bufio.NewScanner(stderr); lines.Scan(); {
		fmt.Fprintln(&log, lines.Text())
		if !ended && strings.Contains(lines.Text(), until) {
			ended = true // the rest is read all the same
			if err := cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
				t.Error(err)
			}
		}
	}
	if err := cmd.Wait(); err != nil && cmd.ProcessState.ExitCode() < 0 {
		t.Errorf("with %q it ended with %v; log:\n%s", capabilities, err, log.String())
	}
	return log.String(), cmd.ProcessState.ExitCode()
}

const (
	// What the agent says where it has found the pod, and only a proxy is missing.
	enrolling   = "no node proxy is connected"
	noticedLate = "changes in pods are noticed late"
	refused     = "operation not permitted"
	hidden      = "(1 could not be looked at: permission denied)"
)

func TestGrantedCapabilitiesSuffice(t *testing.T) {
	netnstest.Require(t)
	n, all := newNode(t), granted(t)
	log, code := run(t, all, enrolling, "", n.agent(t, build(t))...)
	if code != 0 || !strings.Contains(log, enrolling) || strings.Contains(log, noticedLate) || strings.Contains(log, refused) {
		t.Errorf("exit code %d, log:\n%s", code, log)
	}
}

func TestEachCapabilityIsNeeded(t *testing.T) {
	netnstest.Require(t)
	program, n, all := build(t), newNode(t), granted(t)
	if len(all) != len(numbers()) {
		t.Fatalf("the DaemonSet grants %q, of which this test does not try all", all)
	}
	without := func(capability string) []string {
		return slices.DeleteFunc(slices.Clone(all), func(name string) bool { return name == capability })
	}
	for _, capability := range []string{"NET_ADMIN", "SYS_ADMIN"} {
		if log, code := run(t, without(capability), "msg=ready", "", n.agent(t, program)...); code != 1 || !strings.Contains(log, refused) {
			t.Errorf("without %s: exit code %d, log:\n%s", capability, code, log)
		}
	}
	if log, code := run(t, without("NET_BROADCAST"), enrolling, "", n.agent(t, program)...); code != 0 || !strings.Contains(log, noticedLate) {
		t.Errorf("without NET_BROADCAST: exit code %d, log:\n%s", code, log)
	}
	finding := findEnv + "=" + n.proc
	if got, _ := run(t, all, "\x00", finding, "/proc/self/exe"); got != "found\n" {
		t.Errorf("with all capabilities the finder says %s", got)
	}
	if got, _ := run(t, without("SYS_PTRACE"), "\x00", finding, "/proc/self/exe"); !strings.Contains(got, hidden) {
		t.Errorf("without SYS_PTRACE the finder says %s", got)
	}
}

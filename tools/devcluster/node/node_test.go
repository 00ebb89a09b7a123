// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestMain lets the test's binary be the init process, as devcluster's is.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == InitCommand {
		fmt.Fprintln(os.Stderr, Init())
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// begin starts a node that ends with the test at the latest.
func begin(t *testing.T, change func(*Config)) (Process, Control) {
	t.Helper()
	dir := t.TempDir()
	log, err := os.Create(filepath.Join(dir, "init.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cfg := Config{Hostname: "a-node", Control: filepath.Join(dir, "init.sock")}
	if change != nil {
		change(&cfg)
	}
	p, err := Start(t.Context(), cfg, UntilStopped, log, func(p Process) error {
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			if err := p.Stop(ctx); err != nil {
				t.Error(err)
			}
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return p, Control{Socket: cfg.Control}
}

// await asks until the program has ended.
func await(t *testing.T, c Control, name string) Status {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		programs, err := c.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range programs {
			if p.Name == name && p.Ended != "" {
				return p
			}
		}
	}
	t.Fatalf("%s has not ended", name)
	return Status{}
}

// shell runs a script on the node and returns what it printed.
func shell(t *testing.T, c Control, name, script string) string {
	t.Helper()
	log := filepath.Join(t.TempDir(), name+".log")
	if err := c.Start(t.Context(), Program{Name: name, Args: []string{"/bin/sh", "-c", script}, Env: []string{"PATH=/usr/bin:/bin"}, Log: log}); err != nil {
		t.Fatal(err)
	}
	await(t, c, name)
	printed, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(printed))
}

func TestNamespaces(t *testing.T) {
	p, c := begin(t, nil)
	got := shell(t, c, "look", "hostname; cat /proc/1/comm; ls /sys/class/net/ >/dev/null; readlink /proc/self/ns/net")
	lines := strings.Split(got, "\n")
	if len(lines) != 3 || lines[0] != "a-node" {
		t.Fatalf("the node says %q", got)
	}
	for _, kind := range []string{"net", "mnt", "pid", "uts", "ipc"} {
		ours, err := os.Readlink("/proc/self/ns/" + kind)
		if err != nil {
			t.Fatal(err)
		}
		its, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", p.PID, kind))
		if err != nil || its == ours {
			t.Errorf("%s namespace: %s, %v, the same as the machine's", kind, its, err)
		}
		if kind == "net" && its != lines[2] {
			t.Errorf("programs run in %s, the init process in %s", lines[2], its)
		}
	}
	var inside string
	err := p.InNetns(func() (err error) {
		inside, err = os.Readlink("/proc/thread-self/ns/net")
		return err
	})
	if err != nil || inside != lines[2] {
		t.Errorf("InNetns was in %s, %v, want %s", inside, err, lines[2])
	}
}

func TestBindsAndOverlays(t *testing.T) {
	dir := t.TempDir()
	target := filepath.Join(dir, "etc")
	shown := filepath.Join(dir, "shown")
	for _, d := range []string{target, shown} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	constant := filepath.Join(dir, "constant")
	for path, content := range map[string]string{filepath.Join(target, "below"): "machine", filepath.Join(shown, "file"): "shown", constant: "10"} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	_, c := begin(t, func(cfg *Config) {
		cfg.Overlays = []Overlay{{Target: target, Upper: filepath.Join(dir, "layer", "upper"), Work: filepath.Join(dir, "layer", "work")}}
		cfg.Binds = []Bind{
			{Source: shown, Target: filepath.Join(target, "cni", "net.d")},
			{Source: constant, Target: "/proc/sys/kernel/panic"},
		}
	})
	before, err := os.ReadFile("/proc/sys/kernel/panic")
	if err != nil {
		t.Fatal(err)
	}
	got := shell(t, c, "write", fmt.Sprintf("cd %s && cat below cni/net.d/file && echo changed >below && echo new >added && cat /proc/sys/kernel/panic && echo 77 >/proc/sys/kernel/panic", target))
	if got != "machineshown10" {
		t.Errorf("the node sees %q", got)
	}
	if content, err := os.ReadFile(filepath.Join(target, "below")); err != nil || string(content) != "machine" {
		t.Errorf("the machine's file is %q now, %v", content, err)
	}
	if _, err := os.Stat(filepath.Join(target, "added")); err == nil {
		t.Error("what the node wrote is in the machine's directory")
	}
	if after, err := os.ReadFile("/proc/sys/kernel/panic"); err != nil || string(after) != string(before) {
		t.Errorf("the machine's sysctl is %q now, %v, was %q", after, err, before)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(mounts), dir) {
		t.Errorf("mounts of the node are seen on the machine (%v)", err)
	}
}

func TestMountFails(t *testing.T) {
	dir := t.TempDir()
	log, err := os.Create(filepath.Join(dir, "init.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cfg := Config{Hostname: "x", Control: filepath.Join(dir, "s"), Binds: []Bind{{Source: filepath.Join(dir, "missing"), Target: dir}}}
	p, err := Start(t.Context(), cfg, UntilStopped, log, func(Process) error { return nil })
	if err == nil || !strings.Contains(err.Error(), "missing") {
		t.Errorf("got %v, want to be told what is missing", err)
	}
	if err := p.Stop(t.Context()); err != nil || p.Alive() {
		t.Errorf("the node goes on (%v)", err)
	}
}

func TestPrograms(t *testing.T) {
	_, c := begin(t, nil)
	log := filepath.Join(t.TempDir(), "log")
	sleeper := Program{Name: "sleeper", Args: []string{"/bin/sleep", "1000"}, Log: log}
	if err := c.Start(t.Context(), sleeper); err != nil {
		t.Fatal(err)
	}
	if err := c.Start(t.Context(), sleeper); err == nil {
		t.Error("it was started twice")
	}
	if err := c.Running(t.Context(), "sleeper"); err != nil {
		t.Error(err)
	}
	if err := c.Stop(t.Context(), "sleeper"); err != nil {
		t.Fatal(err)
	}
	if got := await(t, c, "sleeper").Ended; got != "killed by terminated" {
		t.Errorf("stopped: %q", got)
	}
	if err := c.Restart(t.Context(), "sleeper"); err != nil {
		t.Fatal(err)
	}
	if err := c.Running(t.Context(), "sleeper"); err != nil {
		t.Errorf("after starting it again: %v", err)
	}
	shell(t, c, "failing", "echo because of this; exit 3")
	if err := c.Running(t.Context(), "failing"); err == nil || !strings.Contains(err.Error(), "exit code 3") || !strings.Contains(err.Error(), "because of this") {
		t.Errorf("got %v, want exit code and the end of the log", err)
	}
	for what, err := range map[string]error{
		"restarting": c.Restart(t.Context(), "nobody"),
		"stopping":   c.Stop(t.Context(), "nobody"),
		"starting":   c.Start(t.Context(), Program{Name: "nobody", Args: []string{"/no/such/program"}, Log: log}),
	} {
		if err == nil {
			t.Errorf("%s what is not there is no error", what)
		}
	}
}

// All that runs on the node ends with it, also what was left to the init process, and what
// does not want to.
func TestStopEndsAll(t *testing.T) {
	p, c := begin(t, nil)
	shell(t, c, "parent", "setsid sh -c 'trap \"\" TERM INT HUP; exec sleep 1000' </dev/null >/dev/null 2>&1 &")
	left := inPIDNamespace(t, p)
	if len(left) != 2 { // the init process and the one that was left
		t.Fatalf("processes %v run on the node, want two", left)
	}
	if err := p.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, pid := range left {
		if runs(pid) {
			t.Errorf("process %d is still there", pid)
		}
	}
	if p.Alive() {
		t.Error("the node says that it is alive")
	}
	if err := p.Stop(t.Context()); err != nil {
		t.Errorf("ending it again: %v", err)
	}
}

// A pid that was given to another process is not touched.
func TestStopOfAnotherProcess(t *testing.T) {
	p, _ := begin(t, nil)
	for _, other := range []Process{{PID: p.PID, Start: p.Start + 1, Boot: p.Boot}, {PID: p.PID, Start: p.Start, Boot: "another"}} {
		if err := other.Stop(t.Context()); err != nil {
			t.Error(err)
		}
		if other.Alive() || !p.Alive() {
			t.Errorf("%+v was taken for %+v", other, p)
		}
	}
}

// If the node could not be written down, nobody will ever end it: it must not begin.
func TestNotRecorded(t *testing.T) {
	dir := t.TempDir()
	log, err := os.Create(filepath.Join(dir, "init.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	var p Process
	cannot := errors.New("the disk is full")
	_, err = Start(t.Context(), Config{Control: filepath.Join(dir, "s")}, UntilStopped, log, func(started Process) error {
		p = started
		return cannot
	})
	if !errors.Is(err, cannot) {
		t.Errorf("got %v, want %v", err, cannot)
	}
	for deadline := time.Now().Add(10 * time.Second); p.Alive(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it goes on, though nobody knows of it")
		}
	}
}

func TestControlRefusesNonsense(t *testing.T) {
	_, c := begin(t, nil)
	if _, err := c.ask(t.Context(), request{Op: "dance"}); err == nil || !strings.Contains(err.Error(), "dance") {
		t.Errorf("got %v", err)
	}
	conn, err := net.Dial("unix", c.Socket)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write([]byte("no JSON")); err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if _, err := c.List(t.Context()); err != nil {
		t.Errorf("after nonsense: %v", err)
	}
}

// inPIDNamespace returns the processes, as the machine sees them, of the node.
func inPIDNamespace(t *testing.T, p Process) []int {
	t.Helper()
	want, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid_for_children", p.PID))
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, entry := range entries {
		var pid int
		if _, err := fmt.Sscan(entry.Name(), &pid); err != nil {
			continue
		}
		if got, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid)); err == nil && got == want {
			pids = append(pids, pid)
		}
	}
	return pids
}

// runs says whether there is such a process that has not ended. It asks once: one that has ended
// may be gone altogether a moment later.
func runs(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(stat), ") Z ") && !strings.Contains(string(stat), ") X ")
}

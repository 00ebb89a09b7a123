// SPDX-License-Identifier: Apache-2.0

package podnetns_test

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"ambientd/tools/netnstest"
)

// leaderlessEnv makes the test's binary a process that outlives its main thread.
const leaderlessEnv = "PODNETNS_TEST_LEADERLESS"

// leaderless ends the main thread, and lives on in others.
func leaderless() {
	go outlive()
	endMainThread()
}

// outlive writes a byte once the main thread has ended, and ends the process when nobody can
// write to its standard input.
func outlive() {
	for {
		if _, err := os.Readlink("/proc/self/ns/net"); err != nil {
			break
		}
		runtime.Gosched()
	}
	_, err := os.Stdout.WriteString(".")
	if err == nil {
		_, err = io.Copy(io.Discard, os.Stdin)
	}
	if err != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

// endMainThread takes thread after thread until it has the main one.
func endMainThread() {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		unix.Syscall(unix.SYS_EXIT, 0, 0, 0) // not exit_group: this thread alone
	}
	go endMainThread()
	select {}
}

// leaderless starts a real process in the netns, of which the main thread has ended, and shows it
// as procfs does: with a cgroup on the threads that live.
func (n *node) leaderless(ns *netnstest.NS, cgroup string) {
	n.tb.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Stdin, cmd.Env = n.life, append(os.Environ(), leaderlessEnv+"=1")
	out, err := cmd.StdoutPipe()
	n.must(err)
	ns.Do(n.tb, cmd.Start)
	n.tb.Cleanup(func() {
		n.must(cmd.Process.Kill())
		cmd.Wait()
	})
	_, err = io.ReadFull(out, make([]byte, 1))
	n.must(err)
	pid := strconv.Itoa(cmd.Process.Pid)
	tasks, err := os.ReadDir(filepath.Join("/proc", pid, "task"))
	n.must(err)
	n.must(os.MkdirAll(filepath.Join(n.proc, pid, "task"), 0o755))
	n.must(os.Symlink(filepath.Join("/proc", pid, "ns"), filepath.Join(n.proc, pid, "ns")))
	n.cgroup(pid, "/")
	for _, task := range tasks {
		of, shown := filepath.Join("/proc", pid, "task", task.Name(), "ns"), filepath.Join(pid, "task", task.Name())
		n.must(os.Mkdir(filepath.Join(n.proc, shown), 0o755))
		n.must(os.Symlink(of, filepath.Join(n.proc, shown, "ns")))
		if task.Name() == pid {
			n.cgroup(shown, "/")
		} else {
			n.cgroup(shown, cgroup)
		}
	}
}

// A process whose main thread has ended leads to its netns like any other.
func TestFindByThread(t *testing.T) {
	n := newNode(t)
	own, host := n.netns("10.0.0.1"), netnstest.Self(t)
	n.leaderless(host, podCgroup(uid1))
	n.check(map[string]any{uid1: "none of 1 processes leads to it"}, wantedPod(uid1, "10.0.0.1"))
	n.leaderless(own, podCgroup(uid1))
	n.check(map[string]any{uid1: own}, wantedPod(uid1, "10.0.0.1"))
}

// Nor does the pod get away from the recorded netns by ending the main thread there.
func TestFindDecoyBesideThread(t *testing.T) {
	for _, decoyFirst := range []string{"decoy first", "decoy last"} {
		t.Run(decoyFirst, func(t *testing.T) {
			n := newNode(t)
			own, decoy := n.netns("10.0.0.9"), n.netns("10.0.0.1")
			if decoyFirst == "decoy first" {
				n.resident(decoy, podCgroup(uid1))
			}
			n.resident(own, systemService)
			n.leaderless(own, podCgroup(uid1))
			if decoyFirst != "decoy first" {
				n.resident(decoy, podCgroup(uid1))
			}
			n.check(map[string]any{uid1: "still in the recorded netns"}, n.recorded(uid1, n.file(own, "cni-1"), own, "10.0.0.1"))
		})
	}
}

// A zombie has a thread too, but not one that lives.
func TestFindAmongZombies(t *testing.T) {
	n := newNode(t)
	own := n.netns("10.0.0.1")
	cmd := exec.Command("true")
	own.Do(t, cmd.Start)
	n.must(awaitZombie(cmd.Process.Pid))
	pid := strconv.Itoa(cmd.Process.Pid)
	n.must(os.Symlink(filepath.Join("/proc", pid), filepath.Join(n.proc, pid)))
	n.check(map[string]any{uid1: "none of 1 processes leads to it"}, wantedPod(uid1, "10.0.0.1"))
	n.must(cmd.Wait())
	n.check(map[string]any{uid1: "none of 1 processes leads to it"}, wantedPod(uid1, "10.0.0.1"))
}

// awaitZombie waits until the process has ended, and leaves it as it is.
func awaitZombie(pid int) error {
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

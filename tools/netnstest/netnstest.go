// SPDX-License-Identifier: Apache-2.0

// Package netnstest runs a package's tests against a real kernel without
// touching the machine they run on.
//
// Main, called from TestMain, re-executes the test binary in network and mount
// namespaces of its own, and in a user namespace with root mapped where the
// caller is not root. So "the host's network namespace" of a test is a fresh
// one, /run is a private tmpfs (xtables.lock, /run/netns), and both vanish with
// the process. NS is one more network namespace inside it, standing for a
// pod, a node or a peer; Connect wires two of them.
//
// It owns namespaces, links and sockets inside them. It knows nothing of rules,
// marks' meanings or the agent, and imports nothing of it, so every package's
// tests may use it.
package netnstest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The stages of a test process, kept in its environment because that is what
// a re-executed binary (ours, and the fuzz workers that package testing starts)
// inherits.
const (
	stageEnv    = "AMBIENTD_NETNSTEST"
	stageEnter  = "enter"   // namespaces are fresh, nothing is set up in them yet
	stageReady  = "ready"   // set up; tests may run
	stageRefuse = "refused" // followed by ": " and the reason: kernel tests skip
)

// Main runs m's tests inside namespaces of their own and returns the exit code:
//
//	func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }
//
// Where the system refuses the namespaces the tests run where they are, and
// those that call Require, New or Self skip with what is missing.
func Main(m *testing.M) int {
	switch os.Getenv(stageEnv) {
	case "":
		code, err := reexec()
		if err == nil {
			return code
		}
		setStage(refusal(err))
	case stageEnter:
		if err := setUp(); err != nil {
			setStage(refusal(err))
			break
		}
		setStage(stageReady)
	}
	return m.Run()
}

// Require skips the test unless the process has namespaces of its own, and
// fails it if the package's TestMain does not call Main: without that, a test
// would work on the machine's own network.
func Require(tb testing.TB) {
	tb.Helper()
	stage := os.Getenv(stageEnv)
	if reason, refused := strings.CutPrefix(stage, stageRefuse+": "); refused {
		tb.Skip(reason)
	}
	if stage != stageReady {
		tb.Fatal("this package's TestMain does not call netnstest.Main")
	}
}

// setStage cannot fail: name and value hold neither NUL nor '='.
func setStage(stage string) {
	if err := os.Setenv(stageEnv, stage); err != nil {
		panic(err)
	}
}

// reexec runs this binary again with the same arguments in fresh namespaces and
// returns its exit code. An error means that it could not be started.
func reexec() (int, error) {
	// The death signal is bound to the thread that forks, not to the process:
	// a thread that ended early would kill the tests. This one is never unlocked.
	runtime.LockOSThread()
	// os/exec cannot restart a Cmd, hence one for each attempt. Root without
	// CAP_SYS_ADMIN, as in many containers, may still be allowed a user namespace.
	var cmd *exec.Cmd
	var err error
	if os.Geteuid() == 0 {
		cmd, err = start(0)
	}
	if cmd == nil {
		cmd, err = start(syscall.CLONE_NEWUSER)
	}
	if err != nil {
		return 0, err
	}
	forwardSignals(cmd.Process)
	var exit *exec.ExitError
	if err := cmd.Wait(); err != nil && (!errors.As(err, &exit) || !exit.Exited()) {
		fmt.Fprintf(os.Stderr, "netnstest: the test process: %v\n", err)
		return 1, nil
	}
	return cmd.ProcessState.ExitCode(), nil
}

func start(userns uintptr) (*exec.Cmd, error) {
	// No deadline: that is the test process's own matter (-timeout).
	cmd := exec.CommandContext(context.Background(), "/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), stageEnv+"="+stageEnter)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS | userns,
		Pdeathsig:  syscall.SIGKILL,
	}
	if userns != 0 {
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getegid(), Size: 1}}
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return cmd, nil
}

// forwardSignals passes on what a person or `go test` (SIGQUIT on a hang, which
// prints the stacks that matter) sends to the process they know of.
func forwardSignals(to *os.Process) {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	go func() {
		for s := range signals {
			if err := to.Signal(s); errors.Is(err, os.ErrProcessDone) {
				return
			}
		}
	}()
}

// setUp makes the fresh namespaces fit for tests: mounts made here stay here,
// /run is empty and private, and lo is up as on every host.
func setUp() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making mounts private: %w", err)
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return fmt.Errorf("mounting a tmpfs on /run: %w", err)
	}
	return loopbackUp()
}

// loopbackUp works on the netns of the calling thread.
func loopbackUp() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("looking up lo: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("setting lo up: %w", err)
	}
	return nil
}

// refusal says what the system refused, and how to get it.
func refusal(err error) string {
	return fmt.Sprintf("%s: needs network and mount namespaces of its own: %v; %s",
		stageRefuse, err, advice(readSysctl))
}

func readSysctl(path string) string {
	b, err := os.ReadFile("/proc/sys/" + path)
	if err != nil {
		return "" // the switch does not exist on this kernel, so it refuses nothing
	}
	return strings.TrimSpace(string(b))
}

// advice names the switch that is off, asking sysctl for each known one.
func advice(sysctl func(path string) string) string {
	for _, known := range []struct{ path, refusing, want string }{
		{"user/max_user_namespaces", "0", "10000"},
		{"user/max_net_namespaces", "0", "10000"},
		{"kernel/unprivileged_userns_clone", "0", "1"},
		{"kernel/apparmor_restrict_unprivileged_userns", "1", "0"},
	} {
		if sysctl(known.path) == known.refusing {
			return fmt.Sprintf("run as root, or allow it: sysctl -w %s=%s",
				strings.ReplaceAll(known.path, "/", "."), known.want)
		}
	}
	return "run as root; in a container, with CAP_SYS_ADMIN and a seccomp profile that allows clone and mount"
}

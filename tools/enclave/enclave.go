// SPDX-License-Identifier: Apache-2.0

package enclave

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ErrRefused is wrapped by errors that say that the system gives no namespaces;
// their text says how to allow them.
var ErrRefused = errors.New("the system refuses namespaces of our own")

// insideEnv holds the directory of the run in the environment of the process that
// is inside, and of nobody else.
const insideEnv = "AMBIENTD_ENCLAVE"

// exitRefused is how the process inside says that its namespaces are of no use.
const exitRefused = 125

// Run runs this program once more, with the same arguments, in namespaces of its
// own, where Run calls inside, and returns its exit code. ctx and the signals
// INT and TERM end the context of inside.
//
// dir is a fresh directory, the same on both sides. It is kept if inside
// returned neither 0 nor because of a signal, since it then holds what explains
// the failure; notes says so in a line, and what else is worth knowing.
//
// Root gets a user namespace too, so that both kinds of user see the same; only
// where that is refused root does without, and notes says so.
func Run(ctx context.Context, notes io.Writer, inside func(ctx context.Context, dir string) int) (int, error) {
	if dir := os.Getenv(insideEnv); dir != "" {
		return runInside(ctx, notes, dir, inside), nil
	}
	dir, err := os.MkdirTemp("", "ambientd-")
	if err != nil {
		return 0, fmt.Errorf("making a directory for the run: %w", err)
	}
	code, interrupted, err := runOutside(ctx, notes, dir)
	if err == nil && code != 0 && !interrupted {
		fmt.Fprintf(notes, "logs and configuration of this run are kept in %s\n", dir)
		return code, nil
	}
	if removeErr := os.RemoveAll(dir); removeErr != nil {
		err = errors.Join(err, fmt.Errorf("removing the run's directory: %w", removeErr))
	}
	return code, err
}

// runOutside starts the process inside and waits for it.
func runOutside(ctx context.Context, notes io.Writer, dir string) (code int, interrupted bool, err error) {
	// The death signal comes when the thread that forked ends, not the process: this thread stays.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// From before the start on, so that no signal falls between.
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	defer signal.Stop(signals)

	cmd, err := startInside(dir, syscall.CLONE_NEWUSER)
	if err != nil && os.Geteuid() == 0 {
		fmt.Fprintf(notes, "no user namespace (%v): going on as root, in mount and network namespaces only\n", err)
		cmd, err = startInside(dir, 0)
	}
	if err != nil {
		return 0, false, refused(err)
	}

	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	done := ctx.Done()
	for {
		select {
		case s := <-signals:
			interrupted = true
			err = cmd.Process.Signal(s)
		case <-done:
			done = nil
			interrupted = true
			err = cmd.Process.Signal(syscall.SIGTERM)
		case err := <-ended:
			var exit *exec.ExitError
			if err != nil && !errors.As(err, &exit) {
				return 0, interrupted, fmt.Errorf("waiting for the process inside: %w", err)
			}
			code, err := exitCode(cmd.ProcessState)
			return code, interrupted, err
		}
		if err != nil && !errors.Is(err, os.ErrProcessDone) {
			return 0, interrupted, fmt.Errorf("passing a signal on: %w", err)
		}
	}
}

func exitCode(state *os.ProcessState) (int, error) {
	switch {
	case !state.Exited():
		return 0, fmt.Errorf("the process inside: %s", state)
	case state.ExitCode() == exitRefused:
		return 0, refused(errors.New("they came without the power to mount and to configure links"))
	}
	return state.ExitCode(), nil
}

func startInside(dir string, userns uintptr) (*exec.Cmd, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("finding this program: %w", err)
	}
	//nolint:noctx // ended by signals, so that it can end its own children
	cmd := exec.Command(self, os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), insideEnv+"="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | userns,
		Pdeathsig:  syscall.SIGKILL,
		// A group of its own: a terminal's ^C comes once, through us.
		Setpgid: true,
	}
	if userns != 0 {
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return cmd, nil
}

// refused says what to do about the switches that are known to be off.
func refused(cause error) error {
	var advice []string
	if os.Geteuid() != 0 {
		advice = append(advice, "run as root")
	}
	for _, s := range []struct{ path, off, fix string }{
		{"/proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=10000"},
		{"/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"},
		{"/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"},
	} {
		value, err := os.ReadFile(s.path)
		if err == nil && strings.TrimSpace(string(value)) == s.off {
			advice = append(advice, "allow them with `"+s.fix+"`")
		}
	}
	if os.Geteuid() == 0 || len(advice) == 1 { // no switch is off: something else refuses
		advice = append(advice, "in a container, start it privileged, or with SYS_ADMIN and NET_ADMIN and without its seccomp profile")
	}
	return fmt.Errorf("%w: %w; %s", ErrRefused, cause, strings.Join(advice, ", or "))
}

func runInside(ctx context.Context, notes io.Writer, dir string, inside func(context.Context, string) int) int {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	// What is started from here shall not take itself for the process inside.
	if err := os.Unsetenv(insideEnv); err != nil {
		fmt.Fprintf(notes, "forgetting the way in: %v\n", err)
		return 1
	}
	if err := furnish(dir); err != nil {
		fmt.Fprintf(notes, "furnishing the namespaces: %v\n", err)
		if errors.Is(err, os.ErrPermission) {
			return exitRefused
		}
		return 1
	}
	return inside(ctx, dir)
}

// furnish makes fresh namespaces look like a host that was just started.
func furnish(dir string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making mounts private: %w", err)
	}
	run, err := runDirectories()
	if err != nil {
		return err
	}
	for _, path := range run {
		if err := unix.Mount("tmpfs", path, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
			return fmt.Errorf("mounting a tmpfs on %s: %w", path, err)
		}
	}
	if _, err := os.Stat(dir); err != nil {
		return fmt.Errorf("the run's directory must not be below %s, set TMPDIR to another place: %w", strings.Join(run, " or "), err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("looking up lo: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("setting lo up: %w", err)
	}
	return nil
}

// runDirectories returns /run, and /var/run where it is not the same.
func runDirectories() ([]string, error) {
	var dirs []string
	for _, path := range []string{"/run", "/var/run"} {
		resolved, err := filepath.EvalSymlinks(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("resolving %s: %w", path, err)
		}
		if len(dirs) == 0 || dirs[0] != resolved {
			dirs = append(dirs, resolved)
		}
	}
	return dirs, nil
}

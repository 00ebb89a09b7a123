// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

func TestRequireRoot(t *testing.T) {
	if err := requireRoot(0); err != nil {
		t.Errorf("root: %v", err)
	}
	if err := requireRoot(1000); err == nil || !strings.Contains(err.Error(), "must be run as root") {
		t.Errorf("user 1000: %v", err)
	}
}

// An ordinary user is told so before the agent makes any directory, also where the
// user could make it.
func TestRunAsOrdinaryUser(t *testing.T) {
	const nobody = 65534
	dir, err := os.MkdirTemp("", "ambientd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	// Called by this name the test binary is ambientd.
	run := exec.CommandContext(t.Context(), "/proc/self/exe", "run", "--node-name=n",
		"--run-dir="+dir+"/run", "--zds-socket="+dir+"/zds/zds.sock", "--pods-from=manifests="+dir)
	run.Args[0] = "ambientd"
	run.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0")
	if os.Geteuid() == 0 {
		run.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody, NoSetGroups: true}}
	}
	out, err := run.CombinedOutput()
	var exit *exec.ExitError
	switch {
	case errors.Is(err, syscall.EINVAL):
		t.Skip("this user namespace has no other user than root")
	case !errors.As(err, &exit) || exit.ExitCode() != 1:
		t.Errorf("it ended with %v, want exit code 1", err)
	}
	if !strings.HasPrefix(string(out), "ambientd: the agent must be run as root, or in a user namespace where it is root;") {
		t.Errorf("it said %s", out)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("it made %v (%v)", entries, err)
	}
}

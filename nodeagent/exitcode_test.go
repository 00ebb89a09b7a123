// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os/exec"
	"strings"
	"testing"
)

// invocations are command lines of one command: without its name.
type invocations struct {
	wrong [][]string // that cannot be understood or used
	fails []string   // that is right, and whose work fails; nil if there is no work
}

func everyCommand() map[string]invocations {
	return map[string]invocations{
		"run": {
			wrong: [][]string{{}, {"extra"}, {"--pods-from=kubelet"}, {"--cert-workers=many"}, {"--config=/missing"}},
			fails: []string{"--pods-from=manifests=/etc", "--node-name=n", "--run-dir=/proc/none"}, // for all but root earlier
		},
		"status": {
			wrong: [][]string{{"shop/web"}, {"--timeout=0s"}, {"--run-dir=relative"}},
			fails: []string{"--run-dir=/missing"},
		},
		"verify": {
			wrong: [][]string{{"--timeout=soon"}, {"--admin-socket=relative"}},
			fails: []string{"--run-dir=/missing"},
		},
		"withdraw": {
			wrong: [][]string{{}, {"--all", "shop/web"}, {"--all", "--timeout=-1s"}},
			fails: []string{"--all", "--run-dir=/missing"},
		},
		"enrol": {
			wrong: [][]string{{}, {"--all", "shop/web"}},
			fails: []string{"--all", "--run-dir=/missing"},
		},
		"install": {
			wrong: [][]string{
				{"extra"}, {"--config=/missing"}, {"--agent-down-policy=open"}, {"--wait=-1s"},
				{"--cni-bin-dir=relative"}, {"--cni-conf-dir=relative"}, {"--plugin=relative"},
			},
			fails: []string{"--cni-bin-dir=/missing", "--cni-conf-dir=/missing", "--plugin=/missing"},
		},
		"uninstall": {
			wrong: [][]string{{"extra"}, {"--cni-bin-dir=relative"}, {"--cni-conf-dir=relative"}},
			fails: []string{"--cni-bin-dir=/missing", "--cni-conf-dir=/proc/version"},
		},
		"version": {wrong: [][]string{{"extra"}}},
	}
}

// TestExitCodes: 0 is done, 1 failed, 2 cannot be understood or used; for every command alike.
func TestExitCodes(t *testing.T) {
	check := func(want int, args ...string) {
		t.Helper()
		if got, out := exitOf(t, args); got != want {
			t.Errorf("ambientd %s: exit code %d, want %d; it said: %s", strings.Join(args, " "), got, want, out)
		}
	}
	check(0, "help")
	check(2)
	check(2, "start")
	check(2, "help", "start")
	check(2, "help", "run", "extra")
	table := everyCommand()
	for _, command := range commands() {
		tests, ok := table[command.name]
		if !ok {
			t.Errorf("the table has no command %s", command.name)
		}
		check(0, command.name, "--help")
		check(0, "help", command.name)
		check(2, command.name, "--bogus")
		for _, args := range tests.wrong {
			check(2, append([]string{command.name}, args...)...)
		}
		if tests.fails != nil {
			check(1, append([]string{command.name}, tests.fails...)...)
		}
	}
}

// exitOf runs the real main and returns its exit code.
func exitOf(t *testing.T, args []string) (code int, output string) {
	t.Helper()
	// Called by this name the test binary is ambientd.
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", args...)
	cmd.Args[0] = "ambientd"
	cmd.Env = append(cmd.Environ(), "GORACE=atexit_sleep_ms=0")
	out, err := cmd.CombinedOutput()
	if exit, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		t.Fatal(err)
	} else if ok {
		return exit.ExitCode(), string(out)
	}
	return 0, string(out)
}

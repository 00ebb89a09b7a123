// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"ambientd/tools/devcluster/node"
)

// streams are what a command reads and writes.
type streams struct {
	in       io.Reader
	out, err io.Writer
}

func main() {
	if len(os.Args) == 2 && os.Args[1] == node.InitCommand {
		fmt.Fprintf(os.Stderr, "%s: %v\n", node.InitCommand, node.Init())
		os.Exit(1)
	}
	os.Exit(run(context.Background(), os.Args[1:], streams{in: os.Stdin, out: os.Stdout, err: os.Stderr}))
}

// errUsage is wrapped by errors of a command line that cannot be understood.
var errUsage = errors.New("see devcluster --help")

// exitError is the exit code of a command that devcluster ran.
type exitError int

func (e exitError) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// run does what the arguments say and returns the exit code: 0, 1 for an error, 2 for a
// command line that cannot be understood, or the code of the command that it ran.
func run(ctx context.Context, args []string, std streams) int {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	err := dispatch(ctx, args, std)
	var exit exitError
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
		return 0
	case errors.As(err, &exit):
		return int(exit)
	}
	fmt.Fprintf(std.err, "devcluster: %v\n", err)
	if errors.Is(err, errUsage) {
		return 2
	}
	return 1
}

// command is one of devcluster's commands.
type command struct {
	name, args, says string
	run              func(ctx context.Context, args []string, std streams) error
}

func commands() []command {
	return []command{
		{"up", "[FLAGS]", "bring a cluster up and leave it running", up},
		{"down", "[--dir DIR]", "take a cluster down, whatever state it is in", takeDown},
		{"run", "[FLAGS] -- COMMAND...", "bring a cluster up, run COMMAND inside, take the cluster down", runInside},
		{"exec", "[--dir DIR] [--node N] -- COMMAND...", "run COMMAND inside of a cluster that is up", execInside},
		{"kubeconfig", "[--dir DIR]", "print the administrator's kubeconfig", kubeconfig},
		{"stop", "[--dir DIR] [--node N] PROGRAM", "end one of a node's programs: kube-apiserver, kubelet, ...", stopProgram},
		{"start", "[--dir DIR] [--node N] PROGRAM", "start it again", startProgram},
		{"build", "[FLAGS]", "build the programs that a cluster of that size needs", build},
	}
}

func dispatch(ctx context.Context, args []string, std streams) error {
	if len(args) == 0 {
		return fmt.Errorf("a command is missing: %w", errUsage)
	}
	if args[0] == "--help" || args[0] == "-h" || args[0] == "help" {
		fmt.Fprint(std.out, "devcluster runs a real Kubernetes on this machine, for tests, in namespaces of its own.\n\n")
		for _, c := range commands() {
			fmt.Fprintf(std.out, "  devcluster %s %s\n        %s\n", c.name, c.args, c.says)
		}
		fmt.Fprint(std.out, "\nEach has --help. It needs root, and etcd, containerd, runc and busybox from Debian packages.\n")
		return nil
	}
	for _, c := range commands() {
		if c.name == args[0] {
			return c.run(ctx, args[1:], std)
		}
	}
	return fmt.Errorf("unknown command %q: %w", args[0], errUsage)
}

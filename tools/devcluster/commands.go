// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"

	"ambientd/tools/devcluster/cluster"
	"ambientd/tools/devcluster/node"
)

// up brings a cluster up, leaves it running and says how to use it.
func up(ctx context.Context, args []string, std streams) error {
	var cfg cluster.Config
	err := without(parse("up", args, std, func(flags *flag.FlagSet) {
		dirFlag(flags, &cfg.Dir)
		clusterFlags(flags, &cfg)
	}))
	if err != nil {
		return err
	}
	if err := complete(&cfg, std); err != nil {
		return err
	}
	state, err := cluster.Up(ctx, cfg, node.UntilStopped)
	if err != nil {
		return err
	}
	for _, variable := range state.Environment() {
		fmt.Fprintln(std.out, variable)
	}
	fmt.Fprintf(std.err, "It is reached from its own network namespace only: devcluster exec --dir %s -- COMMAND\n", state.Dir)
	return nil
}

func takeDown(ctx context.Context, args []string, std streams) error {
	var dir string
	if err := without(parse("down", args, std, func(flags *flag.FlagSet) { dirFlag(flags, &dir) })); err != nil {
		return err
	}
	return cluster.Down(ctx, dir)
}

// runInside brings a cluster up, runs a command inside and takes the cluster down, always.
func runInside(ctx context.Context, args []string, std streams) (err error) {
	var cfg cluster.Config
	command, err := parse("run", args, std, func(flags *flag.FlagSet) {
		flags.StringVar(&cfg.Dir, "dir", "", "directory of the cluster (default: a fresh one)")
		clusterFlags(flags, &cfg)
	})
	if err != nil {
		return err
	}
	if len(command) == 0 {
		return fmt.Errorf("a command to run is missing: %w", errUsage)
	}
	if err := complete(&cfg, std); err != nil {
		return err
	}
	if cfg.Dir == "" {
		if cfg.Dir, err = os.MkdirTemp("/var/tmp", "devcluster-"); err != nil {
			return fmt.Errorf("making a directory for the cluster: %w", err)
		}
		defer func() {
			// It is gone, unless the cluster did not get as far as that.
			if removeErr := os.Remove(cfg.Dir); removeErr != nil && !errors.Is(removeErr, os.ErrNotExist) {
				// Without %w for what the command did: its code would hide this.
				err = fmt.Errorf("removing the directory of a cluster that is down: %w (before that: %v)", removeErr, err) //nolint:errorlint // see above
			}
		}()
	}
	// The cluster dies with this thread, so that not even a kill of this process leaves it running.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	state, err := cluster.Up(ctx, cfg, node.WithParent)
	if err != nil {
		return err
	}
	err = inside(ctx, state, state.Nodes[0].Process, command, std)
	if downErr := cluster.Down(context.WithoutCancel(ctx), state.Dir); downErr != nil {
		// The command's code says less than this.
		return fmt.Errorf("taking the cluster down: %w (devcluster down --dir %s tries again)", downErr, state.Dir)
	}
	return err
}

func execInside(ctx context.Context, args []string, std streams) error {
	var dir string
	var number int
	command, err := parse("exec", args, std, func(flags *flag.FlagSet) {
		dirFlag(flags, &dir)
		nodeFlag(flags, &number)
	})
	if err != nil {
		return err
	}
	if len(command) == 0 {
		return fmt.Errorf("a command to run is missing: %w", errUsage)
	}
	state, err := loadNode(dir, number)
	if err != nil {
		return err
	}
	return inside(ctx, state, state.Nodes[number-1].Process, command, std)
}

// inside runs a command in the network namespace of a node, and in no other one of its
// namespaces: it sees the machine's files and processes.
func inside(ctx context.Context, state *cluster.State, process node.Process, command []string, std streams) error {
	// Not CommandContext, which kills: whoever is interrupted may have to tidy up.
	cmd := exec.Command(command[0], command[1:]...) //nolint:noctx // ended below
	if cmd.Err != nil {
		return fmt.Errorf("finding the command: %w", cmd.Err)
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = std.in, std.out, std.err
	cmd.Env = append(os.Environ(), state.Environment()...)
	cmd.Env = append(cmd.Env, "PATH="+state.Programs+string(os.PathListSeparator)+os.Getenv("PATH"))
	// A terminal sends its signals to the command too; others send them only here.
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	defer signal.Stop(signals)
	if err := process.InNetns(cmd.Start); err != nil {
		return fmt.Errorf("starting %s inside of the cluster: %w", command[0], err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	if ctx.Err() != nil { // interrupted before the signals were ours
		_ = cmd.Process.Signal(syscall.SIGTERM)
	}
	for {
		select {
		case s := <-signals:
			_ = cmd.Process.Signal(s) // if it has ended just now, all is well
		case err := <-ended:
			var exit *exec.ExitError
			if !errors.As(err, &exit) {
				return err
			}
			if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
				return exitError(128 + int(status.Signal()))
			}
			return exitError(exit.ExitCode())
		}
	}
}

func kubeconfig(_ context.Context, args []string, std streams) error {
	var dir string
	if err := without(parse("kubeconfig", args, std, func(flags *flag.FlagSet) { dirFlag(flags, &dir) })); err != nil {
		return err
	}
	state, err := cluster.Load(dir)
	if err != nil {
		return err
	}
	content, err := os.ReadFile(state.Kubeconfig())
	if err != nil {
		return fmt.Errorf("reading the kubeconfig: %w", err)
	}
	_, err = std.out.Write(content)
	return err
}

// program reads the command line of stop and start.
func program(name string, args []string, std streams) (node.Control, string, error) {
	var dir string
	var number int
	rest, err := parse(name, args, std, func(flags *flag.FlagSet) {
		dirFlag(flags, &dir)
		nodeFlag(flags, &number)
	})
	if err != nil {
		return node.Control{}, "", err
	}
	if len(rest) != 1 {
		return node.Control{}, "", fmt.Errorf("expected the name of one program: %w", errUsage)
	}
	state, err := loadNode(dir, number)
	if err != nil {
		return node.Control{}, "", err
	}
	return state.Control(number - 1), rest[0], nil
}

// loadNode returns the state of the cluster in dir, if it has a node of that number.
func loadNode(dir string, number int) (*cluster.State, error) {
	state, err := cluster.Load(dir)
	if err == nil && (number < 1 || number > len(state.Nodes)) {
		return nil, fmt.Errorf("--node=%d: the cluster has nodes 1 to %d: %w", number, len(state.Nodes), errUsage)
	}
	return state, err
}

func stopProgram(ctx context.Context, args []string, std streams) error {
	control, name, err := program("stop", args, std)
	if err != nil {
		return err
	}
	return control.Stop(ctx, name)
}

func startProgram(ctx context.Context, args []string, std streams) error {
	control, name, err := program("start", args, std)
	if err != nil {
		return err
	}
	return control.Restart(ctx, name)
}

func build(ctx context.Context, args []string, std streams) error {
	var cfg cluster.Config
	if err := without(parse("build", args, std, func(flags *flag.FlagSet) { clusterFlags(flags, &cfg) })); err != nil {
		return err
	}
	if err := complete(&cfg, std); err != nil {
		return err
	}
	dir, err := cluster.Build(ctx, cfg)
	if err != nil {
		return err
	}
	fmt.Fprintln(std.out, filepath.Clean(dir))
	return nil
}

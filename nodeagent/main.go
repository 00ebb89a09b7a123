// SPDX-License-Identifier: Apache-2.0

// Command ambientd is the node agent of an ambient mesh. It puts pods in the
// mesh, wholly or not at all: traffic redirection in the pod's network namespace,
// the namespace handed to the node proxy, and a certificate for its identity.
//
// This package owns the command line and the configuration file, and nothing
// below it reads either.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"syscall"
)

// version is set by the linker: -ldflags "-X main.version=v1.2.3".
var version string

func main() {
	// Nothing else runs on the main thread, which unlike others could not be ended
	// if it did not come back from a pod's netns (see podnetns.Netns.Do).
	runtime.LockOSThread()
	os.Exit(mainCode())
}

// mainCode runs the command of os.Args and returns the exit code: 0, 1 for an
// error, 2 for a command line that cannot be understood.
func mainCode() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	if err == nil {
		return 0
	}
	fmt.Fprintf(os.Stderr, "ambientd: %v\n", err)
	if _, ok := errors.AsType[*usageError](err); ok {
		return 2
	}
	return 1
}

// usageError is a command line that cannot be understood.
type usageError struct {
	err  error
	help string // what to call to learn more
}

func (e *usageError) Error() string { return fmt.Sprintf("%v; see `%s`", e.err, e.help) }

func (e *usageError) Unwrap() error { return e.err }

// run runs the command that args name.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if len(args) == 0 {
		return &usageError{err: errors.New("no command given"), help: "ambientd help"}
	}
	switch command, rest := args[0], args[1:]; command {
	case "run":
		return runAgent(ctx, rest, stdout, stderr)
	case "status":
		return showStatus(ctx, rest, stdout)
	case "verify":
		return verify(ctx, rest, stdout)
	case "withdraw":
		return withdraw(ctx, rest, stdout)
	case "enrol":
		return enrol(ctx, rest, stdout)
	case "install":
		return installPlugin(ctx, rest, stdout)
	case "uninstall":
		return uninstallPlugin(rest, stdout)
	case "version", "--version", "-version", "-v":
		return write(stdout, fmt.Sprintf("ambientd %s (%s, %s/%s)\n", buildVersion(), runtime.Version(), runtime.GOOS, runtime.GOARCH))
	case "help", "--help", "-help", "-h":
		if len(rest) == 0 {
			return write(stdout, overview)
		}
		return run(ctx, []string{rest[0], "--help"}, stdout, stderr)
	default:
		return &usageError{err: fmt.Errorf("unknown command %q", command), help: "ambientd help"}
	}
}

const overview = `ambientd is the node agent of an ambient mesh.

Usage: ambientd COMMAND [FLAGS]

  run       run the agent until SIGINT or SIGTERM; packet rules of enrolled pods stay, so that they fail closed
  status    show what the running agent has enrolled
  verify    compare pods with the kernel, and put right what differs
  withdraw  take pods out of the mesh, to stay out
  enrol     let pods back in that were withdrawn
  install   put the CNI plugin on this machine, and its entry into the runtime's network configuration
  uninstall take both away again
  version   show the version
  help      show this, or the flags of a command: ambientd help run
`

// buildVersion is what the linker was told, or else what the Go tool recorded.
func buildVersion() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}

func write(w io.Writer, text string) error {
	_, err := io.WriteString(w, text)
	return err
}

// parse parses args with set, which holds flags only. On --help it prints help
// and returns flag.ErrHelp.
func parse(set *flag.FlagSet, args []string, stdout io.Writer, help func() string) error {
	names, err := parseNames(set, args, stdout, help)
	if err == nil && len(names) > 0 {
		return &usageError{err: fmt.Errorf("unexpected argument %q", names[0]), help: "ambientd " + set.Name() + " --help"}
	}
	return err
}

// parseNames is parse for a command that takes names too, before, between and after
// its flags; after "--" everything is a name.
func parseNames(set *flag.FlagSet, args []string, stdout io.Writer, help func() string) (names []string, err error) {
	set.SetOutput(io.Discard) // errors are returned, help is printed below
	for {
		err := set.Parse(args)
		switch {
		case errors.Is(err, flag.ErrHelp):
			if err := write(stdout, help()); err != nil {
				return nil, err
			}
			return nil, flag.ErrHelp
		case err != nil:
			return nil, &usageError{err: gnuStyle(err), help: "ambientd " + set.Name() + " --help"}
		}
		rest := set.Args()
		if parsed := len(args) - len(rest); parsed > 0 && args[parsed-1] == "--" || len(rest) == 0 {
			return append(names, rest...), nil
		}
		names, args = append(names, rest[0]), rest[1:]
	}
}

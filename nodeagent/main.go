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
	"slices"
	"strings"
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

// mainCode runs the command of os.Args and returns the exit code: 0, 1 where the work
// failed, 2 where nothing was begun, since the command line, or the configuration file
// that it names, is wrong. Doing the same again may help with 1, never with 2.
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

// usageError is a command line, or a configuration file that it names, which cannot be
// understood or used.
type usageError struct {
	err  error
	help string // what to call to learn more; empty where err says all
}

func (e *usageError) Error() string {
	if e.help == "" {
		return e.err.Error()
	}
	return fmt.Sprintf("%v; see `%s`", e.err, e.help)
}

func (e *usageError) Unwrap() error { return e.err }

// command is one of the commands of ambientd. Its run returns flag.ErrHelp once it has
// printed the help that it was asked for.
type command struct {
	name, summary string
	run           func(ctx context.Context, args []string, stdout, stderr io.Writer) error
}

func commands() []command {
	return []command{
		{"run", "run the agent until SIGINT or SIGTERM; packet rules of enrolled pods stay, so that they fail closed", runAgent},
		{"status", "show what the running agent has enrolled", showStatus},
		{"verify", "compare pods with the kernel, and put right what differs", verify},
		{"withdraw", "take pods out of the mesh, to stay out", withdraw},
		{"enrol", "let pods back in that were withdrawn", enrol},
		{"install", "put the CNI plugin on this machine, and its entry into the runtime's network configuration", installPlugin},
		{"uninstall", "take both away again", uninstallPlugin},
		{"version", "show the version", showVersion},
	}
}

// run runs the command that args name.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if len(args) == 0 {
		return &usageError{err: errors.New("no command given"), help: "ambientd help"}
	}
	name, rest := args[0], args[1:]
	if asksForHelp(name) {
		switch {
		case len(rest) > 1:
			return &usageError{err: fmt.Errorf("unexpected argument %q", rest[1]), help: "ambientd help"}
		case len(rest) == 0 || asksForHelp(rest[0]):
			return write(stdout, overview())
		}
		name, rest = rest[0], []string{"--help"}
	}
	if slices.Contains([]string{"--version", "-version", "-v"}, name) {
		name = "version"
	}
	known := []string{"help"}
	for _, c := range commands() {
		if known = append(known, c.name); c.name == name {
			if err := c.run(ctx, rest, stdout, stderr); !errors.Is(err, flag.ErrHelp) {
				return err
			}
			return nil
		}
	}
	return &usageError{err: fmt.Errorf("unknown command %q%s", name, didYouMean(name, known)), help: "ambientd help"}
}

func asksForHelp(name string) bool {
	return slices.Contains([]string{"help", "--help", "-help", "-h"}, name)
}

func overview() string {
	var out strings.Builder
	out.WriteString("ambientd is the node agent of an ambient mesh.\n\nUsage: ambientd COMMAND [FLAGS]\n\n")
	for _, c := range append(commands(), command{name: "help", summary: "show this, or the flags of a command: ambientd help run"}) {
		fmt.Fprintf(&out, "  %-9s %s\n", c.name, c.summary)
	}
	out.WriteString(`
The exit code is 0 when all was done; 1 when it failed; 2 when nothing was begun, because the command line, or the configuration
file that it names, is wrong.
`)
	return out.String()
}

// showVersion is the command version.
func showVersion(_ context.Context, args []string, stdout, _ io.Writer) error {
	if err := parse(newFlags("version").set, args, stdout, func() string { return "Usage: ambientd version\n\nShows the version.\n" }); err != nil {
		return err
	}
	return write(stdout, fmt.Sprintf("ambientd %s (%s, %s/%s)\n", buildVersion(), runtime.Version(), runtime.GOOS, runtime.GOARCH))
}

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
			return nil, &usageError{err: flagError(set, err), help: "ambientd " + set.Name() + " --help"}
		}
		rest := set.Args()
		if parsed := len(args) - len(rest); parsed > 0 && args[parsed-1] == "--" || len(rest) == 0 {
			return append(names, rest...), nil
		}
		names, args = append(names, rest[0]), rest[1:]
	}
}

// SPDX-License-Identifier: Apache-2.0

// Command demo walks pods through the whole mesh on one machine and checks, from
// real traffic and the real kernel, what ambientd promises.
//
// It runs the real ambientd, ambient-cni and devproxy in user, mount and network
// namespaces of their own, plays the container runtime (network namespaces,
// loopback, then a conflist of bridge, host-local and ambient-cni through libcni)
// and the programs in the pods, and prints one line for each check.
//
// It owns the scene and the checks. It refuses to know how any part works: what it
// states is seen from outside, in packets, in the kernel's tables, in the parts'
// sockets and logs.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"ambientd/iptables/backend"
	"ambientd/tools/enclave"
)

// config is what the command line says.
type config struct {
	bin, cniBin string // directories of our binaries and of the reference plugins
	redirection string // ambientd's flag
	json        bool
	hold        bool
}

func main() {
	os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
}

// run does what the arguments say and returns the exit code: 0, 1 for an error or a
// check that did not pass, 2 for a command line that cannot be understood.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	code, err := command(ctx, args, stdout, stderr)
	if err == nil || errors.Is(err, flag.ErrHelp) {
		return code
	}
	fmt.Fprintf(stderr, "demo: %v\n", err)
	return max(code, 1)
}

func command(ctx context.Context, args []string, stdout, stderr io.Writer) (code int, err error) {
	if len(args) > 0 && args[0] == podCommand {
		return 0, runInPod(ctx, args[1:], stdout)
	}
	cfg, err := parse(args, stdout)
	if errors.Is(err, flag.ErrHelp) {
		return 0, err
	}
	if err != nil {
		return 2, err
	}
	return enclave.Run(ctx, stderr, func(ctx context.Context, dir string) int {
		return play(ctx, cfg, dir, stdout, stderr)
	})
}

// parse reads the command line. On --help it prints help and returns flag.ErrHelp.
func parse(args []string, help io.Writer) (config, error) {
	var cfg config
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // errors are returned, help is printed below
	flags.StringVar(&cfg.bin, "bin", "bin", "directory of ambientd, ambient-cni and devproxy")
	flags.StringVar(&cfg.cniBin, "cni-bin", "", "directory of the reference plugins bridge, host-local and loopback (required)")
	flags.StringVar(&cfg.redirection, "redirection", "auto", "auto, nftables or iptables")
	flags.BoolVar(&cfg.json, "json", false, "print one JSON object instead of a line for each check")
	flags.BoolVar(&cfg.hold, "hold", false, "keep everything running after the checks, and say how to look inside")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			flags.SetOutput(help)
			fmt.Fprintln(help, "Usage: make demo ARGS=\"FLAGS\"; make itself gives --bin and --cni-bin")
			flags.PrintDefaults()
			return cfg, err
		}
		return cfg, fmt.Errorf("%w; see `make demo ARGS=--help`", err)
	}
	if flags.NArg() > 0 {
		return cfg, fmt.Errorf("unknown argument %q", flags.Arg(0))
	}
	if modes := []string{backend.Auto, backend.NFTables, backend.IPTables}; !slices.Contains(modes, cfg.redirection) {
		return cfg, fmt.Errorf("--redirection=%s is not supported; supported: %s", cfg.redirection, strings.Join(modes, ", "))
	}
	if cfg.cniBin == "" {
		return cfg, errors.New("--cni-bin is missing: `make demo` gives it")
	}
	for _, dir := range []*string{&cfg.bin, &cfg.cniBin} {
		absolute, err := filepath.Abs(*dir)
		if err != nil {
			return cfg, fmt.Errorf("resolving %s: %w", *dir, err)
		}
		*dir = absolute
	}
	for _, path := range []string{
		filepath.Join(cfg.bin, "ambientd"), filepath.Join(cfg.bin, "ambient-cni"), filepath.Join(cfg.bin, "devproxy"),
		filepath.Join(cfg.cniBin, "bridge"), filepath.Join(cfg.cniBin, "host-local"), filepath.Join(cfg.cniBin, "loopback"),
	} {
		if _, err := os.Stat(path); err != nil {
			return cfg, fmt.Errorf("a program is missing, `make demo` builds it: %w", err)
		}
	}
	return cfg, nil
}

// play is the demo itself, inside the enclave. It returns the exit code.
func play(ctx context.Context, cfg config, dir string, out, progress io.Writer) int {
	rep := &report{out: out, progress: progress, json: cfg.json}
	st, err := setUp(ctx, cfg, dir, progress)
	switch {
	case err != nil && ctx.Err() != nil:
		rep.abort(errInterrupted, checks)
	case err != nil:
		rep.abort(fmt.Errorf("setting the scene: %w", err), checks)
	default:
		rep.run(ctx, checks, st)
	}
	ok := rep.finish()
	if cfg.hold && st != nil && ctx.Err() == nil {
		if err := hold(ctx, st, progress); err != nil && ctx.Err() == nil {
			fmt.Fprintf(progress, "demo: holding: %v\n", err)
			ok = false
		}
	}
	if st != nil {
		if err := st.stop(); err != nil {
			fmt.Fprintf(progress, "demo: stopping: %v\n", err)
			ok = false
		}
	}
	if !ok {
		return 1
	}
	return 0
}

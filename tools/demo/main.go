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
	code, err := run(context.Background(), os.Args[1:])
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintf(os.Stderr, "demo: %v\n", err)
		code = 1
	}
	os.Exit(code)
}

// run does what the arguments say and returns the exit code.
func run(ctx context.Context, args []string) (int, error) {
	if len(args) > 0 && args[0] == podCommand {
		return 0, runInPod(ctx, args[1:], os.Stdout)
	}
	cfg, err := parse(args, os.Stderr)
	if err != nil {
		return 2, err
	}
	return enclave.Run(ctx, os.Stderr, func(ctx context.Context, dir string) int {
		return play(ctx, cfg, dir, os.Stdout, os.Stderr)
	})
}

// parse reads the command line.
func parse(args []string, help io.Writer) (config, error) {
	var cfg config
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	flags.SetOutput(help)
	flags.StringVar(&cfg.bin, "bin", "bin", "directory of ambientd, ambient-cni and devproxy")
	flags.StringVar(&cfg.cniBin, "cni-bin", "", "directory of the reference plugins bridge, host-local and loopback (required)")
	flags.StringVar(&cfg.redirection, "redirection", "auto", "auto, nftables or iptables")
	flags.BoolVar(&cfg.json, "json", false, "print one JSON object instead of a line for each check")
	flags.BoolVar(&cfg.hold, "hold", false, "keep everything running after the checks, and say how to look inside")
	if err := flags.Parse(args); err != nil {
		return cfg, err
	}
	if flags.NArg() > 0 {
		return cfg, fmt.Errorf("unknown argument %q", flags.Arg(0))
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
	if err != nil {
		rep.abort(fmt.Errorf("setting the scene: %w", err))
	} else {
		for _, c := range checks {
			rep.run(ctx, c, st)
		}
	}
	ok := rep.finish()
	if cfg.hold && st != nil && ctx.Err() == nil {
		if err := hold(ctx, st, progress); err != nil {
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

// hold makes the pods of the scene again, says how to look at them, and waits for
// the end of ctx.
func hold(ctx context.Context, st *stage, out io.Writer) error {
	if err := st.populate(ctx); err != nil {
		return err
	}
	self := os.Getpid()
	fmt.Fprintf(out, `
demo: everything goes on running; end it with ^C. To look inside, in another terminal:
  enter the namespaces    nsenter --preserve-credentials -t %[1]d -U -m -n
and there:
  what is enrolled        %[2]s/ambientd status
  logs                    tail -f %[3]s %[4]s
`, self, st.cfg.bin, st.path("ambientd.log"), st.path("devproxy.log"))
	for _, p := range []*pod{st.client, st.server, st.outside, st.optedOut} {
		fmt.Fprintf(out, "  rules of %-14s nsenter --net=%s nft list ruleset\n", p, p.netns.Path())
	}
	exe, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding this program: %w", err)
	}
	fmt.Fprintf(out, "  a request               nsenter --net=%s %s %s client --to=%s --word=hello\n",
		st.client.netns.Path(), exe, podCommand, st.server.endpoint(st.server.ips[0]))
	<-ctx.Done()
	return nil
}

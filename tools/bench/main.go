// SPDX-License-Identifier: Apache-2.0

// Command bench measures what ambientd costs on this machine and checks it against
// limits. The limits are ratios to what the same machine, in the same run, needs for
// two iptables-nft-restore runs of the same rules: absolute times say more about the
// machine than about ambientd.
//
// It runs in namespaces of its own, like the demo, with the real binaries where
// processes are measured. What is compared is measured in turns, so that a busy
// machine slows both sides alike.
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

	"ambientd/tools/apitest"
	"ambientd/tools/enclave"
)

// config is what the command line says.
type config struct {
	bin     string // directory of our binaries
	noop    string // the plugin that does nothing
	results string // directory for the JSON; empty: none is written
	rounds  int    // of what is measured in turns
	pods    int    // enrolled in the larger of two node sizes
	parts   []string
	// backends are those on which pods that run already are measured.
	backends []string
	crowd    crowdSize // that runs before the agent knows of it

	api   bool     // measure what needs an API server, and nothing else
	node  nodeSize // at the API server
	scale scaleSize
	save  string // file for the rows that were measured
	add   string // file with rows to take over
}

// partNames are what can be left out. The rules cannot: everything is compared with them.
func partNames() []string { return []string{"plugin", "enrolment", finderPart, runningPart} }

// apiPartNames are the parts that need an API server.
func apiPartNames() []string { return []string{addsPart, scalePart} }

func backendNames() []string { return []string{nftablesName, iptablesName} }

func main() {
	if base := filepath.Base(os.Args[0]); isCounted(base) {
		fmt.Fprintf(os.Stderr, "bench: counting %s: %v\n", base, countedChild(base))
		os.Exit(1)
	}
	code, err := run(context.Background(), os.Args[1:])
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintf(os.Stderr, "bench: %v\n", err)
		code = 1
	}
	os.Exit(code)
}

func run(ctx context.Context, args []string) (int, error) {
	cfg, err := parse(args, os.Stderr)
	if err != nil {
		return 2, err
	}
	inside := func() (int, error) {
		return enclave.Run(ctx, os.Stderr, func(ctx context.Context, dir string) int {
			ok, err := measure(ctx, cfg, dir, os.Stdout, os.Stderr)
			if err != nil {
				fmt.Fprintf(os.Stderr, "bench: %v\n", err)
			}
			if !ok || err != nil {
				return 1
			}
			return 0
		})
	}
	if !cfg.api {
		return inside()
	}
	code := apitest.Reach(func() (code int) { //nolint:contextcheck // its relay lives until it is closed
		code, err = inside()
		return code
	})
	return code, err
}

// parse reads the command line.
func parse(args []string, help io.Writer) (config, error) {
	cfg := config{crowd: fullCrowd(), node: fullNode(), scale: fullScale()}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(help)
	flags.StringVar(&cfg.bin, "bin", "bin", "directory of ambientd and ambient-cni")
	flags.StringVar(&cfg.noop, "noop-plugin", "out/noop-plugin", "the plugin that does nothing")
	flags.StringVar(&cfg.results, "results", "", "directory to write <date>.json to; none if empty")
	flags.IntVar(&cfg.rounds, "rounds", 40, "how often each thing is measured")
	flags.IntVar(&cfg.pods, "pods", 1000, "pods on the larger of the two nodes that are compared")
	flags.BoolVar(&cfg.api, "api", false, "measure what needs an API server, that of $KUBECONFIG, and nothing else")
	flags.StringVar(&cfg.save, "save", "", "file to write the rows to, for --add; limits are then checked by whoever adds them")
	flags.StringVar(&cfg.add, "add", "", "file of rows that were saved, to add to the table; results are written only with them")
	parts := flags.String("parts", "", "what to measure (default: all; results are written only of all): besides rules "+strings.Join(partNames(), ",")+
		", or with --api "+strings.Join(apiPartNames(), ","))
	backends := flags.String("backends", strings.Join(backendNames(), ","), "on which backends to measure running pods; results are written only of both")
	if err := flags.Parse(args); err != nil {
		return cfg, err
	}
	names := partNames()
	if cfg.api {
		names = apiPartNames()
	}
	if *parts == "" {
		*parts = strings.Join(names, ",")
	}
	var err error
	if cfg.parts, err = choose("--parts", *parts, names); err != nil {
		return cfg, err
	}
	if cfg.backends, err = choose("--backends", *backends, backendNames()); err != nil {
		return cfg, err
	}
	switch {
	case flags.NArg() > 0:
		return cfg, fmt.Errorf("unknown argument %q", flags.Arg(0))
	case cfg.rounds < 1:
		return cfg, fmt.Errorf("--rounds is %d, want at least 1", cfg.rounds)
	case cfg.pods <= fewPods:
		return cfg, fmt.Errorf("--pods is %d, want more than the smaller node's %d", cfg.pods, fewPods)
	}
	for _, path := range []*string{&cfg.bin, &cfg.noop, &cfg.results, &cfg.save, &cfg.add} {
		if *path == "" {
			continue
		}
		absolute, err := filepath.Abs(*path)
		if err != nil {
			return cfg, fmt.Errorf("resolving %s: %w", *path, err)
		}
		*path = absolute
	}
	return cfg, nil
}

// choose returns those names of a list that it says, each once.
func choose(flag, list string, names []string) ([]string, error) {
	var chosen []string
	for name := range strings.SplitSeq(list, ",") {
		if name != "" && !slices.Contains(names, name) {
			return nil, fmt.Errorf("%s names %q, want some of %s", flag, name, strings.Join(names, ", "))
		}
		if name != "" && !slices.Contains(chosen, name) {
			chosen = append(chosen, name)
		}
	}
	return chosen, nil
}

// complete tells whether nothing was left out.
func (c config) complete() bool {
	return !c.api && c.add != "" && len(c.parts) == len(partNames()) && len(c.backends) == len(backendNames())
}

// measure measures everything and prints the table; the limits are met if it returns
// true.
func measure(ctx context.Context, cfg config, dir string, out, progress io.Writer) (bool, error) {
	starter, err := enclave.NewStarter()
	if err != nil {
		return false, err
	}
	b := &bench{cfg: cfg, dir: dir, progress: progress, starter: starter}
	failed := b.measureParts(ctx)
	failed = errors.Join(failed, b.close())
	// What was measured before a failure is still worth reading, but not worth keeping.
	res := newResults(b)
	if cfg.save != "" && failed == nil {
		return true, saveRows(cfg.save, b.rows)
	}
	if err := errors.Join(failed, res.print(out)); err != nil {
		return false, err
	}
	if cfg.results != "" && cfg.complete() {
		path, err := res.write(cfg.results)
		if err != nil {
			return false, err
		}
		fmt.Fprintf(progress, "bench: written to %s\n", path)
	}
	return res.Pass, nil
}

// measureParts measures what was asked for, and ends with the first that fails.
func (b *bench) measureParts(ctx context.Context) error {
	asked := func(parts ...string) bool {
		return slices.ContainsFunc(parts, func(part string) bool { return slices.Contains(b.cfg.parts, part) })
	}
	for _, part := range []struct {
		asked   bool
		measure func(context.Context) error
	}{
		{!b.cfg.api, b.rules},
		{asked("plugin"), b.plugin},
		{asked("enrolment"), b.enrolment},
		{asked(finderPart, runningPart), b.running},
		{asked(addsPart), b.adds},
		{asked(scalePart), b.scale},
		{b.cfg.add != "", func(context.Context) error { return b.addSaved() }},
	} {
		if !part.asked {
			continue
		}
		if err := part.measure(ctx); err != nil {
			return err
		}
	}
	return nil
}

// addSaved takes over the rows of another run.
func (b *bench) addSaved() error {
	rows, err := loadRows(b.cfg.add)
	b.rows = append(b.rows, rows...)
	return err
}

// bench is one run.
type bench struct {
	cfg      config
	dir      string
	progress io.Writer
	starter  *enclave.Starter

	yardstick *yardstick
	r         figure // R
	rows      []row
}

func (b *bench) sampleR(ctx context.Context) error { return b.yardstick.sample(ctx, &b.r) }

// close takes away what parts have left to each other.
func (b *bench) close() error {
	if b.yardstick == nil {
		return nil
	}
	return b.yardstick.discard()
}

func (b *bench) say(format string, args ...any) {
	fmt.Fprintf(b.progress, "bench: "+format+"\n", args...)
}

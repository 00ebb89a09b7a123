// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"

	"ambientd/nodeagent/agent"
)

const runUsage = `Usage: ambientd run [FLAGS]

Runs the node agent until SIGINT or SIGTERM, as root. Packet rules of enrolled pods stay in place when it ends, so that they fail closed.

A DURATION is written as 700ms, 15s or 24h, a LIST with commas between its items; PATH and DIR are absolute.
Only the PATH of --config may be relative.
`

const runFileUsage = `
The configuration file is YAML. Its keys are the flags in camelCase; lists are YAML lists, or strings with commas; flags win. One has no flag:
  selectors: which labels put a pod in the mesh, pairs of podSelector and namespaceSelector, of which any may match
             (default: pods with the label istio.io/dataplane-mode=ambient, and others where their namespace has it)

  nodeName: node-1
  podsFrom: manifests=/etc/ambientd/manifests
  addTimeout: 15s
  excludeNamespaces: [kube-system, storage]
`

// heapGrowth is by how many percent the heap may grow before garbage is collected once the agent
// is ready, half of Go's usual 100. With 400 pods known and 120 enrolled that is 2 to 3 MB of 34 on
// every node, for a tenth of a CPU time that is small then. At the start, where pods wait, it would
// take a tenth longer. GOGC overrides it.
const heapGrowth = 50

// settleHeap ends the memory's time of growth. The list of all pods, read once, takes several times
// what is kept of it. The runtime would give that back bit by bit; a node's memory is short just then,
// after it was booted, when everything starts at once.
func settleHeap() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(heapGrowth)
	}
	debug.FreeOSMemory()
}

// runAgent is the command run.
func runAgent(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	cfg, err := configure(args, stdout)
	if err != nil {
		return err
	}
	if err := requireRoot(os.Geteuid()); err != nil {
		return err
	}
	// Whoever reads the log may go before the agent does. A write to a pipe that is closed then fails;
	// without this it would end the process (package os/signal, "SIGPIPE").
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	cfg.OnReady = settleHeap
	cfg.Version = buildVersion()
	cfg.Logger = newLogger(cfg, stderr)
	return agent.Run(ctx, cfg)
}

// requireRoot returns an error unless euid is root's: without, the agent could not
// make its first directory. Root of a user namespace is root for it.
func requireRoot(euid int) error {
	if euid == 0 {
		return nil
	}
	return fmt.Errorf("the agent must be run as root, or in a user namespace where it is root; here its effective user ID is %d", euid)
}

// configure makes the configuration of args: flags, over the file that they may
// name, over defaults.
func configure(args []string, stdout io.Writer) (agent.Config, error) {
	first, err := newSettings()
	if err != nil {
		return agent.Config{}, err
	}
	if err := parse(first.flags.set, args, stdout, func() string { return runUsage + first.flags.help() + runFileUsage }); err != nil {
		return agent.Config{}, err
	}
	if first.file == "" {
		return first.cfg, first.validate("")
	}
	merged, err := newSettings()
	if err != nil {
		return agent.Config{}, err
	}
	if err := merged.readFile(first.file); err != nil {
		return agent.Config{}, &usageError{err: err}
	}
	if err := parse(merged.flags.set, args, stdout, func() string { return "" }); err != nil {
		return agent.Config{}, err
	}
	return merged.cfg, merged.validate(first.file)
}

// validate checks the settings as a whole.
func (s *settings) validate(file string) error {
	if err := s.cfg.Validate(); err != nil {
		return &usageError{err: &configError{file: file, err: err}}
	}
	return nil
}

// configError is everything that is wrong with the settings.
type configError struct {
	file string // that they are from, besides flags; may be empty
	err  error  // one line for each
}

// Error lists what is wrong, indented.
func (e *configError) Error() string {
	from := "flags"
	if e.file != "" {
		from = e.file + " and flags"
	}
	return fmt.Sprintf("bad configuration, from %s:\n  %s", from, strings.ReplaceAll(e.err.Error(), "\n", "\n  "))
}

func (e *configError) Unwrap() error { return e.err }

func newLogger(cfg agent.Config, w io.Writer) *slog.Logger {
	options := &slog.HandlerOptions{Level: cfg.Level()}
	if cfg.LogFormat == agent.LogJSON {
		options.ReplaceAttr = withUnit
		return slog.New(slog.NewJSONHandler(w, options))
	}
	return slog.New(slog.NewTextHandler(w, options))
}

// withUnit writes durations as text does, such as 5.4ms: in JSON they would be a
// number that does not say of what.
func withUnit(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindDuration {
		a.Value = slog.StringValue(a.Value.Duration().String())
	}
	return a
}

// nodeName is the default of --node-name: what the DaemonSet tells the agent's pod, or
// else the machine's name.
func nodeName() (string, error) {
	if name := os.Getenv("NODE_NAME"); name != "" {
		return name, nil
	}
	name, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("asking for the machine's name: %w", err)
	}
	return name, nil
}

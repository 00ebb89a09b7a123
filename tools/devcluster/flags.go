// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"ambientd/tools/devcluster/cluster"
	"ambientd/tools/devcluster/programs"
)

// defaultDir is where a cluster lies unless --dir says otherwise.
const defaultDir = "/var/tmp/ambientd-devcluster"

// list is a flag that may be given more than once.
type list []string

func (l *list) String() string { return strings.Join(*l, " ") }

// Set appends a value.
func (l *list) Set(value string) error {
	*l = append(*l, value)
	return nil
}

// parse reads the flags of a command. On --help it prints help and returns flag.ErrHelp.
func parse(name string, args []string, std streams, define func(*flag.FlagSet)) (rest []string, err error) {
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	flags.SetOutput(io.Discard) // errors are returned, help is printed below
	define(flags)
	err = flags.Parse(args)
	if errors.Is(err, flag.ErrHelp) {
		for _, c := range commands() {
			if c.name == name {
				fmt.Fprintf(std.out, "devcluster %s %s: %s\n", c.name, c.args, c.says)
			}
		}
		flags.SetOutput(std.out)
		flags.PrintDefaults()
		return nil, err
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, errUsage)
	}
	return flags.Args(), nil
}

// without returns an error if there are arguments where none belong.
func without(rest []string, err error) error {
	if err == nil && len(rest) > 0 {
		return fmt.Errorf("unknown argument %q: %w", rest[0], errUsage)
	}
	return err
}

func dirFlag(flags *flag.FlagSet, dir *string) {
	flags.StringVar(dir, "dir", defaultDir, "directory of the cluster")
}

func nodeFlag(flags *flag.FlagSet, number *int) {
	flags.IntVar(number, "node", 1, "which node; the control plane is on the first")
}

// clusterFlags defines the flags that say what kind of cluster is wanted.
func clusterFlags(flags *flag.FlagSet, cfg *cluster.Config) {
	flags.IntVar(&cfg.Nodes, "nodes", 0, "nodes that run pods: 0 (only etcd and kube-apiserver), 1 or 2")
	flags.IntVar(&cfg.Containerd, "containerd", 1, "major version of the nodes' container runtime: 1 (Debian's) or 2 (built, for the CNI verb STATUS)")
	flags.StringVar(&cfg.Checkout, "checkout", "", "checkout of ambientd, which names the versions of what is built (default: the one around the working directory)")
	flags.StringVar(&cfg.AuditLog, "audit-log", "", "file for the API server's audit log, one JSON object for each request (default: audit.log in the cluster's directory)")
	flags.Func("feature-gates", "NAME=true or NAME=false, separated by commas, for all of Kubernetes; may be repeated", func(value string) error {
		cfg.FeatureGates = append(cfg.FeatureGates, strings.Split(value, ",")...)
		return nil
	})
	flags.Var((*list)(&cfg.Images), "image", "docker-archive file with an image for all nodes; may be repeated")
	flags.Var((*list)(&cfg.APIServerFlags), "apiserver-flag", "further flag of kube-apiserver, as --NAME=VALUE; may be repeated")
}

// complete fills in what is known from the surroundings.
func complete(cfg *cluster.Config, std streams) error {
	cfg.Progress = std.err
	var err error
	if cfg.Cache, err = programs.CacheDir(); err != nil {
		return err
	}
	if cfg.Checkout == "" {
		here, err := os.Getwd()
		if err != nil {
			return fmt.Errorf("finding the checkout: %w", err)
		}
		cfg.Checkout, err = cluster.FindCheckout(here)
		return err
	}
	if cfg.Checkout, err = filepath.Abs(cfg.Checkout); err != nil {
		return fmt.Errorf("resolving the checkout's path: %w", err)
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"

	"ambientd/tools/devcluster/programs"
)

// binaries are the programs of a cluster: paths, or directories where it says so.
type binaries struct {
	kubernetes string // directory
	etcd       string
	// What only nodes that run pods need.
	containerd, ctr, busybox, pause string
	cni                             string // directory of the reference plugins
}

// debian is a program of a Debian package, and where its path is wanted.
type debian struct {
	path              *string
	name, packageName string
}

// find finds the programs that a cluster of this configuration needs, and builds what is missing.
func find(ctx context.Context, cfg Config) (binaries, error) {
	var bin binaries
	wanted := []debian{{&bin.etcd, "etcd", "etcd-server"}}
	if cfg.Nodes > 0 {
		var runc string // found by containerd itself
		wanted = append(wanted, debian{&runc, "runc", "runc"}, debian{&bin.busybox, "busybox", "busybox-static"})
		if cfg.Containerd != 2 {
			wanted = append(wanted, debian{&bin.containerd, "containerd", "containerd"}, debian{&bin.ctr, "ctr", "containerd"})
		}
	}
	var err error
	for _, w := range wanted {
		if *w.path, err = programs.Debian(w.name, w.packageName); err != nil {
			return bin, err
		}
	}
	if bin.kubernetes, err = buildKubernetes(ctx, cfg); err != nil || cfg.Nodes == 0 {
		return bin, err
	}
	return bin, buildOurs(ctx, cfg, &bin)
}

// Build builds those programs that the cluster needs and the cache does not hold, and
// returns the directory of Kubernetes' own.
func Build(ctx context.Context, cfg Config) (string, error) {
	dir, err := buildKubernetes(ctx, cfg)
	if err == nil && cfg.Nodes > 0 {
		err = buildOurs(ctx, cfg, new(binaries))
	}
	return dir, err
}

func buildKubernetes(ctx context.Context, cfg Config) (string, error) {
	const commands = "k8s.io/kubernetes/cmd/"
	packages := []string{commands + "kube-apiserver"}
	if cfg.Nodes > 0 {
		packages = append(packages, commands+"kubelet", commands+"kube-controller-manager", commands+"kube-scheduler", commands+"kubectl")
	}
	builder := programs.Builder{Cache: cfg.Cache, Progress: cfg.Progress}
	return builder.Build(ctx, programs.Kubernetes(cfg.Checkout, Version), packages)
}

// buildOurs builds what nodes need besides Kubernetes.
func buildOurs(ctx context.Context, cfg Config, bin *binaries) error {
	builder := programs.Builder{Cache: cfg.Cache, Progress: cfg.Progress}
	dir, err := builder.Build(ctx, programs.Own(cfg.Checkout, "pause/main.go"), []string{"ambientd/tools/devcluster/pause"})
	if err != nil {
		return err
	}
	bin.pause = filepath.Join(dir, "pause")
	if cfg.Containerd == 2 {
		const commands = "github.com/containerd/containerd/v2/cmd/"
		dir, err := builder.Build(ctx, programs.Containerd(cfg.Checkout), []string{commands + "containerd", commands + "containerd-shim-runc-v2", commands + "ctr"})
		if err != nil {
			return err
		}
		bin.containerd, bin.ctr = filepath.Join(dir, "containerd"), filepath.Join(dir, "ctr")
	}
	// The demo's plugins, in the cache that it uses.
	cmd := exec.CommandContext(ctx, "./common.sh", "build_tools", "tools/cniplugins")
	cmd.Dir = cfg.Checkout
	cmd.Stderr = cfg.Progress
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("building the reference CNI plugins: %w", err)
	}
	bin.cni = strings.TrimSpace(string(out))
	return nil
}

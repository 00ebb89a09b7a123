// SPDX-License-Identifier: Apache-2.0

// Package cluster brings a Kubernetes cluster up on one machine, and down again. It owns the
// cluster's directory, in which everything of it lies, and the order in which its parts
// start. It refuses to touch what it has not written down there first.
package cluster

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// Version is the version of Kubernetes, which kubernetes/go.mod requires.
const Version = "v1.36.3"

// MaxNodes is how many nodes a cluster can have.
const MaxNodes = 2

// maxDir keeps the paths of sockets below Dir within the kernel's 108 bytes.
const maxDir = 60

// Config says what kind of cluster is wanted.
type Config struct {
	// Dir holds all of the cluster. It must not be there, or be empty.
	Dir string
	// Nodes is how many nodes run pods: none, one or two.
	Nodes int
	// Containerd is the major version of the nodes' container runtime: 1, Debian's, or 2, which
	// is built; 0 means 1.
	Containerd int
	// Checkout is where the sources of ambientd are.
	Checkout string
	// Cache is the directory of built programs.
	Cache string
	// AuditLog is the file to which the API server writes an entry for each request; empty
	// means audit.log in Dir.
	AuditLog string
	// FeatureGates are for all of Kubernetes, beside or instead of the ones always set.
	FeatureGates []string
	// APIServerFlags are further flags of kube-apiserver.
	APIServerFlags []string
	// Images are docker-archive files that each node gets.
	Images []string
	// Progress is told what happens.
	Progress io.Writer
}

// check completes cfg, or says what is wrong with it.
func (cfg *Config) check() error {
	if os.Geteuid() != 0 {
		return errors.New("this must run as root: it makes namespaces in which Kubernetes is root")
	}
	if cfg.Nodes < 0 || cfg.Nodes > MaxNodes {
		return fmt.Errorf("--nodes=%d is not supported: 0 for an API server only, 1 or %d", cfg.Nodes, MaxNodes)
	}
	switch cfg.Containerd {
	case 0:
		cfg.Containerd = 1
	case 1, 2:
	default:
		return fmt.Errorf("--containerd=%d is not supported: 1 or 2", cfg.Containerd)
	}
	for _, gate := range cfg.FeatureGates {
		if name, value, ok := strings.Cut(gate, "="); !ok || name == "" || (value != "true" && value != "false") {
			return fmt.Errorf("feature gate %q: expected NAME=true or NAME=false", gate)
		}
	}
	for _, flag := range cfg.APIServerFlags {
		if !strings.HasPrefix(flag, "--") {
			return fmt.Errorf("flag of kube-apiserver %q: expected --NAME=VALUE", flag)
		}
	}
	for _, image := range cfg.Images {
		if _, err := os.Stat(image); err != nil {
			return fmt.Errorf("looking for an image's file: %w", err)
		}
	}
	if len(cfg.Images) > 0 && cfg.Nodes == 0 {
		return errors.New("images are for nodes, and --nodes=0 has none")
	}
	var err error
	if cfg.Dir, err = filepath.Abs(cfg.Dir); err != nil {
		return fmt.Errorf("resolving the cluster's directory: %w", err)
	}
	if len(cfg.Dir) > maxDir {
		return fmt.Errorf("the directory %s is longer than %d bytes, and sockets in it need short paths: choose another with --dir", cfg.Dir, maxDir)
	}
	for _, layered := range layeredDirs {
		if cfg.Dir == layered || strings.HasPrefix(cfg.Dir, layered+"/") {
			return fmt.Errorf("the directory %s is below %s, which each node sees in its own way: choose another with --dir", cfg.Dir, layered)
		}
	}
	if cfg.AuditLog == "" {
		cfg.AuditLog = filepath.Join(cfg.Dir, "audit.log")
	}
	if cfg.AuditLog, err = filepath.Abs(cfg.AuditLog); err != nil {
		return fmt.Errorf("resolving the path of the audit log: %w", err)
	}
	return nil
}

// gates returns the feature gates of all of Kubernetes. The first three are what
// certificates for pods need; the caller's come later and win.
func (cfg *Config) gates() []string {
	return append([]string{"ClusterTrustBundle=true", "ClusterTrustBundleProjection=true", "PodCertificateRequest=true"}, cfg.FeatureGates...)
}

// FindCheckout returns the directory, dir or one above it, that holds the sources of ambientd.
func FindCheckout(dir string) (string, error) {
	start := dir
	for {
		if _, err := os.Stat(filepath.Join(dir, "tools", "devcluster", "kubernetes", "go.mod")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("%s is not in a checkout of ambientd, which names the programs' versions: run devcluster from there, or give --checkout", start)
		}
		dir = filepath.Dir(dir)
	}
}

// layeredDirs are directories to which each node that runs pods writes in a layer of its own.
var layeredDirs = []string{"/etc", "/opt", "/var/lib"} //nolint:gochecknoglobals // nothing writes to it

// SPDX-License-Identifier: Apache-2.0

//go:build apitest

package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"ambientd/tools/enclave"
	"ambientd/tools/netnstest"
)

// newAPIBench makes a bench whose agent is this program.
func newAPIBench(t *testing.T, cfg config) *bench {
	t.Helper()
	netnstest.Require(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cfg.bin, cfg.noop = t.TempDir(), "/bin/cat"
	if err := os.Symlink(self, filepath.Join(cfg.bin, "ambientd")); err != nil {
		t.Fatal(err)
	}
	starter, err := enclave.NewStarter()
	if err != nil {
		t.Fatal(err)
	}
	return &bench{cfg: cfg, dir: t.TempDir(), progress: t.Output(), starter: starter}
}

// The agent of a node depends on its own 250 pods, and not on 5,000 of other nodes that
// come and change: memory and traffic are those of a cluster that has only the 250. The limits
// are those of the rows. How much CPU time it took is in the table, and no reason to fail: that
// depends on what else the machine does.
func TestScale(t *testing.T) {
	b := newAPIBench(t, config{scale: fullScale()})
	ctx, cancel := context.WithTimeout(t.Context(), 4*apiTimeout)
	defer cancel()
	if err := b.scale(ctx); err != nil {
		t.Fatal(err)
	}
	var table strings.Builder
	res := newResults(b)
	if err := res.print(&table); err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + table.String())
	for _, r := range b.rows {
		if !r.Pass && !strings.Contains(r.Name, "CPU") {
			t.Errorf("the agent depends on other nodes' pods: %+v", r)
		}
	}
	if r := find(t, b.rows, "reports of other nodes' kubelets"); r.Value < 250 {
		t.Errorf("other nodes' kubelets reported %v times: too few to tell", r.Value)
	}
	for _, r := range b.rows {
		if r.Value <= 0 {
			t.Errorf("not measured: %+v", r)
		}
	}
	nothingLeft(t)
}

// An ADD of a pod that is known costs no read at the API server, and one patch.
func TestAddRequests(t *testing.T) {
	size := nodeSize{namespaces: 4, meshed: 2, pods: 10, enrolled: 4}
	b := newAPIBench(t, config{node: size})
	build := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(b.cfg.bin, "ambient-cni"), "ambientd/cni-plugin")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("building the plugin: %v\n%s", err, output)
	}
	if err := b.adds(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"reads at the API server for 4 ADDs", "patches of pods/status", "its other requests"} {
		if r := find(t, b.rows, name); !r.Pass {
			t.Errorf("missed: %+v", r)
		}
	}
	allMeasured(t, b.rows)
	nothingLeft(t)
}

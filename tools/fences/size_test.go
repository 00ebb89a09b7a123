// SPDX-License-Identifier: Apache-2.0

package fences

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// maxPluginSize bounds the plugin's binary, in bytes: reading it in is a part of every
// pod's start on a node whose page cache is under pressure.
const maxPluginSize = 5 << 20

// TestPluginSize builds the plugin as the Makefile does.
func TestPluginSize(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "ambient-cni")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", binary, "./cni-plugin")
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building the plugin: %v\n%s", err, out)
	}
	info, err := os.Stat(binary)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("the plugin's binary has %.1f MB", float64(info.Size())/(1<<20))
	if info.Size() > maxPluginSize {
		t.Errorf("the plugin's binary has %d bytes, at most %d are allowed; see what was linked: go list -deps ./cni-plugin", info.Size(), maxPluginSize)
	}
}

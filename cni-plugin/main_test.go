// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"ambientd/tools/netnstest"
)

const pluginName = "ambient-cni"

// TestMain makes the test binary the plugin when it is called by the plugin's name, which is how
// scripts and libcni run the real main, and otherwise runs the tests in namespaces of their own.
func TestMain(m *testing.M) {
	testscript.Main(inNamespaces{m}, map[string]func(){pluginName: main, primaryName: primary})
}

type inNamespaces struct{ m *testing.M }

func (i inNamespaces) Run() int {
	// The race detector makes each process linger for a second at its end unless told not to.
	if err := os.Setenv("GORACE", strings.TrimSpace(os.Getenv("GORACE")+" atexit_sleep_ms=0")); err != nil {
		panic(err)
	}
	return netnstest.Main(i.m)
}

// nsPath is a path by which other processes open the namespace, while the test runs.
func nsPath(ns *netnstest.NS) string {
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), ns.File().Fd())
}

// fileID identifies a file, a namespace too, as "device:inode".
func fileID(file *os.File) string {
	info, err := file.Stat()
	if err != nil {
		return err.Error()
	}
	stat := info.Sys().(*syscall.Stat_t)
	return fmt.Sprintf("%d:%d", stat.Dev, stat.Ino)
}

// samples are what containerd 1.6 and 2.4 were seen to write to a chained plugin's standard input.
func samples(tb testing.TB) map[string][]byte {
	tb.Helper()
	paths, err := filepath.Glob("testdata/stdin/*.json")
	if err != nil || len(paths) != 5 {
		tb.Fatalf("%d samples, %v", len(paths), err)
	}
	found := map[string][]byte{}
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			tb.Fatal(err)
		}
		found[strings.TrimSuffix(filepath.Base(path), ".json")] = data
	}
	return found
}

// withKeys puts keys in front of a network configuration, every byte of which stays as it was.
func withKeys(tb testing.TB, conf []byte, keys map[string]any) []byte {
	tb.Helper()
	added, err := json.Marshal(keys)
	if err != nil {
		tb.Fatal(err)
	}
	rest, ok := bytes.CutPrefix(conf, []byte("{"))
	if !ok {
		tb.Fatalf("no configuration: %s", conf)
	}
	return slices.Concat(bytes.TrimSuffix(added, []byte("}")), []byte(","), rest)
}

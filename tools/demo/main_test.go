// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"ambientd/tools/enclave"
	"ambientd/tools/netnstest"
)

// TestMain gives the tests a host of their own, and plays the programs in pods.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == podCommand {
		if err := runInPod(context.Background(), os.Args[2:], os.Stdout); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(netnstest.Main(m))
}

// deadline bounds what a test waits for.
func deadline(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestParse(t *testing.T) {
	dir := t.TempDir()
	for _, program := range []string{"ambientd", "ambient-cni", "devproxy", "bridge", "host-local", "loopback"} {
		if err := os.WriteFile(filepath.Join(dir, program), nil, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		args []string
		want string // in the error; empty: none
	}{
		{args: []string{"--bin=" + dir, "--cni-bin=" + dir}},
		{args: []string{"--bin=" + dir, "--cni-bin=" + dir, "--json", "--hold", "--redirection=iptables"}},
		{args: []string{"--bin=" + dir}, want: "--cni-bin is missing"},
		{args: []string{"--bin=" + dir, "--cni-bin=" + t.TempDir()}, want: "bridge"},
		{args: []string{"--bin=" + dir, "--cni-bin=" + dir, "--redirection=nftables"}},
		{args: []string{"--redirection=foo"}, want: "--redirection=foo is not supported; supported: auto, nftables, iptables"},
		{args: []string{"--bin=" + dir, "--cni-bin=" + dir, "again"}, want: `"again"`},
		{args: []string{"--fast"}, want: "-fast"},
	} {
		_, err := parse(c.args, &bytes.Buffer{})
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v gives the error %v, want %q", c.args, err, c.want)
		}
	}
}

func TestCommandLine(t *testing.T) {
	for _, c := range []struct {
		args           []string
		code           int
		stdout, stderr string // parts of it; empty: nothing is printed
	}{
		{args: []string{"--help"}, stdout: "-redirection"},
		{args: []string{"-h", "--bin=/nowhere"}, stdout: "-hold"},
		{args: []string{"--redirection=foo"}, code: 2, stderr: "demo: --redirection=foo is not supported"},
		{args: []string{"--fast"}, code: 2, stderr: "demo: flag provided but not defined: -fast; see `make demo ARGS=--help`\n"},
	} {
		var stdout, stderr bytes.Buffer
		if code := run(t.Context(), c.args, &stdout, &stderr); code != c.code {
			t.Errorf("%v: exit code %d, want %d", c.args, code, c.code)
		}
		if got := stdout.String(); !strings.Contains(got, c.stdout) || (got == "") != (c.stdout == "") {
			t.Errorf("%v: standard output is %q", c.args, got)
		}
		if got := stderr.String(); !strings.Contains(got, c.stderr) || (got == "") != (c.stderr == "") {
			t.Errorf("%v: standard error is %q", c.args, got)
		}
	}
}

func TestChecksHaveTheAgreedNames(t *testing.T) {
	want := []string{
		"client-to-server", "outside-to-server", "untouched", "only-enrolled",
		"ready-before-start", "two-pods-one-identity", "whole-or-nothing", "delete",
	}
	var got []string
	for _, c := range checks {
		got = append(got, c.name)
	}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("the checks are %v, want %v", got, want)
	}
}

func TestPoll(t *testing.T) {
	calls := 0
	if err := poll(deadline(t), func() (bool, error) { calls++; return calls == 3, nil }); err != nil || calls != 3 {
		t.Errorf("%d calls, error %v; want 3 and none", calls, err)
	}
	broken := errors.New("broken")
	if err := poll(deadline(t), func() (bool, error) { return false, broken }); !errors.Is(err, broken) {
		t.Errorf("got %v, want %v", err, broken)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := poll(ctx, func() (bool, error) { return false, nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want the context's error", err)
	}
}

func TestManifests(t *testing.T) {
	dir := t.TempDir()
	p := newPod(meshed, "client-1", "client", map[string]string{"app": "x"})
	if err := errors.Join(writeNamespaces(dir), p.writeManifest(dir)); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string][]string{
		"namespace-shop.yaml":    {"kind: Namespace", "istio.io/dataplane-mode: ambient"},
		"namespace-plain.yaml":   {"kind: Namespace", "name: plain"},
		"pod-shop-client-1.yaml": {"kind: Pod", "uid: " + p.uid, "serviceAccountName: client", "app: x"},
	} {
		text, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			t.Fatal(err)
		}
		for _, part := range want {
			if !strings.Contains(string(text), part) {
				t.Errorf("%s has no %q:\n%s", file, part, text)
			}
		}
	}
	if err := errors.Join(p.removeManifest(dir), p.removeManifest(dir)); err != nil {
		t.Errorf("removing twice: %v", err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 2 {
		t.Errorf("%v is left (%v), want the namespaces", left, err)
	}
}

func TestConnectionLineIsMatched(t *testing.T) {
	line := enclave.ParseLine(`{"msg":"connection","direction":"inbound"}`)
	if !withMessage("connection")(line) || withMessage("ready")(line) {
		t.Error("lines are not told apart by their message")
	}
	if isSigning(line) || !isSigning(enclave.ParseLine(`{"msg":"signing refused"}`)) {
		t.Error("the CA's lines are not told from others")
	}
}

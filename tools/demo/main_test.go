// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
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
		{args: []string{"--bin=" + dir, "--cni-bin=" + dir, "again"}, want: `"again"`},
		{args: []string{"--fast"}, want: "-fast"},
	} {
		_, err := parse(c.args, &bytes.Buffer{})
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v gives the error %v, want %q", c.args, err, c.want)
		}
	}
}

func TestReport(t *testing.T) {
	promises := []check{
		{"kept", func(context.Context, *stage) (string, error) { return "seen", nil }},
		{"broken", func(context.Context, *stage) (string, error) { return "", errors.New("seen something else") }},
	}
	run := func(r *report, promises []check) bool {
		for _, c := range promises {
			r.run(t.Context(), c, nil)
		}
		return r.finish()
	}

	var out, progress bytes.Buffer
	if run(&report{out: &out, progress: &progress, json: true}, promises) {
		t.Error("a broken promise is reported as success")
	}
	var got struct {
		Checks []result
		OK     *bool
	}
	decoder := json.NewDecoder(&out)
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&got); err != nil || decoder.More() {
		t.Fatalf("standard output is not one JSON object: %v", err)
	}
	if got.OK == nil || *got.OK || len(got.Checks) != 2 || !got.Checks[0].OK || got.Checks[0].Detail != "seen" ||
		got.Checks[1].OK || got.Checks[1].Detail != "seen something else" {
		t.Errorf("got %+v", got)
	}

	out.Reset()
	if !run(&report{out: &out, progress: &progress}, promises[:1]) {
		t.Error("kept promises are reported as failure")
	}
	if lines := strings.Split(strings.TrimSpace(out.String()), "\n"); len(lines) != 2 || !strings.HasPrefix(lines[0], "ok     kept ") || lines[1] != "1 of 1 checks passed" {
		t.Errorf("got %q", lines)
	}
}

func TestAbortReportsEveryCheck(t *testing.T) {
	var out, progress bytes.Buffer
	r := &report{out: &out, progress: &progress}
	r.abort(errors.New("no agent"))
	if r.finish() {
		t.Error("an abort is reported as success")
	}
	for _, c := range checks {
		if !strings.Contains(out.String(), c.name) {
			t.Errorf("check %s is missing in:\n%s", c.name, out.String())
		}
	}
	if strings.Count(out.String(), "no agent") != len(checks) {
		t.Errorf("the reason is missing in:\n%s", out.String())
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

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// summary is what --json prints.
type summary struct {
	Checks []struct {
		Name   string
		OK     *bool
		Detail string
		MS     int64
	}
	Error string
	OK    *bool
}

// parseSummary reads the one object that standard output is to be.
func parseSummary(t *testing.T, out *bytes.Buffer) summary {
	t.Helper()
	var s summary
	decoder := json.NewDecoder(out)
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&s); err != nil || decoder.More() {
		t.Fatalf("standard output is not one JSON object: %v", err)
	}
	for _, c := range s.Checks {
		if c.OK == nil {
			t.Fatalf("check %s has no ok", c.Name)
		}
	}
	if s.OK == nil {
		t.Fatal("the summary has no ok")
	}
	return s
}

func kept(context.Context, *stage) (string, error) { return "seen", nil }

func broken(context.Context, *stage) (string, error) { return "", errors.New("seen something else") }

func TestReport(t *testing.T) {
	promises := []check{{"kept", kept}, {"broken", broken}}
	var out, progress bytes.Buffer
	r := &report{out: &out, progress: &progress, json: true}
	if r.run(t.Context(), promises, nil); r.finish() {
		t.Error("a broken promise is reported as success")
	}
	got := parseSummary(t, &out)
	if *got.OK || got.Error != "" || len(got.Checks) != 2 || !*got.Checks[0].OK || got.Checks[0].Detail != "seen" ||
		*got.Checks[1].OK || got.Checks[1].Detail != "seen something else" {
		t.Errorf("got %+v", got)
	}

	for _, c := range []struct {
		checks []check
		ok     bool
		want   []string // how the lines begin; of the last, all
	}{
		{promises, false, []string{"ok     kept ", "FAILED broken ", "1 of 2 checks passed"}},
		{promises[:1], true, []string{"ok     kept ", "1 of 1 checks passed"}},
		{nil, false, []string{"0 of 0 checks passed"}},
	} {
		out.Reset()
		r := &report{out: &out, progress: &progress}
		if r.run(t.Context(), c.checks, nil); r.finish() != c.ok {
			t.Errorf("%d checks are reported as %t", len(c.checks), !c.ok)
		}
		expectLines(t, out.String(), c.want)
	}
}

// expectLines checks how lines begin.
func expectLines(t *testing.T, text string, want []string) {
	t.Helper()
	lines := strings.Split(strings.TrimSpace(text), "\n")
	ok := len(lines) == len(want)
	for i := 0; ok && i < len(want); i++ {
		ok = strings.HasPrefix(lines[i], want[i])
	}
	if !ok {
		t.Errorf("got the lines %q, want them to begin with %q", lines, want)
	}
}

// The check that a signal comes into is interrupted, those behind it are not run, and
// none has failed.
func TestInterruptedChecks(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	promises := []check{
		{"kept", kept},
		{"long", func(ctx context.Context, _ *stage) (string, error) {
			cancel()
			<-ctx.Done()
			return "", ctx.Err()
		}},
		{"later", kept},
		{"last", broken},
	}
	var out, progress bytes.Buffer
	r := &report{out: &out, progress: &progress}
	if r.run(ctx, promises, nil); r.finish() {
		t.Error("an interruption is reported as success")
	}
	expectLines(t, out.String(), []string{
		"ok     kept ", "interrupted long", "not run     later", "not run     last",
		"1 of 4 checks passed, 1 interrupted, 2 not run",
	})
	if strings.Contains(out.String(), "FAILED") {
		t.Errorf("an interruption is reported as a failure:\n%s", out.String())
	}
	if got := progress.String(); got != "demo: interrupted\n" {
		t.Errorf("progress is %q", got)
	}
}

// A signal in the last check leaves none to be aborted.
func TestInterruptedLastCheck(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	promises := []check{{"long", func(context.Context, *stage) (string, error) {
		cancel()
		return "", context.Canceled
	}}}
	var out bytes.Buffer
	r := &report{out: &out, progress: &bytes.Buffer{}, json: true}
	if r.run(ctx, promises, nil); r.finish() {
		t.Error("an interruption is reported as success")
	}
	got := parseSummary(t, &out)
	if *got.OK || got.Error != "interrupted" || len(got.Checks) != 1 || *got.Checks[0].OK || got.Checks[0].Detail != "interrupted" {
		t.Errorf("got %+v", got)
	}
}

// program writes a stand-in for a program of ours.
func program(t *testing.T, dir, name, script string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
}

// A start that fails says why once; the checks are not run.
func TestFailedStart(t *testing.T) {
	bin := t.TempDir()
	program(t, bin, "ambientd", "echo 'ambientd: no such luck'; exit 1")
	for _, format := range []string{"text", "json"} {
		t.Run(format, func(t *testing.T) {
			var out, progress bytes.Buffer
			cfg := config{bin: bin, cniBin: bin, redirection: "auto", json: format == "json"}
			if code := play(deadline(t), cfg, t.TempDir(), &out, &progress); code == 0 {
				t.Error("a failed start gives exit code 0")
			}
			for _, once := range []string{"setting the scene", "exit status 1", "no such luck"} {
				if n := strings.Count(progress.String(), once); n != 1 {
					t.Errorf("%q is told %d times:\n%s", once, n, progress.String())
				}
			}
			if format == "text" {
				expectNotRun(t, out.String())
				return
			}
			got := parseSummary(t, &out)
			if *got.OK || !strings.Contains(got.Error, "no such luck") || len(got.Checks) != len(checks) {
				t.Errorf("got %+v", got)
			}
			for _, c := range got.Checks {
				if *c.OK || c.Detail != "not run" {
					t.Errorf("check %s: ok %t, %q; want false and not run", c.Name, *c.OK, c.Detail)
				}
			}
		})
	}
}

// expectNotRun checks the lines of a demo that did not come to its checks.
func expectNotRun(t *testing.T, text string) {
	t.Helper()
	var want []string
	for _, c := range checks {
		want = append(want, "not run     "+c.name)
	}
	expectLines(t, text, append(want, "0 of 8 checks passed, 8 not run"))
}

// canceller is a writer that cancels at a text.
type canceller struct {
	mu     sync.Mutex
	text   bytes.Buffer
	at     string
	cancel context.CancelFunc
}

func (c *canceller) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if strings.Contains(string(p), c.at) {
		c.cancel()
	}
	return c.text.Write(p)
}

func TestInterruptedStart(t *testing.T) {
	bin := t.TempDir()
	program(t, bin, "ambientd", "trap 'exit 1' TERM; while :; do sleep 0.05; done")
	ctx, cancel := context.WithCancel(deadline(t))
	defer cancel()
	progress := &canceller{at: "starting ambientd", cancel: cancel}
	var out bytes.Buffer
	if code := play(ctx, config{bin: bin, cniBin: bin, redirection: "auto"}, t.TempDir(), &out, progress); code == 0 {
		t.Error("an interruption gives exit code 0")
	}
	expectNotRun(t, out.String())
	if got := progress.text.String(); got != "demo: starting ambientd\ndemo: interrupted\n" {
		t.Errorf("progress is %q", got)
	}
}

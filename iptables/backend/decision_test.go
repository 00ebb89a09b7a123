// SPDX-License-Identifier: Apache-2.0

package backend_test

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"ambientd/iptables/backend"
	"ambientd/iptables/iptables"
	"ambientd/iptables/redirection"
	"ambientd/iptables/xtables"
	"ambientd/tools/netnstest"
)

// request asks for a mode, with nothing decided yet.
func request(t *testing.T, mode string) backend.Request {
	t.Helper()
	s := &scratches{t: t}
	return backend.Request{
		Mode: mode, BootID: "this-boot", File: filepath.Join(t.TempDir(), "redirection.json"), Scratch: s.make,
		Logger: slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
}

// probes counts the scratch namespaces that a decision took, and returns the decision.
func probes(t *testing.T, req backend.Request) (d backend.Decision, taken int) {
	t.Helper()
	s := &scratches{t: t}
	req.Scratch = s.make
	d, err := backend.Decide(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	s.checkLeft()
	return d, len(s.given)
}

// One probe a boot and mode; later starts use what it found, and it works.
func TestDecideOncePerBoot(t *testing.T) {
	netnstest.Require(t)
	for _, mode := range []string{backend.Auto, backend.NFTables, backend.IPTables} {
		t.Run(mode, func(t *testing.T) {
			req := request(t, mode)
			first, taken := probes(t, req)
			if taken == 0 || first.Kept {
				t.Fatalf("the first start took %d namespaces and calls the decision kept: %t", taken, first.Kept)
			}
			info, err := os.Lstat(req.File)
			if err != nil || info.Mode() != 0o600 {
				t.Errorf("the file: %v, %v", info, err)
			}
			for range 4 {
				next, taken := probes(t, req)
				if taken != 0 || !next.Kept || next.Name != first.Name || next.Reason != first.Reason || next.Variant != first.Variant || !next.Probed.Equal(first.Probed) {
					t.Errorf("a later start took %d namespaces and decided %+v, the first %+v", taken, next, first)
				}
				live(t, next.Backend)
			}
			if entries, err := os.ReadDir(filepath.Dir(req.File)); err != nil || len(entries) != 1 {
				t.Errorf("beside the file there is %v, %v", entries, err)
			}
		})
	}
}

func TestDecideAnew(t *testing.T) {
	netnstest.Require(t)
	for _, test := range []struct {
		name   string
		change func(t *testing.T, req *backend.Request)
		logged string
	}{
		{"after a boot", func(_ *testing.T, r *backend.Request) { r.BootID = "next-boot" }, ""},
		{"for another mode", func(_ *testing.T, r *backend.Request) { r.Mode = backend.NFTables }, ""},
		{"without the file", func(t *testing.T, r *backend.Request) { write(t, r.File, "", os.Remove) }, ""},
		{"with half a file", func(t *testing.T, r *backend.Request) { write(t, r.File, `{"version":1,`, nil) }, "reading it"},
		{"with an empty file", func(t *testing.T, r *backend.Request) { write(t, r.File, "", nil) }, "reading it"},
		{"of another version", func(t *testing.T, r *backend.Request) { write(t, r.File, `{"version":7}`, nil) }, "version 7"},
		{
			"for an unknown backend", func(t *testing.T, r *backend.Request) {
				write(t, r.File, `{"version":1,"bootID":"this-boot","mode":"auto","backend":"ebpf"}`, nil)
			}, "ebpf",
		},
		{
			"for programs that have gone", func(t *testing.T, r *backend.Request) {
				write(t, r.File, `{"version":1,"bootID":"this-boot","mode":"auto","backend":"iptables","variant":"gone"}`, nil)
			}, "iptables-gone-restore",
		},
		{
			"with a link", func(t *testing.T, r *backend.Request) {
				write(t, r.File, "", os.Remove)
				if err := os.Symlink("/dev/zero", r.File); err != nil {
					t.Fatal(err)
				}
			}, "symbolic links",
		},
		{
			"with a pipe", func(t *testing.T, r *backend.Request) {
				write(t, r.File, "", os.Remove)
				if err := unix.Mkfifo(r.File, 0o600); err != nil {
					t.Fatal(err)
				}
			}, "reading it",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			req := request(t, backend.Auto)
			probes(t, req)
			test.change(t, &req)
			var log bytes.Buffer
			req.Logger = logTo(&log)
			if d, taken := probes(t, req); taken == 0 || d.Kept {
				t.Error("it was not probed again")
			}
			if (test.logged == "") != (log.Len() == 0) || !strings.Contains(log.String(), test.logged) {
				t.Errorf("it logged %q, want something about %q", &log, test.logged)
			}
			// What was found now is what counts.
			req.Logger = logTo(&log)
			if d, taken := probes(t, req); taken != 0 || !d.Kept {
				t.Error("the new decision was not kept")
			}
		})
	}
}

// write changes the file, or with remove takes it away.
func write(t *testing.T, path, content string, remove func(string) error) {
	t.Helper()
	err := os.WriteFile(path, []byte(content), 0o600)
	if remove != nil {
		err = remove(path)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// A start does not fail for want of a place to keep its decision.
func TestDecisionThatCannotBeKept(t *testing.T) {
	netnstest.Require(t)
	req := request(t, backend.Auto)
	req.File = filepath.Join(t.TempDir(), "missing", "redirection.json")
	var log bytes.Buffer
	req.Logger = logTo(&log)
	if d, _ := probes(t, req); d.Backend == nil {
		t.Error("no backend")
	}
	if !strings.Contains(log.String(), "cannot be kept") || !strings.Contains(log.String(), "no such file") {
		t.Errorf("log: %s", &log)
	}
}

// TestMixedTables is case 8 for what decides: tables of any kind and by anybody's hand, in pods' namespaces and around the
// scratch one, change nothing, and none are made.
func TestMixedTables(t *testing.T) {
	netnstest.Require(t)
	req := request(t, backend.Auto)
	first, _ := probes(t, req)
	opts := redirection.DefaultOptions()
	for _, pod := range []struct{ name, program, script string }{
		{"fresh", "", ""},
		{"empty legacy tables", "iptables-legacy-restore", "*nat\nCOMMIT\n*mangle\nCOMMIT\n"},
		{"only chain headers", "iptables-legacy-restore", "*nat\n-N SOMEBODYS\nCOMMIT\n"},
		{"legacy rules", "iptables-legacy-restore", "*nat\n-N SOMEBODYS\n-A OUTPUT -p tcp -m tcp --dport 99 -j SOMEBODYS\n-A SOMEBODYS -j ACCEPT\nCOMMIT\n"},
		{"rules of iptables-nft", "iptables-nft-restore", "*nat\n-A OUTPUT -p tcp -m tcp --dport 99 -j ACCEPT\nCOMMIT\n"},
	} {
		t.Run(pod.name, func(t *testing.T) {
			ns := netnstest.New(t)
			run := ns.Runner()
			if pod.program != "" {
				command(t, ns, pod.script, pod.program)
			}
			tables := legacyTables(t, ns)
			for range 5 {
				d, taken := probes(t, req)
				if d.Name != first.Name || taken != 0 {
					t.Fatalf("decided %s after %d probes, want %s after none", d.Name, taken, first.Name)
				}
				if _, err := d.Backend.Apply(t.Context(), run, opts); err != nil {
					t.Fatal(err)
				}
				if _, err := d.Predecessors.RemovePredecessors(t.Context(), run); err != nil {
					t.Fatal(err)
				}
				if _, differences, err := d.Backend.Verify(t.Context(), run, opts); err != nil || len(differences) > 0 {
					t.Errorf("rules: %v, %v", differences, err)
				}
			}
			if now := legacyTables(t, ns); now != tables {
				t.Errorf("x_tables had tables %q, now %q", tables, now)
			}
			// The hooks are in six chains, each rule set once.
			if n := strings.Count(ruleset(t, ns), "15001"); n != 1 {
				t.Errorf("%d rules redirect egress, want 1:\n%s", n, ruleset(t, ns))
			}
		})
	}
}

func legacyTables(t *testing.T, ns *netnstest.NS) string {
	t.Helper()
	var all []string
	for _, family := range []redirection.Families{redirection.IPv4, redirection.IPv6} {
		tables, err := xtables.LegacyTables(ns.Runner(), family)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, tables...)
	}
	return strings.Join(all, " ")
}

// What is asked for on repair holds for a kept decision, too.
func TestDecideOnRepair(t *testing.T) {
	netnstest.Require(t)
	req := request(t, backend.IPTables)
	probes(t, req)
	req.OnRepair = "perhaps"
	if _, err := backend.Decide(t.Context(), req); err == nil || !strings.Contains(err.Error(), `"perhaps"`) {
		t.Errorf("got %v", err)
	}
	req.OnRepair = iptables.RepairAllow
	if _, err := backend.Decide(t.Context(), req); err != nil {
		t.Error(err)
	}
}

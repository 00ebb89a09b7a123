// SPDX-License-Identifier: Apache-2.0

package backend_test

import (
	"bytes"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/iptables/backend"
	"ambientd/iptables/iptables"
	"ambientd/iptables/nftables"
	"ambientd/iptables/redirection"
	"ambientd/iptables/xtables"
	"ambientd/tools/netnstest"
)

// decide returns the decision for a mode, probed anew.
func decide(t *testing.T, mode string) backend.Decision {
	t.Helper()
	netnstest.Require(t)
	d, err := backend.Decide(t.Context(), request(t, mode))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// command runs a program in the namespace and returns what it prints.
func command(t *testing.T, ns *netnstest.NS, stdin, name string, args ...string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		path = filepath.Join("/usr/sbin", name)
		if _, err := os.Stat(path); err != nil {
			t.Skip("needs ", name)
		}
	}
	var out []byte
	ns.Do(t, func() error {
		cmd := exec.CommandContext(t.Context(), path, args...)
		cmd.Stdin = strings.NewReader(stdin)
		// As in a pod: the host's lock is the host's.
		cmd.Env = append(os.Environ(), "XTABLES_LOCKFILE="+filepath.Join(t.TempDir(), "lock"))
		var err error
		if out, err = cmd.CombinedOutput(); err != nil {
			t.Errorf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
		}
		return nil
	})
	return string(out)
}

// Rules of another agent, among one of the pod's own.
const (
	foreignChains = `*mangle
-N ISTIO_PRERT
-A PREROUTING -j ISTIO_PRERT
-A ISTIO_PRERT -m mark --mark 0x539/0xfff -j CONNMARK --set-xmark 0x111/0xfff
COMMIT
*nat
-N ISTIO_OUTPUT
-A OUTPUT -j ISTIO_OUTPUT
-A OUTPUT -p tcp -m tcp --dport 99 -j ACCEPT
-A ISTIO_OUTPUT -p tcp -j REDIRECT --to-ports 15001
COMMIT
`
	foreignTables = `table inet istio-ambient-nat {
	chain output { type nat hook output priority -100; tcp dport 1-65535 redirect to :15001; }
}
table inet istio-ambient-mangle {
	chain prerouting { type filter hook prerouting priority -150; }
}
table ip theirs {
	chain output { type nat hook output priority 10; tcp dport 99 accept; }
}
`
)

// form is one way in which rules may lie in a pod's namespace.
type form struct {
	name string
	make func(t *testing.T, ns *netnstest.NS)
	not  string // the backend whose own form it is
}

func forms() []form {
	ours := func(variant iptables.Variant) func(t *testing.T, ns *netnstest.NS) {
		return func(t *testing.T, ns *netnstest.NS) {
			b, err := iptables.New(t.Context(), iptables.Config{Variant: variant})
			if err != nil {
				t.Skip(err)
			}
			if _, err := b.Apply(t.Context(), ns.Runner(), redirection.DefaultOptions()); err != nil {
				t.Fatal(err)
			}
		}
	}
	restore := func(program string) func(t *testing.T, ns *netnstest.NS) {
		return func(t *testing.T, ns *netnstest.NS) { command(t, ns, foreignChains, program, "--noflush") }
	}
	return []form{
		{"another agent's native tables", func(t *testing.T, ns *netnstest.NS) { command(t, ns, foreignTables, "nft", "-f", "-") }, ""},
		{"another agent's, by iptables-nft", restore("iptables-nft-restore"), ""},
		{"another agent's, by iptables-nft, IPv6", restore("ip6tables-nft-restore"), ""},
		{"another agent's, by iptables-legacy", restore("iptables-legacy-restore"), ""},
		{"another agent's, by iptables-legacy, IPv6", restore("ip6tables-legacy-restore"), ""},
		{"ours, native", func(t *testing.T, ns *netnstest.NS) {
			b, err := nftables.New()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := b.Apply(t.Context(), ns.Runner(), redirection.DefaultOptions()); err != nil {
				t.Fatal(err)
			}
		}, backend.NFTables},
		{"ours, by iptables-nft", ours(xtables.NFTables), backend.IPTables},
		{"ours, by iptables-legacy", ours(xtables.Legacy), ""},
	}
}

// ruleset is everything that any means has in the namespace.
func ruleset(t *testing.T, ns *netnstest.NS) string {
	t.Helper()
	text := command(t, ns, "", "nft", "list", "ruleset")
	for _, family := range []redirection.Families{redirection.IPv4, redirection.IPv6} {
		tables, err := xtables.LegacyTables(ns.Runner(), family)
		if err != nil {
			t.Fatal(err)
		}
		if len(tables) > 0 {
			text += command(t, ns, "", map[redirection.Families]string{redirection.IPv4: "iptables", redirection.IPv6: "ip6tables"}[family]+"-legacy-save")
		}
	}
	return text
}

// Every form is taken out from under either backend, whose own rules stay whole.
func TestRemovePredecessors(t *testing.T) {
	for _, mode := range []string{backend.NFTables, backend.IPTables} {
		t.Run(mode, func(t *testing.T) {
			d := decide(t, mode)
			for _, f := range forms() {
				if f.not == mode {
					continue
				}
				t.Run(f.name, func(t *testing.T) {
					ns := netnstest.New(t)
					run, opts := ns.Runner(), redirection.DefaultOptions()
					f.make(t, ns)
					if _, err := d.Backend.Apply(t.Context(), run, opts); err != nil {
						t.Fatal(err)
					}
					for _, want := range []bool{true, false} { // once more finds nothing
						if found, err := d.Predecessors.RemovePredecessors(t.Context(), run); found != want || err != nil {
							t.Errorf("removed: %t, %v; want %t", found, err, want)
						}
					}
					if _, differences, err := d.Backend.Verify(t.Context(), run, opts); err != nil || len(differences) > 0 {
						t.Errorf("the backend's own rules: %v, %v", differences, err)
					}
					if err := d.Backend.Remove(t.Context(), run); err != nil {
						t.Fatal(err)
					}
					left := ruleset(t, ns)
					for _, name := range []string{"ISTIO_", "istio-ambient", "AMBIENTD", "table inet ambientd"} {
						if strings.Contains(left, name) {
							t.Errorf("%s is left:\n%s", name, left)
						}
					}
					if strings.HasPrefix(f.name, "another") && !strings.Contains(left, "99") {
						t.Errorf("the pod's own rule is gone:\n%s", left)
					}
				})
			}
		})
	}
}

// Where x_tables has no tables no program is run, on nftables, and none is made.
func TestPredecessorsCostNoProcess(t *testing.T) {
	d := decide(t, backend.NFTables)
	ns := netnstest.New(t)
	command(t, ns, foreignTables, "nft", "-f", "-")
	command(t, ns, foreignChains, "iptables-nft-restore", "--noflush")
	before := children(t)
	if found, err := d.Predecessors.RemovePredecessors(t.Context(), ns.Runner()); !found || err != nil {
		t.Errorf("removed: %t, %v", found, err)
	}
	if _, err := d.Predecessors.RemoveFromHost(t.Context(), ns.Runner()); err != nil {
		t.Error(err)
	}
	if after := children(t); after != before {
		t.Errorf("child processes were run: page faults of all that have ended were %d, now %d", before, after)
	}
	for _, family := range []redirection.Families{redirection.IPv4, redirection.IPv6} {
		if tables, err := xtables.LegacyTables(ns.Runner(), family); err != nil || len(tables) > 0 {
			t.Errorf("x_tables has tables for %s now: %v, %v", family, tables, err)
		}
	}
}

// children grows with every child process that was waited for.
func children(t *testing.T) int64 {
	t.Helper()
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_CHILDREN, &usage); err != nil {
		t.Fatal(err)
	}
	return usage.Minflt + usage.Majflt
}

// The host's rule of another agent, and ours of the other backend, go; the backend's own stays.
func TestRemoveFromHost(t *testing.T) {
	const foreign = "*nat\n-N ISTIO_POSTRT\n-A POSTROUTING -j ISTIO_POSTRT\n-A POSTROUTING -p tcp -m tcp --dport 99 -j ACCEPT\n" +
		"-A ISTIO_POSTRT -p tcp -d 192.0.2.1 -j SNAT --to-source 169.254.7.127\nCOMMIT\n"
	opts := redirection.HostOptions{
		ProbeSourceIPv4: redirection.DefaultOptions().ProbeSourceIPv4, ProbeSourceIPv6: redirection.DefaultOptions().ProbeSourceIPv6,
		IPv6: true, Scope: redirection.ProbeScopePod,
	}
	decisions := map[string]backend.Decision{backend.NFTables: decide(t, backend.NFTables), backend.IPTables: decide(t, backend.IPTables)}
	for mode, other := range map[string]string{backend.NFTables: backend.IPTables, backend.IPTables: backend.NFTables} {
		for _, program := range []string{"iptables-nft-restore", "iptables-legacy-restore"} {
			t.Run(mode+", "+program, func(t *testing.T) {
				ns := netnstest.New(t)
				run := ns.Runner()
				command(t, ns, foreign, program, "--noflush")
				for _, d := range []backend.Decision{decisions[other], decisions[mode]} {
					if err := d.Host.EnsureHost(t.Context(), run, opts); err != nil {
						t.Fatal(err)
					}
				}
				if found, err := decisions[mode].Predecessors.RemoveFromHost(t.Context(), run); !found || err != nil {
					t.Errorf("removed: %t, %v", found, err)
				}
				if differences, err := decisions[mode].Host.VerifyHost(t.Context(), run, opts, nil); err != nil || len(differences) > 0 {
					t.Errorf("the backend's own rule: %v, %v", differences, err)
				}
				if sets := ipsets(t, ns); mode == backend.NFTables && len(sets) > 0 {
					t.Errorf("ipsets are left: %v", sets)
				}
				if err := decisions[mode].Host.RemoveHost(t.Context(), run); err != nil {
					t.Fatal(err)
				}
				left := ruleset(t, ns)
				for _, name := range []string{"ISTIO_", "AMBIENTD", "ambientd"} {
					if strings.Contains(left, name) {
						t.Errorf("%s is left:\n%s", name, left)
					}
				}
				if !strings.Contains(left, "99") {
					t.Errorf("the host's own rule is gone:\n%s", left)
				}
			})
		}
	}
}

// Without the programs of x_tables a pod in whose namespace it has tables is no pod to leave outside; it is told once.
func TestPredecessorsWithoutPrograms(t *testing.T) {
	netnstest.Require(t)
	var log bytes.Buffer
	req := request(t, backend.NFTables)
	req.Logger = slog.New(slog.NewTextHandler(&log, nil))
	d, err := backend.Decide(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	ns := netnstest.New(t)
	command(t, ns, "*nat\n-A OUTPUT -p tcp -m tcp --dport 99 -j ACCEPT\nCOMMIT\n", "iptables-legacy-restore")
	hidePrograms(t)
	for range 2 {
		if found, err := d.Predecessors.RemovePredecessors(t.Context(), ns.Runner()); found || err != nil {
			t.Errorf("removed: %t, %v", found, err)
		}
	}
	if n := strings.Count(log.String(), "programs are not installed"); n != 1 {
		t.Errorf("it was told %d times, want once: %s", n, &log)
	}
}

// hidePrograms puts empty directories over those that hold the iptables programs, in the test's mount namespace.
func hidePrograms(t *testing.T) {
	t.Helper()
	t.Setenv("PATH", t.TempDir())
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		target, err := filepath.EvalSymlinks(dir)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("tmpfs", target, "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount(target, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		})
	}
}

// ipsets lists those of the namespace.
func ipsets(t *testing.T, ns *netnstest.NS) []string {
	t.Helper()
	var names []string
	ns.Do(t, func() error {
		all, err := netlink.IpsetListAll()
		for _, set := range all {
			names = append(names, set.SetName)
		}
		return err
	})
	return names
}

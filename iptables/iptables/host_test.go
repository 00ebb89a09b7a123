// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
	"ambientd/iptables/xtables"
	"ambientd/tools/netnstest"
)

// node is a netns that stands for the host's, and the backend that works on it.
type node struct {
	t    *testing.T
	b    *Backend
	ns   *netnstest.NS
	opts redirection.HostOptions
}

func eachNode(t *testing.T, test func(t *testing.T, n *node)) {
	eachVariant(t, func(t *testing.T, b *Backend) {
		n := &node{t: t, b: b, ns: netnstest.New(t), opts: hostOptions()}
		n.ns.Do(t, func() error {
			if _, _, err := netlink.IpsetProtocol(); err != nil {
				t.Skipf("ipset does not work here: %v; load ip_set, ip_set_hash_ip and ip_set_hash_ipport", err)
			}
			return nil
		})
		test(t, n)
	})
}

func hostOptions() redirection.HostOptions {
	defaults := redirection.DefaultOptions()
	return redirection.HostOptions{ProbeSourceIPv4: defaults.ProbeSourceIPv4, ProbeSourceIPv6: defaults.ProbeSourceIPv6,
		IPv6: true, Scope: redirection.ProbeScopePod}
}

// entries parses "10.0.0.2", "2001:db8::2", "10.0.0.2:80" or "[2001:db8::2]:80".
func entries(t *testing.T, texts ...string) []redirection.HostEntry {
	t.Helper()
	var list []redirection.HostEntry
	for _, text := range texts {
		if addr, err := netip.ParseAddr(text); err == nil {
			list = append(list, redirection.HostEntry{Addr: addr})
			continue
		}
		both, err := netip.ParseAddrPort(text)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, redirection.HostEntry{Addr: both.Addr(), Port: both.Port()})
	}
	return list
}

func (n *node) must(err error) {
	n.t.Helper()
	if err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) ensure() {
	n.t.Helper()
	n.must(n.b.EnsureHost(within(n.t), n.ns.Runner(), n.opts))
}

func (n *node) set(texts ...string) {
	n.t.Helper()
	n.must(n.b.SetEntries(within(n.t), n.ns.Runner(), n.opts, entries(n.t, texts...)))
}

func (n *node) add(text string) {
	n.t.Helper()
	n.must(n.b.AddEntries(within(n.t), n.ns.Runner(), n.opts, entries(n.t, text)[0]))
}

func (n *node) del(text string) {
	n.t.Helper()
	n.must(n.b.DelEntries(within(n.t), n.ns.Runner(), n.opts, entries(n.t, text)[0]))
}

// differs compares the differences from a state with the entries given; none are
// expected unless named.
func (n *node) differs(texts []string, want ...string) {
	n.t.Helper()
	found, err := n.b.VerifyHost(within(n.t), n.ns.Runner(), n.opts, entries(n.t, texts...))
	n.must(err)
	var got []string
	for _, d := range found {
		got = append(got, d.String())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		n.t.Errorf("differences (-want +got):\n%s", diff)
	}
}

func (n *node) restore(script string) {
	n.t.Helper()
	n.must(n.b.programs[redirection.IPv4].Restore(within(n.t), n.ns.Runner(), script))
}

// TestHostLife takes rule and sets through a node's life, with both scopes.
func TestHostLife(t *testing.T) {
	eachNode(t, func(t *testing.T, n *node) {
		n.must(n.b.RemoveHost(within(t), n.ns.Runner())) // of nothing
		n.ensure()
		n.differs(nil)
		n.add("10.0.0.2")
		n.add("10.0.0.2")
		n.add("2001:db8::2")
		n.differs([]string{"10.0.0.2", "2001:db8::2"})
		n.ensure()
		n.differs([]string{"10.0.0.2", "2001:db8::2"})
		n.set("10.0.0.2", "10.0.0.3", "10.0.0.3")
		n.differs([]string{"10.0.0.2", "10.0.0.3"})
		n.del("10.0.0.2")
		n.del("10.0.0.2")
		n.differs([]string{"10.0.0.3"})

		n.opts.Scope = redirection.ProbeScopeDeclared
		n.differs([]string{"10.0.0.3:80"},
			"table nat, chain AMBIENTD_POSTRT, rule 1 (ipv4): want -p tcp -m owner --socket-exists -m set --match-set ambientd-probes-v4 dst,dst -j SNAT --to-source 169.254.7.127, got -p tcp -m owner --socket-exists -m set --match-set ambientd-probes-v4 dst -j SNAT --to-source 169.254.7.127",
			"ipset ambientd-probes-v4 (ipv4): want hash:ip,port family ipv4, got hash:ip family ipv4",
			"table nat, chain AMBIENTD_POSTRT, rule 1 (ipv6): want -p tcp -m owner --socket-exists -m set --match-set ambientd-probes-v6 dst,dst -j SNAT --to-source fd16:9254:7127:1337:ffff:ffff:ffff:ffff, got -p tcp -m owner --socket-exists -m set --match-set ambientd-probes-v6 dst -j SNAT --to-source fd16:9254:7127:1337:ffff:ffff:ffff:ffff",
			"ipset ambientd-probes-v6 (ipv6): want hash:ip,port family ipv6, got hash:ip family ipv6")
		n.ensure()
		n.differs(nil)
		n.set("10.0.0.3:80", "[2001:db8::2]:8080")
		n.add("10.0.0.3:81")
		n.differs([]string{"10.0.0.3:80", "10.0.0.3:81", "[2001:db8::2]:8080"})

		n.opts.IPv6 = false
		n.ensure()
		n.differs([]string{"10.0.0.3:80", "10.0.0.3:81"})
		n.must(n.b.RemoveHost(within(t), n.ns.Runner()))
		n.must(n.b.RemoveHost(within(t), n.ns.Runner()))
		n.nothingLeft()
	})
}

// nothingLeft: no chain of ours, no set at all.
func (n *node) nothingLeft() {
	n.t.Helper()
	for family, s := range state(n.t, n.b, n.ns) {
		if s.Has(redirection.IsOurChain) {
			n.t.Errorf("%s: chains are left: %v", family, compare(s, nil))
		}
	}
	n.ns.Do(n.t, func() error {
		sets, err := netlink.IpsetListAll()
		if len(sets) > 0 {
			n.t.Errorf("%d ipsets are left", len(sets))
		}
		return err
	})
}

// TestHostRepair: what is changed by hand is named, and put right.
func TestHostRepair(t *testing.T) {
	const rule = "-p tcp -m owner --socket-exists -m set --match-set ambientd-probes-v4 dst -j SNAT --to-source 169.254.7.127"
	const jump = "table nat, jump from POSTROUTING to AMBIENTD_POSTRT (ipv4): "
	for _, c := range []struct {
		name   string
		script string
		damage func() error
		want   []string
	}{
		{name: "rule deleted", script: "*nat\n-F AMBIENTD_POSTRT\nCOMMIT\n",
			want: []string{"table nat, chain AMBIENTD_POSTRT, rule 1 (ipv4): missing, want " + rule}},
		{name: "rule changed", script: "*nat\n-R AMBIENTD_POSTRT 1 -p tcp -j SNAT --to-source 169.254.7.127\nCOMMIT\n",
			want: []string{"table nat, chain AMBIENTD_POSTRT, rule 1 (ipv4): want " + rule + ", got -p tcp -j SNAT --to-source 169.254.7.127"}},
		{name: "built-in chain flushed", script: "*nat\n-F POSTROUTING\nCOMMIT\n", want: []string{jump + "missing, want once"}},
		{name: "jump doubled", script: "*nat\n-A POSTROUTING -j AMBIENTD_POSTRT\nCOMMIT\n", want: []string{jump + "want once, got as rule 1, as rule 2"}},
		{name: "masqueraded before", script: "*nat\n-I POSTROUTING -p tcp -j MASQUERADE\nCOMMIT\n",
			want: []string{jump + "want before rules that decide by themselves, got after rule 1: -p tcp -j MASQUERADE"}},
		{name: "another's chain before", script: "*nat\n-N KUBE-POSTROUTING\n-I POSTROUTING -j KUBE-POSTROUTING\nCOMMIT\n"},
		{name: "masqueraded after", script: "*nat\n-A POSTROUTING -p tcp -j MASQUERADE\nCOMMIT\n"},
		{name: "set flushed", damage: func() error { return netlink.IpsetFlush(redirection.ProbeSetIPv4) },
			want: []string{"entry of ipset ambientd-probes-v4 (ipv4): missing, want 10.0.0.2"}},
		{name: "entry added", damage: func() error {
			return netlink.IpsetAdd(redirection.ProbeSetIPv4, &netlink.IPSetEntry{IP: []byte{10, 0, 0, 9}})
		}, want: []string{"entry of ipset ambientd-probes-v4 (ipv4): unexpected 10.0.0.9"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			eachNode(t, func(t *testing.T, n *node) {
				n.ensure()
				n.set("10.0.0.2")
				n.restore(c.script)
				if c.damage != nil {
					n.ns.Do(t, c.damage)
				}
				n.differs([]string{"10.0.0.2"}, c.want...)
				n.ensure()
				n.set("10.0.0.2")
				n.differs([]string{"10.0.0.2"})
			})
		})
	}
}

// TestHostSetGone: the set can only go with the rule that uses it; both come back.
func TestHostSetGone(t *testing.T) {
	eachNode(t, func(t *testing.T, n *node) {
		n.ensure()
		n.restore("*nat\n-F POSTROUTING\n-F AMBIENTD_POSTRT\n-X AMBIENTD_POSTRT\nCOMMIT\n")
		n.ns.Do(t, func() error { return netlink.IpsetDestroy(redirection.ProbeSetIPv4) })
		n.differs([]string{"10.0.0.2"}, "table nat, chain AMBIENTD_POSTRT (ipv4): missing, want 1 rules",
			"table nat, jump from POSTROUTING to AMBIENTD_POSTRT (ipv4): missing, want once",
			"ipset ambientd-probes-v4 (ipv4): missing, want hash:ip with 1 entries")
		if err := n.b.AddEntries(within(t), n.ns.Runner(), n.opts, entries(t, "10.0.0.2")[0]); !errors.Is(err, unix.ENOENT) {
			t.Errorf("adding to a set that is gone: %v", err)
		}
		if err := n.b.SetEntries(within(t), n.ns.Runner(), n.opts, nil); !errors.Is(err, unix.ENOENT) {
			t.Errorf("filling a set that is gone: %v", err)
		}
		n.del("10.0.0.2")
		n.ensure()
		n.set("10.0.0.2")
		n.differs([]string{"10.0.0.2"})
	})
}

// TestHostRefuses: what the options do not allow never reaches the kernel, and a
// set that somebody else uses is not taken from them.
func TestHostRefuses(t *testing.T) {
	eachNode(t, func(t *testing.T, n *node) {
		ctx, run := within(t), n.ns.Runner()
		if err := n.b.EnsureHost(ctx, run, redirection.HostOptions{}); err == nil {
			t.Error("options without a scope were accepted")
		}
		for _, bad := range []string{"10.0.0.2:80", "0.0.0.0"} {
			e := entries(t, bad)
			if err := errors.Join(n.b.AddEntries(ctx, run, n.opts, e[0])); err == nil {
				t.Errorf("%s was added", bad)
			}
			if err := n.b.SetEntries(ctx, run, n.opts, e); err == nil {
				t.Errorf("%s was set", bad)
			}
			if err := n.b.DelEntries(ctx, run, n.opts, e[0]); err == nil {
				t.Errorf("%s was taken out", bad)
			}
			if _, err := n.b.VerifyHost(ctx, run, n.opts, e); err == nil {
				t.Errorf("%s was verified", bad)
			}
		}
		n.ensure()
		n.restore("*nat\n-A PREROUTING -m set --match-set ambientd-probes-v4 dst -j ACCEPT\nCOMMIT\n")
		err := n.b.RemoveHost(ctx, run)
		if err == nil || !strings.Contains(err.Error(), "some rule that is not ours uses it") {
			t.Errorf("removing a set in use: %v", err)
		}
	})
}

// TestHostVerifyWritesNothing: not even a table.
func TestHostVerifyWritesNothing(t *testing.T) {
	eachNode(t, func(t *testing.T, n *node) {
		n.differs(nil, "table nat, chain AMBIENTD_POSTRT (ipv4): missing, want 1 rules",
			"table nat, jump from POSTROUTING to AMBIENTD_POSTRT (ipv4): missing, want once",
			"ipset ambientd-probes-v4 (ipv4): missing, want hash:ip with 0 entries",
			"table nat, chain AMBIENTD_POSTRT (ipv6): missing, want 1 rules",
			"table nat, jump from POSTROUTING to AMBIENTD_POSTRT (ipv6): missing, want once",
			"ipset ambientd-probes-v6 (ipv6): missing, want hash:ip with 0 entries")
		for family, s := range state(t, n.b, n.ns) {
			if len(s) != 0 {
				t.Errorf("%s: tables were made: %v", family, s)
			}
		}
	})
}

// TestHostMigration: the rule of the other variant goes, and the sets, which both
// use, stay.
func TestHostMigration(t *testing.T) {
	eachNode(t, func(t *testing.T, n *node) {
		older := n.b
		to := Legacy
		if older.Variant() == Legacy {
			to = NFTables
		}
		newer, err := New(t.Context(), Config{Variant: to})
		if err != nil {
			t.Skip(err)
		}
		n.ensure()
		n.set("10.0.0.2")
		n.b = newer
		n.ensure()
		for _, want := range []bool{true, false} {
			if found, err := n.b.RemoveOtherFromHost(within(t), n.ns.Runner()); found != want || err != nil {
				t.Errorf("removing the older rule: %t, %v; want %t", found, err, want)
			}
		}
		n.differs([]string{"10.0.0.2"})
		for family, s := range state(t, older, n.ns) {
			if s.Has(redirection.IsOurChain) {
				t.Errorf("%s: the older rule is left", family)
			}
		}
	})
}

// holdHostsLock holds the lock of x_tables, as kube-proxy does, until the test
// ends or the function returned is called.
func holdHostsLock(t *testing.T) (release func()) {
	t.Helper()
	netnstest.Require(t)
	lock, err := os.OpenFile("/run/xtables.lock", os.O_CREATE|os.O_RDONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lock.Close() })
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	return func() { lock.Close() }
}

// TestHostWaitsForTheLock: not for ever, and not at all where there is none to
// take.
func TestHostWaitsForTheLock(t *testing.T) {
	b, err := New(t.Context(), Config{Variant: Legacy, HostLockWait: time.Second})
	if err != nil {
		t.Skip(err)
	}
	n := &node{t: t, b: b, ns: netnstest.New(t), opts: hostOptions()}
	release := holdHostsLock(t)
	err = b.EnsureHost(within(t), n.ns.Runner(), n.opts)
	var exit *exec.ExitError
	if !errors.As(err, &exit) || !strings.Contains(err.Error(), "xtables lock") {
		t.Fatalf("with the lock held: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := b.EnsureHost(ctx, n.ns.Runner(), n.opts); !errors.Is(err, context.Canceled) {
		t.Errorf("with the lock held and the caller gone: %v", err)
	}
	n.add("10.0.0.2") // sets have no lock
	release()
	n.ensure()
	n.differs([]string{"10.0.0.2"})
}

// TestForeignOnHost: the rule of another agent goes, by whichever means it was
// made, and nothing else does.
func TestForeignOnHost(t *testing.T) {
	const theirs = "*nat\n-N ISTIO_POSTRT\n-A POSTROUTING -j ISTIO_POSTRT\n" +
		"-A ISTIO_POSTRT -p tcp -m owner --socket-exists -j SNAT --to-source 169.254.7.127\n" +
		"-N KUBE-POSTROUTING\n-A POSTROUTING -j KUBE-POSTROUTING\nCOMMIT\n"
	eachNode(t, func(t *testing.T, n *node) {
		for _, variant := range []Variant{NFTables, Legacy} {
			programs, err := xtables.Find(t.Context(), variant, redirection.IPv4)
			if err != nil {
				t.Skip(err)
			}
			n.must(programs.Restore(within(t), n.ns.Runner(), theirs))
			n.ensure()
			if found, err := n.b.RemoveForeignFromHost(within(t), n.ns.Runner()); !found || err != nil {
				t.Fatalf("%s: %t, %v", variant, found, err)
			}
			s, err := programs.Save(within(t), n.ns.Runner())
			n.must(err)
			if s.Has(redirection.IsForeignChain) || !s.Has(func(c string) bool { return c == "KUBE-POSTROUTING" }) {
				t.Errorf("%s: left are %v", variant, s["nat"].Chains)
			}
			n.differs(nil)
			if found, err := n.b.RemoveForeignFromHost(within(t), n.ns.Runner()); found || err != nil {
				t.Errorf("%s, once more: %t, %v", variant, found, err)
			}
		}
	})
}

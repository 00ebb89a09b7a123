// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ambientd/cni-plugin/podevent"
	"ambientd/iptables/backend"
	"ambientd/iptables/nftables"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/agent"
	"ambientd/nodeagent/zds/zdstest"
	"ambientd/tools/netnstest"
)

// begin starts an agent for pods that are in the mesh, with its own end at the test's.
func begin(t *testing.T, cfg agent.Config) *running {
	t.Helper()
	r := start(t, cfg)
	r.manifest("shop", shop)
	return r
}

// A new agent takes pods up before a node proxy is told anything, however early that
// connects; rules are not written, and attachments are known.
func TestRestart(t *testing.T) {
	for _, mode := range []string{backend.NFTables, backend.IPTables} {
		t.Run(mode, func(t *testing.T) {
			clearHost(t)
			const pods = 5
			cfg := config(t)
			cfg.Redirection = mode
			r := begin(t, cfg)
			r.proxy(t)
			var sandboxes []*sandbox
			for i := range pods {
				s := newSandbox(t, i+1)
				s.enrol(r, "")
				sandboxes = append(sandboxes, s)
			}
			r.end()
			before, faults := generations(t, sandboxes), children(t)

			peers := make(chan *zdstest.Peer, 1)
			go func() { peers <- dialEarly(t, cfg.ZDSSocket) }()
			r = start(t, cfg)
			peer := <-peers
			defer peer.Close()
			must(t, peer.AwaitReady(t.Context()))
			if n := len(peer.State().Pods); n != pods {
				t.Errorf("the first snapshot has %d pods, want %d", n, pods)
			}
			r.awaitStatus("all pods", allEnrolled(pods))
			if mode == backend.NFTables && children(t) != faults {
				t.Error("the start has run child processes")
			}
			if after := generations(t, sandboxes); mode == backend.NFTables && after != before {
				t.Errorf("rules were written: generations %s, then %s", before, after)
			}
			if result := r.verify(admin.VerifyRequest{}); !result.OK() || len(result.Pods) != pods {
				t.Errorf("after the restart: %+v", result)
			}
			for _, s := range sandboxes {
				if reply := s.call(r, podevent.CommandDel); reply.Result != podevent.ResultWithdrawn || reply.Reason != "" {
					t.Errorf("DEL: %+v", reply)
				}
				wantNoTraces(t, s.ns)
			}
			r.end()
		})
	}
}

// children grows with every child process that was waited for.
func children(t *testing.T) int64 {
	t.Helper()
	var usage unix.Rusage
	must(t, unix.Getrusage(unix.RUSAGE_CHILDREN, &usage))
	return usage.Minflt + usage.Majflt
}

// dialEarly connects as soon as somebody listens.
func dialEarly(t *testing.T, socket string) *zdstest.Peer {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		peer, err := zdstest.Dial(t.Context(), socket, zdstest.AckAll)
		if err == nil || t.Context().Err() != nil {
			return peer
		}
		<-tick.C
	}
}

func generations(t *testing.T, sandboxes []*sandbox) string {
	t.Helper()
	b, err := nftables.New()
	must(t, err)
	var all []string
	for _, s := range sandboxes {
		generation, err := b.Generation(t.Context(), s.ns.Runner())
		must(t, err)
		all = append(all, fmt.Sprint(generation))
	}
	return strings.Join(all, " ")
}

// A pod that was set up under another backend is migrated when the agent starts, and so
// is the host's rule; there are never two sets of rules at rest.
func TestChangeOfBackend(t *testing.T) {
	clearHost(t)
	cfg := config(t)
	s := newSandbox(t, 1)
	for i, mode := range []string{backend.NFTables, backend.IPTables, backend.NFTables} {
		cfg.Redirection = mode
		r := begin(t, cfg)
		r.proxy(t)
		if i == 0 {
			s.enrol(r, "")
		}
		status := r.awaitStatus("the pod", allEnrolled(1))
		if status.Pods[0].Backend != mode || status.Redirection.Backend != mode {
			t.Errorf("under %s status shows %+v", mode, status)
		}
		wanted, other := "table inet ambientd", "AMBIENTD"
		if mode == backend.IPTables {
			wanted, other = other, wanted
		}
		awaitRules(t, s.ns, wanted, other)
		awaitRules(t, netnstest.Self(t), wanted, other)
		if result := r.verify(admin.VerifyRequest{Probes: true}); !result.OK() {
			t.Errorf("under %s: %+v", mode, result)
		}
		r.end()
	}
}

// awaitRules waits until a netns has rules with a word, and none with the other.
func awaitRules(t *testing.T, ns *netnstest.NS, wanted, other string) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); ; <-tick.C {
		text := everything(t, ns)
		if strings.Contains(text, wanted) && !strings.Contains(text, other) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("no %q without %q in\n%s", wanted, other, text)
		}
	}
}

// TestMixedTablesAtStarts is case 8: legacy tables, empty, with chains only or with
// rules, beside others, give one stable answer, probed once per boot; reading makes no
// tables, and each pod has one set of rules.
func TestMixedTablesAtStarts(t *testing.T) {
	clearHost(t)
	cfg := config(t)
	scripts := []string{
		"", "*nat\nCOMMIT\n*mangle\nCOMMIT\n", "*nat\n-N SOMEBODYS\nCOMMIT\n",
		"*nat\n-N SOMEBODYS\n-A OUTPUT -p tcp -m tcp --dport 99 -j SOMEBODYS\n-A SOMEBODYS -j ACCEPT\nCOMMIT\n",
	}
	var sandboxes []*sandbox
	tables := map[string]string{}
	for i, script := range scripts {
		s := newSandbox(t, i+1)
		if script != "" {
			program(t, s.ns, script, "iptables-legacy-restore")
		}
		tables[s.name] = tablesOf(t, s)
		sandboxes = append(sandboxes, s)
	}
	var first admin.RedirectionStatus
	for i := range 5 {
		r := begin(t, cfg)
		r.proxy(t)
		for _, s := range sandboxes {
			if i == 0 {
				s.enrol(r, "")
			}
		}
		status := r.awaitStatus("all pods", allEnrolled(len(sandboxes)))
		if i == 0 {
			first = status.Redirection
		}
		if status.Redirection != first || first.Probed.IsZero() {
			t.Errorf("start %d: %+v, the first %+v", i+1, status.Redirection, first)
		}
		for _, s := range sandboxes {
			if now := tablesOf(t, s); now != tables[s.name] {
				t.Errorf("start %d: x_tables of %s had %q, now %q", i+1, s.name, tables[s.name], now)
			}
			if n := strings.Count(everything(t, s.ns), "15001"); n != 1 {
				t.Errorf("start %d: %d rules of %s redirect egress, want one", i+1, n, s.name)
			}
		}
		r.end()
	}
	info, err := os.Lstat(filepath.Join(cfg.RunDir, "private", "redirection.json"))
	if err != nil || info.Mode() != 0o600 {
		t.Errorf("the decision's file: %v, %v", info, err)
	}
}

func tablesOf(t *testing.T, s *sandbox) string {
	t.Helper()
	var text string
	s.ns.Do(t, func() error {
		for _, family := range []string{"ip", "ip6"} {
			names, err := os.ReadFile("/proc/thread-self/net/" + family + "_tables_names")
			if err == nil {
				text += string(names)
			}
		}
		return nil
	})
	return text
}

// Rules of another agent, as iptables and nft take them.
const (
	theirChains = "*mangle\n-N ISTIO_PRERT\n-A PREROUTING -j ISTIO_PRERT\n-A ISTIO_PRERT -m mark --mark 0x539/0xfff -j CONNMARK --set-xmark 0x111/0xfff\nCOMMIT\n" +
		"*nat\n-N ISTIO_OUTPUT\n-A OUTPUT -j ISTIO_OUTPUT\n-A ISTIO_OUTPUT -p tcp -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15001\nCOMMIT\n"
	theirTables = "table inet istio-ambient-nat {\nchain output { type nat hook output priority -100; meta l4proto tcp redirect to :15001; }\n}\n"
	theirHost   = "*nat\n-N ISTIO_POSTRT\n-A POSTROUTING -j ISTIO_POSTRT\n-A ISTIO_POSTRT -d 10.1.0.0/16 -p tcp -j SNAT --to-source 169.254.7.127\nCOMMIT\n"
)

// Pods that another agent has set up, and its rule on the host, are taken over at the
// start, by either backend.
func TestTakeover(t *testing.T) {
	for _, mode := range []string{backend.NFTables, backend.IPTables} {
		t.Run(mode, func(t *testing.T) {
			clearHost(t)
			cfg := config(t)
			cfg.Redirection = mode
			var sandboxes []*sandbox
			for i, rules := range []struct{ program, script string }{
				{"iptables-nft-restore", theirChains}, {"iptables-legacy-restore", theirChains}, {"nft", theirTables},
			} {
				s := newSandbox(t, i+1)
				if rules.program == "nft" {
					program(t, s.ns, rules.script, "nft", "-f", "-")
				} else {
					program(t, s.ns, rules.script, rules.program)
				}
				program(t, s.ns, "", "ip", "rule", "add", "priority", fmt.Sprint(redirection.RulePriority), "fwmark", "0x111/0xfff", "lookup", "100")
				program(t, s.ns, "", "ip", "route", "add", "local", "default", "dev", "lo", "table", "100")
				sandboxes = append(sandboxes, s)
			}
			program(t, netnstest.Self(t), theirHost, "iptables-nft-restore", "--noflush")
			r := begin(t, cfg)
			r.proxy(t)
			for _, s := range sandboxes {
				s.describe(r, "")
			}
			r.awaitStatus("all pods", allEnrolled(len(sandboxes)))
			awaitRules(t, netnstest.Self(t), map[string]string{backend.NFTables: redirection.HostTable, backend.IPTables: redirection.IPTablesPostrouting}[mode], "ISTIO")
			for _, s := range append(sandboxes, &sandbox{name: "the host", ns: netnstest.Self(t)}) {
				if text := everything(t, s.ns); strings.Contains(text, "ISTIO") || strings.Contains(text, "istio") {
					t.Errorf("another agent's rules are left in %s:\n%s", s.name, text)
				}
			}
			if result := r.verify(admin.VerifyRequest{Probes: true}); !result.OK() {
				t.Errorf("after the takeover: %+v", result)
			}
			if _, err := admin.Withdraw(t.Context(), cfg.AdminSocketPath(), admin.Selection{All: true}); err != nil {
				t.Error(err)
			}
			for _, s := range sandboxes {
				wantNoTraces(t, s.ns)
			}
			r.end()
		})
	}
}

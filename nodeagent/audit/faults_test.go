// SPDX-License-Identifier: Apache-2.0

package audit_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/iptables/backend"
	"ambientd/iptables/nftables"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/agent"
	"ambientd/tools/netnstest"
)

// promptly is what a repair after a notification may take: 0.1 s of settling, and the work.
const promptly = time.Second

// programs is how many a repair with iptables starts, about: two to look, two to repair, two to
// look again. How long the machine, which may run other tests, takes for one shows as the fault is made.
const programs = 6

// fault is a way in which something of a pod's, or of the host's, gets lost.
type fault struct {
	name string
	make func(t *testing.T, ns *netnstest.NS)
	// silent says that the kernel does not tell: it is noticed within an interval.
	silent bool
}

// runs returns a fault that programs make, one after the other.
func runs(name string, commands ...string) fault {
	return fault{name: name, make: func(t *testing.T, ns *netnstest.NS) {
		for _, command := range commands {
			words := strings.Fields(command)
			run(t, ns, words[0], words[1:]...)
		}
	}}
}

// routingFaults are those of both backends.
func routingFaults() []fault {
	var faults []fault
	for family, name := range map[int]string{netlink.FAMILY_V4: "IPv4", netlink.FAMILY_V6: "IPv6"} {
		faults = append(faults, fault{name: "policy rule deleted, " + name, make: func(t *testing.T, ns *netnstest.NS) {
			ns.Do(t, func() error {
				rules, err := netlink.RuleList(family)
				if err != nil {
					return err
				}
				for _, rule := range rules {
					if rule.Priority == int(redirection.RulePriority) {
						rule.Family = family
						return netlink.RuleDel(&rule)
					}
				}
				return fmt.Errorf("no policy rule in %v", rules)
			})
		}}, fault{name: "route deleted, " + name, make: func(t *testing.T, ns *netnstest.NS) {
			ns.Do(t, func() error {
				routes, err := netlink.RouteListFiltered(family, &netlink.Route{Table: int(redirection.RouteTable)}, netlink.RT_FILTER_TABLE)
				if err != nil {
					return err
				}
				return netlink.RouteDel(&routes[0])
			})
		}})
	}
	return faults
}

func nftablesFaults(t *testing.T) []fault {
	faults := append(routingFaults(),
		runs("ruleset flushed", "nft flush ruleset"),
		runs("table flushed", "nft flush table inet ambientd"),
		runs("table deleted", "nft delete table inet ambientd"),
		runs("chain added", "nft add chain inet ambientd extra"),
	)
	for _, chain := range nftablesChains(t) {
		faults = append(faults,
			runs("chain flushed: "+chain, "nft flush chain inet ambientd "+chain),
			runs("chain deleted: "+chain, "nft flush chain inet ambientd "+chain, "nft delete chain inet ambientd "+chain),
			runs("foreign rule before ours: "+chain, "nft insert rule inet ambientd "+chain+" tcp dport 80 accept"),
		)
	}
	return faults
}

// nftablesChains are the chains that a pod has.
func nftablesChains(t *testing.T) (chains []string) {
	t.Helper()
	b, err := nftables.New()
	must(t, err)
	ns := netnstest.New(t)
	_, err = b.Apply(t.Context(), ns.Runner(), redirection.DefaultOptions())
	must(t, err)
	var list struct {
		Nftables []struct {
			Chain *struct{ Name string }
		}
	}
	must(t, json.Unmarshal([]byte(run(t, ns, "nft", "-j", "list", "chains")), &list))
	for _, object := range list.Nftables {
		if object.Chain != nil {
			chains = append(chains, object.Chain.Name)
		}
	}
	if len(chains) == 0 {
		t.Fatal("a pod has no chains")
	}
	return chains
}

// iptablesFaults are those of one variant of the programs.
func iptablesFaults(variant string) []fault {
	faults := routingFaults()
	for _, family := range []string{"iptables", "ip6tables"} {
		program := family + "-" + variant
		for _, chain := range redirection.Chains() {
			ours, builtin := redirection.IPTablesPrerouting, "PREROUTING"
			if chain.Hook == redirection.Output {
				ours, builtin = redirection.IPTablesOutput, "OUTPUT"
			}
			table := string(chain.Table)
			of := fmt.Sprintf(", %s, %s", family, chain)
			faults = append(faults,
				runs("chain flushed"+of, fmt.Sprintf("%s -t %s -F %s", program, table, ours)),
				runs("jump deleted"+of, fmt.Sprintf("%s -t %s -D %s -j %s", program, table, builtin, ours)),
				runs("foreign rule before ours"+of, fmt.Sprintf("%s -t %s -I %s 1 -p tcp --dport 80 -j ACCEPT", program, table, builtin)),
				runs("foreign rule in our chain"+of, fmt.Sprintf("%s -t %s -I %s 1 -p tcp --dport 80 -j ACCEPT", program, table, ours)),
			)
		}
		for _, table := range []string{"raw", "mangle", "nat"} {
			faults = append(faults, runs("table flushed, "+family+", "+table, fmt.Sprintf("%s -t %s -F", program, table)))
		}
	}
	return faults
}

// shorter leaves out most of the faults that are alike, with -short.
func shorter(faults []fault) []fault {
	if !testing.Short() {
		return faults
	}
	var some []fault
	for i, f := range faults {
		if i%7 == 0 {
			some = append(some, f)
		}
	}
	return some
}

// Whatever is lost in a pod is put back on the kernel's word, with one line in the log and
// one count.
func TestFaultsInPods(t *testing.T) {
	for _, c := range []struct {
		mode   string
		faults []fault
	}{
		{backend.NFTables, nftablesFaults(t)},
		{backend.IPTables, iptablesFaults("nft")},
	} {
		t.Run(c.mode, func(t *testing.T) {
			n := startNode(t, func(cfg *agent.Config) { cfg.Redirection, cfg.AuditInterval = c.mode, time.Hour })
			n.checkPods(shorter(c.faults))
		})
	}
}

// checkPods makes each fault in a pod of its own.
func (n *node) checkPods(faults []fault) {
	n.t.Run("pods", func(t *testing.T) { // ends when they have
		for _, f := range faults {
			t.Run(f.name, func(t *testing.T) {
				t.Parallel()
				n := n.in(t)
				n.checkPod(f, n.add())
			})
		}
	})
	if count := n.repairs("redirection"); count != len(faults) {
		n.t.Errorf("%d repairs were counted, want %d", count, len(faults))
	}
}

// in is the node within a subtest.
func (n *node) in(t *testing.T) *node {
	t.Helper()
	return &node{t: t, cfg: n.cfg, http: n.http, logs: n.logs, pods: n.pods}
}

// checkPod makes a fault in a pod and sees it repaired.
func (n *node) checkPod(f fault, p *pod) {
	n.t.Helper()
	if !f.silent {
		n.arm(p.ns, func() time.Time { return n.podStatus(p).Audit.LastAudit })
	}
	began := time.Now()
	f.make(n.t, p.ns)
	limit := promptly + programs*time.Since(began)
	line := n.await("audit has repaired what differed", "uid", p.uid)
	if took := time.Since(began); !f.silent && took > limit {
		n.t.Errorf("the repair took %s, want at most %s", took, limit)
	}
	if line["pod"] != "shop/"+p.name || line["level"] != "WARN" || len(line["differences"].([]any)) == 0 {
		n.t.Errorf("the log's line: %v", line)
	}
	// On demand, so that all that notifications still prompt has nothing to find.
	result, err := admin.Verify(n.t.Context(), n.cfg.AdminSocketPath(), admin.VerifyRequest{Pods: []string{p.uid}})
	must(n.t, err)
	if len(result.Pods) != 1 || !result.Pods[0].OK() {
		n.t.Errorf("after the repair: %+v", result.Pods)
	}
	status := n.podStatus(p)
	if status.Audit.Repairs != 1 || len(status.Audit.Repaired) == 0 || status.Audit.LastRepair.Before(began) || status.State != admin.PodEnrolled {
		n.t.Errorf("status: %+v", status)
	}
	if lines := n.logs.with("audit has repaired what differed", "uid", p.uid); len(lines) != 1 {
		n.t.Errorf("%d lines in the log, want one: %v", len(lines), lines)
	}
}

// Rules of x_tables make no notifications: what is lost is put back within an interval.
func TestFaultsInLegacyTables(t *testing.T) {
	n := startNode(t, func(cfg *agent.Config) {
		cfg.Redirection, cfg.AuditInterval = backend.IPTables, time.Second
		decided(t, cfg, `"backend":"iptables","variant":"legacy","reason":"decided by the test"`)
	})
	var faults []fault
	for i, f := range iptablesFaults("legacy") {
		if i%5 == 0 || strings.HasPrefix(f.name, "table flushed") {
			f.silent = true
			faults = append(faults, f)
		}
	}
	n.checkPods(faults)
}

// decided makes the agent find a decision of an earlier start.
func decided(t *testing.T, cfg *agent.Config, what string) {
	t.Helper()
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	must(t, err)
	must(t, os.MkdirAll(filepath.Join(cfg.RunDir, "private"), 0o700))
	must(t, os.WriteFile(filepath.Join(cfg.RunDir, "private", "redirection.json"), fmt.Appendf(nil,
		`{"version":1,"bootID":%q,"mode":%q,%s}`, strings.TrimSpace(string(boot)), cfg.Redirection, what), 0o600))
}

// The host's rule and its set are put back likewise.
func TestFaultsOnTheHost(t *testing.T) {
	for _, c := range []struct {
		mode   string
		faults []fault
	}{
		{backend.NFTables, []fault{
			runs("table deleted", "nft delete table inet ambientd-host"),
			runs("ruleset flushed", "nft flush ruleset"),
			runs("set flushed", "nft flush set inet ambientd-host ambientd-probes-v4"),
			runs("entry deleted", "nft delete element inet ambientd-host ambientd-probes-v4 { 10.1.0.1 }"),
			runs("foreign entry", "nft add element inet ambientd-host ambientd-probes-v4 { 192.0.2.1 }"),
			{name: "chain flushed", make: func(t *testing.T, _ *netnstest.NS) { run(t, nil, "nft", "flush", "table", "inet", "ambientd-host") }},
		}},
		{backend.IPTables, []fault{
			runs("chain flushed", "iptables-nft -t nat -F AMBIENTD_POSTRT"),
			runs("table flushed", "iptables-nft -t nat -F"),
			runs("jump deleted, IPv6", "ip6tables-nft -t nat -D POSTROUTING -j AMBIENTD_POSTRT"),
			runs("foreign rule before ours", "iptables-nft -t nat -I POSTROUTING 1 -p tcp -j ACCEPT"),
			{name: "set flushed", make: func(t *testing.T, _ *netnstest.NS) { run(t, nil, "ipset", "flush", redirection.ProbeSetIPv4) }, silent: true},
			{name: "foreign entry", make: func(t *testing.T, _ *netnstest.NS) {
				run(t, nil, "ipset", "add", redirection.ProbeSetIPv4, "192.0.2.1")
			}, silent: true},
		}},
	} {
		for _, f := range c.faults {
			t.Run(c.mode+", "+f.name, func(t *testing.T) {
				t.Cleanup(func() { run(t, nil, "nft", "flush", "ruleset") })
				n := startNode(t, func(cfg *agent.Config) {
					cfg.Redirection, cfg.AuditInterval = c.mode, time.Hour
					if f.silent {
						cfg.AuditInterval = time.Second
					}
				})
				n.add()
				n.checkHost(f)
			})
		}
	}
}

func (n *node) checkHost(f fault) {
	n.t.Helper()
	host := netnstest.Self(n.t)
	// Whatever the ADD has prompted comes to its end first.
	n.arm(host, func() time.Time { return n.status().Host.Audit.LastAudit })
	n.awaitSettled()
	began := time.Now()
	f.make(n.t, host)
	line := n.await("audit has repaired what differed", "subject", "host")
	if took := time.Since(began); !f.silent && took > promptly {
		n.t.Errorf("the repair took %s", took)
	}
	if len(line["differences"].([]any)) == 0 {
		n.t.Errorf("the log's line: %v", line)
	}
	result, err := admin.Verify(n.t.Context(), n.cfg.AdminSocketPath(), admin.VerifyRequest{})
	must(n.t, err)
	if !result.OK() {
		n.t.Errorf("after the repair: %+v", result)
	}
	if audit := n.status().Host.Audit; audit.Repairs != 1 || audit.LastRepair.Before(began) || len(audit.Repaired) == 0 || audit.Error != "" {
		n.t.Errorf("status: %+v", audit)
	}
	if lines := n.logs.with("audit has repaired what differed", "subject", "host"); len(lines) != 1 {
		n.t.Errorf("%d lines in the log, want one: %v", len(lines), lines)
	}
	if count := n.repairs("host probes"); count != 1 {
		n.t.Errorf("%d repairs were counted, want one", count)
	}
}

// awaitSettled waits until the agent has done all that it does once: from then on an
// entry of nobody's is a difference.
func (n *node) awaitSettled() {
	n.t.Helper()
	n.await("the host is settled", "", "")
}

// A pod that runs in another netns under the same UID is enrolled there.
func TestNetnsSwapped(t *testing.T) {
	for _, mode := range []string{backend.NFTables, backend.IPTables} {
		t.Run(mode, func(t *testing.T) {
			n := startNode(t, func(cfg *agent.Config) { cfg.Redirection, cfg.AuditInterval = mode, time.Second })
			p := n.add()
			before := n.podStatus(p).Netns
			other := n.sandbox(p.ip)
			must(t, unix.Unmount(p.path, unix.MNT_DETACH))
			must(t, unix.Mount(fmt.Sprintf("/proc/self/fd/%d", other.File().Fd()), p.path, "", unix.MS_BIND, ""))
			line := n.await("audit has repaired what differed", "uid", p.uid)
			if parts := fmt.Sprint(line["parts"]); parts != "[netns]" {
				t.Errorf("parts: %s", parts)
			}
			status := n.podStatus(p)
			if status.Netns == before || status.State != admin.PodEnrolled || status.Audit.Repairs != 1 {
				t.Errorf("status: %+v", status)
			}
			if count := n.repairs("netns"); count != 1 {
				t.Errorf("%d repairs were counted, want one", count)
			}
			result, err := admin.Verify(t.Context(), n.cfg.AdminSocketPath(), admin.VerifyRequest{})
			must(t, err)
			if !result.OK() {
				t.Errorf("after the repair: %+v", result)
			}
			if lines := n.logs.with("audit has repaired what differed", "subject", "pod"); len(lines) != 1 {
				t.Errorf("%d lines in the log, want one: %v", len(lines), lines)
			}
		})
	}
}

// A healthy pod costs audits no write, and on nftables no child process.
func TestHealthyPodsAreLeftAlone(t *testing.T) {
	n := startNode(t, func(cfg *agent.Config) { cfg.Redirection, cfg.AuditInterval = backend.NFTables, time.Second })
	b, err := nftables.New()
	must(t, err)
	var pods []*pod
	for range 5 {
		pods = append(pods, n.add())
	}
	n.awaitSettled()
	generations := func() (all []uint64) {
		for _, p := range pods {
			generation, err := b.Generation(t.Context(), p.ns.Runner())
			must(t, err)
			all = append(all, generation)
		}
		host, err := b.Generation(t.Context(), netnstest.Self(t).Runner())
		must(t, err)
		return append(all, host)
	}
	before, faults := generations(), children(t)
	began := time.Now()
	for deadline := began.Add(patience); ; {
		audited := 0
		for _, s := range n.status().Pods {
			if s.Audit.LastAudit.After(began.Add(2 * time.Second)) {
				audited++
			}
		}
		if audited == len(pods) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d pods were audited", audited)
		}
		<-time.After(50 * time.Millisecond)
	}
	if after := generations(); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("audits have written: generations %v before, %v after", before, after)
	}
	if now := children(t); now != faults {
		t.Error("audits have run child processes")
	}
	if lines := n.logs.with("audit has repaired what differed", "subject", "pod"); len(lines) != 0 {
		t.Errorf("healthy pods were repaired: %v", lines)
	}
}

// children grows with every child process that was waited for.
func children(t *testing.T) int64 {
	t.Helper()
	var usage unix.Rusage
	must(t, unix.Getrusage(unix.RUSAGE_CHILDREN, &usage))
	return usage.Minflt + usage.Majflt
}

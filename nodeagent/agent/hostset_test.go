// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"ambientd/cni-plugin/podevent"
	"ambientd/iptables/backend"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/agent"
	"ambientd/tools/netnstest"
)

// foreign is an address that no pod here has.
var foreign = netip.MustParseAddr("10.9.9.9")

// addEntry puts an address into the host's set, as anybody can.
func addEntry(t *testing.T, mode string, addr netip.Addr) {
	t.Helper()
	if mode == backend.NFTables {
		program(t, netnstest.Self(t), "", "nft", "add", "element", "inet", redirection.HostTable, redirection.ProbeSetIPv4, "{", addr.String(), "}")
		return
	}
	must(t, netlink.IpsetAdd(redirection.ProbeSetIPv4, &netlink.IPSetEntry{IP: addr.AsSlice()}))
}

// hasEntry tells whether an address is in the host's set; without a set none is.
func hasEntry(t *testing.T, mode string, addr netip.Addr) bool {
	t.Helper()
	if mode == backend.NFTables {
		return strings.Contains(program(t, netnstest.Self(t), "", "nft", "list", "ruleset"), addr.String())
	}
	sets, err := netlink.IpsetListAll()
	must(t, err)
	for _, set := range sets {
		for _, entry := range set.Entries {
			if got, _ := netip.AddrFromSlice(entry.IP); set.SetName == redirection.ProbeSetIPv4 && got.Unmap() == addr {
				return true
			}
		}
	}
	return false
}

// isBare tells whether the host's netns holds no rule for probes and no set.
func isBare(t *testing.T) bool {
	t.Helper()
	sets, err := netlink.IpsetListAll()
	must(t, err)
	text := everything(t, netnstest.Self(t))
	return len(sets) == 0 && !strings.Contains(text, redirection.HostTable) && !strings.Contains(text, redirection.IPTablesPostrouting)
}

func wantBareHost(t *testing.T) {
	t.Helper()
	if !isBare(t) {
		t.Errorf("a rule for probes or a set is left on the host:\n%s", everything(t, netnstest.Self(t)))
	}
}

// awaitNoEntry waits for what an agent does soon after its start.
func awaitNoEntry(t *testing.T, mode string, addr netip.Addr) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); hasEntry(t, mode, addr); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("the host's set keeps %s:\n%s", addr, everything(t, netnstest.Self(t)))
		}
	}
}

// eachMode runs test with an agent's configuration for each backend.
func eachMode(t *testing.T, test func(t *testing.T, cfg agent.Config)) {
	for _, mode := range []string{backend.NFTables, backend.IPTables} {
		t.Run(mode, func(t *testing.T) {
			clearHost(t)
			cfg := config(t)
			cfg.Redirection = mode
			test(t, cfg)
		})
	}
}

func (r *running) withdrawAll(t *testing.T) {
	t.Helper()
	outcome, err := admin.Withdraw(t.Context(), r.cfg.AdminSocketPath(), admin.Selection{All: true})
	must(t, err)
	if outcome.Error != "" {
		t.Error(outcome.Error)
	}
}

// A pod whose sandbox ended while no agent ran has no entry under the next one, though its
// object goes on saying that it runs: its address may be that of a pod outside the mesh by now.
func TestNoEntryOutlivesItsPod(t *testing.T) {
	eachMode(t, func(t *testing.T, cfg agent.Config) {
		for name, after := range map[string]func(*sandbox){
			"its netns is there": func(*sandbox) {}, "its netns is gone": func(s *sandbox) { s.unmount(t) },
		} {
			t.Run(name, func(t *testing.T) {
				cfg := cfg
				cfg.PodsFrom = config(t).PodsFrom
				r := begin(t, cfg)
				r.proxy(t)
				s := newSandbox(t, 1)
				s.enrol(r, "")
				r.end()
				if !hasEntry(t, cfg.Redirection, s.ip) {
					t.Fatal("the entry of a pod that runs has gone with the agent")
				}
				s.leave(t, cfg)
				after(s)
				r = start(t, cfg)
				awaitNoEntry(t, cfg.Redirection, s.ip)
				if result := r.verify(admin.VerifyRequest{}); !result.OK() {
					t.Errorf("afterwards: %+v", result)
				}
				r.end()
				wantBareHost(t)
			})
		}
	})
}

// What is in a set that is meant to be empty is found and taken out, also by an agent that
// began with a pod that had ended; and rule and set go with the last pod, by an operator's word
// or at the agent's end.
func TestForeignEntryInAnEmptySet(t *testing.T) {
	eachMode(t, func(t *testing.T, cfg agent.Config) {
		r := begin(t, cfg)
		r.proxy(t)
		earlier, late := newSandbox(t, 1), newSandbox(t, 2)
		earlier.enrol(r, "")
		r.end()
		earlier.leave(t, cfg)
		r = start(t, cfg)
		r.proxy(t)
		for i, leave := range []func(){func() { r.withdrawAll(t) }, r.end} {
			late.enrol(r, "")
			if reply := late.call(r, podevent.CommandDel); reply.Error != nil {
				t.Fatalf("DEL: %+v", reply)
			}
			addEntry(t, cfg.Redirection, foreign)
			result := r.verify(admin.VerifyRequest{})
			if repairs := r.status().Host.Audit.Repairs; result.Host.Error != "" || repairs != i+1 {
				t.Errorf("%d repairs of the host with a foreign entry, verify: %+v", repairs, result.Host)
			}
			if hasEntry(t, cfg.Redirection, foreign) {
				t.Error("the foreign entry is still there")
			}
			leave()
			wantBareHost(t)
		}
	})
}

// An earlier agent's pod that is not found may run all the same: what is in the host's set
// stays until its end is known, and then goes with the agent, however soon that ends.
func TestEntriesStayForPodsNotFound(t *testing.T) {
	eachMode(t, func(t *testing.T, cfg agent.Config) {
		r := begin(t, cfg)
		r.proxy(t)
		s := newSandbox(t, 1)
		s.enrol(r, "")
		r.end()
		s.unmount(t)
		r = start(t, cfg)
		r.withdrawAll(t)
		r.verify(admin.VerifyRequest{})
		if !hasEntry(t, cfg.Redirection, s.ip) {
			t.Error("the entry of a pod that may run is gone")
		}
		if reply := s.call(r, podevent.CommandDel); reply.Error != nil {
			t.Errorf("DEL: %+v", reply)
		}
		r.end()
		wantBareHost(t)
	})
}

// An agent without pods takes the entries that it finds on the host out, and leaves nothing there at its end.
func TestHostWithoutPods(t *testing.T) {
	eachMode(t, func(t *testing.T, cfg agent.Config) {
		r := begin(t, cfg)
		r.proxy(t)
		r.withdrawAll(t)
		wantBareHost(t)
		s := newSandbox(t, 1)
		s.enrol(r, "")
		r.end()
		other := config(t) // which does not know of the pod
		other.Redirection = cfg.Redirection
		r = start(t, other)
		awaitNoEntry(t, cfg.Redirection, s.ip)
		r.end()
		wantBareHost(t)
	})
}

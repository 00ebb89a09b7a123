// SPDX-License-Identifier: Apache-2.0

package nftables_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	google "github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

// node is a namespace that stands for the host's, and the backend that works on it.
type node struct {
	*pod
	opts redirection.HostOptions
}

func newNode(t *testing.T) *node {
	t.Helper()
	netnstest.Require(t)
	return &node{pod: newPod(t, newBackend(t)), opts: hostOptions()}
}

func hostOptions() redirection.HostOptions {
	defaults := redirection.DefaultOptions()
	return redirection.HostOptions{
		ProbeSourceIPv4: defaults.ProbeSourceIPv4, ProbeSourceIPv6: defaults.ProbeSourceIPv6,
		IPv6: true, Scope: redirection.ProbeScopePod,
	}
}

// entries parses "10.0.0.2", "2001:db8::2", "10.0.0.2:80" or "[2001:db8::2]:80".
func entries(t testing.TB, texts ...string) []redirection.HostEntry {
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

func (n *node) ensure() {
	n.t.Helper()
	if err := n.backend.EnsureHost(n.t.Context(), n.run, n.opts); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) set(texts ...string) {
	n.t.Helper()
	if err := n.backend.SetEntries(n.t.Context(), n.run, n.opts, entries(n.t, texts...)); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) add(texts ...string) {
	n.t.Helper()
	if err := n.backend.AddEntries(n.t.Context(), n.run, n.opts, entries(n.t, texts...)...); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) del(texts ...string) {
	n.t.Helper()
	if err := n.backend.DelEntries(n.t.Context(), n.run, n.opts, entries(n.t, texts...)...); err != nil {
		n.t.Fatal(err)
	}
}

// holds fails the test unless these are the entries and nothing else differs.
func (n *node) holds(texts ...string) {
	n.t.Helper()
	n.differs(texts)
}

// differs fails the test unless these are the differences from a state with the entries given.
func (n *node) differs(texts []string, want ...string) {
	n.t.Helper()
	found, err := n.backend.VerifyHost(n.t.Context(), n.run, n.opts, entries(n.t, texts...))
	if err != nil {
		n.t.Fatal(err)
	}
	var got []string
	for _, d := range found {
		got = append(got, d.String())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		n.t.Errorf("differences (-want +got):\n%s", diff)
	}
}

// generation returns the number of the namespace's last transaction, which reading leaves as it is.
func (n *node) generation() uint64 {
	n.t.Helper()
	generation, err := n.backend.Generation(n.t.Context(), n.run)
	if err != nil {
		n.t.Fatal(err)
	}
	return generation
}

func TestHostLife(t *testing.T) {
	n := newNode(t)
	n.differs([]string{"10.0.0.2"}, "table ambientd-host: missing, want with 1 entries")
	n.ensure()
	n.holds()
	n.add("10.0.0.2")
	n.add("10.0.0.2")
	n.add("2001:db8::2")
	n.holds("10.0.0.2", "2001:db8::2")
	n.differs([]string{"10.0.0.2", "10.0.0.3", "10.0.0.3"},
		"entry of set ambientd-probes-v4: missing, want 10.0.0.3", "entry of set ambientd-probes-v6: unexpected 2001:db8::2")
	n.del("10.0.0.9")
	n.del("10.0.0.2")
	n.holds("2001:db8::2")
	n.set("10.0.0.4", "2001:db8::2", "10.0.0.5", "10.0.0.5")
	n.holds("10.0.0.4", "10.0.0.5", "2001:db8::2")
	before := n.generation()
	n.ensure()
	n.holds("10.0.0.4", "10.0.0.5", "2001:db8::2")
	if after := n.generation(); after != before {
		t.Errorf("%d transactions where nothing had to be done", after-before)
	}
	n.set()
	n.holds()
	for range 2 {
		if err := n.backend.RemoveHost(t.Context(), n.run); err != nil {
			t.Fatal(err)
		}
		n.empty()
	}
	n.del("10.0.0.4")
}

// TestHostOptionsChange replaces the table; entries that fit stay.
func TestHostOptionsChange(t *testing.T) {
	n := newNode(t)
	n.ensure()
	n.set("10.0.0.2", "2001:db8::2")
	n.opts.ProbeSourceIPv4 = netip.MustParseAddr("169.254.9.9")
	n.differs([]string{"10.0.0.2", "2001:db8::2"},
		"rule of chain postrouting: missing, want probes of ipv4, ipv4, nat postrouting: from a socket of the host, tcp, address in ambientd-probes-v4 -> source 169.254.9.9",
		"rule of chain postrouting: unexpected probes of ipv4, [ meta load nfproto => reg 1 ] [ cmp eq reg 1 0x02 ] [ meta load skuid => reg 1 ] "+
			"[ cmp neq reg 1 0xffffffff ] [ meta load l4proto => reg 1 ] [ cmp eq reg 1 0x06 ] [ payload load 4b @ network header + 16 => reg 1 ] "+
			"[ lookup reg 1 set ambientd-probes-v4 ] [ immediate reg 1 0xa9fe077f ] [ nat snat family 2 addr_min reg 1 addr_max reg 1 flags 0x1 ]")
	n.ensure()
	n.holds("10.0.0.2", "2001:db8::2")
	n.opts.IPv6 = false
	n.ensure()
	n.holds("10.0.0.2")
	n.opts = hostOptions()
	n.opts.Scope = redirection.ProbeScopeDeclared
	n.ensure()
	n.holds()
	n.add("10.0.0.2:80")
	n.add("10.0.0.2:81")
	n.add("[2001:db8::2]:65535")
	n.holds("10.0.0.2:80", "10.0.0.2:81", "[2001:db8::2]:65535")
	n.del("10.0.0.2:80")
	n.set("10.0.0.2:81", "[2001:db8::2]:443")
	n.holds("10.0.0.2:81", "[2001:db8::2]:443")
}

// hostObjects returns the host's table, its chain and its sets as the library names them.
func hostObjects(set string) (*google.Table, *google.Chain, *google.Set) {
	table := &google.Table{Name: redirection.HostTable, Family: google.TableFamilyINet}
	return table, &google.Chain{Name: "postrouting", Table: table}, &google.Set{Name: set, Table: table, KeyType: google.TypeIPAddr}
}

// TestHostDamage has one case for each kind of thing that others can do to it.
func TestHostDamage(t *testing.T) {
	for _, test := range []struct {
		name   string
		damage func(conn *google.Conn) error
		want   []string
		left   []string // entries after a repair by EnsureHost alone
	}{
		{"rule deleted", func(conn *google.Conn) error {
			table, chain, _ := hostObjects("")
			rules, err := conn.GetRules(table, chain)
			if err != nil {
				return err
			}
			return conn.DelRule(rules[1])
		}, []string{"rule of chain postrouting: missing, want probes of ipv6, ipv6, nat postrouting: from a socket of the host, tcp, " +
			"address in ambientd-probes-v6 -> source fd16:9254:7127:1337:ffff:ffff:ffff:ffff"}, []string{"10.0.0.2", "2001:db8::2"}},
		{"rule inserted", func(conn *google.Conn) error {
			table, chain, _ := hostObjects("")
			conn.InsertRule(&google.Rule{Table: table, Chain: chain, Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}})
			return nil
		}, []string{"rule of chain postrouting: unexpected a rule, [ immediate reg 0 verdict accept ]"}, []string{"10.0.0.2", "2001:db8::2"}},
		{"chain emptied", func(conn *google.Conn) error {
			_, chain, _ := hostObjects("")
			conn.FlushChain(chain)
			return nil
		}, []string{
			"rule of chain postrouting: missing, want probes of ipv4, ipv4, nat postrouting: from a socket of the host, tcp, address in ambientd-probes-v4 -> source 169.254.7.127",
			"rule of chain postrouting: missing, want probes of ipv6, ipv6, nat postrouting: from a socket of the host, tcp, address in ambientd-probes-v6 -> source fd16:9254:7127:1337:ffff:ffff:ffff:ffff",
		}, []string{"10.0.0.2", "2001:db8::2"}},
		{"chain and a set deleted", func(conn *google.Conn) error {
			_, chain, set := hostObjects(redirection.ProbeSetIPv6)
			conn.FlushChain(chain)
			conn.DelChain(chain)
			conn.DelSet(set)
			return nil
		}, []string{
			"chain postrouting: missing, want type nat hook postrouting priority 99 policy accept",
			"set ambientd-probes-v6: missing, want type 0x8 of 16 bytes flags 0x0",
			"entry of set ambientd-probes-v6: missing, want 2001:db8::2",
		}, []string{"10.0.0.2"}},
		{"set emptied", func(conn *google.Conn) error {
			_, _, set := hostObjects(redirection.ProbeSetIPv4)
			conn.FlushSet(set)
			return nil
		}, []string{"entry of set ambientd-probes-v4: missing, want 10.0.0.2"}, nil},
		{"element added", func(conn *google.Conn) error {
			_, _, set := hostObjects(redirection.ProbeSetIPv4)
			return conn.SetAddElements(set, []google.SetElement{{Key: []byte{10, 0, 0, 9}}})
		}, []string{"entry of set ambientd-probes-v4: unexpected 10.0.0.9"}, nil},
		{"set added", func(conn *google.Conn) error {
			table, _, _ := hostObjects("")
			return conn.AddSet(&google.Set{Table: table, Name: "more", KeyType: google.TypeInetService}, nil)
		}, []string{"set more: unexpected type 0xd of 2 bytes flags 0x0"}, []string{"10.0.0.2", "2001:db8::2"}},
		{"chain added", func(conn *google.Conn) error {
			table, _, _ := hostObjects("")
			chain := conn.AddChain(&google.Chain{Table: table, Name: "more"})
			conn.AddRule(&google.Rule{Table: table, Chain: chain, Exprs: []expr.Any{&expr.Counter{}}})
			return nil
		}, []string{"chain more: unexpected no hook with 1 rules"}, []string{"10.0.0.2", "2001:db8::2"}},
		{"table deleted", func(conn *google.Conn) error {
			table, _, _ := hostObjects("")
			conn.DelTable(table)
			return nil
		}, []string{"table ambientd-host: missing, want with 2 entries"}, []string{}},
	} {
		t.Run(test.name, func(t *testing.T) {
			n := newNode(t)
			n.ensure()
			n.set("10.0.0.2", "2001:db8::2")
			n.nft(test.damage)
			n.differs([]string{"10.0.0.2", "2001:db8::2"}, test.want...)
			n.ensure()
			if test.left != nil {
				n.holds(test.left...)
			}
			n.set("10.0.0.2", "2001:db8::2")
			n.holds("10.0.0.2", "2001:db8::2")
		})
	}
}

// TestHostManyEntries has more than one message can carry.
func TestHostManyEntries(t *testing.T) {
	n := newNode(t)
	n.opts.Scope = redirection.ProbeScopeDeclared
	n.ensure()
	var list []redirection.HostEntry
	for i := range 2500 {
		a, b := byte(i>>8), byte(i)
		list = append(list,
			redirection.HostEntry{Addr: netip.AddrFrom4([4]byte{10, 1, a, b}), Port: 80},
			redirection.HostEntry{Addr: netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 14: a, 15: b}), Port: 8080})
	}
	if err := n.backend.SetEntries(t.Context(), n.run, n.opts, list); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		wanted []redirection.HostEntry
		want   int
	}{{list, 0}, {list[1:], 1}, {nil, 41}} {
		found, err := n.backend.VerifyHost(t.Context(), n.run, n.opts, test.wanted)
		if err != nil || len(found) != test.want {
			t.Errorf("%d differences from %d entries, want %d: %v", len(found), len(test.wanted), test.want, err)
		}
	}
	n.nft(func(conn *google.Conn) error { // a repair keeps them all
		_, chain, _ := hostObjects("")
		conn.FlushChain(chain)
		return nil
	})
	n.ensure()
	if found, err := n.backend.VerifyHost(t.Context(), n.run, n.opts, list); err != nil || len(found) > 0 {
		t.Errorf("%v %v", found, err)
	}
}

// Several entries are one transaction; those that are not there keep none of the others.
func TestHostManyEntriesAtOnce(t *testing.T) {
	n := newNode(t)
	n.ensure()
	before := n.generation()
	n.add("10.0.0.2", "fd00::2", "10.0.0.3")
	n.holds("10.0.0.2", "10.0.0.3", "fd00::2")
	if after := n.generation(); after != before+1 {
		t.Errorf("generation %d became %d, want one transaction", before, after)
	}
	n.add("10.0.0.2", "10.0.0.4") // one of them again
	n.del("10.0.0.9", "fd00::2", "10.0.0.3", "fd00::9")
	n.holds("10.0.0.2", "10.0.0.4")
}

func TestHostBadInput(t *testing.T) {
	n := newNode(t)
	entry := entries(t, "10.0.0.2")[0]
	if err := n.backend.AddEntries(t.Context(), n.run, n.opts, entry); !errors.Is(err, unix.ENOENT) {
		t.Errorf("adding where there is no table: %v", err)
	}
	if err := n.backend.SetEntries(t.Context(), n.run, n.opts, nil); !errors.Is(err, unix.ENOENT) {
		t.Errorf("setting where there is no table: %v", err)
	}
	n.ensure() // with a fresh socket after the errors
	never := func(func() error) error { t.Error("the namespace was entered"); return nil }
	mismatch := n.opts
	mismatch.Scope = redirection.ProbeScopeDeclared
	for name, err := range map[string]error{
		"ensure": n.backend.EnsureHost(t.Context(), never, redirection.HostOptions{}),
		"set":    n.backend.SetEntries(t.Context(), never, mismatch, []redirection.HostEntry{entry}),
		"add":    n.backend.AddEntries(t.Context(), never, mismatch, entry),
		"del":    n.backend.DelEntries(t.Context(), never, mismatch, entry),
	} {
		if err == nil || !strings.Contains(err.Error(), "probe") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := n.backend.VerifyHost(t.Context(), never, n.opts, []redirection.HostEntry{{}}); err == nil {
		t.Error("verify: no error")
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := n.backend.EnsureHost(ended, never, n.opts); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end: %v", err)
	}
	gone := errors.New("no way in")
	if err := n.backend.AddEntries(t.Context(), func(func() error) error { return gone }, n.opts, entry); !errors.Is(err, gone) {
		t.Errorf("where the namespace cannot be entered: %v", err)
	}
	n.holds()
}

// TestHostSocketFollowsTheNamespace uses one backend for two namespaces in turn.
func TestHostSocketFollowsTheNamespace(t *testing.T) {
	a := newNode(t)
	b := &node{pod: newPod(t, a.backend), opts: hostOptions()}
	a.ensure()
	b.ensure()
	for range 3 {
		a.add("10.0.0.1")
		b.add("10.0.0.2")
	}
	a.holds("10.0.0.1")
	b.holds("10.0.0.2")
}

// TestHostSocketGoes has nothing left open that would hold the namespace.
func TestHostSocketGoes(t *testing.T) {
	n := newNode(t)
	before := descriptors(t)
	n.ensure()
	n.add("10.0.0.1")
	if err := n.backend.RemoveHost(t.Context(), n.run); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(30 * time.Second); descriptors(t) > before; runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("%d descriptors in the end, %d before", descriptors(t), before)
		}
	}
}

func TestHostConcurrently(t *testing.T) {
	n := newNode(t)
	n.ensure()
	var group sync.WaitGroup
	for i := range 8 {
		group.Go(func() {
			addr := fmt.Sprintf("10.0.0.%d", i)
			for range 50 {
				n.add(addr)
				n.ensure()
				n.del(addr)
			}
			n.add(addr)
		})
	}
	group.Wait()
	n.holds("10.0.0.0", "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6", "10.0.0.7")
}

// TestHostListRulesetGolden shows what an operator sees on a node.
func TestHostListRulesetGolden(t *testing.T) {
	for _, scope := range []redirection.ProbeScope{redirection.ProbeScopePod, redirection.ProbeScopeDeclared} {
		t.Run(string(scope), func(t *testing.T) {
			n := newNode(t)
			n.opts.Scope = scope
			n.ensure()
			list := []string{"10.0.0.2", "2001:db8::2"}
			if scope == redirection.ProbeScopeDeclared {
				list = []string{"10.0.0.2:8080", "[2001:db8::2]:8080"}
			}
			n.set(list...)
			listingGolden(t, n.pod, "host-"+string(scope)+".nft")
		})
	}
}

// TestProbes sends packets: what a process of the node sends to an enrolled pod arrives with the probe source; what the
// node forwards does not, though it carries the node's address; nor does anything else.
func TestProbes(t *testing.T) {
	for _, scope := range []redirection.ProbeScope{redirection.ProbeScopePod, redirection.ProbeScopeDeclared} {
		t.Run(string(scope), func(t *testing.T) {
			n := newNode(t)
			n.opts.Scope = scope
			pod, client := netnstest.New(t), netnstest.New(t)
			prefix, addr := netip.MustParsePrefix, netip.MustParseAddr
			netnstest.Connect(t,
				netnstest.Port{NS: n.NS, Name: "pod0", Addrs: []netip.Prefix{prefix("10.0.0.1/24"), prefix("2001:db8::1/64")}},
				netnstest.Port{NS: pod, Name: "eth0", Addrs: []netip.Prefix{prefix("10.0.0.2/24"), prefix("2001:db8::2/64")},
					Gateways: []netip.Addr{addr("10.0.0.1"), addr("2001:db8::1")}})
			netnstest.Connect(t,
				netnstest.Port{NS: n.NS, Name: "client0", Addrs: []netip.Prefix{prefix("10.1.0.1/24"), prefix("2001:db9::1/64")}},
				netnstest.Port{NS: client, Name: "eth0", Addrs: []netip.Prefix{prefix("10.1.0.2/24"), prefix("2001:db9::2/64")},
					Gateways: []netip.Addr{addr("10.1.0.1"), addr("2001:db9::1")}})
			n.forwardAndMasquerade()
			n.ensure()
			list := []string{"10.0.0.2", "2001:db8::2"}
			if scope == redirection.ProbeScopeDeclared {
				list = []string{"10.0.0.2:8080", "[2001:db8::2]:8080"}
			}
			n.set(list...)
			for _, test := range []struct {
				name, to, fromNode, fromClient string
			}{
				{"v4", "10.0.0.2:8080", "169.254.7.127", "10.0.0.1"},
				{"v6", "[2001:db8::2]:8080", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff", "2001:db8::1"},
			} {
				to := netip.MustParseAddrPort(test.to)
				other := netip.AddrPortFrom(to.Addr(), 8081)
				fromNodeOther := test.fromNode
				if scope == redirection.ProbeScopeDeclared {
					fromNodeOther = test.fromClient
				}
				for _, flow := range []struct {
					name string
					from *netnstest.NS
					to   netip.AddrPort
					want string
				}{
					{"from a process of the node", n.NS, to, test.fromNode},
					{"to another port", n.NS, other, fromNodeOther},
					{"forwarded", client, to, test.fromClient},
				} {
					t.Run(test.name+"/"+flow.name, func(t *testing.T) {
						if got := sourceOf(t, flow.from, pod, flow.to); got.String() != flow.want {
							t.Errorf("it came from %s, want %s", got, flow.want)
						}
					})
				}
				n.del(list[0])
				list = list[1:]
				if got := sourceOf(t, n.NS, pod, to); got.String() != test.fromClient {
					t.Errorf("to a pod that is no longer enrolled it came from %s, want %s", got, test.fromClient)
				}
			}
		})
	}
}

// forwardAndMasquerade makes the node a router that does what kube-proxy may do: all that it forwards leaves with the
// node's own address.
func (n *node) forwardAndMasquerade() {
	n.t.Helper()
	n.Do(n.t, func() error {
		script := "table inet kube { chain post { type nat hook postrouting priority srcnat; masquerade; }; }"
		for _, command := range [][]string{
			{"sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"}, {"nft", script},
		} {
			if out, err := exec.CommandContext(n.t.Context(), command[0], command[1:]...).CombinedOutput(); err != nil {
				return fmt.Errorf("%v: %w: %s", command, err, out)
			}
		}
		return nil
	})
}

// sourceOf opens a TCP connection and returns where it came from, as the pod sees it.
func sourceOf(t *testing.T, from, pod *netnstest.NS, to netip.AddrPort) netip.Addr {
	t.Helper()
	listener := pod.ListenTCP(t, to)
	defer listener.Close()
	conn, err := from.DialTCP(t.Context(), netip.AddrPort{}, to)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	accepted, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer accepted.Close()
	return netip.MustParseAddrPort(accepted.RemoteAddr().String()).Addr()
}

// SPDX-License-Identifier: Apache-2.0

package nftables_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	google "github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/iptables/nftables"
	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }

// pod is a namespace and the backend that works on it.
type pod struct {
	*netnstest.NS
	t       *testing.T
	backend *nftables.Backend
	run     redirection.Runner
}

func newBackend(t *testing.T) *nftables.Backend {
	t.Helper()
	backend, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	return backend
}

func newPod(t *testing.T, backend *nftables.Backend) *pod {
	t.Helper()
	ns := netnstest.New(t)
	return &pod{NS: ns, t: t, backend: backend, run: ns.Runner()}
}

func (p *pod) apply(opts redirection.Options) redirection.Families {
	p.t.Helper()
	families, err := p.backend.Apply(p.t.Context(), p.run, opts)
	if err != nil {
		p.t.Fatal(err)
	}
	return families
}

// verify fails the test unless these are the differences.
func (p *pod) verify(opts redirection.Options, want ...string) redirection.Families {
	p.t.Helper()
	families, differences, err := p.backend.Verify(p.t.Context(), p.run, opts)
	if err != nil {
		p.t.Fatal(err)
	}
	var got []string
	for _, d := range differences {
		got = append(got, d.String())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		p.t.Errorf("differences (-want +got):\n%s", diff)
	}
	return families
}

func (p *pod) remove() {
	p.t.Helper()
	if err := p.backend.Remove(p.t.Context(), p.run); err != nil {
		p.t.Fatal(err)
	}
}

// nft changes or reads the namespace's packet rules with the library as everybody uses it.
func (p *pod) nft(change func(conn *google.Conn) error) {
	p.t.Helper()
	p.Do(p.t, func() error {
		conn, err := google.New()
		if err != nil {
			return err
		}
		if err := change(conn); err != nil {
			return err
		}
		return conn.Flush()
	})
}

// empty fails the test unless nothing at all is left, of ours or otherwise, but the kernel's own policy rules.
func (p *pod) empty() {
	p.t.Helper()
	p.nft(func(conn *google.Conn) error {
		tables, err := conn.ListTables()
		for _, table := range tables {
			p.t.Errorf("table %s is left", table.Name)
		}
		return err
	})
	p.Do(p.t, func() error {
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			rules, err := netlink.RuleList(family)
			if err != nil {
				return err
			}
			routes, err := netlink.RouteListFiltered(family, &netlink.Route{Table: 100}, netlink.RT_FILTER_TABLE)
			if err != nil {
				return err
			}
			for _, rule := range rules {
				if rule.Priority == int(redirection.RulePriority) {
					p.t.Errorf("policy rule %s is left", rule)
				}
			}
			for _, route := range routes {
				p.t.Errorf("route %s is left", route)
			}
		}
		return nil
	})
}

// ours returns our table and a chain of it as the library names them.
func ours(chain string) (*google.Table, *google.Chain) {
	table := &google.Table{Name: redirection.NFTablesTable, Family: google.TableFamilyINet}
	return table, &google.Chain{Name: chain, Table: table}
}

const (
	noTable  = "table ambientd: missing, want 6 chains"
	noRule4  = "policy rule (ipv4): missing, want fwmark 0x111/0xfff lookup 100 priority 32764"
	noRoute4 = "route (ipv4): missing, want local default dev lo table 100"
	noRule6  = "policy rule (ipv6): missing, want fwmark 0x111/0xfff lookup 100 priority 32764"
	noRoute6 = "route (ipv6): missing, want local default dev lo table 100"
)

func TestLife(t *testing.T) {
	backend := newBackend(t)
	for _, round := range []string{"first pod", "second pod"} { // the second meets what was learnt from the first
		t.Run(round, func(t *testing.T) {
			p := newPod(t, backend)
			opts := redirection.DefaultOptions()
			opts.RerouteInterfaces = []string{"tap0"}
			p.verify(opts, noTable, noRule4, noRoute4, noRule6, noRoute6)
			if got := p.apply(opts); got != redirection.DualStack {
				t.Errorf("applied for %s", got)
			}
			for range 3 {
				if got := p.verify(opts); got != redirection.DualStack {
					t.Errorf("verified for %s", got)
				}
			}
			p.apply(opts)
			p.verify(opts)
			for range 2 {
				p.remove()
				p.verify(opts, noTable, noRule4, noRoute4, noRule6, noRoute6)
				p.empty()
			}
			p.apply(opts)
			p.verify(opts)
		})
	}
}

// TestOptionsLive goes through the life of every kind of option, one after the other in the same namespace.
func TestOptionsLive(t *testing.T) {
	p := newPod(t, newBackend(t))
	for name, change := range map[string]func(*redirection.Options){
		"keep established": func(o *redirection.Options) { o.KeepEstablished = true },
		"inbound ports": func(o *redirection.Options) {
			o.ExcludeInboundPorts = []redirection.PortRange{{First: 22, Last: 22}, {First: 8000, Last: 8010}}
		},
		"outbound ports": func(o *redirection.Options) {
			o.ExcludeOutboundPorts = []redirection.PortRange{{First: 1, Last: 65535}}
		},
		"CIDRs": func(o *redirection.Options) {
			for _, cidr := range []string{"0.0.0.0/0", "::/0"} {
				o.ExcludeOutboundCIDRs = append(o.ExcludeOutboundCIDRs, netip.MustParsePrefix(cidr))
			}
		},
		"odd CIDRs": func(o *redirection.Options) {
			for _, cidr := range []string{"10.0.0.0/9", "192.0.2.1/32", "2001:db8::/33", "2001:db9::1/128"} {
				o.ExcludeOutboundCIDRs = append(o.ExcludeOutboundCIDRs, netip.MustParsePrefix(cidr))
			}
		},
		"interfaces":    func(o *redirection.Options) { o.ExcludeInterfaces = []string{"net1", "net2"} },
		"IPv6 shut":     func(o *redirection.Options) { o.IPv6 = false },
		"IPv6 open":     func(o *redirection.Options) { o.IPv6, o.IPv6Uncaptured = false, redirection.UncapturedAllow },
		"probe sources": func(o *redirection.Options) { o.ProbeSourceIPv6 = netip.MustParseAddr("fe80::7") },
		"the most there can be": func(o *redirection.Options) {
			for i := range uint16(redirection.MaxExclusions) {
				o.ExcludeInboundPorts = append(o.ExcludeInboundPorts, redirection.PortRange{First: 1000 + 10*i, Last: 1005 + 10*i})
				o.ExcludeOutboundPorts = append(o.ExcludeOutboundPorts, redirection.PortRange{First: 1000 + 10*i, Last: 1005 + 10*i})
				o.ExcludeOutboundCIDRs = append(o.ExcludeOutboundCIDRs, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i), 128}), 17))
				o.ExcludeInterfaces = append(o.ExcludeInterfaces, fmt.Sprintf("net%d", i))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			opts := redirection.DefaultOptions()
			change(&opts)
			want := opts.Allowed()
			if got := p.apply(opts); got != want {
				t.Errorf("applied for %s, want %s", got, want)
			}
			for range 2 { // the second time by the generation number
				if got := p.verify(opts); got != want {
					t.Errorf("verified for %s, want %s", got, want)
				}
			}
			if _, differences, err := p.backend.Verify(t.Context(), p.run, redirection.DefaultOptions()); err != nil || len(differences) == 0 {
				t.Errorf("no difference from the default: %v", err)
			}
		})
	}
	p.remove()
	p.empty()
}

// TestReplacementDoesNotAdd replays one rule set over another many times.
func TestReplacementDoesNotAdd(t *testing.T) {
	p := newPod(t, newBackend(t))
	a, b := redirection.DefaultOptions(), redirection.DefaultOptions()
	b.InboundBypass, b.DNSCapture = true, false
	for range 10 {
		p.apply(a)
		p.verify(a)
		p.apply(b)
		p.verify(b)
	}
	count := map[string]int{}
	for _, chain := range []string{"raw_prerouting", "mangle_prerouting", "mangle_output", "nat_prerouting", "nat_output"} {
		count[chain] = len(p.handles(chain))
	}
	want := map[string]int{"raw_prerouting": 0, "mangle_prerouting": 1, "mangle_output": 1, "nat_prerouting": 0, "nat_output": 8}
	if diff := cmp.Diff(want, count); diff != "" {
		t.Errorf("rules by chain (-want +got):\n%s", diff)
	}
}

// handles returns the kernel's numbers of the rules of a chain of ours. The library cannot read the rules themselves: it
// takes the direction of a connection's address for a number of four bytes.
func (p *pod) handles(chain string) []uint64 {
	p.t.Helper()
	sockets, err := rawnetlink.New().Open(p.run, unix.NETLINK_NETFILTER)
	if err != nil {
		p.t.Fatal(err)
	}
	defer sockets[0].Close()
	payload := []byte{unix.NFPROTO_INET, 0, 0, 0}
	for kind, name := range map[uint16]string{unix.NFTA_RULE_TABLE: redirection.NFTablesTable, unix.NFTA_RULE_CHAIN: chain} {
		payload = rawnetlink.AppendAttribute(payload, rawnetlink.Attribute{Type: kind, Data: []byte(name + "\x00")})
	}
	answer, err := sockets[0].Dump(rawnetlink.AppendMessage(nil, rawnetlink.Message{
		Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETRULE, Flags: unix.NLM_F_REQUEST | unix.NLM_F_DUMP, Payload: payload,
	}), 1<<20)
	if err != nil {
		p.t.Fatal(err)
	}
	var handles []uint64
	for len(answer) > 0 {
		var m rawnetlink.Message
		if m, answer, err = rawnetlink.Next(answer); err != nil {
			p.t.Fatal(err)
		}
		for rest := m.Payload[4:]; len(rest) > 0; {
			var a rawnetlink.Attribute
			if a, rest, err = rawnetlink.NextAttribute(rest); err != nil {
				p.t.Fatal(err)
			}
			if a.Type == unix.NFTA_RULE_HANDLE {
				handles = append(handles, binary.BigEndian.Uint64(a.Data))
			}
		}
	}
	return handles
}

func TestOtherOptionsAreDifferences(t *testing.T) {
	p := newPod(t, newBackend(t))
	opts := redirection.DefaultOptions()
	p.apply(opts)
	p.verify(opts)
	opts.InboundBypass = true
	p.verify(opts, "chain nat_prerouting: unexpected type nat hook prerouting priority -101 policy accept with 4 rules")
	opts = redirection.DefaultOptions()
	opts.RerouteInterfaces = []string{"tap0"}
	p.verify(opts, "rule of chain nat_prerouting: missing, want row 1, ipv4,ipv6: in tap0 tcp -> redirect to :15001")
}

// TestDamageIsReportedAndRepaired has one case for each kind of thing that others can do to us.
func TestDamageIsReportedAndRepaired(t *testing.T) {
	accept := []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}
	deleteRule := func(p *pod, conn *google.Conn, chain string, index int) error {
		table, c := ours(chain)
		return conn.DelRule(&google.Rule{Table: table, Chain: c, Handle: p.handles(chain)[index]})
	}
	for _, test := range []struct {
		name   string
		damage func(p *pod, conn *google.Conn) error
		want   []string
	}{
		{"rule deleted", func(p *pod, conn *google.Conn) error { return deleteRule(p, conn, "nat_output", 9) }, []string{
			"rule of chain nat_output: missing, want row 13, ipv4,ipv6: tcp -> redirect to :15001"}},
		{"rule in the middle deleted", func(p *pod, conn *google.Conn) error { return deleteRule(p, conn, "nat_prerouting", 2) }, []string{
			"rule of chain nat_prerouting: missing, want row 3, ipv6: source fd16:9254:7127:1337:ffff:ffff:ffff:ffff/128 -> accept"}},
		{"rule inserted", func(_ *pod, conn *google.Conn) error {
			table, c := ours("nat_output")
			conn.InsertRule(&google.Rule{Table: table, Chain: c, Exprs: accept})
			return nil
		}, []string{"rule of chain nat_output: unexpected a rule, [ immediate reg 0 verdict accept ]"}},
		{"rule of ours again", func(_ *pod, conn *google.Conn) error {
			table, c := ours("mangle_output")
			rules, err := conn.GetRules(table, c)
			if err != nil {
				return err
			}
			table, c = ours("mangle_prerouting")
			conn.AddRule(&google.Rule{Table: table, Chain: c, Exprs: rules[0].Exprs})
			return nil
		}, []string{"rule of chain mangle_prerouting: unexpected a rule, ipv4,ipv6: connmark 0x111/0xfff -> restore mark from connmark"}},
		{"rule moved", func(p *pod, conn *google.Conn) error {
			table, c := ours("nat_prerouting")
			row3 := p.handles(c.Name)[1]
			source := binary.BigEndian.AppendUint32(nil, 0xa9fe077f)
			conn.AddRule(&google.Rule{Table: table, Chain: c, Exprs: []expr.Any{
				&expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4, DestRegister: 1},
				&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: source}, &expr.Verdict{Kind: expr.VerdictAccept},
			}})
			return conn.DelRule(&google.Rule{Table: table, Chain: c, Handle: row3})
		}, []string{
			"rule of chain nat_prerouting: missing, want row 3, ipv4: source 169.254.7.127/32 -> accept",
			"rule of chain nat_prerouting: unexpected a rule, [ payload load 4b @ network header + 12 => reg 1 ] [ cmp eq reg 1 0xa9fe077f ] [ immediate reg 0 verdict accept ]"}},
		{"chain emptied", func(_ *pod, conn *google.Conn) error {
			_, c := ours("mangle_output")
			conn.FlushChain(c)
			return nil
		}, []string{"rule of chain mangle_output: missing, want row 6, ipv4,ipv6: connmark 0x111/0xfff -> restore mark from connmark"}},
		{"chain deleted", func(_ *pod, conn *google.Conn) error {
			_, c := ours("raw_output")
			conn.FlushChain(c)
			conn.DelChain(c)
			return nil
		}, []string{"chain raw_output: missing, want type filter hook output priority -300 policy accept"}},
		{"chain of another type", func(_ *pod, conn *google.Conn) error {
			table, c := ours("mangle_output")
			rules, err := conn.GetRules(table, c)
			if err != nil {
				return err
			}
			conn.FlushChain(c)
			conn.DelChain(c)
			c.Type, c.Hooknum, c.Priority = google.ChainTypeFilter, google.ChainHookOutput, google.ChainPriorityMangle
			conn.AddChain(c)
			conn.AddRule(&google.Rule{Table: table, Chain: c, Exprs: rules[0].Exprs})
			return nil
		}, []string{"chain mangle_output: want type route hook output priority -150 policy accept, got type filter hook output priority -150 policy accept"}},
		{"policy changed", func(_ *pod, conn *google.Conn) error {
			_, c := ours("nat_output")
			drop := google.ChainPolicyDrop
			c.Type, c.Hooknum, c.Priority, c.Policy = google.ChainTypeNAT, google.ChainHookOutput, google.ChainPriorityRef(-101), &drop
			conn.AddChain(c)
			return nil
		}, []string{"chain nat_output: want type nat hook output priority -101 policy accept, got type nat hook output priority -101 policy drop"}},
		{"chain added", func(_ *pod, conn *google.Conn) error {
			_, c := ours("more")
			conn.AddChain(c)
			return nil
		}, []string{"chain more: unexpected no hook with 0 rules"}},
		{"set added", func(_ *pod, conn *google.Conn) error {
			table, _ := ours("")
			return conn.AddSet(&google.Set{Table: table, Name: "more", KeyType: google.TypeInetService}, nil)
		}, []string{"table ambientd: unexpected sets or other objects in it: 1"}},
		{"table deleted", func(_ *pod, conn *google.Conn) error {
			table, _ := ours("")
			conn.DelTable(table)
			return nil
		}, []string{noTable}},
		{"policy rule and route deleted", func(*pod, *google.Conn) error {
			mask := redirection.MarkMask
			rule := netlink.NewRule()
			rule.Family, rule.Priority, rule.Table = netlink.FAMILY_V6, int(redirection.RulePriority), 100
			rule.Mark, rule.Mask = redirection.ConnMark, &mask
			routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: 100}, netlink.RT_FILTER_TABLE)
			if err != nil {
				return err
			}
			return errors.Join(netlink.RuleDel(rule), netlink.RouteDel(&routes[0]))
		}, []string{noRoute4, noRule6}},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := newPod(t, newBackend(t))
			opts := redirection.DefaultOptions()
			p.apply(opts)
			p.verify(opts)
			p.nft(func(conn *google.Conn) error { return test.damage(p, conn) })
			p.verify(opts, test.want...)
			p.verify(opts, test.want...)
			p.apply(opts)
			p.verify(opts)
		})
	}
}

// TestDormantTable has every rule in place and none at work.
func TestDormantTable(t *testing.T) {
	p := newPod(t, newBackend(t))
	opts := redirection.DefaultOptions()
	p.apply(opts)
	p.verify(opts)
	fd := tableSocket(t, p)
	sendTable(t, fd, unix.NFT_TABLE_F_DORMANT)
	closeSocket(t, fd)
	p.verify(opts, "table ambientd: want flags 0x0, got flags 0x1")
	p.apply(opts)
	p.verify(opts)
}

func TestOthersAreLeftAlone(t *testing.T) {
	p := newPod(t, newBackend(t))
	foreign := &google.Table{Name: "foreign", Family: google.TableFamilyINet}
	namesake := &google.Table{Name: redirection.NFTablesTable, Family: google.TableFamilyIPv4}
	count := func() (rules int) {
		p.nft(func(conn *google.Conn) error {
			for _, table := range []*google.Table{foreign, namesake} {
				list, err := conn.GetRules(table, &google.Chain{Name: "nat_output", Table: table})
				if err != nil {
					return err
				}
				rules += len(list)
			}
			return nil
		})
		return rules
	}
	p.nft(func(conn *google.Conn) error {
		for _, table := range []*google.Table{foreign, namesake} {
			conn.AddTable(table)
			chain := conn.AddChain(&google.Chain{Name: "nat_output", Table: table})
			conn.AddRule(&google.Rule{Table: table, Chain: chain, Exprs: []expr.Any{&expr.Counter{}}})
		}
		return nil
	})
	opts := redirection.DefaultOptions()
	for _, step := range []func(){
		func() { p.verify(opts, noTable, noRule4, noRoute4, noRule6, noRoute6) },
		func() { p.apply(opts) },
		func() { p.verify(opts) },
		func() { p.apply(opts) },
		p.remove,
	} {
		step()
		if got := count(); got != 2 {
			t.Fatalf("%d foreign rules, want 2", got)
		}
	}
}

// TestForeignTransactionsDoNotHideDamage has others commit, before and after what is to be found.
func TestForeignTransactionsDoNotHideDamage(t *testing.T) {
	p := newPod(t, newBackend(t))
	opts := redirection.DefaultOptions()
	foreign := func(conn *google.Conn) error {
		conn.AddTable(&google.Table{Name: "foreign", Family: google.TableFamilyIPv4})
		return nil
	}
	p.apply(opts)
	p.verify(opts)
	p.nft(foreign)
	p.verify(opts)
	p.nft(func(conn *google.Conn) error {
		_, c := ours("mangle_output")
		conn.FlushChain(c)
		return foreign(conn)
	})
	want := "rule of chain mangle_output: missing, want row 6, ipv4,ipv6: connmark 0x111/0xfff -> restore mark from connmark"
	p.verify(opts, want)
	p.nft(foreign)
	p.verify(opts, want)
}

func TestIPv6Absent(t *testing.T) {
	for _, setting := range []string{"all", "lo"} {
		t.Run(setting, func(t *testing.T) {
			p := newPod(t, newBackend(t))
			opts := redirection.DefaultOptions()
			disable := func(value string) {
				p.Do(t, func() error {
					return os.WriteFile("/proc/sys/net/ipv6/conf/"+setting+"/disable_ipv6", []byte(value), 0)
				})
			}
			disable("1")
			if got := p.apply(opts); got != redirection.IPv4 {
				t.Errorf("applied for %s", got)
			}
			if got := p.verify(opts); got != redirection.IPv4 {
				t.Errorf("verified for %s", got)
			}
			p.remove()
			p.empty()
		})
	}
	t.Run("not wanted", func(t *testing.T) {
		p := newPod(t, newBackend(t))
		opts := redirection.DefaultOptions()
		p.apply(opts)
		opts.IPv6 = false
		if got := p.apply(opts); got != redirection.IPv4 {
			t.Errorf("applied for %s", got)
		}
		if got := p.verify(opts); got != redirection.IPv4 {
			t.Errorf("verified for %s", got)
		}
	})
}

// TestApplyFailsWhole has another process own a table of our name, so that the transaction is refused at its beginning.
func TestApplyFailsWhole(t *testing.T) {
	p := newPod(t, newBackend(t))
	owner := tableSocket(t, p)
	sendTable(t, owner, tableFlagOwner)
	opts := redirection.DefaultOptions()
	_, err := p.backend.Apply(t.Context(), p.run, opts)
	if !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "applying redirection (nftables): adding table inet ambientd") {
		t.Errorf("got %v", err)
	}
	if err := p.backend.Remove(t.Context(), p.run); !errors.Is(err, unix.EPERM) {
		t.Errorf("removing what another process owns: %v", err)
	}
	closeSocket(t, owner) // the table goes with it
	p.empty()
	p.apply(opts)
	p.verify(opts)
}

func TestBadInput(t *testing.T) {
	netnstest.Require(t)
	backend := newBackend(t)
	never := redirection.Runner(func(func() error) error { t.Error("the namespace was entered"); return nil })
	if _, err := backend.Apply(t.Context(), never, redirection.Options{}); err == nil || !strings.Contains(err.Error(), "probe source") {
		t.Errorf("apply with bad options: %v", err)
	}
	if _, _, err := backend.Verify(t.Context(), never, redirection.Options{}); err == nil || !strings.Contains(err.Error(), "probe source") {
		t.Errorf("verify with bad options: %v", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := backend.Apply(ended, never, redirection.DefaultOptions()); !errors.Is(err, context.Canceled) {
		t.Errorf("apply after the end: %v", err)
	}
	if _, _, err := backend.Verify(ended, never, redirection.DefaultOptions()); !errors.Is(err, context.Canceled) {
		t.Errorf("verify after the end: %v", err)
	}
	if err := backend.Remove(ended, never); !errors.Is(err, context.Canceled) {
		t.Errorf("remove after the end: %v", err)
	}
	gone := errors.New("namespace gone")
	broken := redirection.Runner(func(func() error) error { return gone })
	if _, err := backend.Apply(t.Context(), broken, redirection.DefaultOptions()); !errors.Is(err, gone) {
		t.Errorf("apply where the namespace cannot be entered: %v", err)
	}
}

// TestConcurrently works on several namespaces at once, and on one from several sides.
func TestConcurrently(t *testing.T) {
	backend := newBackend(t)
	opts := redirection.DefaultOptions()
	pods := make([]*pod, 6)
	for i := range pods {
		pods[i] = newPod(t, backend)
	}
	shared := pods[0]
	var group sync.WaitGroup
	for i, p := range pods {
		group.Go(func() {
			mine := opts
			mine.DNSCapture = i%2 == 0
			for range 20 {
				if _, err := backend.Apply(t.Context(), p.run, mine); err != nil {
					t.Error(err)
				}
				if _, _, err := backend.Verify(t.Context(), shared.run, opts); err != nil {
					t.Error(err)
				}
				if p == shared {
					continue
				}
				if _, differences, err := backend.Verify(t.Context(), p.run, mine); err != nil || len(differences) > 0 {
					t.Errorf("%v %v", differences, err)
				}
				if err := backend.Remove(t.Context(), p.run); err != nil {
					t.Error(err)
				}
			}
		})
		group.Go(func() {
			for range 20 {
				if _, err := backend.Apply(t.Context(), shared.run, opts); err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	shared.verify(opts)
	for _, p := range pods[1:] {
		p.empty()
	}
}

// SPDX-License-Identifier: Apache-2.0

package policyroute_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/iptables/policyroute"
	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }

// connect returns a connection to the namespace that lasts until the test ends.
func connect(t *testing.T, ns *netnstest.NS) *policyroute.Conn {
	t.Helper()
	sockets, err := rawnetlink.New().Open(ns.Runner(), unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := sockets[0].Close(); err != nil {
			t.Error(err)
		}
	})
	conn, err := policyroute.New(sockets[0])
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

func read(t *testing.T, conn *policyroute.Conn) *policyroute.State {
	t.Helper()
	state, err := conn.Read()
	if err != nil {
		t.Fatal(err)
	}
	return state
}

func apply(t *testing.T, conn *policyroute.Conn, families redirection.Families) policyroute.Undo {
	t.Helper()
	undo, err := conn.Apply(t.Context(), read(t, conn), families)
	if err != nil {
		t.Fatal(err)
	}
	return undo
}

// differences returns them as lines.
func differences(t *testing.T, conn *policyroute.Conn, families redirection.Families) []string {
	t.Helper()
	var lines []string
	for _, d := range read(t, conn).Differences(families) {
		lines = append(lines, d.String())
	}
	return lines
}

func wantLines(t *testing.T, what string, got []string, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// inventory lists rules and routes of the namespace in the words of an independent reader.
func inventory(t *testing.T, ns *netnstest.NS) []string {
	t.Helper()
	var lines []string
	ns.Do(t, func() error {
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			rules, err := netlink.RuleList(family)
			if err != nil {
				return err
			}
			for _, r := range rules {
				mask := uint32(0)
				if r.Mask != nil {
					mask = *r.Mask
				}
				lines = append(lines, fmt.Sprintf("family %d rule %d mark %#x/%#x table %d", family, r.Priority, r.Mark, mask, r.Table))
			}
			routes, err := netlink.RouteListFiltered(family, &netlink.Route{Table: 100}, netlink.RT_FILTER_TABLE)
			if err != nil {
				return err
			}
			for _, r := range routes {
				lines = append(lines, fmt.Sprintf("family %d route type %d dst %s link %d", family, r.Type, r.Dst, r.LinkIndex))
			}
		}
		return nil
	})
	return lines
}

func sysctl(t *testing.T, ns *netnstest.NS, path, value string) {
	t.Helper()
	ns.Do(t, func() error { return os.WriteFile("/proc/sys/net/"+path, []byte(value), 0) })
}

const (
	missingRule4  = "policy rule (ipv4): missing, want fwmark 0x111/0xfff lookup 100 priority 32764"
	missingRoute4 = "route (ipv4): missing, want local default dev lo table 100"
	missingRule6  = "policy rule (ipv6): missing, want fwmark 0x111/0xfff lookup 100 priority 32764"
	missingRoute6 = "route (ipv6): missing, want local default dev lo table 100"
)

func TestApplyAndRemove(t *testing.T) {
	ns := netnstest.New(t)
	conn := connect(t, ns)
	before := inventory(t, ns)
	wantLines(t, "empty namespace", differences(t, conn, redirection.DualStack),
		missingRule4, missingRoute4, missingRule6, missingRoute6)

	apply(t, conn, redirection.DualStack)
	wantLines(t, "applied", differences(t, conn, redirection.DualStack))
	applied := inventory(t, ns)
	wantAdded := []string{
		"family 2 route type 2 dst 0.0.0.0/0 link 1", "family 2 rule 32764 mark 0x111/0xfff table 100",
		"family 10 route type 2 dst ::/0 link 1", "family 10 rule 32764 mark 0x111/0xfff table 100",
	}
	for _, want := range wantAdded {
		if !strings.Contains(strings.Join(applied, "\n"), want) {
			t.Errorf("no %q in\n%s", want, strings.Join(applied, "\n"))
		}
	}
	if len(applied) != len(before)+len(wantAdded) {
		t.Errorf("before:\n%s\nafter:\n%s", strings.Join(before, "\n"), strings.Join(applied, "\n"))
	}

	apply(t, conn, redirection.DualStack)
	wantLines(t, "applied twice", inventory(t, ns), applied...)

	for _, round := range []string{"removed", "removed twice"} {
		if err := conn.Remove(read(t, conn)); err != nil {
			t.Fatal(err)
		}
		wantLines(t, round, inventory(t, ns), before...)
	}
}

func TestUndoTakesBackWhatWasAdded(t *testing.T) {
	ns := netnstest.New(t)
	conn := connect(t, ns)
	before := inventory(t, ns)
	undo := apply(t, conn, redirection.DualStack)
	if err := undo.Undo(); err != nil {
		t.Fatal(err)
	}
	wantLines(t, "undone", inventory(t, ns), before...)

	apply(t, conn, redirection.IPv4)
	half := inventory(t, ns)
	undo = apply(t, conn, redirection.DualStack)
	if err := undo.Undo(); err != nil {
		t.Fatal(err)
	}
	wantLines(t, "undone with IPv4 there before", inventory(t, ns), half...)
	if err := (policyroute.Undo{}).Undo(); err != nil {
		t.Errorf("zero value: %v", err)
	}
}

// TestApplyTakesBackAfterARefusal makes only the IPv6 route impossible, after the others of the same batch.
func TestApplyTakesBackAfterARefusal(t *testing.T) {
	ns := netnstest.New(t)
	conn := connect(t, ns)
	state := read(t, conn)
	before := inventory(t, ns)
	sysctl(t, ns, "ipv6/conf/lo/disable_ipv6", "1")
	_, err := conn.Apply(t.Context(), state, redirection.DualStack) // the state still says that there is IPv6
	if !errors.Is(err, unix.EACCES) || !strings.Contains(err.Error(), "adding the ipv6 route") {
		t.Errorf("got %v", err)
	}
	wantLines(t, "after the refusal", inventory(t, ns), before...)
}

// damage is what others do to our rule and route, and what is then reported.
func TestDamageIsReportedAndRepaired(t *testing.T) {
	mask := redirection.MarkMask
	ours := func(family int) *netlink.Rule {
		r := netlink.NewRule()
		r.Family, r.Priority, r.Table, r.Mark, r.Mask = family, int(redirection.RulePriority), 100, redirection.ConnMark, &mask
		return r
	}
	route := func(cidr string, change func(*netlink.Route)) *netlink.Route {
		_, dst, err := net.ParseCIDR(cidr)
		if err != nil {
			t.Fatal(err)
		}
		r := &netlink.Route{Table: 100, Dst: dst, LinkIndex: 1, Type: unix.RTN_LOCAL, Scope: unix.RT_SCOPE_HOST}
		change(r)
		return r
	}
	for _, test := range []struct {
		name   string
		damage func() error
		want   []string
	}{
		{"rule deleted", func() error { return netlink.RuleDel(ours(netlink.FAMILY_V4)) }, []string{missingRule4}},
		{"IPv6 rule deleted", func() error { return netlink.RuleDel(ours(netlink.FAMILY_V6)) }, []string{missingRule6}},
		{"route deleted", func() error {
			return netlink.RouteDel(route("0.0.0.0/0", func(*netlink.Route) {}))
		}, []string{missingRoute4}},
		{"routes flushed by lo going down and up", func() error {
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			return errors.Join(netlink.LinkSetDown(lo), netlink.LinkSetUp(lo))
		}, []string{missingRoute6}},
		{"rule replaced by one with another mask", func() error {
			all := uint32(0xffffffff)
			other := ours(netlink.FAMILY_V4)
			other.Mask = &all
			return errors.Join(netlink.RuleDel(ours(netlink.FAMILY_V4)), netlink.RuleAdd(other))
		}, []string{missingRule4, "policy rule (ipv4): unexpected from all fwmark 0x111/0xffffffff lookup 100 priority 32764"}},
		{"rule with a suppressed prefix length", func() error {
			other := ours(netlink.FAMILY_V6)
			other.SuppressPrefixlen = 0
			return errors.Join(netlink.RuleDel(ours(netlink.FAMILY_V6)), netlink.RuleAdd(other))
		}, []string{missingRule6, "policy rule (ipv6): unexpected from all fwmark 0x111/0xfff lookup 100 priority 32764"}},
		{"another rule at our priority", func() error {
			other := ours(netlink.FAMILY_V4)
			other.Src = &net.IPNet{IP: net.IPv4(10, 0, 0, 0), Mask: net.CIDRMask(8, 32)}
			other.Invert = true
			return netlink.RuleAdd(other)
		}, []string{"policy rule (ipv4): unexpected not from 10.0.0.0/8 fwmark 0x111/0xfff lookup 100 priority 32764"}},
		{"default route replaced", func() error {
			return netlink.RouteReplace(&netlink.Route{Table: 100, Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, Type: unix.RTN_BLACKHOLE})
		}, []string{missingRoute4, "route (ipv4): unexpected blackhole default table 100"}},
		{"a more specific route", func() error {
			return netlink.RouteAdd(route("10.1.0.0/16", func(*netlink.Route) {}))
		}, []string{"route (ipv4): unexpected local 10.1.0.0/16 dev index 1 table 100"}},
		{"the route twice", func() error {
			return netlink.RouteAdd(route("0.0.0.0/0", func(r *netlink.Route) { r.Priority = 7 }))
		}, []string{"route (ipv4): unexpected local default dev index 1 table 100 metric 7"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			ns := netnstest.New(t)
			conn := connect(t, ns)
			apply(t, conn, redirection.DualStack)
			intact := inventory(t, ns)
			ns.Do(t, test.damage)
			wantLines(t, "reported", differences(t, conn, redirection.DualStack), test.want...)
			apply(t, conn, redirection.DualStack)
			wantLines(t, "after the repair", differences(t, conn, redirection.DualStack))
			if got := inventory(t, ns); len(got) != len(intact) {
				t.Errorf("repaired:\n%s\nintact:\n%s", strings.Join(got, "\n"), strings.Join(intact, "\n"))
			}
		})
	}
}

// TestOthersAreLeftAlone has rules and routes around ours, and things in IPv6 while only IPv4 is covered.
func TestOthersAreLeftAlone(t *testing.T) {
	ns := netnstest.New(t)
	conn := connect(t, ns)
	ns.Do(t, func() error {
		before, after := netlink.NewRule(), netlink.NewRule()
		before.Priority, before.Table, before.Mark = 100, 200, 0x111
		after.Priority, after.Table, after.Family = 32765, 100, netlink.FAMILY_V4
		inIPv6 := netlink.NewRule()
		inIPv6.Family, inIPv6.Priority, inIPv6.Table = netlink.FAMILY_V6, int(redirection.RulePriority), 7
		_, dst, err := net.ParseCIDR("10.0.0.0/8")
		if err != nil {
			return err
		}
		return errors.Join(netlink.RuleAdd(before), netlink.RuleAdd(after), netlink.RuleAdd(inIPv6),
			netlink.RouteAdd(&netlink.Route{Table: 101, Dst: dst, LinkIndex: 1}))
	})
	before := inventory(t, ns)
	apply(t, conn, redirection.IPv4)
	wantLines(t, "applied", differences(t, conn, redirection.IPv4))
	if err := conn.Remove(read(t, conn)); err != nil {
		t.Fatal(err)
	}
	wantLines(t, "removed", inventory(t, ns), before...)
}

// TestIPv6Absent has the two forms that a test can make; TestStateWithoutIPv6InTheKernel has the third.
func TestIPv6Absent(t *testing.T) {
	for _, test := range []struct{ name, setting string }{
		{"switched off for all", "ipv6/conf/all/disable_ipv6"},
		{"switched off for lo", "ipv6/conf/lo/disable_ipv6"},
	} {
		t.Run(test.name, func(t *testing.T) {
			ns := netnstest.New(t)
			conn := connect(t, ns)
			sysctl(t, ns, test.setting, "1")
			families := read(t, conn).Families(redirection.DualStack)
			if families != redirection.IPv4 {
				t.Fatalf("families %s, want ipv4", families)
			}
			apply(t, conn, families)
			wantLines(t, "applied", differences(t, conn, families))
			for _, line := range inventory(t, ns) {
				if strings.HasPrefix(line, "family 10 rule 32764") || strings.HasPrefix(line, "family 10 route") {
					t.Errorf("left in IPv6: %s", line)
				}
			}
		})
		t.Run(test.name+", later", func(t *testing.T) {
			ns := netnstest.New(t)
			conn := connect(t, ns)
			apply(t, conn, redirection.DualStack)
			sysctl(t, ns, test.setting, "1")
			families := read(t, conn).Families(redirection.DualStack)
			if families != redirection.IPv4 {
				t.Fatalf("families %s, want ipv4", families)
			}
			wantLines(t, "left over", differences(t, conn, families),
				"policy rule (ipv6): unexpected from all fwmark 0x111/0xfff lookup 100 priority 32764")
			apply(t, conn, families)
			wantLines(t, "applied", differences(t, conn, families))
		})
	}
}

func TestLoopbackDown(t *testing.T) {
	ns := netnstest.New(t)
	conn := connect(t, ns)
	before := inventory(t, ns)
	ns.Do(t, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.LinkSetDown(lo)
	})
	if _, err := conn.Apply(t.Context(), read(t, conn), redirection.DualStack); !errors.Is(err, policyroute.ErrLoopbackDown) {
		t.Errorf("got %v, want ErrLoopbackDown", err)
	}
	wantLines(t, "nothing done", inventory(t, ns), before...)
	if got := differences(t, conn, redirection.IPv4); got[0] != "loopback device: want up, got down" {
		t.Errorf("differences: %q", got)
	}
}

// TestConcurrently applies from many sides at once; each finds what another did fine.
func TestConcurrently(t *testing.T) {
	ns := netnstest.New(t)
	conns := make([]*policyroute.Conn, 8)
	for i := range conns {
		conns[i] = connect(t, ns)
	}
	var group sync.WaitGroup
	for _, conn := range conns {
		group.Go(func() {
			for range 50 {
				state, err := conn.Read()
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := conn.Apply(t.Context(), state, redirection.DualStack); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	group.Wait()
	wantLines(t, "in the end", differences(t, conns[0], redirection.DualStack))
}

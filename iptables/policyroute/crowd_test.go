// SPDX-License-Identifier: Apache-2.0

package policyroute_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/iptables/policyroute"
	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

// addRoutes adds n routes to our table, as a pod may that has the capability.
func addRoutes(t *testing.T, ns *netnstest.NS, n int) {
	t.Helper()
	ns.Do(t, func() error {
		for i := range n {
			dst := &net.IPNet{IP: binary.BigEndian.AppendUint32(nil, 0x0b000000+uint32(i)), Mask: net.CIDRMask(32, 32)}
			if err := netlink.RouteAdd(&netlink.Route{Dst: dst, Table: 100, Type: unix.RTN_BLACKHOLE}); err != nil {
				return err
			}
		}
		return nil
	})
}

// TestRoutesWithoutNumber has more routes in our table than are read: that is a difference, and repair takes them all away.
func TestRoutesWithoutNumber(t *testing.T) {
	ns := netnstest.New(t)
	conn := connect(t, ns)
	apply(t, conn, redirection.DualStack)
	addRoutes(t, ns, 9000)
	state := read(t, conn)
	found := state.Differences(redirection.DualStack)
	if last := found[len(found)-1]; len(found) > 20 || last.What != "routes of table 100" || !strings.HasPrefix(last.Got, "more than ") {
		t.Errorf("%d differences, the last %v", len(found), last)
	}
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := conn.Apply(canceled, state, redirection.DualStack); !errors.Is(err, context.Canceled) {
		t.Errorf("repair after its deadline: %v", err)
	}
	apply(t, conn, redirection.DualStack)
	wantLines(t, "repaired", differences(t, conn, redirection.DualStack))
}

// TestRemoveAmongRoutesWithoutNumber leaves what is not ours.
func TestRemoveAmongRoutesWithoutNumber(t *testing.T) {
	ns := netnstest.New(t)
	conn := connect(t, ns)
	apply(t, conn, redirection.DualStack)
	addRoutes(t, ns, 8000)
	if err := conn.Remove(read(t, conn)); err != nil {
		t.Fatal(err)
	}
	ns.Do(t, func() error {
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			routes, err := netlink.RouteListFiltered(family, &netlink.Route{Table: 100, Type: unix.RTN_LOCAL}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE)
			if err != nil || len(routes) > 0 {
				t.Errorf("family %d: local routes left: %v, %v", family, routes, err)
			}
		}
		rest, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: 100}, netlink.RT_FILTER_TABLE)
		if err != nil || len(rest) != 8000 {
			t.Errorf("%d routes of others left, %v", len(rest), err)
		}
		return nil
	})
}

// TestRulesWithoutNumber has more policy rules than are read, all of them before ours.
func TestRulesWithoutNumber(t *testing.T) {
	ns := netnstest.New(t)
	conn := connect(t, ns)
	apply(t, conn, redirection.DualStack)
	ns.Do(t, func() error {
		for i := range 4000 {
			r := netlink.NewRule()
			r.Family, r.Priority, r.Table, r.Mark = netlink.FAMILY_V4, 1000, 7, uint32(i+1)
			if err := netlink.RuleAdd(r); err != nil {
				return err
			}
		}
		return nil
	})
	found := read(t, conn).Differences(redirection.DualStack)
	if last := found[len(found)-1]; last.What != "policy rules" || !strings.HasPrefix(last.Got, "more than ") {
		t.Errorf("found %v", found)
	}
	apply(t, conn, redirection.DualStack)
	if err := conn.Remove(read(t, conn)); err != nil {
		t.Fatal(err)
	}
	ns.Do(t, func() error {
		ours, err := netlink.RuleListFiltered(netlink.FAMILY_V4, &netlink.Rule{Table: 100}, netlink.RT_FILTER_TABLE)
		if err != nil || len(ours) > 0 {
			t.Errorf("left of ours: %v, %v", ours, err)
		}
		return nil
	})
}

// TestBegin starts where something stands in the way: a default route in our table that leads elsewhere, as plugins for
// routing by source make them; loopback that is down; and IPv6 that is switched off.
func TestBegin(t *testing.T) {
	begin := func(t *testing.T, ns *netnstest.NS) (*policyroute.Conn, *policyroute.State, policyroute.Undo, error) {
		conn := connect(t, ns)
		state, undo, err := conn.Begin(t.Context(), redirection.DualStack)
		return conn, state, undo, err
	}
	t.Run("nothing in the way", func(t *testing.T) {
		ns := netnstest.New(t)
		before := inventory(t, ns)
		conn, state, undo, err := begin(t, ns)
		if err != nil || state.Families(redirection.DualStack) != redirection.DualStack {
			t.Fatalf("%v, %v", state, err)
		}
		wantLines(t, "begun", differences(t, conn, redirection.DualStack))
		if err := undo.Undo(); err != nil {
			t.Fatal(err)
		}
		wantLines(t, "undone", inventory(t, ns), before...)
	})
	t.Run("another default route", func(t *testing.T) {
		ns := netnstest.New(t)
		ns.Do(t, func() error {
			_, all, err := net.ParseCIDR("0.0.0.0/0")
			if err != nil {
				return err
			}
			return netlink.RouteAdd(&netlink.Route{Dst: all, Table: 100, Type: unix.RTN_BLACKHOLE})
		})
		conn, _, _, err := begin(t, ns)
		if err != nil {
			t.Fatal(err)
		}
		wantLines(t, "begun", differences(t, conn, redirection.DualStack))
	})
	t.Run("no IPv6", func(t *testing.T) {
		ns := netnstest.New(t)
		sysctl(t, ns, "ipv6/conf/lo/disable_ipv6", "1")
		conn, state, _, err := begin(t, ns)
		if err != nil || state.Families(redirection.DualStack) != redirection.IPv4 {
			t.Fatalf("%v, %v", state, err)
		}
		wantLines(t, "begun", differences(t, conn, redirection.IPv4))
	})
	t.Run("loopback down", func(t *testing.T) {
		ns := netnstest.New(t)
		ns.Do(t, func() error {
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			return netlink.LinkSetDown(lo)
		})
		before := inventory(t, ns)
		if _, _, _, err := begin(t, ns); !errors.Is(err, policyroute.ErrLoopbackDown) {
			t.Errorf("got %v", err)
		}
		wantLines(t, "after the refusal", inventory(t, ns), before...)
	})
}

// TestLoopbackIsKnownByTheRoute switches IPv6 off, and loopback, under what was applied.
func TestLoopbackIsKnownByTheRoute(t *testing.T) {
	ns := netnstest.New(t)
	conn := connect(t, ns)
	apply(t, conn, redirection.DualStack)
	sysctl(t, ns, "ipv6/conf/all/disable_ipv6", "1")
	if got := read(t, conn).Families(redirection.DualStack); got != redirection.IPv4 {
		t.Errorf("IPv6 off: %s", got)
	}
	sysctl(t, ns, "ipv6/conf/all/disable_ipv6", "0")
	apply(t, conn, redirection.DualStack)
	ns.Do(t, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.LinkSetDown(lo)
	})
	if err := read(t, conn).CheckLoopback(); !errors.Is(err, policyroute.ErrLoopbackDown) {
		t.Errorf("loopback down: %v", err)
	}
}

// addWideRoute adds a route to our table that has n ways to go.
func addWideRoute(t *testing.T, ns *netnstest.NS, n int) {
	t.Helper()
	ns.Do(t, func() error {
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "wide"}, PeerName: "wide-peer"}
		if err := netlink.LinkAdd(veth); err != nil && !errors.Is(err, unix.EEXIST) {
			return err
		}
		link, err := netlink.LinkByName("wide")
		if err != nil {
			return err
		}
		if err := netlink.LinkSetUp(link); err != nil {
			return err
		}
		address, err := netlink.ParseAddr("172.16.0.1/12")
		if err != nil {
			return err
		}
		if err := netlink.AddrReplace(link, address); err != nil {
			return err
		}
		route := &netlink.Route{Table: 100, Dst: &net.IPNet{IP: net.IPv4(198, 51, 100, 0).To4(), Mask: net.CIDRMask(24, 32)}}
		for i := range n {
			via := binary.BigEndian.AppendUint32(nil, 0xac100002+uint32(i))
			route.MultiPath = append(route.MultiPath, &netlink.NexthopInfo{LinkIndex: link.Attrs().Index, Gw: via})
		}
		return netlink.RouteReplace(route)
	})
}

// TestRouteWithManyWays has a route in our table that no message of the usual length tells of: it is a difference like every
// other, and goes.
func TestRouteWithManyWays(t *testing.T) {
	for _, ways := range []int{200, 600, 1900} {
		t.Run(fmt.Sprint(ways), func(t *testing.T) {
			ns := netnstest.New(t)
			conn := connect(t, ns)
			apply(t, conn, redirection.DualStack)
			addWideRoute(t, ns, ways)
			wantLines(t, "with another's route", differences(t, conn, redirection.DualStack),
				"route (ipv4): unexpected unicast 198.51.100.0/24 table 100")
			apply(t, conn, redirection.DualStack)
			wantLines(t, "repaired", differences(t, conn, redirection.DualStack))
		})
	}
}

// TestRouteThatIsNotListed has one that no message of any length tells of: it is a difference, a repair says that it cannot
// help, and ours can be removed nevertheless.
func TestRouteThatIsNotListed(t *testing.T) {
	ns := netnstest.New(t)
	conn := connect(t, ns)
	apply(t, conn, redirection.DualStack)
	addWideRoute(t, ns, 4000)
	state := read(t, conn)
	if found := state.Differences(redirection.DualStack); !strings.Contains(fmt.Sprint(found), "one that the kernel cannot list") {
		t.Errorf("found %v", found)
	}
	if _, err := conn.Apply(t.Context(), state, redirection.DualStack); !errors.Is(err, policyroute.ErrUntold) {
		t.Errorf("repair: %v", err)
	}
	if err := conn.Remove(read(t, conn)); err != nil {
		t.Error(err)
	}
	ns.Do(t, func() error {
		left, err := netlink.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{Table: 100}, netlink.RT_FILTER_TABLE)
		if err != nil || len(left) > 0 {
			t.Errorf("left: %v, %v", left, err)
		}
		return nil
	})
	addWideRoute(t, ns, 2) // in its place
	apply(t, conn, redirection.DualStack)
	wantLines(t, "repaired", differences(t, conn, redirection.DualStack))
}

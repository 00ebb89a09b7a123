// SPDX-License-Identifier: Apache-2.0

package podnetns_test

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/tools/netnstest"
)

const systemService = "/system.slice/tool.service"

// A pod with NET_ADMIN has moved its address from the recorded netns to one that it made: as
// long as it lives in the recorded one, the other is not it.
func TestFindDecoy(t *testing.T) {
	for name, test := range map[string]struct {
		own      []string // cgroups of the processes in the recorded netns
		unread   bool     // the recorded path leads to it no more
		runtime  bool     // the runtime has it for the netns of a ready sandbox
		rebooted bool     // the record is of an earlier boot
		found    bool     // the other netns is the pod's
	}{
		"it lives in the recorded one":  {own: []string{podCgroup(uid1)}},
		"enrolled while it ran":         {own: []string{podCgroup(uid1)}, unread: true},
		"others came in":                {own: []string{systemService, podCgroup(uid1), podCgroup(uid2), systemService}},
		"no process, but a sandbox":     {runtime: true},
		"the recorded sandbox is over":  {found: true},
		"others are in it":              {own: []string{systemService, podCgroup(uid2)}, found: true},
		"the machine has started again": {own: []string{podCgroup(uid1)}, rebooted: true, found: true},
	} {
		for _, decoyFirst := range []string{"decoy first", "decoy last"} {
			t.Run(name+", "+decoyFirst, func(t *testing.T) {
				n := newNode(t)
				own, decoy, own2 := n.netns("10.0.0.9"), n.netns("10.0.0.1"), n.netns("10.0.0.2")
				if decoyFirst == "decoy first" {
					n.resident(decoy, podCgroup(uid1))
				}
				for _, cgroup := range test.own {
					n.resident(own, cgroup)
				}
				if decoyFirst != "decoy first" {
					n.resident(decoy, podCgroup(uid1))
				}
				n.resident(own2, podCgroup(uid2))
				w := n.recorded(uid1, n.file(own, "cni-1"), own, "10.0.0.1")
				if test.runtime {
					n.runtime = runtimePaths{uid1: {w.NetnsPath}}
				}
				if test.unread {
					w.NetnsPath = ""
				}
				if test.rebooted {
					w.Key.BootID = "6c1f2f0e-0000-4000-8000-000000000000"
				}
				want := map[string]any{uid1: "still in the recorded netns " + w.Key.String() + ", but: it holds 10.0.0.9, and not the pod's 10.0.0.1", uid2: own2}
				if test.found {
					want[uid1] = decoy
				}
				n.check(want, w, wantedPod(uid2, "10.0.0.2"))
			})
		}
	}
}

// That the address is nowhere any more is told as plainly.
func TestFindMovedAddress(t *testing.T) {
	n := newNode(t)
	own := n.netns()
	n.resident(own, podCgroup(uid1))
	n.check(map[string]any{uid1: "still in the recorded netns"}, n.recorded(uid1, n.file(own, "cni-1"), own, "10.0.0.1"))
}

// A pod whose addresses cannot be read, because they never stay the same for as long as that
// takes, is not found in the decoy either.
func TestFindDecoyWhileAddressesChange(t *testing.T) {
	n := newNode(t)
	own, decoy := n.netns(), n.netns("10.0.0.1")
	n.manyAddresses(own, 2000)
	n.resident(own, podCgroup(uid1))
	n.resident(decoy, podCgroup(uid1))
	w := n.recorded(uid1, n.file(own, "cni-1"), own, "10.0.0.1")
	stop, stopped := make(chan struct{}), make(chan error)
	change := n.changer(own)
	go func() {
		for {
			select {
			case <-stop:
				stopped <- nil
				return
			default:
			}
			if err := change(); err != nil {
				stopped <- err
				return
			}
		}
	}()
	for range 5 {
		n.check(map[string]any{uid1: "still in the recorded netns"}, w)
	}
	close(stop)
	n.must(<-stopped)
}

// changer returns a function that adds an address in the netns and deletes it again.
func (n *node) changer(ns *netnstest.NS) func() error {
	n.tb.Helper()
	var inside *netlink.Handle
	var lo netlink.Link
	ns.Do(n.tb, func() (err error) {
		if inside, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
			return err
		}
		lo, err = inside.LinkByName("lo")
		return err
	})
	n.tb.Cleanup(inside.Close)
	addr := &netlink.Addr{IPNet: netlink.NewIPNet(netip.MustParseAddr("10.9.9.9").AsSlice())}
	return func() error { return errors.Join(inside.AddrAdd(lo, addr), inside.AddrDel(lo, addr)) }
}

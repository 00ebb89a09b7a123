// SPDX-License-Identifier: Apache-2.0

package growth_test

import (
	"fmt"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"ambientd/tools/netnstest"
)

// namespaces counts the network namespaces that it has made and that are still there.
// Each gets a number in the one that stands for the host's (rtnetlink(7), RTM_NEWNSID),
// which the kernel forgets when the namespace ends: when no descriptor, socket or process
// refers to it any more.
type namespaces struct {
	made int
}

func newNamespaces(t *testing.T) *namespaces {
	t.Helper()
	if left := numbered(t); left != 0 {
		t.Fatalf("%d network namespaces have a number before any was made", left)
	}
	return &namespaces{}
}

// make makes a netns that lives until the end of the test, at least.
func (n *namespaces) make(t *testing.T) *netnstest.NS {
	t.Helper()
	ns := netnstest.New(t)
	n.made++
	if err := netlink.SetNetNsIdByFd(int(ns.File().Fd()), n.made); err != nil {
		t.Fatalf("giving a network namespace a number: %v", err)
	}
	return ns
}

// awaitGone waits until all have ended and the kernel has taken them apart.
func (n *namespaces) awaitGone(t *testing.T) {
	t.Helper()
	left := 0
	gone := func() bool { left = numbered(t); return left == 0 }
	still := func() string {
		return fmt.Sprintf("%d network namespaces are still there, though nothing should hold them", left)
	}
	await(t, gone, still)
	// The kernel takes apart in batches what has ended meanwhile, numbers first. Once one
	// that ends now has lost its own, the batches before are done with.
	t.Run("last", func(t *testing.T) { n.make(t) })
	await(t, gone, still)
}

// numbered returns how many network namespaces have a number in ours.
func numbered(t *testing.T) int {
	t.Helper()
	request := nl.NewNetlinkRequest(unix.RTM_GETNSID, unix.NLM_F_DUMP)
	request.AddData(nl.NewRtGenMsg())
	answers, err := request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWNSID)
	if err != nil {
		t.Fatalf("listing network namespaces: %v", err)
	}
	return len(answers)
}

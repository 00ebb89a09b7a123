// SPDX-License-Identifier: Apache-2.0

package packettest_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"ambientd/iptables/policyroute"
	"ambientd/iptables/redirection"
)

// TestShutWhileLoopbackIsDown: in an enrolled pod lo goes down, and then the rules go too, as a pod can do to itself that may
// change its network. What is put back lets nothing past the proxy, and all of it is right again with lo.
func TestShutWhileLoopbackIsDown(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		n := newNetwork(t, nil)
		opts := redirection.DefaultOptions()
		apply(t, b, n, opts, redirection.DualStack)
		set := func(change func(netlink.Link) error) {
			t.Helper()
			n.pod.Do(t, func() error {
				lo, err := netlink.LinkByName(redirection.Loopback)
				if err != nil {
					return err
				}
				return change(lo)
			})
		}
		set(netlink.LinkSetDown)
		if err := b.Remove(t.Context(), n.pod.Runner()); err != nil {
			t.Fatal(err)
		}
		if _, err := b.Apply(t.Context(), n.pod.Runner(), opts); !errors.Is(err, policyroute.ErrLoopbackDown) {
			t.Errorf("applied while lo is down: %v", err)
		}
		_, found, err := b.Verify(t.Context(), n.pod.Runner(), opts)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range found {
			if !slices.Contains([]string{"loopback device", "policy rule", "route"}, d.What) {
				t.Errorf("packet rules differ: %s", d)
			}
		}
		set(netlink.LinkSetUp)
		apply(t, b, n, opts, redirection.DualStack)
	})
}

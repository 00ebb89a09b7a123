// SPDX-License-Identifier: Apache-2.0

package xtables_test

import (
	"testing"

	"github.com/vishvananda/netlink"

	"ambientd/iptables/redirection"
	"ambientd/iptables/xtables"
	"ambientd/tools/netnstest"
)

// TestRemoveProbeSets reports a set that is there, once, and none where none is.
func TestRemoveProbeSets(t *testing.T) {
	ns := netnstest.New(t)
	ns.Do(t, func() error {
		return netlink.IpsetCreate(redirection.ProbeSetIPv4, "hash:ip", netlink.IpsetCreateOptions{})
	})
	for _, want := range []bool{true, false} {
		if found, err := xtables.RemoveProbeSets(ns.Runner()); found != want || err != nil {
			t.Errorf("found: %v, want %v; %v", found, want, err)
		}
	}
	ns.Do(t, func() error {
		sets, err := netlink.IpsetListAll()
		if len(sets) > 0 {
			t.Errorf("%d sets left", len(sets))
		}
		return err
	})
}

// SPDX-License-Identifier: Apache-2.0

package policyroute_test

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"ambientd/iptables/policyroute"
	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }

func TestX(t *testing.T) {
	ns := netnstest.New(t)
	s := rawnetlink.New()
	socks, err := s.Open(ns.Runner(), unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	c, err := policyroute.New(socks[0])
	if err != nil {
		t.Fatal(err)
	}
	st, err := c.Read()
	if err != nil {
		t.Fatal(err)
	}
	t.Log(st.Families(redirection.DualStack), st.Differences(redirection.DualStack))
	if _, err := c.Apply(st, redirection.DualStack); err != nil {
		t.Fatal(err)
	}
	st, err = c.Read()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", st)
	t.Log(st.Families(redirection.DualStack), st.Differences(redirection.DualStack))
	if err := c.Remove(st); err != nil {
		t.Fatal(err)
	}
	st, err = c.Read()
	if err != nil {
		t.Fatal(err)
	}
	t.Log(st.Families(redirection.DualStack), st.Differences(redirection.DualStack))
}

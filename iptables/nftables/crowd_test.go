// SPDX-License-Identifier: Apache-2.0

package nftables_test

import (
	"strings"
	"testing"

	google "github.com/google/nftables"
	"github.com/google/nftables/expr"

	"ambientd/iptables/redirection"
)

// crowd adds thousands of rules to our table, as many at a time as sockets take.
func (p *pod) crowd() {
	p.t.Helper()
	for range 40 {
		p.nft(func(conn *google.Conn) error {
			table, chain := ours("nat_output")
			for range 100 {
				conn.AddRule(&google.Rule{Table: table, Chain: chain, Exprs: []expr.Any{&expr.Counter{}}})
			}
			return nil
		})
	}
}

// TestRulesWithoutNumber has a pod fill our table with more than is read of it: that is a difference, and the repair takes
// all of it away in one transaction.
func TestRulesWithoutNumber(t *testing.T) {
	p := newPod(t, newBackend(t))
	opts := redirection.DefaultOptions()
	p.apply(opts)
	p.crowd()
	_, found, err := p.backend.Verify(t.Context(), p.run, opts)
	if err != nil || len(found) != 1 || !strings.HasPrefix(found[0].Got, "more than ") {
		t.Fatalf("%d differences, %v", len(found), err)
	}
	p.apply(opts)
	p.exact(opts)
}

// TestRemovalOfRulesWithoutNumber likewise removes them.
func TestRemovalOfRulesWithoutNumber(t *testing.T) {
	p := newPod(t, newBackend(t))
	p.apply(redirection.DefaultOptions())
	p.crowd()
	if err := p.backend.Remove(t.Context(), p.run); err != nil {
		t.Fatal(err)
	}
	if there, err := p.backend.HasTable(t.Context(), p.run); err != nil || there {
		t.Errorf("table still there: %t, %v", there, err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package nftables_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

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
	if there, err := p.backend.HasOwn(t.Context(), p.run); err != nil || there {
		t.Errorf("table still there: %t, %v", there, err)
	}
}

// iptablesChain is a chain that our iptables backend makes, with the jump to it.
const iptablesChain = `*nat
-N %[1]s
-A %[1]s -p tcp -j REDIRECT --to-ports 15001
-I OUTPUT 1 -j %[1]s
COMMIT
`

// withIPTablesChain makes it, after n rules of the pod's own in the same place.
func (p *pod) withIPTablesChain(n int) {
	p.t.Helper()
	var script strings.Builder
	script.WriteString("*nat\n")
	for i := range n {
		if i%400 == 399 {
			// Who is not the machine's root has no larger transactions: they have to fit the socket's buffer.
			script.WriteString("COMMIT\n*nat\n")
		}
		fmt.Fprintf(&script, "-A OUTPUT -d 11.%d.%d.%d/32 -p tcp -j ACCEPT\n", i>>16&0xff, i>>8&0xff, i&0xff)
	}
	script.WriteString("COMMIT\n")
	p.command(script.String()+fmt.Sprintf(iptablesChain, redirection.IPTablesOutput), "iptables-nft-restore", "--noflush")
}

// TestRemovalFromAmongForeignRules takes our jump out of twenty thousand rules of the pod's own, and reads no more of them
// than it takes to find it.
func TestRemovalFromAmongForeignRules(t *testing.T) {
	p := newPod(t, newBackend(t))
	p.withIPTablesChain(20000)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if found, err := p.backend.RemoveNFTChains(ctx, p.run); err != nil || !found {
		t.Errorf("found %t, %v", found, err)
	}
	if found, err := p.backend.RemoveEmptyTables(ctx, p.run); err != nil || found {
		t.Errorf("empty tables: %t, %v", found, err)
	}
	saved := p.command("", "iptables-nft-save", "-t", "nat")
	if strings.Contains(saved, redirection.IPTablesOutput) || strings.Count(saved, "-j ACCEPT") != 20000 {
		t.Errorf("left of ours, or less than all of theirs: %d bytes", len(saved))
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if _, err := p.backend.RemoveNFTChains(ended, p.run); !errors.Is(err, context.Canceled) {
		t.Errorf("after the deadline: %v", err)
	}
}

// TestRemovalOfWhatAPodLeadsTo has the pod lead to our chain in ways that are no rules of iptables: from a chain of its own,
// which ends with the rule, and from a map of verdicts. The kernel does not give up a chain that a map names. So it is left
// empty, and counts as gone.
func TestRemovalOfWhatAPodLeadsTo(t *testing.T) {
	p := newPod(t, newBackend(t))
	p.withIPTablesChain(0)
	p.command(fmt.Sprintf(`
table ip nat {
	map mine { type ipv4_addr : verdict; elements = { 192.0.2.1 : jump %[1]s }; }
	chain OWN { ip daddr vmap @mine; ip daddr 192.0.2.2 goto %[1]s; }
}
`, redirection.IPTablesOutput), "nft", "-f", "-")
	for _, want := range []bool{true, false} {
		if found, err := p.backend.RemoveNFTChains(t.Context(), p.run); err != nil || found != want {
			t.Errorf("found %t, want %t; %v", found, want, err)
		}
	}
	if has, err := p.backend.HasNFTChains(t.Context(), p.run); err != nil || has {
		t.Errorf("still there: %t, %v", has, err)
	}
	listed := p.command("", "nft", "list", "table", "ip", "nat")
	if strings.Contains(listed, "redirect") || strings.Contains(listed, "goto") || !strings.Contains(listed, "vmap @mine") {
		t.Errorf("left:\n%s", listed)
	}
}

// TestRemovalWithTheTable leaves nothing where nobody else has anything.
func TestRemovalWithTheTable(t *testing.T) {
	p := newPod(t, newBackend(t))
	p.withIPTablesChain(0)
	if _, err := p.backend.RemoveNFTChains(t.Context(), p.run); err != nil {
		t.Fatal(err)
	}
	p.empty()
}

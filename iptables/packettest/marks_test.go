// SPDX-License-Identifier: Apache-2.0

package packettest_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"testing"

	nft "github.com/google/nftables"
	"github.com/google/nftables/expr"

	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

// TestUpperMarkBits: marks of others, above our mask, neither hide the proxy's
// connections nor get lost. CNI plugins use such bits.
func TestUpperMarkBits(t *testing.T) {
	const theirs = 0x4000_0000
	eachBackend(t, func(t *testing.T, b backend) {
		n := newNetwork(t, nil)
		markConnections(t, n.pod, theirs)
		apply(t, b, n, with(), redirection.DualStack)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		for _, f := range redirection.DualStack.Each() {
			client, app := netip.AddrPortFrom(n.addr(peer, f), 0), netip.AddrPortFrom(n.addr(pod, f), tcpPort)
			l, err := sendTCP(ctx, n.pod, client, app, netnstest.Mark(theirs|redirection.ProxyMark), netnstest.Transparent())
			if err != nil {
				t.Fatal(err)
			}
			if l.At != "app" {
				t.Errorf("%s: it ended at %s, want the application", f, l.At)
			}
			checkConnMark(t, n, l.From, app, theirs|redirection.ConnMark)
		}
	})
}

// markConnections makes rules of somebody else's that mark every connection which
// begins in the netns.
func markConnections(t *testing.T, ns *netnstest.NS, mark uint32) {
	t.Helper()
	ns.Do(t, func() error {
		conn, err := nft.New()
		if err != nil {
			return err
		}
		table := conn.AddTable(&nft.Table{Family: nft.TableFamilyINet, Name: "theirs"})
		chain := conn.AddChain(&nft.Chain{Table: table, Name: "output", Type: nft.ChainTypeFilter,
			Hooknum: nft.ChainHookOutput, Priority: nft.ChainPriorityRef(-199)}) // right after conntrack
		conn.AddRule(&nft.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			&expr.Ct{Register: 1, Key: expr.CtKeyMARK},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: native(^mark), Xor: native(mark)},
			&expr.Ct{Register: 1, Key: expr.CtKeyMARK, SourceRegister: true},
		}})
		return conn.Flush()
	})
}

func native(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// TestReplacementUnderTraffic: while rules are replaced, over and over, with other
// options and the same, every new connection and query is captured, in both
// directions and families, and none waits.
func TestReplacementUnderTraffic(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		n := newNetwork(t, nil)
		apply(t, b, n, with(), redirection.DualStack)
		traffic, stop := context.WithCancel(t.Context())
		defer stop()
		result := make(chan error, 2)
		for _, f := range redirection.DualStack.Each() {
			go func() { result <- keepSending(traffic, n, f) }()
		}
		for _, opts := range []redirection.Options{with(), with(reroute), with(exclude53), with(keepEstablished), with()} {
			apply(t, b, n, opts, redirection.DualStack)
		}
		stop()
		if err := errors.Join(<-result, <-result); err != nil {
			t.Error(err)
		}
	})
}

// keepSending sends until ctx ends, and returns at what point a flow escaped.
func keepSending(ctx context.Context, n *network, f redirection.Families) error {
	fromPod, fromPeer := netip.AddrPortFrom(n.addr(pod, f), 0), netip.AddrPortFrom(n.addr(peer, f), 0)
	for sent := 0; ctx.Err() == nil || sent == 0; sent++ {
		attempt, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
		out, err := sendTCP(attempt, n.pod, fromPod, netip.AddrPortFrom(n.addr(peer, f), tcpPort))
		query, _, queryErr := sendUDP(attempt, n.pod, fromPod, netip.AddrPortFrom(n.addr(peer, f), redirection.DNSPort))
		in, inErr := sendTCP(attempt, n.peer, fromPeer, netip.AddrPortFrom(n.addr(pod, f), tcpPort))
		cancel()
		if err := errors.Join(err, queryErr, inErr); err != nil {
			return err
		}
		if out.At != "proxy outbound" || query.At != "proxy dns" || in.At != "proxy inbound" {
			return fmt.Errorf("%s: a connection ended at %s, one to the pod at %s, a query at %s", f, out.At, in.At, query.At)
		}
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
	"ambientd/iptables/xtables"
)

// MayHoldOthers reports whether the namespace holds any table besides ours, of nf_tables or of x_tables:
// only then can there be what [Backend.HasForeign] and [Backend.HasOther] report. It is one look, for the many pods in
// which nobody else has programmed anything.
func (b *Backend) MayHoldOthers(ctx context.Context, ns redirection.Netns) (some bool, err error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	err = ns.Do(func() (err error) {
		some, err = xtables.TablesHere()
		return err
	})
	if err == nil && !some {
		err = b.packetRules(ns, func(socket *rawnetlink.Socket) (err error) {
			some, err = holdsOtherTables(ctx, socket)
			return err
		})
	}
	if err != nil {
		return false, fmt.Errorf("looking for others' tables (nftables): %w", err)
	}
	return some, nil
}

// holdsOtherTables reports whether nf_tables has a table that is not ours.
func holdsOtherTables(ctx context.Context, socket *rawnetlink.Socket) (bool, error) {
	others := false
	request := dumpRequest(unix.NFT_MSG_GETTABLE, []byte{unix.NFPROTO_UNSPEC, unix.NFNETLINK_V0, 0, 0})
	err := socket.Scan(ctx, request, func(m rawnetlink.Message) (more bool, err error) {
		if m.Type == messageType(unix.NFT_MSG_NEWTABLE) && len(m.Payload) >= nfgenHeader {
			name := text(lookup(m.Payload[nfgenHeader:], unix.NFTA_TABLE_NAME))
			others = others || m.Payload[0] != unix.NFPROTO_INET || name != redirection.NFTablesTable
		}
		return !others, nil
	})
	return others, err
}

// SPDX-License-Identifier: Apache-2.0

package foreign

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
)

// nfgenHeader is the length of struct nfgenmsg (linux/netfilter/nfnetlink.h):
// family, version, resource ID.
const nfgenHeader = 4

// messageType returns the type of an nf_tables message.
func messageType(message uint16) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | message }

// fields are attributes by type; they alias the datagram.
type fields map[uint16][]byte

// fieldsOf reads attributes up to the first that is broken, which the kernel never
// sends.
func fieldsOf(b []byte) fields {
	f := fields{}
	for len(b) > 0 {
		a, rest, err := rawnetlink.NextAttribute(b)
		if err != nil {
			break
		}
		f[a.Type] = a.Data
		b = rest
	}
	return f
}

func (f fields) text(kind uint16) string { return strings.TrimRight(string(f[kind]), "\x00") }

// number reads 32 bits in network order, 0 where there are none.
func (f fields) number(kind uint16) uint32 {
	if len(f[kind]) < 4 {
		return 0
	}
	return binary.BigEndian.Uint32(f[kind])
}

func appendText(b []byte, kind uint16, text string) []byte {
	return rawnetlink.AppendAttribute(b, rawnetlink.Attribute{Type: kind, Data: append([]byte(text), 0)})
}

// dump asks for objects of a family and calls take with each.
func dump(socket *rawnetlink.Socket, message uint16, family byte, filter []byte, take func(family byte, f fields)) error {
	answer, err := socket.Dump(rawnetlink.AppendMessage(nil, rawnetlink.Message{
		Type: messageType(message), Flags: unix.NLM_F_REQUEST | unix.NLM_F_DUMP,
		Payload: append([]byte{family, 0, 0, 0}, filter...),
	}))
	if err != nil {
		return err
	}
	for len(answer) > 0 {
		var m rawnetlink.Message
		if m, answer, err = rawnetlink.Next(answer); err != nil {
			return err
		}
		if len(m.Payload) < nfgenHeader {
			return fmt.Errorf("nf_tables message of %d bytes", len(m.Payload))
		}
		take(m.Payload[0], fieldsOf(m.Payload[nfgenHeader:]))
	}
	return nil
}

// transaction is a list of deletions that happen all at once or not at all.
type transaction struct {
	steps []step
}

type step struct {
	message, flags uint16
	table          tableID
	chain          string // of the deletion of a chain
	attributes     []byte
	text           string // for errors
}

// extent says what the deletion of a table may take with it.
type extent uint16

const (
	whateverItHolds extent = 0
	ifEmpty         extent = unix.NLM_F_NONREC
)

func (t *transaction) deleteTable(id tableID, extent extent) {
	t.steps = append(t.steps, step{message: unix.NFT_MSG_DELTABLE, flags: uint16(extent), table: id,
		attributes: appendText(nil, unix.NFTA_TABLE_NAME, id.name), text: "deleting table " + id.name})
}

// deleteChain deletes a chain that holds no rule and that no rule leads to.
func (t *transaction) deleteChain(id tableID, name string) {
	t.steps = append(t.steps, step{message: unix.NFT_MSG_DELCHAIN, flags: unix.NLM_F_NONREC, table: id, chain: name,
		attributes: appendText(appendText(nil, unix.NFTA_CHAIN_TABLE, id.name), unix.NFTA_CHAIN_NAME, name),
		text:       fmt.Sprintf("deleting chain %s of table %s", name, id.name)})
}

func (t *transaction) flushChain(id tableID, name string) {
	t.steps = append(t.steps, step{message: unix.NFT_MSG_DELRULE, table: id,
		attributes: appendText(appendText(nil, unix.NFTA_RULE_TABLE, id.name), unix.NFTA_RULE_CHAIN, name),
		text:       fmt.Sprintf("emptying chain %s of table %s", name, id.name)})
}

func (t *transaction) deleteRule(id tableID, r rule) {
	attributes := appendText(appendText(nil, unix.NFTA_RULE_TABLE, id.name), unix.NFTA_RULE_CHAIN, r.chain)
	t.steps = append(t.steps, step{message: unix.NFT_MSG_DELRULE, table: id,
		attributes: rawnetlink.AppendAttribute(attributes, rawnetlink.Attribute{Type: unix.NFTA_RULE_HANDLE, Data: r.handle}),
		text:       fmt.Sprintf("deleting the jump from %s to %s in table %s", r.chain, r.target, id.name)})
}

// deletes reports whether the chain is deleted so far.
func (t *transaction) deletes(id tableID, chain string) bool {
	return slices.ContainsFunc(t.steps, func(s step) bool {
		return s.message == unix.NFT_MSG_DELCHAIN && s.table == id && s.chain == chain
	})
}

// commit sends the transaction, if there is anything in it.
func (t *transaction) commit(socket *rawnetlink.Socket) error {
	if len(t.steps) == 0 {
		return nil
	}
	subsystem := binary.BigEndian.AppendUint16([]byte{unix.AF_UNSPEC, 0}, unix.NFNL_SUBSYS_NFTABLES)
	batch := rawnetlink.AppendMessage(nil, rawnetlink.Message{
		Type: unix.NFNL_MSG_BATCH_BEGIN, Flags: unix.NLM_F_REQUEST, Payload: subsystem})
	last := uint32(len(t.steps))
	for i, s := range t.steps {
		m := rawnetlink.Message{Type: messageType(s.message), Flags: unix.NLM_F_REQUEST | s.flags, Sequence: uint32(i) + 1,
			Payload: append([]byte{s.table.family, 0, 0, 0}, s.attributes...)}
		if m.Sequence == last {
			m.Flags |= unix.NLM_F_ACK
		}
		batch = rawnetlink.AppendMessage(batch, m)
	}
	batch = rawnetlink.AppendMessage(batch, rawnetlink.Message{
		Type: unix.NFNL_MSG_BATCH_END, Flags: unix.NLM_F_REQUEST, Sequence: last + 1, Payload: subsystem})
	refused, err := socket.Execute(batch, last)
	if err != nil || len(refused) == 0 {
		return err
	}
	first := refused[0]
	if at := int(first.Sequence) - 1; at >= 0 && at < len(t.steps) {
		return fmt.Errorf("%s: %w", t.steps[at].text, first)
	}
	return errors.Join(errors.New("committing the transaction"), first)
}

// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"encoding/binary"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
)

// batch is an nfnetlink transaction, ready to be sent to any network namespace.
type batch struct {
	bytes []byte
	last  uint32   // sequence number of the message that asks for the acknowledgement
	steps []string // by sequence number: what a message does, for errors
}

// describe says which message of the batch the kernel's error with that sequence number belongs to.
func (b *batch) describe(sequence uint32) string {
	if int(sequence) < len(b.steps) {
		return b.steps[sequence]
	}
	return fmt.Sprintf("message %d", sequence)
}

// change is one message of a transaction.
type change struct {
	message uint16 // NFT_MSG_
	flags   uint16 // besides NLM_F_REQUEST and, for the last one, NLM_F_ACK
	payload []byte
	what    string // it does, for errors
}

// assemble makes a transaction of changes. Only the last one asks for an acknowledgement: all others would have to be
// read, and a message that fails is reported without asking.
func assemble(changes []change) *batch { return assembleWith(nil, changes) }

// assembleEchoed likewise, so that the kernel tells which generation the transaction made. When it decides whether to, it
// looks at the first message alone (nf_tables_gen_notify, net/netfilter/nf_tables_api.c). That must not be one that deletes
// a table: its echo is everything in it.
func assembleEchoed(changes []change) *batch {
	changes = slices.Clone(changes)
	changes[0].flags |= unix.NLM_F_ECHO
	return assembleWith(nil, changes)
}

// assembleAt makes a transaction that the kernel refuses with ERESTART, at once, unless it is the next one after that
// generation. So the generation that it makes is known.
func assembleAt(generation uint32, changes []change) *batch {
	return assembleWith([]rawnetlink.Attribute{number(batchGenerationID, generation)}, changes)
}

// at returns a transaction of assembleAt for another generation, for the socket to send before it is closed.
func (b *batch) at(generation uint32, socket *rawnetlink.Socket) *batch {
	const offset = unix.NLMSG_HDRLEN + nfgenHeader + unix.NLA_HDRLEN
	moved := *b
	moved.bytes = socket.Copy(b.bytes)
	binary.BigEndian.PutUint32(moved.bytes[offset:], generation)
	return &moved
}

// next returns the generation after one (nf_tables_commit, net/netfilter/nf_tables_api.c).
func next(generation uint32) uint32 { return max(generation+1, 1) }

// batchGenerationID is NFNL_BATCH_GENID of linux/netfilter/nfnetlink.h, which package unix does not have.
const batchGenerationID = 1

func assembleWith(conditions []rawnetlink.Attribute, changes []change) *batch {
	b := &batch{last: uint32(len(changes))}
	add := func(m rawnetlink.Message, step string) {
		m.Flags |= unix.NLM_F_REQUEST
		m.Sequence = uint32(len(b.steps))
		if m.Sequence == b.last {
			m.Flags |= unix.NLM_F_ACK
		}
		b.bytes = rawnetlink.AppendMessage(b.bytes, m)
		b.steps = append(b.steps, step)
	}
	// struct nfgenmsg, of which the kernel takes the subsystem from res_id.
	frame := []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES}
	begin := slices.Clone(frame)
	for _, a := range conditions {
		begin = rawnetlink.AppendAttribute(begin, a)
	}
	add(rawnetlink.Message{Type: unix.NFNL_MSG_BATCH_BEGIN, Payload: begin}, "beginning a transaction")
	for _, c := range changes {
		add(rawnetlink.Message{Type: messageType(c.message), Flags: c.flags, Payload: c.payload}, c.what)
	}
	add(rawnetlink.Message{Type: unix.NFNL_MSG_BATCH_END, Payload: frame}, "committing the transaction")
	return b
}

// messageType returns the type of an nf_tables message: the subsystem in the upper byte (linux/netfilter/nfnetlink.h).
func messageType(message uint16) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | message }

// encodeRemoval encodes the transaction that deletes a table. Without the table, it fails with ENOENT.
func encodeRemoval(table string) *batch { return assemble([]change{deleteTable(table)}) }

// replaceTable makes an empty table, whether there is one or not: adding it first makes the deletion succeed where there
// is none. All of it happens at once for packets.
func replaceTable(table string) []change {
	return []change{addTable(table, 0), deleteTable(table), addTable(table, unix.NLM_F_EXCL)}
}

func addTable(table string, flags uint16) change {
	return change{
		message: unix.NFT_MSG_NEWTABLE, flags: unix.NLM_F_CREATE | flags,
		payload: ofTable(table), what: "adding table inet " + table,
	}
}

func deleteTable(table string) change {
	return change{
		message: unix.NFT_MSG_DELTABLE, payload: ofTable(table), what: "deleting table inet " + table,
	}
}

// hook is where a chain is attached, and as what.
type hook struct {
	number   uint32 // NF_INET_
	kind     string
	priority int32
}

// addChain adds a chain whose policy is to accept.
func addChain(table, name string, h hook) change {
	at := rawnetlink.AppendAttribute(nil, number(unix.NFTA_HOOK_HOOKNUM, h.number))
	at = rawnetlink.AppendAttribute(at, number(unix.NFTA_HOOK_PRIORITY, uint32(h.priority)))
	payload := appendText(ofTable(table), unix.NFTA_CHAIN_NAME, name)
	payload = appendNested(payload, unix.NFTA_CHAIN_HOOK, at)
	payload = rawnetlink.AppendAttribute(payload, number(unix.NFTA_CHAIN_POLICY, verdictAccept))
	payload = appendText(payload, unix.NFTA_CHAIN_TYPE, h.kind)
	return change{message: unix.NFT_MSG_NEWCHAIN, flags: unix.NLM_F_CREATE, payload: payload, what: "adding chain " + name}
}

// addRule appends a rule to a chain. The comment is for whoever lists it, and says in errors which rule it is: the
// kernel's own name for it is a number that it gives later.
func addRule(table, chain, comment string, expressions []expression) change {
	payload := appendText(ofTable(table), unix.NFTA_RULE_CHAIN, chain)
	payload = appendNested(payload, unix.NFTA_RULE_EXPRESSIONS, expressionList(expressions))
	payload = rawnetlink.AppendAttribute(payload, rawnetlink.Attribute{Type: unix.NFTA_RULE_USERDATA, Data: userComment(comment)})
	return change{
		message: unix.NFT_MSG_NEWRULE, flags: unix.NLM_F_CREATE | unix.NLM_F_APPEND,
		payload: payload, what: fmt.Sprintf("adding %s to chain %s", comment, chain),
	}
}

// ofTable returns the beginning of a payload about a table of family inet, or something in it: the table's name is the
// first attribute of tables, chains, rules, sets and lists of elements.
func ofTable(name string) []byte {
	return appendText([]byte{unix.NFPROTO_INET, unix.NFNETLINK_V0, 0, 0}, unix.NFTA_TABLE_NAME, name)
}

// appendText appends a string attribute, with the terminating zero that the kernel expects.
func appendText(b []byte, kind uint16, value string) []byte {
	return rawnetlink.AppendAttribute(b, rawnetlink.Attribute{Type: kind, Data: append([]byte(value), 0)})
}

// appendNested appends an attribute that holds attributes.
func appendNested(b []byte, kind uint16, attributes []byte) []byte {
	return rawnetlink.AppendAttribute(b, rawnetlink.Attribute{Type: kind | unix.NLA_F_NESTED, Data: attributes})
}

// number returns a 32-bit attribute. nf_tables has them big-endian.
func number(kind uint16, value uint32) rawnetlink.Attribute {
	return rawnetlink.Attribute{Type: kind, Data: binary.BigEndian.AppendUint32(nil, value)}
}

// nativeEndian returns a number as marks and conntrack zones are compared and set: in the byte order of the machine.
func nativeEndian(value uint32) []byte { return binary.NativeEndian.AppendUint32(nil, value) }

// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
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

// encodeReplacement encodes the transaction after which our table holds exactly the chains given, whatever it held before.
// Adding the table first makes the deletion succeed where there is none; both happen at once for packets.
func encodeReplacement(chains []chainLines) (*batch, error) {
	return encode(func(conn *nftables.Conn) error {
		replaceTable(conn, ourTable())
		return addChains(conn, chains)
	})
}

// replaceTable makes an empty table of it, whether there is one or not.
func replaceTable(conn *nftables.Conn, table *nftables.Table) {
	conn.AddTable(table)
	conn.DelTable(table)
	conn.CreateTable(table)
}

// encodeCreation encodes the transaction that makes our table where there is none. With a table, it fails with EEXIST.
func encodeCreation(chains []chainLines) (*batch, error) {
	return encode(func(conn *nftables.Conn) error {
		conn.CreateTable(ourTable())
		return addChains(conn, chains)
	})
}

// encodeRemoval encodes the transaction that deletes a table. Without the table, it fails with ENOENT.
func encodeRemoval(table *nftables.Table) (*batch, error) {
	return encode(func(conn *nftables.Conn) error {
		conn.DelTable(table)
		return nil
	})
}

func ourTable() *nftables.Table {
	return &nftables.Table{Name: redirection.NFTablesTable, Family: nftables.TableFamilyINet}
}

// encode returns what build makes the library send as a transaction that can be sent as it is, and often. The messages
// given as more come last in it.
func encode(build func(*nftables.Conn) error, more ...netlink.Message) (*batch, error) {
	var messages []netlink.Message
	conn, err := nftables.New(nftables.WithTestDial(func(request []netlink.Message) ([]netlink.Message, error) {
		messages = append(messages, request...)
		return acknowledge(request), nil
	}))
	if err != nil {
		return nil, fmt.Errorf("encoding the rules: %w", err)
	}
	if err := build(conn); err != nil {
		return nil, err
	}
	if err := conn.Flush(); err != nil {
		return nil, fmt.Errorf("encoding the rules: %w", err)
	}
	// The library begins and ends the transaction.
	return assemble(slices.Concat(messages[1:len(messages)-1], more))
}

// acknowledge answers for the kernel: one ACK for each message that asks for it. The library calls again, without a
// message, for each answer that it then reads.
func acknowledge(request []netlink.Message) []netlink.Message {
	var acks []netlink.Message
	for _, m := range request {
		if m.Header.Flags&netlink.Acknowledge == 0 {
			continue
		}
		acks = append(acks, netlink.Message{
			Header: netlink.Header{Type: netlink.Error, Sequence: m.Header.Sequence, PID: m.Header.PID},
			Data:   make([]byte, 4),
		})
	}
	return acks
}

// assemble makes a transaction of messages. Only the last one asks for an ACK: 27 others would have to be read, and a
// message that fails is reported without asking. None asks for its echo.
func assemble(messages []netlink.Message) (*batch, error) {
	// struct nfgenmsg, of which the kernel takes the subsystem from res_id.
	subsystem := []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES}
	frame := func(kind netlink.HeaderType) netlink.Message {
		return netlink.Message{Header: netlink.Header{Type: kind, Flags: netlink.Request}, Data: subsystem}
	}
	b := &batch{last: uint32(len(messages))}
	messages = slices.Concat([]netlink.Message{frame(unix.NFNL_MSG_BATCH_BEGIN)}, messages, []netlink.Message{frame(unix.NFNL_MSG_BATCH_END)})
	for i, m := range messages {
		m.Header.Sequence = uint32(i)
		m.Header.PID = 0
		m.Header.Flags &^= netlink.Echo | netlink.Acknowledge
		if uint32(i) == b.last {
			m.Header.Flags |= netlink.Acknowledge
		}
		m.Header.Length = uint32(nlmsgHeader + len(m.Data))
		encoded, err := m.MarshalBinary()
		if err != nil {
			return nil, fmt.Errorf("encoding the rules: %w", err)
		}
		b.bytes = append(b.bytes, encoded...)
		b.steps = append(b.steps, describeStep(m))
	}
	return b, nil
}

// nlmsgHeader is the length of struct nlmsghdr.
const nlmsgHeader = unix.NLMSG_HDRLEN

// describeStep names what a message of a batch does: "adding rule 2 of chain nat_output" would need a count that nobody
// has at hand when it fails, so rules are named by the comment that they carry.
func describeStep(m netlink.Message) string {
	if len(m.Data) < nfgenHeader {
		return "an incomplete message"
	}
	field := func(kind uint16) string { return text(lookup(m.Data[nfgenHeader:], kind)) }
	switch uint16(m.Header.Type) {
	case unix.NFNL_MSG_BATCH_BEGIN:
		return "beginning a transaction"
	case unix.NFNL_MSG_BATCH_END:
		return "committing the transaction"
	case messageType(unix.NFT_MSG_NEWTABLE):
		return "adding table inet " + field(unix.NFTA_TABLE_NAME)
	case messageType(unix.NFT_MSG_DELTABLE):
		return "deleting table inet " + field(unix.NFTA_TABLE_NAME)
	case messageType(unix.NFT_MSG_NEWSET):
		return "adding set " + field(unix.NFTA_SET_NAME)
	case messageType(unix.NFT_MSG_NEWSETELEM):
		return "adding elements to set " + field(unix.NFTA_SET_ELEM_LIST_SET)
	case messageType(unix.NFT_MSG_DELSETELEM):
		return "emptying set " + field(unix.NFTA_SET_ELEM_LIST_SET)
	case messageType(unix.NFT_MSG_NEWCHAIN):
		return "adding chain " + field(unix.NFTA_CHAIN_NAME)
	case messageType(unix.NFT_MSG_NEWRULE):
		return fmt.Sprintf("adding %s to chain %s",
			comment(lookup(m.Data[nfgenHeader:], unix.NFTA_RULE_USERDATA)), field(unix.NFTA_RULE_CHAIN))
	default:
		return fmt.Sprintf("message of type %#x", uint16(m.Header.Type))
	}
}

// messageType returns the type of an nf_tables message: the subsystem in the upper byte (linux/netfilter/nfnetlink.h).
func messageType(message uint16) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | message }

// nativeEndian returns a number as marks and conntrack zones are compared and set: in the byte order of the machine.
func nativeEndian(value uint32) []byte { return binary.NativeEndian.AppendUint32(nil, value) }

// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
)

// register is the one that expressions load to and read from unless they say otherwise: rules compare one value at a time.
const register = unix.NFT_REG_1

// otherRegister is for what must not change the first one.
const otherRegister = unix.NFT_REG_2

// expression is one step of a rule, as an element of the rule's list (enum nft_expr_attributes of
// linux/netfilter/nf_tables.h): a packet that does not compare as it should goes on to the next rule.
type expression []byte

func newExpression(name string, attributes ...rawnetlink.Attribute) expression {
	var data []byte
	for _, a := range attributes {
		data = rawnetlink.AppendAttribute(data, a)
	}
	return appendNested(appendText(nil, unix.NFTA_EXPR_NAME, name), unix.NFTA_EXPR_DATA, data)
}

func expressionList(expressions []expression) []byte {
	var list []byte
	for _, e := range expressions {
		list = appendNested(list, unix.NFTA_LIST_ELEM, e)
	}
	return list
}

// value returns an attribute that holds bytes to compare or to set.
func value(kind uint16, bytes []byte) rawnetlink.Attribute {
	data := rawnetlink.AppendAttribute(nil, rawnetlink.Attribute{Type: unix.NFTA_DATA_VALUE, Data: bytes})
	return rawnetlink.Attribute{Type: kind | unix.NLA_F_NESTED, Data: data}
}

// loadMeta loads a property of the packet (enum nft_meta_keys).
func loadMeta(key uint32) expression {
	return newExpression("meta", number(unix.NFTA_META_KEY, key), number(unix.NFTA_META_DREG, register))
}

// setMeta sets one.
func setMeta(key uint32) expression {
	return newExpression("meta", number(unix.NFTA_META_KEY, key), number(unix.NFTA_META_SREG, register))
}

// loadConnMark loads the mark of the packet's connection.
func loadConnMark() expression {
	return newExpression("ct", number(unix.NFTA_CT_KEY, unix.NFT_CT_MARK), number(unix.NFTA_CT_DREG, register))
}

// loadOriginal loads a property of the connection's original direction (enum nft_ct_keys).
func loadOriginal(key uint32) expression {
	return newExpression("ct", number(unix.NFTA_CT_KEY, key), number(unix.NFTA_CT_DREG, register),
		rawnetlink.Attribute{Type: unix.NFTA_CT_DIRECTION, Data: []byte{0}}) // IP_CT_DIR_ORIGINAL
}

// setConntrack sets a property of the packet's connection.
func setConntrack(key uint32) expression {
	return newExpression("ct", number(unix.NFTA_CT_KEY, key), number(unix.NFTA_CT_SREG, register))
}

// loadPayload loads bytes of the packet, counted from a header (enum nft_payload_bases).
func loadPayload(header, offset, length uint32) expression {
	return loadPayloadTo(register, header, offset, length)
}

func loadPayloadTo(register, header, offset, length uint32) expression {
	return newExpression("payload", number(unix.NFTA_PAYLOAD_DREG, register), number(unix.NFTA_PAYLOAD_BASE, header),
		number(unix.NFTA_PAYLOAD_OFFSET, offset), number(unix.NFTA_PAYLOAD_LEN, length))
}

// compare compares what was loaded, or as much of it as want is long.
func compare(op uint32, want []byte) expression { return compareIn(register, op, want) }

func compareIn(register, op uint32, want []byte) expression {
	return newExpression("cmp", number(unix.NFTA_CMP_SREG, register), number(unix.NFTA_CMP_OP, op), value(unix.NFTA_CMP_DATA, want))
}

// compareRange compares with a range, both ends included.
func compareRange(op uint32, first, last []byte) expression {
	return newExpression("range", number(unix.NFTA_RANGE_SREG, register), number(unix.NFTA_RANGE_OP, op),
		value(unix.NFTA_RANGE_FROM_DATA, first), value(unix.NFTA_RANGE_TO_DATA, last))
}

// mask keeps the bits of what was loaded that are in the mask, and then sets or flips those of xor.
func mask(mask, xor []byte) expression { return maskTo(register, mask, xor) }

func maskTo(destination uint32, mask, xor []byte) expression {
	return newExpression("bitwise", number(unix.NFTA_BITWISE_SREG, register), number(unix.NFTA_BITWISE_DREG, destination),
		number(unix.NFTA_BITWISE_LEN, uint32(len(mask))), value(unix.NFTA_BITWISE_MASK, mask), value(unix.NFTA_BITWISE_XOR, xor))
}

// load puts bytes in the register.
func load(bytes []byte) expression {
	return newExpression("immediate", number(unix.NFTA_IMMEDIATE_DREG, register), value(unix.NFTA_IMMEDIATE_DATA, bytes))
}

// decide ends the chain with a verdict.
func decide(verdict uint32) expression {
	code := rawnetlink.AppendAttribute(nil, number(unix.NFTA_VERDICT_CODE, verdict))
	return newExpression("immediate", number(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT), rawnetlink.Attribute{
		Type: unix.NFTA_IMMEDIATE_DATA | unix.NLA_F_NESTED, Data: appendNested(nil, unix.NFTA_DATA_VERDICT, code),
	})
}

// redirect sends the packet to the local port in the register.
func redirect() expression {
	return newExpression("redir", number(unix.NFTA_REDIR_REG_PROTO_MIN, register),
		number(unix.NFTA_REDIR_FLAGS, unix.NF_NAT_RANGE_PROTO_SPECIFIED))
}

// translateSource gives the packet the source address in the register.
func translateSource(family byte) expression {
	return newExpression("nat", number(unix.NFTA_NAT_TYPE, unix.NFT_NAT_SNAT), number(unix.NFTA_NAT_FAMILY, uint32(family)),
		number(unix.NFTA_NAT_REG_ADDR_MIN, register))
}

// lookupIn goes on if what was loaded is in the set.
func lookupIn(set string) expression {
	return newExpression("lookup", number(unix.NFTA_LOOKUP_SREG, register),
		rawnetlink.Attribute{Type: unix.NFTA_LOOKUP_SET, Data: append([]byte(set), 0)})
}

// userComment returns a comment as nft stores it in a rule's user data (libnftnl's udata: type, length, value with a
// terminating zero).
func userComment(comment string) []byte {
	value := append([]byte(comment), 0)
	return append([]byte{typeComment, byte(len(value))}, value...)
}

// typeComment is NFTNL_UDATA_RULE_COMMENT of libnftnl/udata.h.
const typeComment = 0

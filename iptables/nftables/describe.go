// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
)

// fields holds the attributes of an object by type.
type fields map[uint16][]byte

func fieldsOf(b []byte) (fields, error) {
	f := fields{}
	for len(b) > 0 {
		a, rest, err := rawnetlink.NextAttribute(b)
		if err != nil {
			return nil, err
		}
		f[a.Type], b = a.Data, rest
	}
	return f, nil
}

// take returns an attribute and takes it out, so that what is left was not understood.
func (f fields) take(kind uint16) []byte {
	data := f[kind]
	delete(f, kind)
	return data
}

// number takes a 32-bit attribute; it is 0, as it means, where it is absent. nf_tables sends them big-endian.
func (f fields) number(kind uint16) uint32 { return bigEndian(f.take(kind)) }

func bigEndian(data []byte) uint32 {
	if len(data) != 4 {
		return 0
	}
	return binary.BigEndian.Uint32(data)
}

// value takes a nested data attribute (enum nft_data_attributes) and returns the bytes or the verdict in it.
func (f fields) value(kind uint16) string {
	data := f.take(kind)
	if verdict := lookup(data, unix.NFTA_DATA_VERDICT); verdict != nil {
		return "verdict " + verdictName(lookup(verdict, unix.NFTA_VERDICT_CODE)) + text(lookup(verdict, unix.NFTA_VERDICT_CHAIN))
	}
	return fmt.Sprintf("0x%x", lookup(data, unix.NFTA_DATA_VALUE))
}

// rest describes what was not taken. Zeros mean the same as absence in every expression that we use, and newer kernels
// add attributes.
func (f fields) rest() string {
	var words []string
	for kind, data := range f {
		if slices.ContainsFunc(data, func(b byte) bool { return b != 0 }) {
			words = append(words, fmt.Sprintf(" attribute%d=0x%x", kind, data))
		}
	}
	slices.Sort(words)
	return strings.Join(words, "")
}

// describeExpressions returns a rule's expressions as text, in the notation of "nft --debug=netlink". Equal texts mean
// equal behaviour: the form that was sent and the form that the kernel reports differ in bytes, but not in text.
func describeExpressions(list []byte) (string, error) {
	var b strings.Builder
	for len(list) > 0 {
		element, after, err := rawnetlink.NextAttribute(list)
		if err != nil {
			return "", err
		}
		list = after
		expression, err := fieldsOf(element.Data)
		if err != nil {
			return "", err
		}
		data, err := fieldsOf(expression[unix.NFTA_EXPR_DATA])
		if err != nil {
			return "", err
		}
		if b.Len() > 0 {
			b.WriteByte(' ')
		}
		b.WriteString("[ " + describeExpression(text(expression[unix.NFTA_EXPR_NAME]), data) + data.rest() + " ]")
	}
	return b.String(), nil
}

// describeExpression describes one expression and takes the attributes that it understands.
func describeExpression(name string, f fields) string {
	switch name {
	case "meta":
		key := f.number(unix.NFTA_META_KEY)
		return describeLoad("meta", metaKey(key), f, unix.NFTA_META_DREG, unix.NFTA_META_SREG)
	case "ct":
		key := f.number(unix.NFTA_CT_KEY)
		return describeLoad("ct", conntrackKey(key), f, unix.NFTA_CT_DREG, unix.NFTA_CT_SREG)
	case "payload":
		return fmt.Sprintf("payload load %db @ %s + %d => reg %d", f.number(unix.NFTA_PAYLOAD_LEN),
			payloadBase(f.number(unix.NFTA_PAYLOAD_BASE)), f.number(unix.NFTA_PAYLOAD_OFFSET), f.number(unix.NFTA_PAYLOAD_DREG))
	case "cmp":
		return fmt.Sprintf("cmp %s reg %d %s", comparison(f.number(unix.NFTA_CMP_OP)), f.number(unix.NFTA_CMP_SREG),
			f.value(unix.NFTA_CMP_DATA))
	case "range":
		return fmt.Sprintf("range %s reg %d %s %s", comparison(f.number(unix.NFTA_RANGE_OP)), f.number(unix.NFTA_RANGE_SREG),
			f.value(unix.NFTA_RANGE_FROM_DATA), f.value(unix.NFTA_RANGE_TO_DATA))
	case "bitwise":
		return fmt.Sprintf("bitwise reg %d = ( reg %d & %s ) ^ %s length %d", f.number(unix.NFTA_BITWISE_DREG),
			f.number(unix.NFTA_BITWISE_SREG), f.value(unix.NFTA_BITWISE_MASK), f.value(unix.NFTA_BITWISE_XOR),
			f.number(unix.NFTA_BITWISE_LEN))
	case "immediate":
		return fmt.Sprintf("immediate reg %d %s", f.number(unix.NFTA_IMMEDIATE_DREG), f.value(unix.NFTA_IMMEDIATE_DATA))
	case "lookup":
		f.take(unix.NFTA_LOOKUP_SET_ID) // names the set within a transaction
		return fmt.Sprintf("lookup reg %d set %s", f.number(unix.NFTA_LOOKUP_SREG), text(f.take(unix.NFTA_LOOKUP_SET)))
	case "nat":
		return describeNAT(f)
	case "redir":
		low, high := f.number(unix.NFTA_REDIR_REG_PROTO_MIN), f.number(unix.NFTA_REDIR_REG_PROTO_MAX)
		if high == 0 { // the kernel fills it in
			high = low
		}
		return fmt.Sprintf("redir reg %d to reg %d flags %#x", low, high, f.number(unix.NFTA_REDIR_FLAGS))
	default:
		return name
	}
}

func describeNAT(f fields) string {
	kind := "dnat"
	if f.number(unix.NFTA_NAT_TYPE) == unix.NFT_NAT_SNAT {
		kind = "snat"
	}
	family := f.number(unix.NFTA_NAT_FAMILY)
	low, high := f.number(unix.NFTA_NAT_REG_ADDR_MIN), f.number(unix.NFTA_NAT_REG_ADDR_MAX)
	flags := f.number(unix.NFTA_NAT_FLAGS)
	if low != 0 { // both are what the kernel fills in
		high = max(low, high)
		flags |= unix.NF_NAT_RANGE_MAP_IPS
	}
	return fmt.Sprintf("nat %s family %d addr_min reg %d addr_max reg %d flags %#x", kind, family, low, high, flags)
}

func describeLoad(name, key string, f fields, destination, source uint16) string {
	if _, sets := f[source]; sets {
		return fmt.Sprintf("%s set %s with reg %d", name, key, f.number(source))
	}
	loaded := fmt.Sprintf("%s load %s => reg %d", name, key, f.number(destination))
	if name != "ct" {
		return loaded
	}
	if direction := f.take(unix.NFTA_CT_DIRECTION); len(direction) == 1 {
		loaded += fmt.Sprintf(" direction %d", direction[0])
	}
	return loaded
}

func metaKey(key uint32) string {
	switch key {
	case unix.NFT_META_MARK:
		return "mark"
	case unix.NFT_META_IIFNAME:
		return "iifname"
	case unix.NFT_META_OIFNAME:
		return "oifname"
	case unix.NFT_META_NFPROTO:
		return "nfproto"
	case unix.NFT_META_L4PROTO:
		return "l4proto"
	case unix.NFT_META_SKUID:
		return "skuid"
	default:
		return fmt.Sprintf("key %d", key)
	}
}

func conntrackKey(key uint32) string {
	switch key {
	case unix.NFT_CT_MARK:
		return "mark"
	case unix.NFT_CT_ZONE:
		return "zone"
	case unix.NFT_CT_SRC_IP:
		return "src_ip"
	case unix.NFT_CT_DST_IP:
		return "dst_ip"
	case unix.NFT_CT_SRC_IP6:
		return "src_ip6"
	case unix.NFT_CT_DST_IP6:
		return "dst_ip6"
	default:
		return fmt.Sprintf("key %d", key)
	}
}

func payloadBase(base uint32) string {
	switch base {
	case unix.NFT_PAYLOAD_NETWORK_HEADER:
		return "network header"
	case unix.NFT_PAYLOAD_TRANSPORT_HEADER:
		return "transport header"
	default:
		return fmt.Sprintf("base %d", base)
	}
}

func comparison(op uint32) string {
	switch op {
	case unix.NFT_CMP_EQ:
		return "eq"
	case unix.NFT_CMP_NEQ:
		return "neq"
	default:
		return fmt.Sprintf("op %d", op)
	}
}

// NF_DROP and NF_ACCEPT of linux/netfilter.h.
const (
	verdictDrop   = 0
	verdictAccept = 1
)

// verdictName names what a verdict code stands for (linux/netfilter.h, negative ones linux/netfilter/nf_tables.h).
func verdictName(code []byte) string {
	switch verdict := int32(bigEndian(code)); verdict {
	case verdictDrop:
		return "drop"
	case verdictAccept:
		return "accept"
	case unix.NFT_RETURN:
		return "return"
	case unix.NFT_JUMP:
		return "jump "
	case unix.NFT_GOTO:
		return "goto "
	default:
		return fmt.Sprintf("code %d", verdict)
	}
}

// lookup returns the data of the first attribute of that type, nil if there is none.
func lookup(b []byte, kind uint16) []byte {
	for len(b) > 0 {
		a, rest, err := rawnetlink.NextAttribute(b)
		if err != nil {
			return nil
		}
		if a.Type == kind {
			return a.Data
		}
		b = rest
	}
	return nil
}

// text returns a string attribute without its terminating zero.
func text(data []byte) string { return strings.TrimSuffix(string(data), "\x00") }

// comment returns the comment in a rule's user data, or "a rule".
func comment(data []byte) string {
	for len(data) >= 2 && len(data) >= 2+int(data[1]) {
		value := data[2 : 2+int(data[1])]
		if data[0] == typeComment {
			return text(value)
		}
		data = data[2+int(data[1]):]
	}
	return "a rule"
}

// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"

	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
)

// Priorities where chains of their kind are by custom (enum nf_ip_hook_priorities of linux/netfilter_ipv4.h).
const (
	rawPriority    = -300 // before conntrack, as setting a zone must be
	manglePriority = -150
)

// natPriority is one before where nat prerouting and output are by custom, so that our chains decide before those of
// others, legacy iptables included: at equal priority the chain that was registered later would win. The kernel refuses
// NAT at -200 and before.
const natPriority = -101

// chainName returns the name of a chain of the model in our table, such as "nat_output".
func chainName(c redirection.Chain) string { return string(c.Table) + "_" + string(c.Hook) }

// hookOf returns where a chain of the model is attached.
func hookOf(c redirection.Chain) (hook, error) {
	h := hook{kind: "filter"}
	switch c.Hook {
	case redirection.Prerouting:
		h.number = unix.NF_INET_PRE_ROUTING
	case redirection.Output:
		h.number = unix.NF_INET_LOCAL_OUT
	default:
		return hook{}, fmt.Errorf("rendering chain %s: unknown hook", c)
	}
	switch c.Table {
	case redirection.Raw:
		h.priority = rawPriority
	case redirection.Mangle:
		h.priority = manglePriority
		if c.Hook == redirection.Output {
			// Only a chain of type route makes the kernel look up the route again after the mark has changed.
			h.kind = "route"
		}
	case redirection.NAT:
		h.priority = natPriority
		h.kind = "nat"
	default:
		return hook{}, fmt.Errorf("rendering chain %s: unknown table", c)
	}
	return h, nil
}

// chainChanges are what adds a chain.
type chainChanges struct {
	chain change
	rules []change
}

// encodeChains returns the changes that add the chains with their lines to a table.
func encodeChains(table string, chains []chainLines) ([]chainChanges, error) {
	var encoded []chainChanges
	for _, c := range chains {
		h, err := hookOf(c.chain)
		if err != nil {
			return nil, err
		}
		changes := chainChanges{chain: addChain(table, chainName(c.chain), h)}
		for _, l := range c.lines {
			list, err := renderRule(l.Rule)
			if err != nil {
				return nil, fmt.Errorf("rendering %s: %w", l.comment, err)
			}
			changes.rules = append(changes.rules, addRule(table, chainName(c.chain), l.comment, list))
		}
		encoded = append(encoded, changes)
	}
	return encoded, nil
}

// joinChains returns all changes, each chain followed by its rules.
func joinChains(chains []chainChanges) []change {
	var all []change
	for _, c := range chains {
		all = append(append(all, c.chain), c.rules...)
	}
	return all
}

// renderRule returns the expressions of a rule.
func renderRule(rule redirection.Rule) ([]expression, error) {
	if m := rule.Match.ConnMark; rule.Verdict.Action == redirection.RestoreMark && m.Mark.Mask != 0 {
		// What was loaded to be compared can be set as it is if the comparison leaves it alone.
		rule.Match.ConnMark = redirection.MarkMatch{}
		return append(renderMatch(rule),
			loadConnMark(),
			maskTo(otherRegister, nativeEndian(m.Mark.Mask), make([]byte, 4)),
			compareIn(otherRegister, negation(m.Not).op(), nativeEndian(m.Mark.Value)),
			setMeta(unix.NFT_META_MARK),
		), nil
	}
	verdict, err := renderVerdict(rule.Verdict)
	return append(renderMatch(rule), verdict...), err
}

// renderMatch returns the expressions that a packet must pass, the cheap and telling ones first.
func renderMatch(rule redirection.Rule) []expression {
	var e expressions
	m := rule.Match
	// NAT chains see the packet that opens a connection, before anything was translated: its addresses are those of the
	// connection's original direction. Loading them tells the families apart by itself, which a header's bytes do not.
	tracked := rule.Chain.Table == redirection.NAT
	addressed := m.Source.Prefix.IsValid() || m.Destination.Prefix.IsValid()
	if rule.Families != redirection.DualStack && (!tracked || !addressed) {
		// A table of family inet sees both.
		e.compare(loadMeta(unix.NFT_META_NFPROTO), unix.NFT_CMP_EQ, []byte{protocolFamily(rule.Families)})
	}
	e.interfaceName(unix.NFT_META_IIFNAME, m.In)
	e.interfaceName(unix.NFT_META_OIFNAME, m.Out)
	if tracked {
		e.address(m.Source, original(unix.NFT_CT_SRC_IP), original(unix.NFT_CT_SRC_IP6))
		e.address(m.Destination, original(unix.NFT_CT_DST_IP), original(unix.NFT_CT_DST_IP6))
	} else {
		e.address(m.Source, inHeader(12), inHeader(8))
		e.address(m.Destination, inHeader(16), inHeader(24))
	}
	if m.Protocol != redirection.AnyProtocol {
		e.compare(loadMeta(unix.NFT_META_L4PROTO), unix.NFT_CMP_EQ, []byte{byte(m.Protocol)})
	}
	e.port(m.SourcePort, 0)
	e.port(m.DestinationPort, 2)
	if m.WithoutSYN {
		// The flags are byte 13 of the TCP header; SYN is bit 1 (RFC 9293, section 3.1).
		e.masked(loadPayload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 13, 1), []byte{2}, unix.NFT_CMP_EQ, []byte{0})
	}
	if m.ICMPType.First != 0 {
		e.between(loadPayload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 0, 1),
			unix.NFT_CMP_EQ, []byte{m.ICMPType.First}, []byte{m.ICMPType.Last})
	}
	e.mark(loadMeta(unix.NFT_META_MARK), m.PacketMark)
	e.mark(loadConnMark(), m.ConnMark)
	return e
}

// expressions is a rule under construction.
type expressions []expression

// compare loads a value and lets the packet pass if it compares as it should.
func (e *expressions) compare(load expression, op uint32, want []byte) {
	*e = append(*e, load, compare(op, want))
}

// masked likewise compares a part of the value.
func (e *expressions) masked(load expression, bits []byte, op uint32, want []byte) {
	*e = append(*e, load, mask(bits, make([]byte, len(bits))), compare(op, want))
}

// between likewise compares with a range, both ends included.
func (e *expressions) between(load expression, op uint32, first, last []byte) {
	if bytes.Equal(first, last) {
		e.compare(load, op, first)
		return
	}
	*e = append(*e, load, compareRange(op, first, last))
}

// negation is the Not of a condition.
type negation bool

// op returns the comparison that the condition asks for. Those of ranges have the same numbers.
func (n negation) op() uint32 {
	if n {
		return unix.NFT_CMP_NEQ
	}
	return unix.NFT_CMP_EQ
}

func (e *expressions) interfaceName(key uint32, m redirection.InterfaceMatch) {
	if m.Name == "" {
		return
	}
	name := make([]byte, unix.IFNAMSIZ) // all of it: a shorter comparison would match a prefix
	copy(name, m.Name)
	e.compare(loadMeta(key), negation(m.Not).op(), name)
}

// loader loads so many bytes of an address, or more.
type loader func(length uint32) expression

func original(key uint32) loader { return func(uint32) expression { return loadOriginal(key) } }

func inHeader(offset uint32) loader {
	return func(length uint32) expression { return loadPayload(unix.NFT_PAYLOAD_NETWORK_HEADER, offset, length) }
}

// address compares an address, which is loaded in the way of its family.
func (e *expressions) address(m redirection.AddressMatch, loadIPv4, loadIPv6 loader) {
	if !m.Prefix.IsValid() {
		return
	}
	want := m.Prefix.Masked().Addr().AsSlice()
	bits, load := m.Prefix.Bits(), loadIPv4
	if m.Prefix.Addr().Is6() {
		load = loadIPv6
	}
	if bits%8 != 0 {
		e.masked(load(uint32(len(want))), net.CIDRMask(bits, 8*len(want)), negation(m.Not).op(), want)
		return
	}
	e.compare(load(uint32(bits/8)), negation(m.Not).op(), want[:bits/8]) // the network part alone needs no mask
}

// port compares a port of TCP or UDP; both have the source's at offset 0 and the destination's at 2.
func (e *expressions) port(m redirection.PortMatch, offset uint32) {
	if m.Ports == (redirection.PortRange{}) {
		return
	}
	e.between(loadPayload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, offset, 2), negation(m.Not).op(),
		binary.BigEndian.AppendUint16(nil, m.Ports.First), binary.BigEndian.AppendUint16(nil, m.Ports.Last))
}

func (e *expressions) mark(load expression, m redirection.MarkMatch) {
	if m.Mark.Mask == 0 {
		return
	}
	e.masked(load, nativeEndian(m.Mark.Mask), negation(m.Not).op(), nativeEndian(m.Mark.Value))
}

func renderVerdict(v redirection.Verdict) ([]expression, error) {
	switch v.Action {
	case redirection.Accept:
		return []expression{decide(verdictAccept)}, nil
	case redirection.Drop:
		return []expression{decide(verdictDrop)}, nil
	case redirection.Redirect:
		return []expression{load(binary.BigEndian.AppendUint16(nil, v.Port)), redirect()}, nil
	case redirection.SetConnMark:
		return []expression{
			loadConnMark(),
			mask(nativeEndian(^v.Mark.Mask), nativeEndian(v.Mark.Value)),
			setConntrack(unix.NFT_CT_MARK),
		}, nil
	case redirection.RestoreMark:
		return []expression{loadConnMark(), setMeta(unix.NFT_META_MARK)}, nil
	case redirection.SetZone:
		return []expression{load(binary.NativeEndian.AppendUint16(nil, v.Zone)), setConntrack(unix.NFT_CT_ZONE)}, nil
	default:
		return nil, fmt.Errorf("unknown verdict %s", v)
	}
}

// protocolFamily returns the NFPROTO_ number of a single family.
func protocolFamily(family redirection.Families) byte {
	if family == redirection.IPv4 {
		return unix.NFPROTO_IPV4
	}
	return unix.NFPROTO_IPV6
}

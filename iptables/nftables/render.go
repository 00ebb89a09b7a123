// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
)

// register is the one that every expression loads to and reads from: rules compare one value at a time.
const register = unix.NFT_REG_1

// natPriority is one before where nat prerouting and output are by custom, so that our chains decide before those of
// others, legacy iptables included: at equal priority the chain that was registered later would win. The kernel refuses
// NAT at -200 and before.
const natPriority = -101

// chainName returns the name of a chain of the model in our table, such as "nat_output".
func chainName(c redirection.Chain) string { return string(c.Table) + "_" + string(c.Hook) }

// baseChain returns the chain with type and priority.
func baseChain(c redirection.Chain) (*nftables.Chain, error) {
	accept := nftables.ChainPolicyAccept
	chain := &nftables.Chain{Name: chainName(c), Table: ourTable(), Type: nftables.ChainTypeFilter, Policy: &accept}
	switch c.Hook {
	case redirection.Prerouting:
		chain.Hooknum = nftables.ChainHookPrerouting
	case redirection.Output:
		chain.Hooknum = nftables.ChainHookOutput
	default:
		return nil, fmt.Errorf("rendering chain %s: unknown hook", c)
	}
	switch c.Table {
	case redirection.Raw: // before conntrack, as setting a zone must be
		chain.Priority = nftables.ChainPriorityRaw
	case redirection.Mangle:
		chain.Priority = nftables.ChainPriorityMangle
		if c.Hook == redirection.Output {
			// Only a chain of type route makes the kernel look up the route again after the mark has changed.
			chain.Type = nftables.ChainTypeRoute
		}
	case redirection.NAT:
		chain.Priority = nftables.ChainPriorityRef(natPriority)
		chain.Type = nftables.ChainTypeNAT
	default:
		return nil, fmt.Errorf("rendering chain %s: unknown table", c)
	}
	return chain, nil
}

// addChains adds the chains with their lines.
func addChains(conn *nftables.Conn, chains []chainLines) error {
	for _, c := range chains {
		chain, err := baseChain(c.chain)
		if err != nil {
			return err
		}
		conn.AddChain(chain)
		for _, l := range c.lines {
			verdict, err := renderVerdict(l.Verdict)
			if err != nil {
				return fmt.Errorf("rendering %s: %w", l.comment, err)
			}
			conn.AddRule(&nftables.Rule{
				Table:    ourTable(),
				Chain:    chain,
				Exprs:    append(renderMatch(l.Rule), verdict...),
				UserData: userdata.AppendString(nil, userdata.TypeComment, l.comment),
			})
		}
	}
	return nil
}

// renderMatch returns the expressions that a packet must pass, the cheap and telling ones first.
func renderMatch(rule redirection.Rule) []expr.Any {
	var e expressions
	m := rule.Match
	if rule.Families != redirection.DualStack {
		// A table of family inet sees both.
		e.compare(&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: register}, expr.CmpOpEq, []byte{protocolFamily(rule.Families)})
	}
	e.interfaceName(expr.MetaKeyIIFNAME, m.In)
	e.interfaceName(expr.MetaKeyOIFNAME, m.Out)
	e.address(m.Source, 12, 8)
	e.address(m.Destination, 16, 24)
	if m.Protocol != redirection.AnyProtocol {
		e.compare(&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: register}, expr.CmpOpEq, []byte{byte(m.Protocol)})
	}
	e.port(m.SourcePort, 0)
	e.port(m.DestinationPort, 2)
	if m.WithoutSYN {
		// The flags are byte 13 of the TCP header; SYN is bit 1 (RFC 9293, section 3.1).
		e.masked(&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1, DestRegister: register},
			[]byte{2}, expr.CmpOpEq, []byte{0})
	}
	if m.ICMPType.First != 0 {
		e.between(&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 1, DestRegister: register},
			expr.CmpOpEq, []byte{m.ICMPType.First}, []byte{m.ICMPType.Last})
	}
	e.mark(&expr.Meta{Key: expr.MetaKeyMARK, Register: register}, m.PacketMark)
	e.mark(&expr.Ct{Key: expr.CtKeyMARK, Register: register}, m.ConnMark)
	return e
}

// expressions is a rule under construction.
type expressions []expr.Any

// compare loads a value and lets the packet pass if it compares as it should.
func (e *expressions) compare(load expr.Any, op expr.CmpOp, want []byte) {
	*e = append(*e, load, &expr.Cmp{Op: op, Register: register, Data: want})
}

// masked likewise compares a part of the value.
func (e *expressions) masked(load expr.Any, mask []byte, op expr.CmpOp, want []byte) {
	*e = append(*e, load, &expr.Bitwise{
		SourceRegister: register, DestRegister: register, Len: uint32(len(mask)), Mask: mask, Xor: make([]byte, len(mask)),
	}, &expr.Cmp{Op: op, Register: register, Data: want})
}

// between likewise compares with a range, both ends included.
func (e *expressions) between(load expr.Any, op expr.CmpOp, first, last []byte) {
	if bytes.Equal(first, last) {
		e.compare(load, op, first)
		return
	}
	*e = append(*e, load, &expr.Range{Op: op, Register: register, FromData: first, ToData: last})
}

// negation is the Not of a condition.
type negation bool

// op returns the comparison that the condition asks for.
func (n negation) op() expr.CmpOp {
	if n {
		return expr.CmpOpNeq
	}
	return expr.CmpOpEq
}

func (e *expressions) interfaceName(key expr.MetaKey, m redirection.InterfaceMatch) {
	if m.Name == "" {
		return
	}
	name := make([]byte, unix.IFNAMSIZ) // all of it: a shorter comparison would match a prefix
	copy(name, m.Name)
	e.compare(&expr.Meta{Key: key, Register: register}, negation(m.Not).op(), name)
}

// address compares an address at the offset that it has in the header of its family.
func (e *expressions) address(m redirection.AddressMatch, offsetIPv4, offsetIPv6 uint32) {
	if !m.Prefix.IsValid() {
		return
	}
	want := m.Prefix.Masked().Addr().AsSlice()
	bits := m.Prefix.Bits()
	load := &expr.Payload{
		Base: expr.PayloadBaseNetworkHeader, Offset: offsetIPv4, Len: uint32(len(want)), DestRegister: register,
	}
	if m.Prefix.Addr().Is6() {
		load.Offset = offsetIPv6
	}
	if bits%8 != 0 {
		e.masked(load, net.CIDRMask(bits, 8*len(want)), negation(m.Not).op(), want)
		return
	}
	load.Len = uint32(bits / 8) // the network part alone needs no mask
	e.compare(load, negation(m.Not).op(), want[:bits/8])
}

// port compares a port of TCP or UDP; both have the source's at offset 0 and the destination's at 2.
func (e *expressions) port(m redirection.PortMatch, offset uint32) {
	if m.Ports == (redirection.PortRange{}) {
		return
	}
	e.between(&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 2, DestRegister: register},
		negation(m.Not).op(), binary.BigEndian.AppendUint16(nil, m.Ports.First), binary.BigEndian.AppendUint16(nil, m.Ports.Last))
}

func (e *expressions) mark(load expr.Any, m redirection.MarkMatch) {
	if m.Mark.Mask == 0 {
		return
	}
	e.masked(load, nativeEndian(m.Mark.Mask), negation(m.Not).op(), nativeEndian(m.Mark.Value))
}

func renderVerdict(v redirection.Verdict) ([]expr.Any, error) {
	switch v.Action {
	case redirection.Accept:
		return []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}, nil
	case redirection.Drop:
		return []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}}, nil
	case redirection.Redirect:
		return []expr.Any{
			&expr.Immediate{Register: register, Data: binary.BigEndian.AppendUint16(nil, v.Port)},
			&expr.Redir{RegisterProtoMin: register, Flags: unix.NF_NAT_RANGE_PROTO_SPECIFIED},
		}, nil
	case redirection.SetConnMark:
		return []expr.Any{
			&expr.Ct{Key: expr.CtKeyMARK, Register: register},
			&expr.Bitwise{
				SourceRegister: register, DestRegister: register, Len: 4,
				Mask: nativeEndian(^v.Mark.Mask), Xor: nativeEndian(v.Mark.Value),
			},
			&expr.Ct{Key: expr.CtKeyMARK, Register: register, SourceRegister: true},
		}, nil
	case redirection.RestoreMark:
		return []expr.Any{
			&expr.Ct{Key: expr.CtKeyMARK, Register: register},
			&expr.Meta{Key: expr.MetaKeyMARK, Register: register, SourceRegister: true},
		}, nil
	case redirection.SetZone:
		return []expr.Any{
			&expr.Immediate{Register: register, Data: binary.NativeEndian.AppendUint16(nil, v.Zone)},
			&expr.Ct{Key: expr.CtKeyZONE, Register: register, SourceRegister: true},
		}, nil
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

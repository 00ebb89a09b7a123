// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
)

// hostPriority is one before where source NAT is by custom, for the reason that natPriority is: kube-proxy's masquerading
// would decide first.
const hostPriority = 99

// hostChain is the only chain of the host's table.
const hostChain = "postrouting"

// noSocket is the user ID that no process has (the kernel's INVALID_UID). Comparing with it looks for nothing but the
// socket itself: without one of this namespace, loading its owner ends the rule (nft_meta_get_eval_skugid,
// net/netfilter/nft_meta.c). The expression that is called "socket" is refused in postrouting.
const noSocket = 0xffffffff

// Registers of a concatenated key: each part begins at a multiple of 4 bytes from the first. An IPv4 address fills the
// first quarter of register 1, an IPv6 address all of it.
const (
	portRegisterIPv4 = unix.NFT_REG32_01
	portRegisterIPv6 = unix.NFT_REG_2
)

func hostTable() *nftables.Table {
	return &nftables.Table{Name: redirection.HostTable, Family: nftables.TableFamilyINet}
}

// buildHost makes the host's table as the options call for it, with empty sets, whatever it was before.
func buildHost(conn *nftables.Conn, opts redirection.HostOptions) error {
	table := hostTable()
	replaceTable(conn, table)
	accept := nftables.ChainPolicyAccept
	chain := &nftables.Chain{
		Name: hostChain, Table: table, Type: nftables.ChainTypeNAT, Policy: &accept,
		Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityRef(hostPriority),
	}
	rules := redirection.HostRules(opts)
	for _, rule := range rules {
		if err := conn.AddSet(probeSet(table, rule), nil); err != nil {
			return fmt.Errorf("encoding set %s: %w", rule.Set, err)
		}
	}
	conn.AddChain(chain)
	for _, rule := range rules {
		conn.AddRule(&nftables.Rule{
			Table: table, Chain: chain, Exprs: renderHostRule(rule),
			UserData: userdata.AppendString(nil, userdata.TypeComment, "probes of "+rule.Family.String()),
		})
	}
	return nil
}

func probeSet(table *nftables.Table, rule redirection.HostRule) *nftables.Set {
	address := nftables.TypeIPAddr
	if rule.Family == redirection.IPv6 {
		address = nftables.TypeIP6Addr
	}
	set := &nftables.Set{Table: table, Name: rule.Set, KeyType: address}
	if rule.Scope == redirection.ProbeScopeDeclared {
		set.KeyType = nftables.MustConcatSetType(address, nftables.TypeInetService)
		set.Concatenation = true
	}
	return set
}

func renderHostRule(rule redirection.HostRule) []expr.Any {
	var e expressions
	e.compare(&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: register}, expr.CmpOpEq, []byte{protocolFamily(rule.Family)})
	e.compare(&expr.Meta{Key: expr.MetaKeySKUID, Register: register}, expr.CmpOpNeq, nativeEndian(noSocket))
	e.compare(&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: register}, expr.CmpOpEq, []byte{byte(redirection.TCP)})
	address := &expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4, DestRegister: register}
	portRegister := uint32(portRegisterIPv4)
	if rule.Family == redirection.IPv6 {
		address.Offset, address.Len, portRegister = 24, 16, portRegisterIPv6
	}
	e = append(e, address)
	if rule.Scope == redirection.ProbeScopeDeclared {
		e = append(e, &expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2, DestRegister: portRegister})
	}
	return append(e,
		&expr.Lookup{SourceRegister: register, SetName: rule.Set},
		&expr.Immediate{Register: register, Data: rule.Source.AsSlice()},
		&expr.NAT{Type: expr.NATTypeSourceNAT, Family: uint32(protocolFamily(rule.Family)), RegAddrMin: register},
	)
}

// hostState is what the kernel reports of the host's table.
type hostState struct {
	table   *table
	entries map[redirection.HostEntry]bool
	strange int // elements that are no entries, such as the one that stands for everything
}

// readHost returns a consistent state; nil if there is no table.
func readHost(socket *rawnetlink.Socket) (*hostState, error) {
	for range readAttempts {
		// A dump that is refused leaves answers behind, so the table is asked for first.
		there, err := readStatus(socket, redirection.HostTable)
		if err != nil || !there.exists {
			return nil, err
		}
		state, err := readHostOnce(socket)
		if !errors.Is(err, rawnetlink.ErrInterrupted) {
			return state, err
		}
	}
	return nil, fmt.Errorf("%w, %d times in a row", rawnetlink.ErrInterrupted, readAttempts)
}

func readHostOnce(socket *rawnetlink.Socket) (*hostState, error) {
	var answers [][]byte
	ask := func(request []byte) error {
		answer, err := socket.Dump(request)
		answers = append(answers, answer)
		return err
	}
	for _, request := range [][]byte{
		objectsRequest(redirection.HostTable), setsRequest(redirection.HostTable), rulesRequest(redirection.HostTable),
	} {
		if err := ask(request); err != nil {
			return nil, err
		}
	}
	table, err := decode(redirection.HostTable, slices.Concat(answers...))
	if err != nil {
		return nil, err
	}
	state := &hostState{table: table, entries: map[redirection.HostEntry]bool{}}
	for _, set := range table.sets {
		if set.name != redirection.ProbeSetIPv4 && set.name != redirection.ProbeSetIPv6 {
			continue
		}
		if err := ask(elementsRequest(set.name)); err != nil {
			return nil, err
		}
		if err := state.addElements(answers[len(answers)-1]); err != nil {
			return nil, err
		}
	}
	if !sameGeneration(answers...) {
		return nil, rawnetlink.ErrInterrupted
	}
	return state, nil
}

// addElements takes up the elements of our sets.
func (s *hostState) addElements(messages []byte) error {
	for len(messages) > 0 {
		m, rest, err := rawnetlink.Next(messages)
		if err != nil {
			return err
		}
		messages = rest
		if m.Type != messageType(unix.NFT_MSG_NEWSETELEM) || !isAbout(m, redirection.HostTable) {
			continue
		}
		list := lookup(m.Payload[nfgenHeader:], unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		for len(list) > 0 {
			var element rawnetlink.Attribute
			if element, list, err = rawnetlink.NextAttribute(list); err != nil {
				return err
			}
			key := lookup(lookup(element.Data, unix.NFTA_SET_ELEM_KEY), unix.NFTA_DATA_VALUE)
			if entry, ok := parseKey(key); ok {
				s.entries[entry] = true
			} else {
				s.strange++
			}
		}
	}
	return nil
}

// appendKey appends the entry as it is stored in a set: the address, and the port padded to 4 bytes if there is one.
func appendKey(b []byte, e redirection.HostEntry) []byte {
	b = append(b, e.Addr.AsSlice()...)
	if e.Port != 0 {
		b = append(b, byte(e.Port>>8), byte(e.Port), 0, 0)
	}
	return b
}

func parseKey(key []byte) (redirection.HostEntry, bool) {
	var e redirection.HostEntry
	switch len(key) {
	case 4 + 4, 16 + 4:
		port := key[len(key)-4:]
		e.Port = uint16(port[0])<<8 | uint16(port[1])
		key = key[:len(key)-4]
	case 4, 16:
	default:
		return e, false
	}
	addr, ok := netip.AddrFromSlice(key)
	e.Addr = addr
	return e, ok
}

// setOf returns the name of the set that holds entries of that family.
func setOf(family redirection.Families) string {
	if family == redirection.IPv6 {
		return redirection.ProbeSetIPv6
	}
	return redirection.ProbeSetIPv4
}

// setsRequest asks for the sets of a table.
func setsRequest(table string) []byte {
	return rawnetlink.AppendMessage(make([]byte, 0, 48), rawnetlink.Message{
		Type: messageType(unix.NFT_MSG_GETSET), Flags: unix.NLM_F_REQUEST | unix.NLM_F_DUMP,
		Payload: ofTable(table, unix.NFTA_SET_TABLE),
	})
}

// elementsRequest asks for the elements of a set of the host's table.
func elementsRequest(set string) []byte {
	return rawnetlink.AppendMessage(make([]byte, 0, 96), rawnetlink.Message{
		Type: messageType(unix.NFT_MSG_GETSETELEM), Flags: unix.NLM_F_REQUEST | unix.NLM_F_DUMP,
		Payload: ofSet(set),
	})
}

// ofSet returns the beginning of a payload about the elements of a set of the host's table.
func ofSet(set string) []byte {
	return appendText(ofTable(redirection.HostTable, unix.NFTA_SET_ELEM_LIST_TABLE), unix.NFTA_SET_ELEM_LIST_SET, set)
}

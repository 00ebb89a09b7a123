// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

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

// buildHost returns the changes that make the host's table as the options call for it, with empty sets, whatever it was
// before.
func buildHost(opts redirection.HostOptions) []change {
	changes := replaceTable(redirection.HostTable)
	for i, rule := range redirection.HostRules(opts) {
		changes = append(changes, addSet(rule, uint32(i)+1))
	}
	return append(changes, buildHostChain(opts)...)
}

// rebuildHostChains returns the changes that make the table's chains as the options call for them, and leave its sets
// alone.
func rebuildHostChains(opts redirection.HostOptions, got *table) []change {
	var changes []change
	for _, message := range []uint16{unix.NFT_MSG_DELRULE, unix.NFT_MSG_DELCHAIN} { // their rules may lead to each other
		name := uint16(unix.NFTA_RULE_CHAIN)
		if message == unix.NFT_MSG_DELCHAIN {
			name = unix.NFTA_CHAIN_NAME
		}
		for _, c := range got.chains {
			payload := appendText(ofTable(redirection.HostTable), name, c.name)
			changes = append(changes, change{message: message, payload: payload, what: "deleting chain " + c.name})
		}
	}
	return append(changes, buildHostChain(opts)...)
}

func buildHostChain(opts redirection.HostOptions) []change {
	changes := []change{addChain(redirection.HostTable, hostChain,
		hook{number: unix.NF_INET_POST_ROUTING, kind: "nat", priority: hostPriority})}
	for _, rule := range redirection.HostRules(opts) {
		changes = append(changes, addRule(redirection.HostTable, hostChain, "probes of "+rule.Family.String(), renderHostRule(rule)))
	}
	return changes
}

// Numbers by which nft knows the types of keys (enum datatypes of its datatype.h), for listings; those of a concatenation
// are put together, 6 bits each. The kernel knows lengths only.
const (
	typeIPv4Address = 7
	typeIPv6Address = 8
	typeService     = 13
	typeBits        = 6
)

// From linux/netfilter/nf_tables.h; package unix does not have them.
const (
	setFlagConcat   = 0x80 // NFT_SET_CONCAT: keys have several parts
	setDescConcat   = 2    // NFTA_SET_DESC_CONCAT
	setFieldLength  = 1    // NFTA_SET_FIELD_LEN
	lengthOfService = 2
)

// addSet adds the set that a rule looks addresses up in. The number tells it from others of the transaction.
func addSet(rule redirection.HostRule, id uint32) change {
	kind, length := uint32(typeIPv4Address), uint32(4)
	if rule.Family == redirection.IPv6 {
		kind, length = typeIPv6Address, 16
	}
	payload := appendText(ofTable(redirection.HostTable), unix.NFTA_SET_NAME, rule.Set)
	var description []byte
	if rule.Scope == redirection.ProbeScopeDeclared {
		description = appendNested(nil, setDescConcat, slices.Concat(fieldOfLength(length), fieldOfLength(lengthOfService)))
		kind, length = kind<<typeBits|typeService, length+4
		payload = rawnetlink.AppendAttribute(payload, number(unix.NFTA_SET_FLAGS, setFlagConcat))
	}
	for _, a := range []rawnetlink.Attribute{
		number(unix.NFTA_SET_KEY_TYPE, kind), number(unix.NFTA_SET_KEY_LEN, length), number(unix.NFTA_SET_ID, id),
	} {
		payload = rawnetlink.AppendAttribute(payload, a)
	}
	if description != nil {
		payload = appendNested(payload, unix.NFTA_SET_DESC, description)
	}
	return change{message: unix.NFT_MSG_NEWSET, flags: unix.NLM_F_CREATE, payload: payload, what: "adding set " + rule.Set}
}

func fieldOfLength(length uint32) []byte {
	return appendNested(nil, unix.NFTA_LIST_ELEM, rawnetlink.AppendAttribute(nil, number(setFieldLength, length)))
}

func renderHostRule(rule redirection.HostRule) []expression {
	var e expressions
	e.compare(loadMeta(unix.NFT_META_NFPROTO), unix.NFT_CMP_EQ, []byte{protocolFamily(rule.Family)})
	e.compare(loadMeta(unix.NFT_META_SKUID), unix.NFT_CMP_NEQ, nativeEndian(noSocket))
	e.compare(loadMeta(unix.NFT_META_L4PROTO), unix.NFT_CMP_EQ, []byte{byte(redirection.TCP)})
	offset, length, portRegister := uint32(16), uint32(4), uint32(portRegisterIPv4)
	if rule.Family == redirection.IPv6 {
		offset, length, portRegister = 24, 16, portRegisterIPv6
	}
	e = append(e, loadPayload(unix.NFT_PAYLOAD_NETWORK_HEADER, offset, length))
	if rule.Scope == redirection.ProbeScopeDeclared {
		e = append(e, loadPayloadTo(portRegister, unix.NFT_PAYLOAD_TRANSPORT_HEADER, 2, lengthOfService))
	}
	return append(e, lookupIn(rule.Set), load(rule.Source.AsSlice()), translateSource(protocolFamily(rule.Family)))
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

// maxHostDump bounds what is read of the host's packet rules, in bytes. They are the node's own, and no pod's to lengthen.
const maxHostDump = 64 << 20

func readHostOnce(socket *rawnetlink.Socket) (*hostState, error) {
	var answers [][]byte
	ask := func(request []byte) error {
		answer, err := socket.Dump(request, maxHostDump)
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

// confirm asks for entries one by one that a list of the elements did not show, and takes up those that are there: the
// kernel's hash table grows in the background, and a list that is made meanwhile may lack some.
func (s *hostState) confirm(socket *rawnetlink.Socket, entries []redirection.HostEntry) error {
	const atOnce = 64 // so that the answers fit into the socket's buffer
	for part := range slices.Chunk(entries, atOnce) {
		var requests []byte
		for _, entry := range part {
			requests = rawnetlink.AppendMessage(requests, rawnetlink.Message{
				Type: messageType(unix.NFT_MSG_GETSETELEM), Flags: unix.NLM_F_REQUEST,
				Payload: appendElements(ofSet(setOf(redirection.FamilyOf(entry.Addr))), entry),
			})
		}
		answers, err := socket.Query(requests, len(part))
		if err != nil {
			return err
		}
		if err := s.addElements(answers); err != nil {
			return err
		}
	}
	return nil
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
		Payload: ofTable(table),
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
	return appendText(ofTable(redirection.HostTable), unix.NFTA_SET_ELEM_LIST_SET, set)
}

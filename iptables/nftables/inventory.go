// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
)

// inventory is what a namespace holds of somebody, among what it holds of others.
type inventory struct {
	whose      owner
	generation uint32
	tables     []*foundTable
}

// foundTable is a table with all that is in it.
type foundTable struct {
	family byte // NFPROTO_
	name   string
	uses   int // objects in it, chains included
	chains []foundChain
	rules  []foundRule // read only where something of somebody's was found, or might be
}

type foundChain struct {
	name   string
	base   bool
	policy []byte // of a base chain
}

type foundRule struct {
	chain  string
	handle []byte
	target string // the chain that it jumps or goes to, empty for none
}

// readInventory looks for what belongs to whose. Answers may be from different generations: whoever acts on them names
// the first.
func readInventory(socket *rawnetlink.Socket, whose owner) (*inventory, error) {
	for range readAttempts {
		here, err := readInventoryOnce(socket, whose)
		if !errors.Is(err, rawnetlink.ErrInterrupted) {
			return here, err
		}
	}
	return &inventory{}, fmt.Errorf("reading tables and chains: %w, %d times in a row", rawnetlink.ErrInterrupted, readAttempts)
}

func readInventoryOnce(socket *rawnetlink.Socket, whose owner) (*inventory, error) {
	here := &inventory{whose: whose}
	before, err := readStatus(socket, "")
	if err != nil {
		return here, err
	}
	here.generation = before.generation
	for _, message := range []uint16{unix.NFT_MSG_GETTABLE, unix.NFT_MSG_GETCHAIN} {
		if err := here.dump(socket, dumpRequest(message, []byte{unix.NFPROTO_UNSPEC, unix.NFNETLINK_V0, 0, 0})); err != nil {
			return here, fmt.Errorf("listing tables and chains: %w", err)
		}
	}
	for _, t := range here.tables {
		if !here.concerns(t) {
			continue
		}
		payload := appendText([]byte{t.family, unix.NFNETLINK_V0, 0, 0}, unix.NFTA_RULE_TABLE, t.name)
		if err := here.dump(socket, dumpRequest(unix.NFT_MSG_GETRULE, payload)); err != nil {
			return here, fmt.Errorf("listing the rules of table %s: %w", t, err)
		}
	}
	return here, nil
}

func dumpRequest(message uint16, payload []byte) []byte {
	return rawnetlink.AppendMessage(nil, rawnetlink.Message{
		Type: messageType(message), Flags: unix.NLM_F_REQUEST | unix.NLM_F_DUMP, Payload: payload,
	})
}

// maxInventory bounds each of its dumps, in bytes: tens of thousands of rules.
const maxInventory = 8 << 20

// dump takes up the answers to a request.
func (here *inventory) dump(socket *rawnetlink.Socket, request []byte) error {
	answer, err := socket.Dump(request, maxInventory)
	for err == nil && len(answer) > 0 {
		var m rawnetlink.Message
		if m, answer, err = rawnetlink.Next(answer); err != nil || len(m.Payload) < nfgenHeader {
			continue
		}
		var f fields
		if f, err = fieldsOf(m.Payload[nfgenHeader:]); err != nil {
			continue
		}
		family := m.Payload[0]
		switch m.Type {
		case messageType(unix.NFT_MSG_NEWTABLE):
			here.tables = append(here.tables, &foundTable{
				family: family, name: text(f[unix.NFTA_TABLE_NAME]), uses: int(f.number(unix.NFTA_TABLE_USE)),
			})
		case messageType(unix.NFT_MSG_NEWCHAIN):
			if t := here.table(family, text(f[unix.NFTA_CHAIN_TABLE])); t != nil {
				t.chains = append(t.chains, foundChain{
					name: text(f[unix.NFTA_CHAIN_NAME]), base: f[unix.NFTA_CHAIN_HOOK] != nil, policy: bytes.Clone(f[unix.NFTA_CHAIN_POLICY]),
				})
			}
		case messageType(unix.NFT_MSG_NEWRULE):
			if t := here.table(family, text(f[unix.NFTA_RULE_TABLE])); t != nil {
				t.rules = append(t.rules, foundRule{
					chain: text(f[unix.NFTA_RULE_CHAIN]), handle: bytes.Clone(f[unix.NFTA_RULE_HANDLE]),
					target: jumpTarget(f[unix.NFTA_RULE_EXPRESSIONS]),
				})
			}
		}
	}
	return err
}

// jumpTarget returns the chain that a rule's last expression jumps or goes to, as iptables' targets do.
func jumpTarget(expressions []byte) string {
	target := ""
	for len(expressions) > 0 {
		element, rest, err := rawnetlink.NextAttribute(expressions)
		if err != nil {
			return target
		}
		expressions = rest
		if text(lookup(element.Data, unix.NFTA_EXPR_NAME)) != "immediate" {
			continue
		}
		data := lookup(lookup(element.Data, unix.NFTA_EXPR_DATA), unix.NFTA_IMMEDIATE_DATA)
		if chain := lookup(lookup(data, unix.NFTA_DATA_VERDICT), unix.NFTA_VERDICT_CHAIN); chain != nil {
			target = text(chain)
		}
	}
	return target
}

func (here *inventory) table(family byte, name string) *foundTable {
	for _, t := range here.tables {
		if t.family == family && t.name == name {
			return t
		}
	}
	return nil
}

// concerns reports whether a table's rules have to be known.
func (here *inventory) concerns(t *foundTable) bool {
	return len(here.chainsOf(t)) > 0 || here.whose.empty && t.isBare()
}

// chainsOf returns the chains of a table that belong to whom the inventory is for.
func (here *inventory) chainsOf(t *foundTable) []string {
	if !t.isIPTables() {
		return nil
	}
	var names []string
	for _, c := range t.chains {
		if here.whose.spare(c.name) {
			return nil
		}
		if here.whose.chain(c.name) && !c.base {
			names = append(names, c.name)
		}
	}
	return names
}

// removal returns the changes after which nothing of whom the inventory is for is left.
func (here *inventory) removal() []change {
	var changes []change
	for _, t := range here.tables {
		native := t.family == unix.NFPROTO_INET || t.family == unix.NFPROTO_IPV4 || t.family == unix.NFPROTO_IPV6
		chains := here.chainsOf(t)
		switch {
		case native && here.whose.table(t.name),
			len(chains) > 0 && t.without(chains).isEmpty(),
			here.whose.empty && t.isEmpty():
			changes = append(changes, t.change(unix.NFT_MSG_DELTABLE, "deleting table "+t.String()))
		case len(chains) > 0:
			changes = append(changes, t.removeChains(chains)...)
		}
	}
	return changes
}

// isIPTables reports whether a table is one that iptables-nft would take for its own.
func (t *foundTable) isIPTables() bool {
	return (t.family == unix.NFPROTO_IPV4 || t.family == unix.NFPROTO_IPV6) &&
		slices.Contains([]string{"raw", "mangle", "nat", "filter", "security"}, t.name)
}

// isBare reports whether a table is one of iptables' own that holds nothing but built-in chains which accept.
func (t *foundTable) isBare() bool {
	builtin := []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}
	for _, c := range t.chains {
		if !c.base || !slices.Contains(builtin, c.name) || verdictName(c.policy) != "accept" {
			return false
		}
	}
	return t.isIPTables() && t.uses == len(t.chains)
}

// isEmpty reports whether, besides, there are no rules in them.
func (t *foundTable) isEmpty() bool { return t.isBare() && len(t.rules) == 0 }

// without returns what a table is when the chains, and all rules in them or leading to them, are gone.
func (t *foundTable) without(chains []string) *foundTable {
	rest := &foundTable{family: t.family, name: t.name, uses: t.uses - len(chains)}
	for _, c := range t.chains {
		if !slices.Contains(chains, c.name) {
			rest.chains = append(rest.chains, c)
		}
	}
	for _, r := range t.rules {
		if !slices.Contains(chains, r.chain) && !slices.Contains(chains, r.target) {
			rest.rules = append(rest.rules, r)
		}
	}
	return rest
}

// change returns a message about the table. The name of the table is attribute 1 of all of them.
func (t *foundTable) change(message uint16, what string) change {
	payload := appendText([]byte{t.family, unix.NFNETLINK_V0, 0, 0}, unix.NFTA_TABLE_NAME, t.name)
	return change{message: message, payload: payload, what: what}
}

// removeChains takes away chains: first what leads to them, then what is in them, since they may lead to each other.
func (t *foundTable) removeChains(chains []string) []change {
	var changes []change
	for _, r := range t.rules {
		if slices.Contains(chains, r.target) && !slices.Contains(chains, r.chain) {
			c := t.change(unix.NFT_MSG_DELRULE, fmt.Sprintf("deleting the jump from %s to %s in table %s", r.chain, r.target, t))
			c.payload = appendText(c.payload, unix.NFTA_RULE_CHAIN, r.chain)
			c.payload = rawnetlink.AppendAttribute(c.payload, rawnetlink.Attribute{Type: unix.NFTA_RULE_HANDLE, Data: r.handle})
			changes = append(changes, c)
		}
	}
	for _, name := range chains {
		c := t.change(unix.NFT_MSG_DELRULE, fmt.Sprintf("emptying chain %s of table %s", name, t))
		c.payload = appendText(c.payload, unix.NFTA_RULE_CHAIN, name)
		changes = append(changes, c)
	}
	for _, name := range chains {
		c := t.change(unix.NFT_MSG_DELCHAIN, fmt.Sprintf("deleting chain %s of table %s", name, t))
		c.payload = appendText(c.payload, unix.NFTA_CHAIN_NAME, name)
		changes = append(changes, c)
	}
	return changes
}

// String returns the table as nft names it: "ip nat".
func (t *foundTable) String() string {
	switch t.family {
	case unix.NFPROTO_IPV4:
		return "ip " + t.name
	case unix.NFPROTO_IPV6:
		return "ip6 " + t.name
	case unix.NFPROTO_INET:
		return "inet " + t.name
	default:
		return fmt.Sprintf("family %d %s", t.family, t.name)
	}
}

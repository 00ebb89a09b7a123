// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
)

// inventory is what a namespace holds of somebody, among what it holds of others. A pod decides how much that is, so of
// rules only those are kept that lead to somebody's chains, and none are read that nothing depends on.
type inventory struct {
	whose      owner
	generation uint32
	tables     []*foundTable
	byName     map[tableName]*foundTable
	kept       int // tables and chains
}

type tableName struct {
	family byte // NFPROTO_
	name   string
}

// foundTable is a table with what is in it.
type foundTable struct {
	tableName
	uses   int          // objects in it, chains included
	chains []foundChain // built-in ones, and those whose names tell something
	jumps  []foundJump  // to somebody's chains, from others
}

type foundChain struct {
	name   string
	base   bool
	policy []byte // of a base chain
	uses   int    // rules in it, and whatever leads to it
	rules  int    // in it, where it is somebody's
	kept   bool   // something else than rules leads to it, such as a map of verdicts, so the kernel does not give it up
}

// foundJump is a rule that jumps or goes to a chain.
type foundJump struct {
	chain  string // that holds it
	handle []byte
	target string
}

// maxKept bounds how many tables and chains are kept in mind: more than anybody has, and a host has that are not a
// service's.
const maxKept = 1 << 16

// readInventory looks for what belongs to whose. Answers may be from different generations: whoever acts on them names
// the first.
func readInventory(ctx context.Context, socket *rawnetlink.Socket, whose owner) (*inventory, error) {
	for range readAttempts {
		here, err := readInventoryOnce(ctx, socket, whose)
		if !errors.Is(err, rawnetlink.ErrInterrupted) {
			return here, err
		}
	}
	return &inventory{}, fmt.Errorf("reading tables and chains: %w, %d times in a row", rawnetlink.ErrInterrupted, readAttempts)
}

func readInventoryOnce(ctx context.Context, socket *rawnetlink.Socket, whose owner) (*inventory, error) {
	here := &inventory{whose: whose, byName: map[tableName]*foundTable{}}
	before, err := readStatus(socket, "")
	if err != nil {
		return here, err
	}
	here.generation = before.generation
	for _, message := range []uint16{unix.NFT_MSG_GETTABLE, unix.NFT_MSG_GETCHAIN} {
		request := dumpRequest(message, []byte{unix.NFPROTO_UNSPEC, unix.NFNETLINK_V0, 0, 0})
		if err := socket.Scan(ctx, request, here.take); err != nil {
			return here, fmt.Errorf("listing tables and chains: %w", err)
		}
	}
	for _, t := range here.tables {
		if err := t.readJumps(ctx, socket, here.chainsOf(t)); err != nil {
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

// take takes up a table or a chain.
func (here *inventory) take(m rawnetlink.Message) (more bool, err error) {
	if len(m.Payload) < nfgenHeader {
		return true, nil
	}
	f, err := fieldsOf(m.Payload[nfgenHeader:])
	if err != nil {
		return false, err
	}
	switch m.Type {
	case messageType(unix.NFT_MSG_NEWTABLE):
		t := &foundTable{tableName: tableName{m.Payload[0], text(f[unix.NFTA_TABLE_NAME])}, uses: int(f.number(unix.NFTA_TABLE_USE))}
		here.tables = append(here.tables, t)
		here.byName[t.tableName] = t
		here.kept++
	case messageType(unix.NFT_MSG_NEWCHAIN):
		t := here.byName[tableName{m.Payload[0], text(f[unix.NFTA_CHAIN_TABLE])}]
		c := foundChain{
			name: text(f[unix.NFTA_CHAIN_NAME]), base: f[unix.NFTA_CHAIN_HOOK] != nil,
			policy: bytes.Clone(f[unix.NFTA_CHAIN_POLICY]), uses: int(f.number(unix.NFTA_CHAIN_USE)),
		}
		if t != nil && (c.base || here.whose.chain(c.name) || here.whose.spare(c.name)) {
			t.chains = append(t.chains, c)
			here.kept++
		}
	}
	if here.kept > maxKept {
		return false, fmt.Errorf("more than %d tables and chains with hooks", maxKept)
	}
	return true, nil
}

// readJumps looks for the rules that lead to the chains given. The kernel counts what uses a chain, so it is known how many
// there are: with none left to find, the rest of the table does not matter.
func (t *foundTable) readJumps(ctx context.Context, socket *rawnetlink.Socket, chains []string) error {
	if len(chains) == 0 {
		return nil
	}
	unseen := map[string]int{} // uses of each chain that are not explained yet
	missing := 0
	for _, c := range t.chains {
		if slices.Contains(chains, c.name) {
			unseen[c.name] = c.uses
			missing += c.uses
		}
	}
	explained := func(chain string) {
		if _, is := unseen[chain]; is {
			unseen[chain]--
			missing--
		}
	}
	rules := map[string]int{}
	for _, name := range chains { // few, and short as a rule
		payload := appendText(t.payload(), unix.NFTA_RULE_CHAIN, name)
		err := t.scanRules(ctx, socket, payload, func(_ []byte, chain, target string) bool {
			if chain == name {
				rules[name]++
				explained(name)
				explained(target)
			}
			return true
		})
		if err != nil {
			return err
		}
	}
	if missing > 0 {
		err := t.scanRules(ctx, socket, t.payload(), func(handle []byte, chain, target string) bool {
			if slices.Contains(chains, target) && !slices.Contains(chains, chain) {
				t.jumps = append(t.jumps, foundJump{chain: chain, handle: bytes.Clone(handle), target: target})
				explained(target)
			}
			return missing > 0
		})
		if err != nil {
			return err
		}
	}
	for i := range t.chains {
		c := &t.chains[i]
		c.kept, c.rules = unseen[c.name] > 0, rules[c.name]
	}
	return nil
}

func (t *foundTable) payload() []byte {
	return appendText([]byte{t.family, unix.NFNETLINK_V0, 0, 0}, unix.NFTA_RULE_TABLE, t.name)
}

// scanRules calls take for rules until it wants no more.
func (t *foundTable) scanRules(ctx context.Context, socket *rawnetlink.Socket, payload []byte, take func(handle []byte, chain, target string) bool) error {
	return socket.Scan(ctx, dumpRequest(unix.NFT_MSG_GETRULE, payload), func(m rawnetlink.Message) (bool, error) {
		if m.Type != messageType(unix.NFT_MSG_NEWRULE) || len(m.Payload) < nfgenHeader {
			return true, nil
		}
		attributes := m.Payload[nfgenHeader:]
		return take(lookup(attributes, unix.NFTA_RULE_HANDLE), text(lookup(attributes, unix.NFTA_RULE_CHAIN)),
			jumpTarget(lookup(attributes, unix.NFTA_RULE_EXPRESSIONS))), nil
	})
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
func (t *foundTable) isEmpty() bool {
	rules := 0
	for _, c := range t.chains {
		rules += c.uses
	}
	return t.isBare() && rules == 0
}

// without returns what a table is when the chains, and all rules in them or leading to them, are gone.
func (t *foundTable) without(chains []string) *foundTable {
	rest := &foundTable{tableName: t.tableName, uses: t.uses - len(chains)}
	for _, c := range t.chains {
		if slices.Contains(chains, c.name) {
			continue
		}
		for _, jump := range t.jumps {
			if jump.chain == c.name {
				c.uses--
			}
		}
		rest.chains = append(rest.chains, c)
	}
	return rest
}

// change returns a message about the table. The name of the table is attribute 1 of all of them.
func (t *foundTable) change(message uint16, what string) change {
	payload := appendText([]byte{t.family, unix.NFNETLINK_V0, 0, 0}, unix.NFTA_TABLE_NAME, t.name)
	return change{message: message, payload: payload, what: what}
}

// removeChains takes away chains: first what leads to them, then what is in them, since they may lead to each other. One
// that the kernel would not give up is left, and empty: to lead to it means nothing then.
func (t *foundTable) removeChains(chains []string) []change {
	var changes []change
	for _, jump := range t.jumps {
		c := t.change(unix.NFT_MSG_DELRULE, fmt.Sprintf("deleting the jump from %s to %s in table %s", jump.chain, jump.target, t))
		c.payload = appendText(c.payload, unix.NFTA_RULE_CHAIN, jump.chain)
		c.payload = rawnetlink.AppendAttribute(c.payload, rawnetlink.Attribute{Type: unix.NFTA_RULE_HANDLE, Data: jump.handle})
		changes = append(changes, c)
	}
	for _, chain := range t.chains {
		if !slices.Contains(chains, chain.name) || chain.kept && chain.rules == 0 {
			continue
		}
		c := t.change(unix.NFT_MSG_DELRULE, fmt.Sprintf("emptying chain %s of table %s", chain.name, t))
		c.payload = appendText(c.payload, unix.NFTA_RULE_CHAIN, chain.name)
		changes = append(changes, c)
	}
	for _, chain := range t.chains {
		if !slices.Contains(chains, chain.name) || chain.kept {
			continue
		}
		c := t.change(unix.NFT_MSG_DELCHAIN, fmt.Sprintf("deleting chain %s of table %s", chain.name, t))
		c.payload = appendText(c.payload, unix.NFTA_CHAIN_NAME, chain.name)
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

// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"encoding/binary"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
)

// amend turns a table that is known to hold another rule set into this one, by changing what differs, in one transaction,
// and returns what the namespace holds after it. The kernel refuses it with ERESTART if there was any other transaction
// since the generation at which that was known.
func (s *ruleSet) amend(socket *rawnetlink.Socket, known sighting) (sighting, error) {
	changes, after := s.amendment(known)
	if len(changes) == 0 { // the options differ, and the rules do not
		now, err := readGeneration(socket)
		if err == nil && now != known.generation {
			err = unix.ERESTART
		}
		return sighting{generation: now, set: s, handles: after}, err
	}
	answers, err := commitEchoed(socket, assembleAt(known.generation, changes))
	if err != nil {
		return sighting{}, err
	}
	return sighting{generation: next(known.generation), set: s, handles: withEchoed(after, answers)}, nil
}

// amendment returns the changes, and the handles of the rules after them; those that the kernel is yet to give are 0.
func (s *ruleSet) amendment(known sighting) ([]change, handles) {
	var changes []change
	had := known.set.want.chains
	for _, c := range had {
		if _, stays := s.want.chain(c.name); !stays {
			changes = append(changes, removeChain(c.name)...)
		}
	}
	after := handles{}
	for i, c := range s.want.chains {
		j := slices.IndexFunc(had, func(h chain) bool { return h.name == c.name })
		var rules []rule
		if j < 0 {
			changes = append(changes, s.chains[i].chain)
		} else {
			rules = had[j].rules
		}
		more, ofChain := s.amendChain(i, rules, known.handles[c.name])
		changes = append(changes, more...)
		after[c.name] = ofChain
	}
	return changes, after
}

// amendChain returns what turns the rules that a chain has into those wanted: rules that are the same in the same order
// stay, and each new one goes before the next that does.
func (s *ruleSet) amendChain(index int, had []rule, ofHad []uint64) ([]change, []uint64) {
	want := s.want.chains[index]
	stays := pair(want.rules, had, func(a, b rule) bool { return a.expressions == b.expressions && a.comment == b.comment })
	var changes []change
	for j, r := range had {
		if !slices.Contains(stays, j) {
			changes = append(changes, deleteRule(want.name, r.comment, ofHad[j]))
		}
	}
	after := make([]uint64, len(want.rules))
	for i, j := range stays {
		if j >= 0 {
			after[i] = ofHad[j]
		}
	}
	for i, j := range stays {
		if j < 0 {
			changes = append(changes, insertRule(s.chains[index].rules[i], firstKnown(after[i:])))
		}
	}
	return changes, after
}

// firstKnown returns the first handle that is there, 0 if none is.
func firstKnown(list []uint64) uint64 {
	for _, handle := range list {
		if handle != 0 {
			return handle
		}
	}
	return 0
}

// insertRule returns the change that adds a rule before the one with that handle, or at the end if it is 0. It asks for
// its echo, which holds the rule's own handle.
func insertRule(add change, before uint64) change {
	add.flags |= unix.NLM_F_ECHO
	if before != 0 {
		add.flags &^= unix.NLM_F_APPEND
		add.payload = rawnetlink.AppendAttribute(slices.Clip(add.payload), handleAttribute(unix.NFTA_RULE_POSITION, before))
	}
	return add
}

func deleteRule(chain, comment string, handle uint64) change {
	payload := appendText(ofTable(redirection.NFTablesTable), unix.NFTA_RULE_CHAIN, chain)
	return change{
		message: unix.NFT_MSG_DELRULE, payload: rawnetlink.AppendAttribute(payload, handleAttribute(unix.NFTA_RULE_HANDLE, handle)),
		what: fmt.Sprintf("deleting %s from chain %s", comment, chain),
	}
}

// removeChain returns the changes that delete a chain with its rules. No others lead to it.
func removeChain(name string) []change {
	rules := appendText(ofTable(redirection.NFTablesTable), unix.NFTA_RULE_CHAIN, name)
	itself := appendText(ofTable(redirection.NFTablesTable), unix.NFTA_CHAIN_NAME, name)
	return []change{
		{message: unix.NFT_MSG_DELRULE, payload: rules, what: "emptying chain " + name},
		{message: unix.NFT_MSG_DELCHAIN, payload: itself, what: "deleting chain " + name},
	}
}

func handleAttribute(kind uint16, handle uint64) rawnetlink.Attribute {
	return rawnetlink.Attribute{Type: kind, Data: binary.BigEndian.AppendUint64(nil, handle)}
}

// withEchoed fills in the handles of new rules, which the kernel echoed in the order of the transaction. It returns nil if
// some are still not known then.
func withEchoed(after handles, answers []byte) handles {
	for len(answers) > 0 {
		m, rest, err := rawnetlink.Next(answers)
		if err != nil {
			return nil
		}
		answers = rest
		if m.Type != messageType(unix.NFT_MSG_NEWRULE) || !isAbout(m, redirection.NFTablesTable) {
			continue
		}
		name := text(lookup(m.Payload[nfgenHeader:], unix.NFTA_RULE_CHAIN))
		handle := lookup(m.Payload[nfgenHeader:], unix.NFTA_RULE_HANDLE)
		if i := slices.Index(after[name], 0); i >= 0 && len(handle) == 8 {
			after[name][i] = binary.BigEndian.Uint64(handle)
		}
	}
	for _, ofChain := range after {
		if slices.Contains(ofChain, 0) {
			return nil
		}
	}
	return after
}

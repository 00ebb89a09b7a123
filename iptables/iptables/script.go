// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"slices"
	"strings"

	"ambientd/iptables/redirection"
	"ambientd/iptables/xtables"
)

// script builds the input of iptables-restore.
type script struct{ strings.Builder }

func (s *script) line(format string, args ...any) {
	fmt.Fprintf(s, format+"\n", args...)
}

// fill appends the rules to an empty chain and makes it the first in its hooks.
func (s *script) fill(c chain) {
	for _, rule := range c.rules {
		s.line("-A %s %s", c.name, rule)
	}
	for _, builtin := range c.builtins {
		s.line("-I %s 1 -j %s", builtin, c.name)
	}
}

// clear takes out every way into our chains, empties them, and deletes those that
// are not to be kept.
func (s *script) clear(got *xtables.Table, kept ...string) {
	if got == nil {
		return
	}
	for _, r := range got.References(redirection.IsOurChain) {
		s.line("-D %s %s", r.From, r.Rule)
	}
	chains := slices.DeleteFunc(slices.Clone(got.Chains), func(name string) bool { return !redirection.IsOurChain(name) })
	for _, name := range chains {
		s.line("-F %s", name) // rules of one may lead to the other
	}
	for _, name := range chains {
		if !slices.Contains(kept, name) {
			s.line("-X %s", name)
		}
	}
}

// raise adds the transaction that puts up the guardrail, in place of one that is
// left from before.
func (s *script) raise(guard []chain, got *xtables.Table) {
	s.line("*%s", filterTable)
	s.clear(got)
	for _, c := range guard {
		s.line("-N %s", c.name)
		s.fill(c)
	}
	s.line("COMMIT")
}

// lower adds the transaction that takes it down.
func (s *script) lower(guard []chain) {
	t := &xtables.Table{Rules: map[string][]string{}}
	for _, c := range guard {
		t.Chains = append(t.Chains, c.name)
		for _, builtin := range c.builtins {
			t.Chains = append(t.Chains, builtin)
			t.Rules[builtin] = []string{"-j " + c.name}
		}
	}
	s.line("*%s", filterTable)
	s.clear(t)
	s.line("COMMIT")
}

// creation returns the script for a netns without chains of ours. There, -N fails
// where a chain exists already, and the table stays as it was.
func creation(want ruleset) string {
	var s script
	for _, table := range tables() {
		if len(want.tables[table]) == 0 {
			continue
		}
		s.line("*%s", table)
		for _, c := range want.tables[table] {
			s.line("-N %s", c.name)
			s.fill(c)
		}
		s.line("COMMIT")
	}
	return s.String()
}

// transition returns the script that turns got into want, "" where they agree: our
// chains emptied and filled anew, those that are not wanted deleted, and every way
// into them replaced. It leaves out the tables that are as they should be. Each
// table changes in one transaction; where NAT is not the only one, that is behind
// the guardrail, unless want has none.
func transition(got xtables.Saved, want ruleset) string {
	order := slices.DeleteFunc(allTables(got), func(table string) bool {
		return len(compareTable(table, got[table], want.tables[table])) == 0
	})
	if want.empty() {
		slices.Reverse(order) // see [tables]
	}
	var s script
	first := len(order) > 0 && order[0] == string(redirection.NAT) // what is left of a guardrail comes after it
	guarded := len(want.guard) > 0 && slices.Contains(order, string(redirection.NAT)) && !first
	if guarded {
		s.raise(want.guard, got[filterTable])
		order = slices.DeleteFunc(order, func(table string) bool { return table == filterTable })
	}
	for _, table := range order {
		t := got[table]
		s.line("*%s", table)
		var kept []string
		for _, c := range want.tables[table] {
			kept = append(kept, c.name)
		}
		s.clear(t, kept...)
		for _, c := range want.tables[table] {
			if t == nil || !slices.Contains(t.Chains, c.name) {
				s.line("-N %s", c.name)
			}
			s.fill(c)
		}
		s.line("COMMIT")
	}
	if guarded {
		s.lower(want.guard)
	}
	return s.String()
}

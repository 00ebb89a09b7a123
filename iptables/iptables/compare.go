// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"ambientd/iptables/redirection"
	"ambientd/iptables/xtables"
)

// maxDifferences bounds what is reported of one family: a pod with the right to
// do so can put any number of rules into our chains.
const maxDifferences = 40

// compare returns the points in which got differs from want, in the order of the
// tables, up to [maxDifferences] and one that counts the rest. It looks at our
// chains and at what leads into them; all else in got is others' business.
func compare(got xtables.Saved, want map[string][]chain) []redirection.Difference {
	return bound(compareAll(got, want))
}

func bound(differences []redirection.Difference) []redirection.Difference {
	if more := len(differences) - maxDifferences; more > 0 {
		differences = append(differences[:maxDifferences], redirection.Difference{
			What: "rules", Got: fmt.Sprintf("state in %d more points", more)})
	}
	return differences
}

func compareAll(got xtables.Saved, want map[string][]chain) []redirection.Difference {
	var differences []redirection.Difference
	for _, table := range allTables(got) {
		differences = append(differences, compareTable(table, got[table], want[table])...)
	}
	return differences
}

// compareTable compares one table, of which nothing may be there.
func compareTable(table string, t *xtables.Table, want []chain) []redirection.Difference {
	if t == nil {
		t = &xtables.Table{}
	}
	var differences []redirection.Difference
	refs := t.References(redirection.IsOurChain)
	for _, c := range want {
		differences = append(differences, compareChain(table, t, c)...)
		var d []redirection.Difference
		d, refs = compareJump(table, c, refs)
		differences = append(differences, d...)
	}
	for _, r := range refs { // those that no wanted chain accounts for
		differences = append(differences, redirection.Difference{
			What: fmt.Sprintf("table %s, chain %s, rule %d", table, r.From, r.Position), Got: r.Rule})
	}
	for _, name := range t.Chains {
		if redirection.IsOurChain(name) && !slices.ContainsFunc(want, func(c chain) bool { return c.name == name }) {
			differences = append(differences, redirection.Difference{
				What: fmt.Sprintf("table %s", table), Got: "chain " + name})
		}
	}
	return differences
}

// allTables returns the model's tables and any other that was read, in a fixed
// order.
func allTables(got xtables.Saved) []string {
	all := tables()
	for _, name := range slices.Sorted(maps.Keys(got)) {
		if !slices.Contains(all, name) {
			all = append(all, name)
		}
	}
	return all
}

// compareChain compares rule by rule. Where a rule is missing or added, those
// that follow it are not reported as well.
func compareChain(table string, t *xtables.Table, want chain) []redirection.Difference {
	where := fmt.Sprintf("table %s, chain %s", table, want.name)
	if !slices.Contains(t.Chains, want.name) {
		return []redirection.Difference{{What: where, Want: fmt.Sprintf("%d rules", len(want.rules))}}
	}
	got := t.Rules[want.name]
	missing, extra := subtract(want.rules, got), subtract(got, want.rules)
	if len(missing) == 0 && len(extra) == 0 {
		return compareOrder(where, got, want.rules)
	}
	var differences []redirection.Difference
	for _, i := range missing {
		d := redirection.Difference{What: fmt.Sprintf("%s, rule %d", where, i+1), Want: want.rules[i]}
		// A rule in the very place of a missing one is that rule, changed.
		if at := slices.Index(extra, i); at >= 0 {
			d.Got = got[i]
			extra = slices.Delete(extra, at, at+1)
		}
		differences = append(differences, d)
	}
	for _, i := range extra {
		differences = append(differences, redirection.Difference{What: fmt.Sprintf("%s, rule %d", where, i+1), Got: got[i]})
	}
	return differences
}

// compareOrder reports the first rule that is out of order; the rules are the
// same ones.
func compareOrder(where string, got, want []string) []redirection.Difference {
	for i := range want {
		if xtables.Canonical(got[i]) != xtables.Canonical(want[i]) {
			return []redirection.Difference{{
				What: fmt.Sprintf("%s, order from rule %d", where, i+1), Want: want[i], Got: got[i]}}
		}
	}
	return nil
}

// subtract returns the indices of the rules in a that b does not hold as often.
func subtract(a, b []string) []int {
	count := map[string]int{}
	for _, rule := range b {
		count[xtables.Canonical(rule)]++
	}
	var rest []int
	for i, rule := range a {
		key := xtables.Canonical(rule)
		if count[key] > 0 {
			count[key]--
			continue
		}
		rest = append(rest, i)
	}
	return rest
}

// compareJump checks that the built-in chain jumps to c without condition, once,
// and before anything else. It returns the references that it did not account
// for.
func compareJump(table string, c chain, refs []xtables.Reference) ([]redirection.Difference, []xtables.Reference) {
	var differences []redirection.Difference
	for _, builtin := range c.builtins {
		var positions []string
		var rest []xtables.Reference
		for _, r := range refs {
			if r.From == builtin && r.Rule == "-j "+c.name {
				positions = append(positions, strconv.Itoa(r.Position))
			} else {
				rest = append(rest, r)
			}
		}
		refs = rest
		if len(positions) == 1 && positions[0] == "1" {
			continue
		}
		d := redirection.Difference{
			What: fmt.Sprintf("table %s, jump from %s to %s", table, builtin, c.name), Want: "as rule 1"}
		if len(positions) > 0 {
			d.Got = "as rule " + strings.Join(positions, " and ")
		}
		differences = append(differences, d)
	}
	return differences, refs
}

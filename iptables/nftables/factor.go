// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"fmt"
	"strconv"
	"strings"

	"ambientd/iptables/redirection"
)

// line is a rule of our table and the comment that it carries there.
type line struct {
	redirection.Rule
	comment string
}

// String returns the line without its comment.
func (l line) String() string { return fmt.Sprintf("%s: %s -> %s", l.Families, l.Match, l.Verdict) }

// chainLines is one chain of our table.
type chainLines struct {
	chain redirection.Chain
	lines []line
}

// arrange turns the model's rules into the chains of our table. A chain without rules is left out.
func arrange(rules []redirection.Rule) []chainLines {
	byChain := map[redirection.Chain][]redirection.Rule{}
	for _, rule := range rules {
		byChain[rule.Chain] = append(byChain[rule.Chain], rule)
	}
	var chains []chainLines
	for _, c := range redirection.Chains() {
		if len(byChain[c]) > 0 {
			chains = append(chains, chainLines{chain: c, lines: lines(byChain[c])})
		}
	}
	return chains
}

// lines turns the rules of one chain into those of our table.
//
// What the kernel takes to install a table goes by the number of expressions: it looks each one up by name in a list of
// some sixty types. Several rows exempt loopback destinations, once for each family. Where nothing after the first of
// them does anything to such a packet, one rule per family that accepts it there says the same, and the rows after it
// need not tell the families apart.
func lines(rules []redirection.Rule) []line {
	plain := make([]line, 0, len(rules))
	for _, r := range rules {
		plain = append(plain, line{Rule: r, comment: "row " + strconv.Itoa(r.Row)})
	}
	if factored := factorLoopback(plain); factored != nil && expressionCount(factored) < expressionCount(plain) {
		return factored
	}
	return plain
}

// factorLoopback returns the shorter form, or nil where it would mean something else.
func factorLoopback(plain []line) []line {
	first := -1
	var rows []string
	for i, l := range plain {
		exempt := l.Match.Destination.Not
		if exempt && first < 0 {
			first = i
		}
		if first >= 0 && !exempt && l.Verdict.Action != redirection.Accept {
			return nil // this one does something to loopback destinations
		}
		if row := strconv.Itoa(l.Row); exempt && (len(rows) == 0 || rows[len(rows)-1] != row) {
			rows = append(rows, row)
		}
	}
	if first < 0 {
		return nil
	}
	factored := append([]line(nil), plain[:first]...)
	exempted := redirection.Families(0)
	for _, l := range plain[first:] {
		if l.Match.Destination.Not && !exempted.Has(l.Families) {
			exempted |= l.Families
			factored = append(factored, acceptDestination(l, rows))
		}
	}
	for _, l := range plain[first:] {
		if l.Match.Destination.Not {
			l.Match.Destination = redirection.AddressMatch{}
		}
		last := &factored[len(factored)-1]
		if last.Row == l.Row && last.Match == l.Match && last.Verdict == l.Verdict {
			last.Families |= l.Families
			continue
		}
		factored = append(factored, l)
	}
	return factored
}

// acceptDestination returns the line that accepts what l exempts.
func acceptDestination(l line, rows []string) line {
	rule := redirection.Rule{Families: l.Families, Chain: l.Chain, Verdict: redirection.Verdict{Action: redirection.Accept}}
	rule.Match.Destination.Prefix = l.Match.Destination.Prefix
	label := "row"
	if len(rows) > 1 {
		label = "rows"
	}
	return line{Rule: rule, comment: fmt.Sprintf("loopback is exempt from %s %s", label, strings.Join(rows, ", "))}
}

func expressionCount(lines []line) int {
	count := 0
	for _, l := range lines {
		count += len(renderMatch(l.Rule)) // verdicts take the same number in both forms
	}
	return count
}

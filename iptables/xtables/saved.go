// SPDX-License-Identifier: Apache-2.0

package xtables

import (
	"fmt"
	"slices"
	"strings"
)

// Saved is what iptables-save printed: the tables by their names. One that it did
// not print is absent.
type Saved map[string]*Table

// Table is a table's chains with their rules.
type Table struct {
	Chains []string            // in the order printed
	Rules  map[string][]string // by chain, each without "-A CHAIN "
}

// Reference is a rule that jumps or goes to a chain.
type Reference struct {
	From     string // the chain that holds the rule
	Position int    // of the rule in that chain, from 1
	Rule, To string
}

// Parse reads the output of iptables-save (iptables-save(8), without
// counters). A table that the program could not show is an error: nothing could
// be said about it.
func Parse(out string) (Saved, error) {
	s := Saved{}
	var table *Table
	for line := range strings.Lines(out) {
		line = strings.TrimRight(line, "\n")
		switch {
		case line == "" || line == "COMMIT":
		case line[0] == '#':
			// iptables-nft-save prints this where rules were made with nft that have no
			// equal in iptables: "# Table `nat' is incompatible, use 'nft' tool."
			if strings.Contains(line, "is incompatible") {
				return nil, fmt.Errorf("reading rules: %s", strings.TrimPrefix(line, "# "))
			}
		case line[0] == '*':
			table = &Table{Rules: map[string][]string{}}
			s[line[1:]] = table
		case table == nil:
			return nil, fmt.Errorf("reading rules: %.80q stands before any table", line)
		case line[0] == ':':
			name, _, _ := strings.Cut(line[1:], " ")
			table.Chains = append(table.Chains, name)
		case strings.HasPrefix(line, "-A "):
			name, rule, _ := strings.Cut(line[len("-A "):], " ")
			table.Rules[name] = append(table.Rules[name], rule)
		default:
			return nil, fmt.Errorf("reading rules: %.80q is no line of iptables-save", line)
		}
	}
	return s, nil
}

// Has reports whether any table has a chain whose name match accepts.
func (s Saved) Has(match func(chain string) bool) bool {
	for _, t := range s {
		if slices.ContainsFunc(t.Chains, match) {
			return true
		}
	}
	return false
}

// References returns the rules that lead into the chains that match accepts,
// except those within such chains. A nil Table has none.
func (t *Table) References(match func(chain string) bool) []Reference {
	if t == nil {
		return nil
	}
	var refs []Reference
	for _, name := range t.Chains {
		if match(name) {
			continue
		}
		for i, rule := range t.Rules[name] {
			if to := Target(rule); match(to) {
				refs = append(refs, Reference{From: name, Position: i + 1, Rule: rule, To: to})
			}
		}
	}
	return refs
}

// Target returns the chain or target that a rule jumps or goes to, "" if none.
func Target(rule string) string {
	words := split(rule)
	for i, w := range words {
		if (w == "-j" || w == "-g") && i+1 < len(words) {
			return words[i+1]
		}
	}
	return ""
}

// split splits a rule at blanks, except within double quotes, in which
// iptables-save puts comments and the like; "\" escapes there.
func split(rule string) []string {
	var words []string
	var word strings.Builder
	inWord, quoted, escaped := false, false, false
	for _, c := range rule {
		switch {
		case escaped:
			escaped = false
			word.WriteRune(c)
		case quoted && c == '\\':
			escaped = true
			word.WriteRune(c)
		case c == '"':
			quoted, inWord = !quoted, true
			word.WriteRune(c)
		case c == ' ' && !quoted:
			if inWord {
				words = append(words, word.String())
			}
			word.Reset()
			inWord = false
		default:
			inWord = true
			word.WriteRune(c)
		}
	}
	if inWord {
		words = append(words, word.String())
	}
	return words
}

// Canonical returns a form of the rule that is equal for rules which differ only
// in the order of their options: it has no meaning, and depends on the version of
// iptables-save.
func Canonical(rule string) string {
	var options []string
	negation := ""
	for _, w := range split(rule) {
		switch {
		case w == "!":
			negation = "! "
		case w[0] == '-' || len(options) == 0:
			options = append(options, negation+w)
			negation = ""
		default:
			options[len(options)-1] += " " + w
		}
	}
	slices.Sort(options)
	return strings.Join(options, "\n")
}

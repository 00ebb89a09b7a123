// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"slices"
	"strings"

	"ambientd/iptables/redirection"
)

// saved is what iptables-save printed: of each table the chains with their rules.
type saved map[string]*savedTable

type savedTable struct {
	chains []string            // in the order printed
	rules  map[string][]string // by chain, each without "-A CHAIN "
}

// reference is a rule that jumps or goes to one of our chains.
type reference struct {
	table, from string
	position    int // of the rule in its chain, from 1
	rule, to    string
}

// parseSave reads the output of iptables-save (iptables-save(8), without
// counters). A table that the program could not show is an error: nothing could
// be said about it.
func parseSave(out string) (saved, error) {
	s := saved{}
	var table *savedTable
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
			table = &savedTable{rules: map[string][]string{}}
			s[line[1:]] = table
		case table == nil:
			return nil, fmt.Errorf("reading rules: %.80q stands before any table", line)
		case line[0] == ':':
			name, _, _ := strings.Cut(line[1:], " ")
			table.chains = append(table.chains, name)
		case strings.HasPrefix(line, "-A "):
			name, rule, _ := strings.Cut(line[len("-A "):], " ")
			table.rules[name] = append(table.rules[name], rule)
		default:
			return nil, fmt.Errorf("reading rules: %.80q is no line of iptables-save", line)
		}
	}
	return s, nil
}

// ours reports whether a chain of that name is ours, in whichever table.
func ours(name string) bool {
	return name == redirection.IPTablesPrerouting || name == redirection.IPTablesOutput
}

func (s saved) hasOurs() bool {
	for _, t := range s {
		if slices.ContainsFunc(t.chains, ours) {
			return true
		}
	}
	return false
}

// references returns the rules outside our chains that lead into them.
func (t *savedTable) references(table string) []reference {
	var refs []reference
	for _, name := range t.chains {
		if ours(name) {
			continue
		}
		for i, rule := range t.rules[name] {
			if to := target(rule); ours(to) {
				refs = append(refs, reference{table: table, from: name, position: i + 1, rule: rule, to: to})
			}
		}
	}
	return refs
}

// target returns the chain or target that a rule jumps or goes to, "" if none.
func target(rule string) string {
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

// canonical returns a form of the rule that is equal for rules which differ only
// in the order of their options: it has no meaning, and depends on the version of
// iptables-save.
func canonical(rule string) string {
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

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

// table is one of our tables as text: what was sent, or what the kernel reports.
type table struct {
	name   string
	flags  uint32 // NFT_TABLE_F_DORMANT switches all of it off
	chains []chain
	sets   []set // without their elements
	others int   // objects in the table that are neither: flow tables, stateful objects, sets that were not asked for
}

type set struct {
	name string
	base string // what its elements are
}

type chain struct {
	name  string
	base  string // hook, type, priority and policy; empty for a chain that only jumps reach
	rules []rule
}

type rule struct {
	comment     string
	expressions string
	meaning     string // of the expressions in the model's words, empty for those of others
	handle      uint64 // the kernel's number for it within its table, 0 in what was sent
}

// decode reads messages that make, or report, tables, sets, chains and rules, and takes up what belongs to the table of
// that name.
func decode(name string, messages []byte) (*table, error) {
	t := &table{name: name}
	uses := 0
	for len(messages) > 0 {
		m, rest, err := rawnetlink.Next(messages)
		if err != nil {
			return nil, err
		}
		messages = rest
		if !isAbout(m, name) {
			continue
		}
		f, err := fieldsOf(m.Payload[nfgenHeader:])
		if err != nil {
			return nil, err
		}
		switch m.Type {
		case messageType(unix.NFT_MSG_NEWTABLE):
			t.flags = f.number(unix.NFTA_TABLE_FLAGS)
			uses = int(f.number(unix.NFTA_TABLE_USE))
		case messageType(unix.NFT_MSG_NEWCHAIN):
			c, err := decodeChain(f)
			if err != nil {
				return nil, err
			}
			t.chains = append(t.chains, c)
		case messageType(unix.NFT_MSG_NEWSET):
			t.sets = append(t.sets, decodeSet(f))
		case messageType(unix.NFT_MSG_NEWRULE):
			if err := t.addRule(f); err != nil {
				return nil, err
			}
		}
	}
	t.others = max(0, uses-len(t.chains)-len(t.sets))
	return t, nil
}

func decodeSet(f fields) set {
	return set{
		name: text(f[unix.NFTA_SET_NAME]),
		base: fmt.Sprintf("type %#x of %d bytes flags %#x",
			f.number(unix.NFTA_SET_KEY_TYPE), f.number(unix.NFTA_SET_KEY_LEN), f.number(unix.NFTA_SET_FLAGS)),
	}
}

func decodeChain(f fields) (chain, error) {
	c := chain{name: text(f[unix.NFTA_CHAIN_NAME])}
	if f[unix.NFTA_CHAIN_HOOK] == nil {
		return c, nil
	}
	hook, err := fieldsOf(f[unix.NFTA_CHAIN_HOOK])
	if err != nil {
		return chain{}, err
	}
	c.base = fmt.Sprintf("type %s hook %s priority %d policy %s", text(f[unix.NFTA_CHAIN_TYPE]),
		hookName(hook.number(unix.NFTA_HOOK_HOOKNUM)), int32(hook.number(unix.NFTA_HOOK_PRIORITY)),
		verdictName(f[unix.NFTA_CHAIN_POLICY]))
	if flags := f.number(chainFlags) &^ chainFlagBase; flags != 0 {
		c.base += fmt.Sprintf(" flags %#x", flags)
	}
	return c, nil
}

// From linux/netfilter/nf_tables.h; package unix does not have them.
const (
	chainFlags    = 10 // NFTA_CHAIN_FLAGS
	chainFlagBase = 1  // NFT_CHAIN_BASE, which newer kernels report for every chain with a hook
)

func hookName(number uint32) string {
	switch number {
	case unix.NF_INET_PRE_ROUTING:
		return string(redirection.Prerouting)
	case unix.NF_INET_LOCAL_OUT:
		return string(redirection.Output)
	case unix.NF_INET_POST_ROUTING:
		return "postrouting"
	default:
		return fmt.Sprintf("number %d", number)
	}
}

func (t *table) addRule(f fields) error {
	expressions, err := describeExpressions(f[unix.NFTA_RULE_EXPRESSIONS])
	if err != nil {
		return err
	}
	r := rule{comment: comment(f[unix.NFTA_RULE_USERDATA]), expressions: expressions}
	if handle := f[unix.NFTA_RULE_HANDLE]; len(handle) == 8 {
		r.handle = binary.BigEndian.Uint64(handle)
	}
	name := text(f[unix.NFTA_RULE_CHAIN])
	for i := range t.chains {
		if t.chains[i].name == name {
			t.chains[i].rules = append(t.chains[i].rules, r)
			return nil
		}
	}
	return fmt.Errorf("a rule of chain %q, which was not listed", name)
}

// differences returns in what got is not want.
func differences(want, got *table) []redirection.Difference {
	var found []redirection.Difference
	add := func(what, want, got string) {
		found = append(found, redirection.Difference{What: what, Want: want, Got: got})
	}
	if got.flags != want.flags {
		add("table "+want.name, fmt.Sprintf("flags %#x", want.flags), fmt.Sprintf("flags %#x", got.flags))
	}
	if got.others > 0 {
		add("table "+want.name, "", fmt.Sprintf("sets or other objects in it: %d", got.others))
	}
	for _, w := range want.chains {
		g, ok := got.chain(w.name)
		switch {
		case !ok:
			add("chain "+w.name, w.base, "")
			continue
		case g.base != w.base:
			add("chain "+w.name, w.base, orText(g.base, "no hook"))
		}
		for _, edit := range edits(w.rules, g.rules) {
			add("rule of chain "+w.name, edit.want, edit.got)
		}
	}
	for _, g := range got.chains {
		if _, ok := want.chain(g.name); !ok {
			add("chain "+g.name, "", fmt.Sprintf("%s with %d rules", orText(g.base, "no hook"), len(g.rules)))
		}
	}
	return append(found, setDifferences(want, got)...)
}

func setDifferences(want, got *table) []redirection.Difference {
	var found []redirection.Difference
	for _, w := range want.sets {
		i := slices.IndexFunc(got.sets, func(g set) bool { return g.name == w.name })
		switch {
		case i < 0:
			found = append(found, redirection.Difference{What: "set " + w.name, Want: w.base})
		case got.sets[i].base != w.base:
			found = append(found, redirection.Difference{What: "set " + w.name, Want: w.base, Got: got.sets[i].base})
		}
	}
	for _, g := range got.sets {
		if !slices.ContainsFunc(want.sets, func(w set) bool { return w.name == g.name }) {
			found = append(found, redirection.Difference{What: "set " + g.name, Got: g.base})
		}
	}
	return found
}

func (t *table) chain(name string) (chain, bool) {
	for _, c := range t.chains {
		if c.name == name {
			return c, true
		}
	}
	return chain{}, false
}

func orText(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

// edit is a rule that is missing (got is empty) or should not be there (want is empty).
type edit struct{ want, got string }

// edits returns the shortest list of rules to add and to take away that turns got into want, in order. Comments do not
// count.
func edits(want, got []rule) []edit {
	var found []edit
	next := 0 // of got
	unexpected := func(until int) {
		for ; next < until; next++ {
			found = append(found, edit{got: got[next].String()})
		}
	}
	for i, j := range pair(want, got, func(a, b rule) bool { return a.expressions == b.expressions }) {
		if j < 0 {
			found = append(found, edit{want: want[i].String()})
			continue
		}
		unexpected(j)
		next++
	}
	unexpected(len(got))
	return found
}

// pair returns for each rule of a which rule of b it is, in a longest common subsequence of both, or -1. What both begin
// and end with is most of it as a rule.
func pair(a, b []rule, same func(a, b rule) bool) []int {
	begin := 0
	for begin < min(len(a), len(b)) && same(a[begin], b[begin]) {
		begin++
	}
	end := 0
	for end < min(len(a), len(b))-begin && same(a[len(a)-1-end], b[len(b)-1-end]) {
		end++
	}
	pairs := make([]int, len(a))
	for i := range begin {
		pairs[i] = i
	}
	for i := range end {
		pairs[len(a)-1-i] = len(b) - 1 - i
	}
	for i, j := range pairBetween(a[begin:len(a)-end], b[begin:len(b)-end], same) {
		if j >= 0 {
			j += begin
		}
		pairs[begin+i] = j
	}
	return pairs
}

// pairBetween is pair for lists that are short: it makes a table of the lengths of common subsequences.
func pairBetween(a, b []rule, same func(a, b rule) bool) []int {
	common := make([][]int, len(a)+1)
	for i := range common {
		common[i] = make([]int, len(b)+1)
	}
	for i := len(a) - 1; i >= 0; i-- {
		for j := len(b) - 1; j >= 0; j-- {
			if same(a[i], b[j]) {
				common[i][j] = common[i+1][j+1] + 1
			} else {
				common[i][j] = max(common[i+1][j], common[i][j+1])
			}
		}
	}
	pairs := make([]int, len(a))
	for i, j := 0, 0; i < len(a); {
		switch {
		case j < len(b) && same(a[i], b[j]):
			pairs[i] = j
			i, j = i+1, j+1
		case j == len(b) || common[i+1][j] >= common[i][j+1]:
			pairs[i] = -1
			i++
		default:
			j++
		}
	}
	return pairs
}

// handles returns the kernel's numbers of the rules.
func (t *table) handles() handles {
	all := handles{}
	for _, c := range t.chains {
		ofChain := make([]uint64, 0, len(c.rules))
		for _, r := range c.rules {
			ofChain = append(ofChain, r.handle)
		}
		all[c.name] = ofChain
	}
	return all
}

// explain adds the meanings of expressions that are known.
func (t *table) explain(meanings map[string]string) {
	for _, c := range t.chains {
		for i := range c.rules {
			c.rules[i].meaning = meanings[c.rules[i].expressions]
		}
	}
}

// String returns the rule with the comment that says which row it is.
func (r rule) String() string { return r.comment + ", " + orText(r.meaning, r.expressions) }

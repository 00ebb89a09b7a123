// SPDX-License-Identifier: Apache-2.0

package foreign

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
)

// sweeping says whether tables that are left empty go too.
type sweeping string

const (
	sweep      sweeping = "sweep"
	keepTables sweeping = "keep tables"
)

// attempts bounds how often a removal starts again because somebody changed the
// same rules meanwhile.
const attempts = 5

// nfAccept is NF_ACCEPT of linux/netfilter.h.
const nfAccept = 1

// tableID names a table of nf_tables.
type tableID struct {
	family byte // NFPROTO_*
	name   string
}

// chain is what the kernel says of a chain.
type chain struct {
	table tableID
	name  string
	base  bool   // it has a hook
	drops bool   // a base chain whose policy is to drop
	use   uint32 // rules in it and references to it
}

// rule is what the kernel says of a rule.
type rule struct {
	chain  string
	handle []byte // as the kernel spells it
	target string // the chain that it jumps or goes to, "" if none
}

// survey is a picture of the netns's tables and chains.
type survey struct {
	tables map[tableID]uint32 // to how many objects are in it
	chains []chain
}

// ids returns the tables in a fixed order.
func (s survey) ids() []tableID {
	return slices.SortedFunc(maps.Keys(s.tables), func(a, b tableID) int {
		return cmp.Or(cmp.Compare(a.family, b.family), cmp.Compare(a.name, b.name))
	})
}

// madeByIPTables reports whether iptables-nft keeps its chains in the table.
func (t tableID) madeByIPTables() bool {
	return (t.family == unix.NFPROTO_IPV4 || t.family == unix.NFPROTO_IPV6) &&
		slices.Contains([]string{"raw", "mangle", "nat", "filter", "security"}, t.name)
}

// doomed reports whether a native table is to go.
func (t tableID) doomed(own Means) bool {
	if t.madeByIPTables() {
		return false
	}
	ours := t.family == unix.NFPROTO_INET && (t.name == redirection.NFTablesTable || t.name == redirection.HostTable)
	return redirection.IsForeignTable(t.name) || ours && own != NFTables
}

// doomed reports whether a chain of iptables-nft is to go.
func (c chain) doomed(own Means) bool {
	return c.table.madeByIPTables() && !c.base && condemned(own, IPTablesNFT)(c.name)
}

func (s survey) finds(own Means) bool {
	return slices.ContainsFunc(s.ids(), func(t tableID) bool { return t.doomed(own) }) ||
		slices.ContainsFunc(s.chains, func(c chain) bool { return c.doomed(own) })
}

func (f *Finder) hasNFTables(run redirection.Runner, own Means) (found bool, err error) {
	err = f.within(run, func(socket *rawnetlink.Socket) error {
		s, err := look(socket)
		found = s.finds(own)
		return err
	})
	return found, err
}

func (f *Finder) removeNFTables(run redirection.Runner, own Means, sweeping sweeping) (found bool, err error) {
	err = f.retry(run, func(socket *rawnetlink.Socket) error {
		s, err := look(socket)
		if err != nil || !s.finds(own) {
			return err
		}
		found = true
		t, err := s.removal(socket, own, sweeping)
		if err != nil {
			return err
		}
		return t.commit(socket)
	})
	return found, err
}

func (f *Finder) sweepNFTables(run redirection.Runner) error {
	return f.retry(run, func(socket *rawnetlink.Socket) error {
		s, err := look(socket)
		if err != nil {
			return err
		}
		var t transaction
		for _, id := range s.ids() {
			if id.madeByIPTables() {
				s.sweep(&t, id, nil)
			}
		}
		return t.commit(socket)
	})
}

// retry starts again, with a fresh socket, where the rules changed meanwhile.
func (f *Finder) retry(run redirection.Runner, fn func(*rawnetlink.Socket) error) error {
	var err error
	for range attempts {
		err = f.within(run, fn)
		// What was to go has gone, or has got a new rule.
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EBUSY) && !errors.Is(err, rawnetlink.ErrInterrupted) {
			return err
		}
	}
	return fmt.Errorf("somebody changes the same rules, %d times in a row: %w", attempts, err)
}

// removal returns the transaction that takes out all that is doomed.
func (s survey) removal(socket *rawnetlink.Socket, own Means, sweeping sweeping) (transaction, error) {
	var t transaction
	for _, id := range s.ids() {
		if id.doomed(own) {
			t.deleteTable(id, whateverItHolds)
			continue
		}
		var doomed []string
		for _, c := range s.chains {
			if c.table == id && c.doomed(own) {
				doomed = append(doomed, c.name)
			}
		}
		if len(doomed) == 0 {
			continue
		}
		references, err := s.references(socket, id, doomed, sweeping)
		if err != nil {
			return transaction{}, err
		}
		for _, r := range references {
			t.deleteRule(id, r)
		}
		for _, name := range doomed {
			t.flushChain(id, name)
		}
		for _, name := range doomed {
			t.deleteChain(id, name)
		}
		if sweeping == sweep {
			s.sweep(&t, id, references)
		}
	}
	return t, nil
}

// references returns the rules outside the doomed chains that lead into them. In
// the host's netns it looks in base chains only: others' tables may be long there.
func (s survey) references(socket *rawnetlink.Socket, id tableID, doomed []string, sweeping sweeping) ([]rule, error) {
	in := []string{""} // all of the table
	if sweeping == keepTables {
		in = nil
		for _, c := range s.chains {
			if c.table == id && c.base {
				in = append(in, c.name)
			}
		}
	}
	var found []rule
	for _, name := range in {
		rules, err := rulesOf(socket, id, name)
		if err != nil {
			return nil, err
		}
		for _, r := range rules {
			if slices.Contains(doomed, r.target) && !slices.Contains(doomed, r.chain) {
				found = append(found, r)
			}
		}
	}
	return found, nil
}

// sweep adds the deletion of a table of iptables-nft, if nothing but empty built-in
// chains will be left of it once the rules in deleted and the doomed chains are
// gone. The kernel refuses the transaction if somebody has used one meanwhile.
func (s survey) sweep(t *transaction, id tableID, deleted []rule) {
	var bases []string
	objects := s.tables[id]
	for _, c := range s.chains {
		if c.table != id {
			continue
		}
		objects--
		if !c.base {
			if !t.deletes(id, c.name) {
				return
			}
			continue
		}
		gone := 0
		for _, r := range deleted {
			if r.chain == c.name {
				gone++
			}
		}
		if c.drops || int(c.use) != gone {
			return
		}
		bases = append(bases, c.name)
	}
	if objects != 0 { // sets and the like
		return
	}
	for _, name := range bases {
		t.deleteChain(id, name)
	}
	t.deleteTable(id, ifEmpty)
}

// look reads tables and chains of all families.
func look(socket *rawnetlink.Socket) (survey, error) {
	s := survey{tables: map[tableID]uint32{}}
	err := dump(socket, unix.NFT_MSG_GETTABLE, unix.NFPROTO_UNSPEC, nil, func(family byte, f fields) {
		s.tables[tableID{family, f.text(unix.NFTA_TABLE_NAME)}] = f.number(unix.NFTA_TABLE_USE)
	})
	if err != nil {
		return survey{}, fmt.Errorf("reading the tables of nf_tables: %w", err)
	}
	if len(s.tables) == 0 {
		return s, nil
	}
	err = dump(socket, unix.NFT_MSG_GETCHAIN, unix.NFPROTO_UNSPEC, nil, func(family byte, f fields) {
		s.chains = append(s.chains, chain{
			table: tableID{family, f.text(unix.NFTA_CHAIN_TABLE)}, name: f.text(unix.NFTA_CHAIN_NAME),
			base: f[unix.NFTA_CHAIN_HOOK] != nil, use: f.number(unix.NFTA_CHAIN_USE),
			drops: f[unix.NFTA_CHAIN_POLICY] != nil && f.number(unix.NFTA_CHAIN_POLICY) != nfAccept,
		})
	})
	if err != nil {
		return survey{}, fmt.Errorf("reading the chains of nf_tables: %w", err)
	}
	return s, nil
}

// rulesOf reads the rules of a chain, or with "" of a table.
func rulesOf(socket *rawnetlink.Socket, id tableID, chain string) ([]rule, error) {
	filter := appendText(nil, unix.NFTA_RULE_TABLE, id.name)
	if chain != "" {
		filter = appendText(filter, unix.NFTA_RULE_CHAIN, chain)
	}
	var rules []rule
	err := dump(socket, unix.NFT_MSG_GETRULE, id.family, filter, func(_ byte, f fields) {
		if f.text(unix.NFTA_RULE_TABLE) != id.name { // kernels before 5.1 do not filter
			return
		}
		rules = append(rules, rule{chain: f.text(unix.NFTA_RULE_CHAIN), handle: slices.Clone(f[unix.NFTA_RULE_HANDLE]),
			target: target(f[unix.NFTA_RULE_EXPRESSIONS])})
	})
	if err != nil {
		return nil, fmt.Errorf("reading the rules of table %s: %w", id.name, err)
	}
	return rules, nil
}

// target returns the chain that one of a rule's expressions jumps or goes to.
func target(expressions []byte) string {
	for len(expressions) > 0 {
		element, rest, err := rawnetlink.NextAttribute(expressions)
		if err != nil {
			return ""
		}
		expressions = rest
		expression := fieldsOf(element.Data)
		if expression.text(unix.NFTA_EXPR_NAME) != "immediate" {
			continue
		}
		data := fieldsOf(fieldsOf(expression[unix.NFTA_EXPR_DATA])[unix.NFTA_IMMEDIATE_DATA])
		if name := fieldsOf(data[unix.NFTA_DATA_VERDICT]).text(unix.NFTA_VERDICT_CHAIN); name != "" {
			return name
		}
	}
	return ""
}

// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
)

// ruleSet is what one combination of options and families needs, encoded once.
type ruleSet struct {
	creation    *batch // where there is no table of ours
	replacement *batch // where there may be one
	want        *table
	meanings    map[string]string // what a rule's expressions mean in the model's words
	// good is what a kernel reported that a full comparison found to be as wanted, nil until then. Equal messages need
	// no other comparison.
	good atomic.Pointer[report]
}

func newRuleSet(rules []redirection.Rule) (*ruleSet, error) {
	chains := arrange(rules)
	creation, err := encodeCreation(chains)
	if err != nil {
		return nil, err
	}
	replacement, err := encodeReplacement(chains)
	if err != nil {
		return nil, err
	}
	want, err := decode(redirection.NFTablesTable, creation.bytes)
	if err != nil {
		return nil, fmt.Errorf("reading back the encoded rules: %w", err)
	}
	set := &ruleSet{creation: creation, replacement: replacement, want: want, meanings: map[string]string{}}
	for i, c := range chains {
		for j, l := range c.lines {
			set.meanings[want.chains[i].rules[j].expressions] = l.String()
		}
	}
	want.explain(set.meanings)
	return set, nil
}

// install makes our table hold the rule set, in one transaction. Replacing a table costs the kernel a grace period later
// on, so that is not done where, before, there was none.
func (s *ruleSet) install(socket *rawnetlink.Socket, before status) error {
	if !before.exists {
		err := commit(socket, s.creation)
		if !errors.Is(err, unix.EEXIST) {
			return err
		}
		// Somebody else was faster.
	}
	return commit(socket, s.replacement)
}

// compare reads our table and returns in what it differs from the rule set.
func (s *ruleSet) compare(socket *rawnetlink.Socket) ([]redirection.Difference, error) {
	got, err := read(socket)
	if errors.Is(err, unix.ENOENT) {
		return []redirection.Difference{{
			What: "table " + redirection.NFTablesTable,
			Want: fmt.Sprintf("%d chains", len(s.want.chains)),
		}}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading table %s: %w", redirection.NFTablesTable, err)
	}
	if good := s.good.Load(); good != nil && good.equal(got) {
		return nil, nil
	}
	decoded, err := got.decode()
	if err != nil {
		return nil, fmt.Errorf("reading table %s: %w", redirection.NFTablesTable, err)
	}
	decoded.explain(s.meanings)
	found := differences(s.want, decoded)
	if len(found) == 0 {
		s.good.Store(got.clone())
	}
	return found, nil
}

// commit sends a transaction. The kernel may report more than one message; the first refusal is why nothing happened.
func commit(socket *rawnetlink.Socket, b *batch) error {
	refused, err := socket.Execute(b.bytes, b.last)
	if err != nil {
		return fmt.Errorf("changing packet rules: %w", err)
	}
	if len(refused) > 0 {
		return fmt.Errorf("%s: %w", b.describe(refused[0].Sequence), refused[0])
	}
	return nil
}

// maxRuleSets bounds the cache: options hold interface names that a pod's author chooses.
const maxRuleSets = 256

// cache holds encoded rule sets. Its zero value is empty and ready. It may be used concurrently.
type cache struct {
	mu   sync.RWMutex
	sets map[cacheKey]*ruleSet
}

type cacheKey struct {
	options  string
	families redirection.Families
}

// get returns the rule set for the options and families, encoding it when it is not held.
func (c *cache) get(opts redirection.Options, families redirection.Families) (*ruleSet, error) {
	key := cacheKey{options: opts.Key(), families: families}
	c.mu.RLock()
	set := c.sets[key]
	c.mu.RUnlock()
	if set != nil {
		return set, nil
	}
	set, err := newRuleSet(redirection.Rules(opts, families))
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if held := c.sets[key]; held != nil {
		return held, nil // encoded twice at the same time; one of them is to be known everywhere
	}
	if len(c.sets) >= maxRuleSets || c.sets == nil {
		// Which sets are in use is not worth tracking: encoding one takes less than a millisecond.
		c.sets = map[cacheKey]*ruleSet{}
	}
	c.sets[key] = set
	return set, nil
}

// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
)

// ruleSet is what one combination of options and families needs, encoded once.
type ruleSet struct {
	creation    *batch // where there never was a transaction, and so is no table of ours
	replacement *batch // where there may be one
	key         string // stands for the messages, for processes after this one
	chains      []chainChanges
	want        *table
	meanings    map[string]string // what a rule's expressions mean in the model's words
	initial     handles           // of the rules of a table that was made at once, if the kernel counts chains and rules from 1
	// proven is set once a full comparison has found that a kernel made of these messages what they are meant to say.
	proven atomic.Bool
	// good is what a kernel reported then of a table that was made at once, nil until then. Equal messages need no other
	// comparison.
	good atomic.Pointer[report]
}

func newRuleSet(rules []redirection.Rule) (*ruleSet, error) {
	arranged := arrange(rules)
	chains, err := encodeChains(redirection.NFTablesTable, arranged)
	if err != nil {
		return nil, err
	}
	all := joinChains(chains)
	s := &ruleSet{
		creation:    assembleAt(firstGeneration, slices.Concat([]change{addTable(redirection.NFTablesTable, unix.NLM_F_EXCL)}, all)),
		replacement: assembleEchoed(slices.Concat(replaceTable(redirection.NFTablesTable), all)),
		chains:      chains,
		meanings:    map[string]string{},
		initial:     handles{},
	}
	s.key = keyOfMessages(s.creation.bytes)
	if s.want, err = decode(redirection.NFTablesTable, s.creation.bytes); err != nil {
		return nil, fmt.Errorf("reading back the encoded rules: %w", err)
	}
	next := uint64(1)
	for i, c := range arranged {
		next++ // the chain's own
		var ofChain []uint64
		for j, l := range c.lines {
			s.meanings[s.want.chains[i].rules[j].expressions] = l.String()
			ofChain = append(ofChain, next)
			next++
		}
		s.initial[chainName(c.chain)] = ofChain
	}
	s.want.explain(s.meanings)
	return s, nil
}

// install makes our table hold the rule set, in one transaction, and returns what the namespace held after it. Replacing a
// table costs the kernel a grace period later on, so that is not done where, before, there was none.
func (s *ruleSet) install(socket *rawnetlink.Socket, before status) (sighting, error) {
	if !before.exists {
		after, err := s.create(socket, before.generation)
		if !errors.Is(err, unix.ERESTART) {
			return after, err
		}
		// Somebody else was faster, whatever that made.
	}
	answers, err := commitEchoed(socket, s.replacement)
	return sighting{generation: generationOf(answers), set: s, handles: s.initial}, err
}

// firstGeneration is that of a namespace whose packet rules nobody has ever changed.
const firstGeneration = 1

// create makes our table at a generation at which there is none. At another one, it fails with ERESTART.
func (s *ruleSet) create(socket *rawnetlink.Socket, generation uint32) (sighting, error) {
	creation := s.creation
	if generation != firstGeneration {
		creation = creation.at(generation, socket)
	}
	err := commit(socket, creation)
	return sighting{generation: next(generation), set: s, handles: s.initial}, err
}

// compare reads our table and returns in what it differs from the rule set. If it does not, it returns the handles of its
// rules.
func (s *ruleSet) compare(socket *rawnetlink.Socket) (handles, []redirection.Difference, error) {
	got, err := read(socket)
	if errors.Is(err, unix.ENOENT) {
		return nil, []redirection.Difference{{
			What: "table " + redirection.NFTablesTable,
			Want: fmt.Sprintf("%d chains", len(s.want.chains)),
		}}, nil
	}
	if errors.Is(err, rawnetlink.ErrTooLong) {
		return nil, []redirection.Difference{{
			What: "table " + redirection.NFTablesTable,
			Want: fmt.Sprintf("%d chains", len(s.want.chains)),
			Got:  fmt.Sprintf("more than %d KiB of rules, or of chains in all tables of the pod", maxDump>>10),
		}}, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("reading table %s: %w", redirection.NFTablesTable, err)
	}
	if good := s.good.Load(); good != nil && good.equal(got) {
		return s.initial, nil, nil
	}
	decoded, err := got.decode()
	if err != nil {
		return nil, nil, fmt.Errorf("reading table %s: %w", redirection.NFTablesTable, err)
	}
	decoded.explain(s.meanings)
	if found := differences(s.want, decoded); len(found) > 0 {
		return nil, found, nil
	}
	s.proven.Store(true)
	if s.isInitial(decoded.handles()) {
		s.good.Store(got.clone())
	}
	return decoded.handles(), nil, nil
}

// isInitial reports whether handles are those of a table that was made at once.
func (s *ruleSet) isInitial(h handles) bool {
	return maps.EqualFunc(h, s.initial, slices.Equal[[]uint64])
}

// commit sends a transaction. The kernel may report more than one message; the first refusal is why nothing happened.
func commit(socket *rawnetlink.Socket, b *batch) error {
	_, err := commitEchoed(socket, b)
	return err
}

// commitEchoed likewise returns what the kernel answered.
func commitEchoed(socket *rawnetlink.Socket, b *batch) ([]byte, error) {
	answers, refused, err := socket.ExecuteEchoed(b.bytes, b.last)
	if err != nil {
		return nil, fmt.Errorf("changing packet rules: %w", err)
	}
	if len(refused) > 0 {
		return nil, fmt.Errorf("%s: %w", b.describe(refused[0].Sequence), refused[0])
	}
	return answers, nil
}

// maxRuleSets bounds the cache: options hold names and numbers that a pod's author chooses.
const maxRuleSets = 256

// cache holds encoded rule sets. Its zero value is empty and ready. It may be used concurrently.
type cache struct {
	mu   sync.RWMutex
	sets map[cacheKey]*ruleSet
}

// cacheKey is equal for options that make the same rules in the same families.
type cacheKey struct {
	families               redirection.Families
	bypass, dns, ipv6      bool
	established            bool
	uncaptured             redirection.Uncaptured
	sourceIPv4, sourceIPv6 netip.Addr
	lists                  string // what the options' lists say; most pods have none, and making a text of them takes a while
}

func keyOf(o redirection.Options, families redirection.Families) cacheKey {
	key := cacheKey{
		families: families, bypass: o.InboundBypass, dns: o.DNSCapture, ipv6: o.IPv6, established: o.KeepEstablished,
		uncaptured: o.IPv6Uncaptured, sourceIPv4: o.ProbeSourceIPv4, sourceIPv6: o.ProbeSourceIPv6,
	}
	lists := len(o.RerouteInterfaces) + len(o.ExcludeInboundPorts) + len(o.ExcludeOutboundPorts) +
		len(o.ExcludeOutboundCIDRs) + len(o.ExcludeInterfaces)
	if lists > 0 {
		key.lists = o.Key()
	}
	return key
}

// get returns the rule set for the options and families, encoding it when it is not held.
func (c *cache) get(opts redirection.Options, families redirection.Families) (*ruleSet, error) {
	key := keyOf(opts, families)
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

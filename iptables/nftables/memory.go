// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"crypto/sha256"
	"encoding/base64"

	"ambientd/iptables/redirection"
)

// Whoever starts anew knows no namespace's rules, and reading them all is most of what verifying a node's pods takes. "At
// number G this namespace held that rule set" is as true as before, so it may be told by the process before, if that ran
// since the last boot: cookies and numbers start anew with the kernel.

// comparing is part of what stands for a rule set. It is to be changed with how [ruleSet.compare] compares: what an
// earlier program took for equal says nothing then.
const comparing = "1"

// keyOfMessages returns what stands for a rule set: it says which messages make it.
func keyOfMessages(messages []byte) string {
	sum := sha256.Sum256(append([]byte(comparing), messages...))
	return base64.RawStdEncoding.EncodeToString(sum[:])
}

// Seen returns what is known of the packet rules in the namespace with that cookie, to be kept for [Backend.Recall].
func (b *Backend) Seen(cookie uint64) (redirection.Sighting, bool) {
	seen, known := b.seen.last(cookie)
	if !known {
		return redirection.Sighting{}, false
	}
	return redirection.Sighting{
		Generation: seen.generation, Rules: seen.set.key, Numbered: seen.numbered,
	}, true
}

// Recall tells what a process before this one has seen since the last boot. Where the kernel's number is still the same,
// and the rules wanted are those, [Backend.Verify] does not read them.
func (b *Backend) Recall(cookie uint64, seen redirection.Sighting) {
	b.seen.recall(cookie, seen)
}

// recognize reports whether a process before this one has seen that the namespace held the rule set at that generation.
// It has compared everything then, and its kernel was this one.
func (b *Backend) recognize(cookie uint64, generation uint32, set *ruleSet) bool {
	recalled, is := b.seen.takeRecalled(cookie)
	if !is || recalled.Generation != generation || recalled.Rules != set.key {
		return false
	}
	seen := sighting{generation: generation, set: set, numbered: recalled.Numbered}
	set.proven.Store(true)
	if recalled.Numbered {
		seen.handles = set.initial
		b.counts.Store(true)
	}
	b.seen.record(cookie, seen)
	return true
}

// recall keeps what is told of a namespace of which nothing is known yet.
func (s *sightings) recall(cookie uint64, told redirection.Sighting) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.recalled == nil {
		s.recalled = map[uint64]redirection.Sighting{}
	}
	if len(s.recalled) < maxSightings { // each one left out costs one full comparison
		s.recalled[cookie] = told
	}
}

// takeRecalled returns what was told of the namespace, once.
func (s *sightings) takeRecalled(cookie uint64) (redirection.Sighting, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	told, is := s.recalled[cookie]
	delete(s.recalled, cookie)
	return told, is
}

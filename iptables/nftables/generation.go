// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
)

// The kernel counts the transactions of each network namespace, foreign ones included: nothing in its packet rules can
// change while the number stays (nft_base_seq, net/netfilter/nf_tables_api.c). So "at number G this namespace held that
// rule set" stays true for good, and asking for the number, which takes 3 µs, tells whether it still holds it.

// status is what the kernel says of a namespace's packet rules without listing them.
type status struct {
	generation uint32
	exists     bool // the table that was asked for does
}

// readStatus asks for the generation and for a table.
func readStatus(socket *rawnetlink.Socket, table string) (status, error) {
	ofTable := rawnetlink.Message{Type: messageType(unix.NFT_MSG_GETTABLE), Flags: unix.NLM_F_REQUEST, Payload: ofTable(table)}
	return ask(socket, ofTable, generationRequest())
}

// readGeneration asks for the generation alone.
func readGeneration(socket *rawnetlink.Socket) (uint32, error) {
	s, err := ask(socket, generationRequest())
	return s.generation, err
}

func generationRequest() rawnetlink.Message {
	return rawnetlink.Message{
		Type: messageType(unix.NFT_MSG_GETGEN), Flags: unix.NLM_F_REQUEST, Payload: binary.BigEndian.AppendUint32(nil, 0), // no family
	}
}

func ask(socket *rawnetlink.Socket, requests ...rawnetlink.Message) (status, error) {
	all := make([]byte, 0, 128)
	for _, request := range requests {
		all = rawnetlink.AppendMessage(all, request)
	}
	answers, err := socket.Query(all, len(requests))
	var s status
	for err == nil && len(answers) > 0 {
		var m rawnetlink.Message
		if m, answers, err = rawnetlink.Next(answers); err == nil {
			err = s.take(m)
		}
	}
	if err != nil {
		return status{}, fmt.Errorf("reading the generation of the packet rules: %w", err)
	}
	return s, nil
}

// take takes up an answer.
func (s *status) take(m rawnetlink.Message) error {
	switch err := m.Failure(); {
	case errors.Is(err, unix.ENOENT): // there is no such table
	case err != nil:
		return err
	case m.Type == messageType(unix.NFT_MSG_NEWTABLE):
		s.exists = true
	case m.Type == messageType(unix.NFT_MSG_NEWGEN) && len(m.Payload) >= nfgenHeader:
		s.generation = bigEndian(lookup(m.Payload[nfgenHeader:], unix.NFTA_GEN_ID))
	}
	return nil
}

// maxSightings bounds the memory of namespaces, some of which go without a word.
const maxSightings = 4096

// sightings remembers which namespace held which rule set at which generation. Its zero value is empty and ready. It may
// be used concurrently.
type sightings struct {
	mu       sync.Mutex
	seen     map[uint64]sighting // by netns cookie
	recalled map[uint64]redirection.Sighting
}

// sighting is what a namespace held at a generation.
type sighting struct {
	generation uint32
	set        *ruleSet
	handles    handles // of its rules; nil if they are not known
	numbered   bool    // the handles are those of a table that was made at once
}

// handles are the kernel's numbers for the rules of a table, by the name of their chain.
type handles map[string][]uint64

// record notes what the namespace held.
func (s *sightings) record(cookie uint64, seen sighting) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.seen) >= maxSightings || s.seen == nil {
		s.seen = map[uint64]sighting{} // each one forgotten costs one full comparison
	}
	s.seen[cookie] = seen
}

// last returns what is known of the namespace, if anything is.
func (s *sightings) last(cookie uint64) (sighting, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	seen, known := s.seen[cookie]
	return seen, known
}

// holds reports whether the namespace is known to have held the rule set at that generation.
func (s *sightings) holds(cookie uint64, generation uint32, set *ruleSet) bool {
	seen, known := s.last(cookie)
	return known && seen.generation == generation && seen.set == set
}

// forget drops what is known of the namespace.
func (s *sightings) forget(cookie uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.seen, cookie)
	delete(s.recalled, cookie)
}

// generationOf returns the generation that a transaction made, from what it echoed; 0, which no generation is, if it does
// not say.
func generationOf(answers []byte) uint32 {
	for len(answers) > 0 {
		m, rest, err := rawnetlink.Next(answers)
		if err != nil {
			return 0
		}
		if m.Type == messageType(unix.NFT_MSG_NEWGEN) && len(m.Payload) >= nfgenHeader {
			return bigEndian(lookup(m.Payload[nfgenHeader:], unix.NFTA_GEN_ID))
		}
		answers = rest
	}
	return 0
}

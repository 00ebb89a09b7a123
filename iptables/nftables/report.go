// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
)

// report is what the kernel says of our table, as it says it.
type report struct {
	objects []byte // our table, and the chains of all tables of its family
	rules   []byte // of our table
}

// readAttempts bounds how often a read starts again because of a change meanwhile.
const readAttempts = 5

// maxDump bounds what is read of a table, in bytes, of which ours has some thousands: a pod with the capability to change
// its network can have any number of rules.
const maxDump = 256 << 10

// read returns a consistent report. It fails with ENOENT if there is no table of ours, and with
// [rawnetlink.ErrTooLong] if there is more in it, or more chains in all tables, than anybody of ours makes.
func read(socket *rawnetlink.Socket) (report, error) {
	for range readAttempts {
		r, err := readOnce(socket)
		if !errors.Is(err, rawnetlink.ErrInterrupted) {
			return r, err
		}
	}
	return report{}, fmt.Errorf("%w, %d times in a row", rawnetlink.ErrInterrupted, readAttempts)
}

func readOnce(socket *rawnetlink.Socket) (report, error) {
	objects, err := socket.Dump(objectsRequest(redirection.NFTablesTable), maxDump)
	if err != nil {
		return report{}, err
	}
	rules, err := socket.Dump(rulesRequest(redirection.NFTablesTable), maxDump)
	if err != nil {
		return report{}, err
	}
	if !sameGeneration(objects, rules) {
		return report{}, rawnetlink.ErrInterrupted
	}
	return report{objects: objects, rules: rules}, nil
}

// sameGeneration reports whether all messages are from one generation of the namespace's rules: nfgenmsg.res_id holds
// the lower 16 bits of its number.
func sameGeneration(answers ...[]byte) bool {
	var generation []byte
	for _, part := range answers {
		for len(part) > 0 {
			m, rest, err := rawnetlink.Next(part)
			if err != nil || len(m.Payload) < nfgenHeader {
				return false
			}
			if generation == nil {
				generation = m.Payload[2:4]
			}
			if !bytes.Equal(generation, m.Payload[2:4]) {
				return false
			}
			part = rest
		}
	}
	return true
}

// equal reports whether two reports say the same, handles included, apart from what differs between namespaces that hold
// the same rules: the generation, and the handle of the table.
func (r report) equal(other report) bool {
	return sameMessages(r.objects, other.objects) && sameMessages(r.rules, other.rules)
}

func sameMessages(a, b []byte) bool {
	for {
		messageA, restA, okA := nextOurs(a)
		messageB, restB, okB := nextOurs(b)
		if !okA || !okB {
			return okA == okB
		}
		if messageA.Type != messageB.Type {
			return false
		}
		bodyA, bodyB := messageA.Payload[nfgenHeader:], messageB.Payload[nfgenHeader:]
		if messageA.Type == messageType(unix.NFT_MSG_NEWTABLE) {
			if !sameTable(bodyA, bodyB) {
				return false
			}
		} else if !bytes.Equal(bodyA, bodyB) {
			return false
		}
		a, b = restA, restB
	}
}

// sameTable compares what decode takes of a table.
func sameTable(a, b []byte) bool {
	for _, kind := range []uint16{unix.NFTA_TABLE_FLAGS, unix.NFTA_TABLE_USE} {
		if !bytes.Equal(lookup(a, kind), lookup(b, kind)) {
			return false
		}
	}
	return true
}

// nextOurs returns the first message about our table and what follows it; false when there is none, or a broken one,
// which the full comparison will report.
func nextOurs(b []byte) (rawnetlink.Message, []byte, bool) {
	for len(b) > 0 {
		m, rest, err := rawnetlink.Next(b)
		if err != nil {
			return rawnetlink.Message{}, nil, false
		}
		if isAbout(m, redirection.NFTablesTable) {
			return m, rest, true
		}
		b = rest
	}
	return rawnetlink.Message{}, nil, false
}

// isAbout reports whether a message is about a table of family inet or something in it. The table's name is attribute 1
// of tables, chains, rules, sets and lists of elements.
func isAbout(m rawnetlink.Message, table string) bool {
	if len(m.Payload) < nfgenHeader || m.Payload[0] != unix.NFPROTO_INET {
		return false
	}
	return string(lookup(m.Payload[nfgenHeader:], unix.NFTA_TABLE_NAME)) == table+"\x00"
}

// clone returns a copy that does not alias the socket's buffer.
func (r report) clone() *report {
	return &report{objects: bytes.Clone(r.objects), rules: bytes.Clone(r.rules)}
}

func (r report) decode() (*table, error) {
	return decode(redirection.NFTablesTable, slices.Concat(r.objects, r.rules))
}

// nfgenHeader is the length of struct nfgenmsg: family, version, and 16 bits that answers use for the generation.
const nfgenHeader = 4

// objectsRequest asks for a table and for the chains of all tables of its family. Chains cannot be asked for by table; a
// pod's namespace holds few others.
func objectsRequest(table string) []byte {
	b := rawnetlink.AppendMessage(make([]byte, 0, 64), rawnetlink.Message{
		Type: messageType(unix.NFT_MSG_GETTABLE), Flags: unix.NLM_F_REQUEST, Payload: ofTable(table),
	})
	return rawnetlink.AppendMessage(b, rawnetlink.Message{
		Type: messageType(unix.NFT_MSG_GETCHAIN), Flags: unix.NLM_F_REQUEST | unix.NLM_F_DUMP, Payload: ofFamily(),
	})
}

// rulesRequest asks for the rules of a table.
func rulesRequest(table string) []byte {
	return rawnetlink.AppendMessage(make([]byte, 0, 48), rawnetlink.Message{
		Type: messageType(unix.NFT_MSG_GETRULE), Flags: unix.NLM_F_REQUEST | unix.NLM_F_DUMP,
		Payload: ofTable(table),
	})
}

func ofFamily() []byte { return []byte{unix.NFPROTO_INET, unix.NFNETLINK_V0, 0, 0} }

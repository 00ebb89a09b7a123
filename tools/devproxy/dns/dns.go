// SPDX-License-Identifier: Apache-2.0

// Package dns answers a pod's captured DNS queries over UDP. The proxy cannot
// learn to which resolver a redirected UDP packet was going, but it can for
// TCP; so every answer is an empty one with the "truncated" flag, upon which
// the pod's stub resolver asks the same resolver again over TCP (RFC 7766), and
// that connection is relayed like any other.
//
// It owns nothing beyond that answer: it resolves no name and keeps no state.
package dns

import (
	"errors"
	"net"
)

// The layout of a message, RFC 1035, section 4.1.
const (
	headerSize   = 12
	maxQuestion  = 255 + 4 // a name, type and class
	flagResponse = 0x80    // in the header's third byte
	flagTrunc    = 0x02
	keepOfQuery  = 0x79 // opcode and "recursion desired"
	flagRecurse  = 0x80 // "recursion available", in the fourth byte
)

var errNotAQuery = errors.New("packet is no DNS query with one question")

// Serve answers what arrives on c until it is closed, and returns that error.
// What is no query is dropped.
func Serve(c *net.UDPConn) error {
	buf := make([]byte, 64<<10)
	for {
		n, client, err := c.ReadFromUDPAddrPort(buf)
		if err != nil {
			return err
		}
		answer, err := truncated(buf[:n])
		if err != nil {
			continue
		}
		if _, err := c.WriteToUDPAddrPort(answer, client); err != nil && errors.Is(err, net.ErrClosed) {
			return err // any other error concerns this client only, who asks again
		}
	}
}

// truncated returns the answer to a query.
func truncated(query []byte) ([]byte, error) {
	if len(query) < headerSize || query[2]&flagResponse != 0 || query[4] != 0 || query[5] != 1 {
		return nil, errNotAQuery
	}
	end, err := questionEnd(query)
	if err != nil {
		return nil, err
	}
	answer := make([]byte, end)
	copy(answer, query)
	answer[2] = query[2]&keepOfQuery | flagResponse | flagTrunc
	answer[3] = flagRecurse
	clear(answer[6:headerSize]) // no answer, authority or additional record
	return answer, nil
}

// questionEnd returns where the only question ends.
func questionEnd(query []byte) (int, error) {
	at := headerSize
	for at < len(query) && at-headerSize < maxQuestion {
		length := int(query[at])
		if length > 63 {
			return 0, errNotAQuery // a compressed name has nothing to refer to
		}
		at += 1 + length
		if length == 0 {
			at += 4
			if at > len(query) {
				break
			}
			return at, nil
		}
	}
	return 0, errNotAQuery
}

// SPDX-License-Identifier: Apache-2.0

// Package policyroute owns the policy rule and the route that redirection needs next to its packet rules: packets that
// carry the connection mark look up a table of ours, in which every destination is local. It also owns the question
// which IP families a network namespace has, since it is loopback's state that decides it. It refuses to know packet
// rules; both backends share it.
//
// # Why
//
// The proxy dials the application from the original source address. The application's answer to that address would
// leave the pod; row 6 of the model marks it, and this rule and route bring it back to the proxy's socket.
//
// # Whose table
//
// Inside an enrolled pod's namespace, routing table 100 and rule priority 32764 belong to redirection, in the families
// that it covers: any other rule at that priority, and any other route in that table, can take answers away from the
// proxy. They count as differences, and Apply deletes them. Outside that, nothing of others is looked at.
//
// # What the kernel makes of it
//
// rtnetlink is not transactional, so Apply undoes what it has done when a later message is refused. A route needs an
// enabled device: with lo down IPv6 refuses it (ENETDOWN), and a lo that goes down and up again keeps the IPv4 route but
// loses the IPv6 one. With IPv6 switched off the rule would succeed and only the route fail (EACCES).
package policyroute

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
)

// ErrLoopbackDown means that the namespace's lo is down. Nothing can be redirected to a local port then, and routes to
// it cannot be made.
var ErrLoopbackDown = errors.New("loopback device lo is down: a container runtime brings it up (loopback plugin) before it calls CNI plugins")

// Conn looks at and changes the policy routing of one network namespace, through a socket that was opened in it. It is
// for one goroutine at a time.
type Conn struct {
	socket *rawnetlink.Socket
}

// New wraps a socket of unix.NETLINK_ROUTE, which stays the caller's to close.
func New(socket *rawnetlink.Socket) (*Conn, error) {
	if err := socket.SetStrict(); err != nil {
		return nil, err
	}
	return &Conn{socket: socket}, nil
}

// Undo takes back what one Apply added. The zero value takes back nothing.
type Undo struct {
	conn     *Conn
	requests []request
}

// Read returns the state of the namespace: of loopback, of the rules at our priority, and of the routes in our table.
func (c *Conn) Read() (*State, error) {
	s := &State{}
	request := rawnetlink.AppendMessage(make([]byte, 0, 128), linkRequest())
	if err := c.complete(s, request); err != nil {
		return nil, err
	}
	return s, nil
}

// ReadLoopback returns the state of loopback alone, which is enough to know the namespace's families.
// [Conn.Complete] reads the rest.
func (c *Conn) ReadLoopback() (*State, error) {
	answer, err := c.socket.Query(rawnetlink.AppendMessage(make([]byte, 0, 64), linkRequest()), 1)
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", redirection.Loopback, err)
	}
	m, _, err := rawnetlink.Next(answer)
	if err == nil {
		err = m.Failure()
	}
	s := &State{}
	if err == nil {
		err = s.readLoopback(m.Payload)
	}
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", redirection.Loopback, err)
	}
	return s, nil
}

// Complete reads the rules at our priority and the routes in our table into a state that has loopback's.
func (c *Conn) Complete(s *State) error { return c.complete(s, nil) }

// readAttempts bounds how often a read starts again because something changed under it.
const readAttempts = 5

// complete reads rules and routes. What it asks in front of them is no dump.
func (c *Conn) complete(s *State, before []byte) error {
	for range readAttempts {
		s.rules, s.routes = nil, nil
		err := c.dump(rawnetlink.AppendMessage(slices.Clip(before), ruleDumpRequest()), s)
		if err == nil {
			err = c.dump(rawnetlink.AppendMessage(make([]byte, 0, 64), routeDumpRequest()), s)
		}
		if !errors.Is(err, rawnetlink.ErrInterrupted) {
			if err != nil {
				return fmt.Errorf("reading %s, the policy rules and the routes of table %d: %w", redirection.Loopback, redirection.RouteTable, err)
			}
			return nil
		}
	}
	return fmt.Errorf("reading policy routing: %w, %d times in a row", rawnetlink.ErrInterrupted, readAttempts)
}

func (c *Conn) dump(request []byte, into *State) error {
	answer, err := c.socket.Dump(request)
	if err != nil {
		return err
	}
	for len(answer) > 0 {
		var m rawnetlink.Message
		if m, answer, err = rawnetlink.Next(answer); err != nil {
			return err
		}
		switch m.Type {
		case unix.RTM_NEWLINK:
			err = into.readLoopback(m.Payload)
		case unix.RTM_NEWRULE:
			err = into.addRule(m.Payload)
		case unix.RTM_NEWROUTE:
			err = into.addRoute(m.Payload)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Apply makes rule and route of each family be there once, and takes away what stands in their way or is left from
// families that are no longer covered. It starts from what Read returned; what others add or delete meanwhile is not an
// error. On an error it has taken back what it added; the Undo takes it back later.
func (c *Conn) Apply(state *State, families redirection.Families) (Undo, error) {
	if err := state.CheckLoopback(); err != nil {
		return Undo{}, err
	}
	requests := state.surplus(families)
	for _, family := range families.Each() {
		// The route first: a rule that leads to an empty table sends answers on to the default route.
		if !hasOurs(state.routes, family) {
			requests = append(requests, addRoute(family))
		}
		if !hasOurs(state.rules, family) {
			requests = append(requests, addRule(family))
		}
	}
	return c.execute(requests)
}

// Remove deletes our rules and routes in both families, and nothing else.
func (c *Conn) Remove(state *State) error {
	_, err := c.execute(state.surplus(0))
	return err
}

// Undo deletes what the Apply that returned it added.
func (u Undo) Undo() error {
	_, err := u.conn.execute(u.requests)
	return err
}

// execute sends the requests. Something that is there already, or gone already, is what was wanted. On any other refusal
// it deletes what it added.
func (c *Conn) execute(requests []request) (Undo, error) {
	undo := Undo{conn: c}
	if len(requests) == 0 {
		return undo, nil
	}
	refused, err := c.socket.Execute(encode(requests), uint32(len(requests)))
	if err != nil {
		return undo, fmt.Errorf("changing policy routing: %w", err)
	}
	added := requests
	if len(refused) > 0 {
		added = slices.Clone(requests)
	}
	for _, refusal := range slices.Backward(refused) {
		i := int(refusal.Sequence) - 1
		if i < 0 || i >= len(requests) {
			return undo, fmt.Errorf("changing policy routing: %w", refusal)
		}
		added = slices.Delete(added, i, i+1)
		if !isMoot(requests[i], refusal.Errno) {
			err = errors.Join(fmt.Errorf("%s: %w", requests[i], refusal), err)
		}
	}
	for _, r := range slices.Backward(added) {
		if r.creates() {
			undo.requests = append(undo.requests, r.inverse())
		}
	}
	if err != nil {
		return Undo{}, errors.Join(err, undo.Undo())
	}
	return undo, nil
}

// isMoot reports whether a refusal says that there was nothing left to do.
func isMoot(r request, errno unix.Errno) bool {
	if r.creates() {
		return errno == unix.EEXIST
	}
	return errno == unix.ENOENT || errno == unix.ESRCH // of rules, of routes
}

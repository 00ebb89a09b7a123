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
	"context"
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
	socket.ExpectShort()
	return &Conn{socket: socket}, nil
}

// ErrUntold means that our table holds a route that the kernel cannot tell of, so that nobody can delete it who does not
// know its destination.
var ErrUntold = errors.New("a route in our table (100) has so many ways to go that the kernel cannot list it: somebody has to delete it inside the pod, by its destination")

// Undo takes back what one Apply added. The zero value takes back nothing.
type Undo struct {
	conn     *Conn
	requests []request
}

// Read returns the state of the namespace: of loopback, of the rules at our priority, and of the routes in our table.
func (c *Conn) Read() (*State, error) {
	s, err := c.ReadRouting()
	if err != nil {
		return nil, err
	}
	if hasOurs(s.routes, redirection.IPv6) {
		// IPv6 routes go with the device that they lead to, as it goes down or IPv6 is switched off for it
		// (rt6_disable_ip, net/ipv6/route.c). So there is no need to ask.
		s.loopbackUp, s.ipv6 = true, true
		return s, nil
	}
	return s, c.askLoopback(s)
}

func (c *Conn) askLoopback(s *State) error {
	answer, err := c.socket.Query(rawnetlink.AppendMessage(make([]byte, 0, 64), linkRequest()), 1)
	if err != nil {
		return fmt.Errorf("reading %s: %w", redirection.Loopback, err)
	}
	m, _, err := rawnetlink.Next(answer)
	if err == nil {
		err = m.Failure()
	}
	if err == nil {
		err = s.readLoopback(m.Payload)
	}
	if err != nil {
		return fmt.Errorf("reading %s: %w", redirection.Loopback, err)
	}
	return nil
}

// readAttempts bounds how often a read starts again because something changed under it.
const readAttempts = 5

// maxDump bounds what is read of rules, and of routes, in bytes: some thousands of them. A pod with the capability to
// change its network can have any number.
const maxDump = 256 << 10

// ReadRouting returns the state without loopback's: what [Conn.Remove] starts from.
func (c *Conn) ReadRouting() (*State, error) {
	for range readAttempts {
		s := &State{}
		var err error
		if s.moreRules, err = c.dump(ruleDumpRequest(), s); err == nil {
			s.moreRoutes, err = c.dump(routeDumpRequest(), s)
		}
		if err == nil {
			return s, nil
		}
		if !errors.Is(err, rawnetlink.ErrInterrupted) {
			return nil, fmt.Errorf("reading the policy rules and the routes of table %d: %w", redirection.RouteTable, err)
		}
	}
	return nil, fmt.Errorf("reading policy routing: %w, %d times in a row", rawnetlink.ErrInterrupted, readAttempts)
}

// dump takes up rules or routes. If there are more than it has read, it returns how many it has.
func (c *Conn) dump(request rawnetlink.Message, into *State) (more int, err error) {
	answer, err := c.socket.Dump(rawnetlink.AppendMessage(make([]byte, 0, 64), request), maxDump)
	tooLong := errors.Is(err, rawnetlink.ErrTooLong)
	tooWide := errors.Is(err, rawnetlink.ErrTooWide)
	if err != nil && !tooLong && !tooWide {
		return 0, err
	}
	into.untold = into.untold || tooWide
	read := 0
	for ; len(answer) > 0; read++ {
		var m rawnetlink.Message
		if m, answer, err = rawnetlink.Next(answer); err != nil {
			return 0, err
		}
		switch m.Type {
		case unix.RTM_NEWRULE:
			err = into.addRule(m.Payload)
		case unix.RTM_NEWROUTE:
			err = into.addRoute(m.Payload)
		}
		if err != nil {
			return 0, err
		}
	}
	if tooLong {
		return read, nil
	}
	return 0, nil
}

// Begin does what Read and Apply do, for the families of those allowed that the namespace has, where most likely neither
// rules nor routes are there yet: it adds them, and looks after that. Whether the kernel takes them tells what loopback is
// like.
func (c *Conn) Begin(ctx context.Context, allowed redirection.Families) (*State, Undo, error) {
	var begun Undo
	if allowed == redirection.DualStack { // loopback's IPv4 route could be made, also while it is down
		var refused error
		if begun, refused = c.execute((&State{}).missing(allowed)); refused != nil {
			begun = Undo{conn: c}
		}
	}
	state, err := c.Read()
	if err != nil {
		return nil, begun, errors.Join(err, begun.Undo())
	}
	undo, err := c.Apply(ctx, state, state.Families(allowed))
	if err != nil {
		return nil, begun, errors.Join(err, begun.Undo())
	}
	undo.requests = append(undo.requests, begun.requests...)
	return state, undo, nil
}

// Apply makes rule and route of each family be there once, and takes away what stands in their way or is left from
// families that are no longer covered. It starts from what Read returned; what others add or delete meanwhile is not an
// error. On an error it has taken back what it added; the Undo takes it back later.
func (c *Conn) Apply(ctx context.Context, state *State, families redirection.Families) (Undo, error) {
	if err := state.CheckLoopback(); err != nil {
		return Undo{}, err
	}
	if err := c.thin(ctx, state, families); err != nil {
		return Undo{}, err
	}
	if state.untold {
		return Undo{}, ErrUntold
	}
	return c.execute(append(state.surplus(families), state.missing(families)...))
}

// thin deletes what should not be there until what is left can be read at once.
func (c *Conn) thin(ctx context.Context, state *State, families redirection.Families) error {
	for state.moreRoutes > 0 {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("deleting more than %d routes of table %d: %w", state.moreRoutes, redirection.RouteTable, err)
		}
		for some := range slices.Chunk(state.surplus(families), maxRequests) {
			if _, err := c.execute(some); err != nil {
				return err
			}
		}
		c.socket.Forget()
		rest, err := c.ReadRouting()
		if err != nil {
			return err
		}
		rest.loopbackUp, rest.ipv6 = state.loopbackUp, state.ipv6
		*state = *rest
	}
	return nil
}

// maxRequests bounds what is sent at once: all of it, and its answers, must fit in the socket's buffers.
const maxRequests = 256

// Remove deletes our rules and routes in both families, and nothing else.
func (c *Conn) Remove(state *State) error {
	requests := state.surplus(0)
	if state.moreRules > 0 || state.moreRoutes > 0 || state.untold { // ours may be among those that were not read
		for _, added := range slices.Backward((&State{}).missing(redirection.DualStack)) {
			requests = append(requests, added.inverse())
		}
	}
	for some := range slices.Chunk(requests, maxRequests) {
		if _, err := c.execute(some); err != nil {
			return err
		}
	}
	return nil
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

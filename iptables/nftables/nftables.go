// SPDX-License-Identifier: Apache-2.0

// Package nftables programs redirection into network namespaces through netlink, without a child process. It owns one
// table, "inet ambientd", and renders the model of package redirection into it. It refuses to touch anything outside
// that table except, through package policyroute, the policy rule and the route.
//
// # How it is fast
//
// The messages of a rule set depend on the options and on the families alone, so they are encoded once, and sent to every
// namespace as they are: one system call carries the whole transaction, one reads the
// answer. Only opening the sockets happens inside the namespace. Verification asks for the generation number of the
// namespace's rules; if it is another than when they were last seen to be right, our table is read as raw messages,
// compared with bytes that an earlier comparison found to mean the same, and else expression by expression.
//
// # What is atomic
//
// The table is replaced in one transaction: packets see the old rules or the new ones. Policy rule and route are added
// before it, harmless while no rule sets their mark, and taken back if the transaction fails.
package nftables

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"ambientd/iptables/policyroute"
	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
)

// Backend applies, verifies and removes redirection. It may be used concurrently, for different network namespaces and
// for the same one.
type Backend struct {
	sockets *rawnetlink.Sockets
	removal *batch
	rules   cache
	seen    sightings
	counts  atomic.Bool // a kernel has been seen to count rules as [ruleSet.initial] says
	host    hostSocket
}

// New returns a ready backend. It does not look at the kernel.
func New() (*Backend, error) {
	return &Backend{sockets: rawnetlink.New(), removal: encodeRemoval(redirection.NFTablesTable)}, nil
}

// Verify compares what the kernel has in the namespace with what the options call for, without writing.
// It returns the families that redirection should cover there, and every difference.
func (b *Backend) Verify(ctx context.Context, ns redirection.Netns, opts redirection.Options) (redirection.Families, []redirection.Difference, error) {
	if err := opts.Validate(); err != nil {
		return 0, nil, fmt.Errorf("redirection options: %w", err)
	}
	if err := ctx.Err(); err != nil {
		return 0, nil, err
	}
	var families redirection.Families
	var found []redirection.Difference
	err := b.within(ns, func(c *conn) error {
		state, err := c.route.Read()
		if err != nil {
			return err
		}
		families = state.Families(opts.Allowed())
		set, err := b.rules.get(opts, families)
		if err != nil {
			return err
		}
		if found, err = b.compare(c, set); err != nil {
			return err
		}
		found = append(found, state.Differences(families)...)
		return nil
	})
	if err != nil {
		return 0, nil, fmt.Errorf("verifying redirection (nftables): %w", err)
	}
	return families, found, nil
}

// Generation returns the number of the last transaction on the packet rules of the namespace, whoever's it
// was. It starts at 1 in a new namespace, so it says something only together with the namespace's key. While it stays, no
// packet rule has changed that nf_tables knows of; rules of iptables-legacy, policy rules and routes are not counted.
func (b *Backend) Generation(ctx context.Context, ns redirection.Netns) (uint64, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	var generation uint32
	err := b.packetRules(ns, func(socket *rawnetlink.Socket) (err error) {
		generation, err = readGeneration(socket)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("reading the generation of packet rules: %w", err)
	}
	return uint64(generation), nil
}

// Remove deletes our table, policy rules and routes in the namespace. Where there are none it succeeds.
func (b *Backend) Remove(ctx context.Context, ns redirection.Netns) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	err := b.within(ns, func(c *conn) error {
		_, known := b.seen.last(c.cookie)
		b.seen.forget(c.cookie)
		var err error
		if known {
			_, err = removeTable(c.packet, b.removal)
		} else {
			_, err = removeTableIfThere(c.packet, redirection.NFTablesTable, b.removal)
		}
		return errors.Join(err, removePolicyRouting(c.route)) // worth doing though the other fails
	})
	if err != nil {
		return fmt.Errorf("removing redirection (nftables): %w", err)
	}
	return nil
}

func removePolicyRouting(route *policyroute.Conn) error {
	state, err := route.ReadRouting()
	if err != nil {
		return err
	}
	return route.Remove(state)
}

// removeTableIfThere deletes a table and reports whether there was one. It looks first: a transaction that is refused
// takes the kernel a grace period, some 10 ms (__nf_tables_abort, net/netfilter/nf_tables_api.c).
func removeTableIfThere(socket *rawnetlink.Socket, name string, removal *batch) (bool, error) {
	if there, err := readStatus(socket, name); err != nil || !there.exists {
		return false, err
	}
	return removeTable(socket, removal)
}

// removeTable deletes a table that is most likely there, and reports whether it was.
func removeTable(socket *rawnetlink.Socket, removal *batch) (bool, error) {
	err := commit(socket, removal)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	return err == nil, err
}

// compare returns in what the namespace's packet rules differ from the rule set.
func (b *Backend) compare(c *conn, set *ruleSet) ([]redirection.Difference, error) {
	before, err := readGeneration(c.packet)
	if err != nil {
		return nil, err
	}
	if b.seen.holds(c.cookie, before, set) || b.recognize(c.cookie, before, set) {
		c.quiet = true
		return nil, nil
	}
	ofRules, found, err := set.compare(c.packet)
	if err != nil || len(found) > 0 {
		return found, err
	}
	after, err := readGeneration(c.packet)
	if err != nil {
		return nil, err
	}
	if after == before {
		numbered := set.isInitial(ofRules)
		if numbered {
			b.counts.Store(true)
		}
		b.seen.record(c.cookie, sighting{generation: after, set: set, handles: ofRules, numbered: numbered})
	}
	return nil, nil
}

// conn reaches one network namespace for one operation.
type conn struct {
	cookie uint64 // of the namespace
	packet *rawnetlink.Socket
	route  *policyroute.Conn
	quiet  bool // nothing can have been deleted of the packet rules a moment ago, by anybody
}

// within takes or opens the sockets of the namespace, calls fn outside of it, and gives them back or closes them.
func (b *Backend) within(ns redirection.Netns, fn func(*conn) error) (err error) {
	opened, err := b.sockets.Open(ns, unix.NETLINK_NETFILTER, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	c := &conn{packet: opened[0]}
	defer func() {
		closing := b.sockets.Close
		if c.quiet {
			closing = b.sockets.CloseNow
		}
		err = errors.Join(err, closing(opened...))
	}()
	if c.cookie, err = c.packet.NetnsCookie(); err != nil {
		return err
	}
	if c.route, err = policyroute.New(opened[1]); err != nil {
		return err
	}
	return fn(c)
}

// packetRules likewise calls fn where policy routing is no matter.
func (b *Backend) packetRules(ns redirection.Netns, fn func(*rawnetlink.Socket) error) (err error) {
	opened, err := b.sockets.Open(ns, unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, opened[0].Close()) }()
	return fn(opened[0])
}

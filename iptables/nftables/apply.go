// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"ambientd/iptables/policyroute"
	"ambientd/iptables/redirection"
)

// Apply makes redirection in the namespace exactly what the options call for, whatever was there of ours
// before, and returns the families that it covers: those allowed that the namespace has. Applying again changes nothing
// for packets. On an error the packet rules are as they were, and what was added of policy rule and route is taken back. The
// one exception is [policyroute.ErrLoopbackDown]: the packet rules are in place then, so that nothing leaves the pod past
// the proxy, and whoever enrols a new pod calls Remove.
func (b *Backend) Apply(ctx context.Context, ns redirection.Netns, opts redirection.Options) (redirection.Families, error) {
	if err := opts.Validate(); err != nil {
		return 0, fmt.Errorf("redirection options: %w", err)
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	var families redirection.Families
	err := b.within(ns, func(c *conn) (err error) {
		if known, is := b.seen.last(c.cookie); is {
			families, err = b.change(ctx, c, opts, known)
		} else {
			families, err = b.begin(ctx, c, opts)
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("applying redirection (nftables): %w", err)
	}
	return families, nil
}

// begin applies to a namespace of which nothing is known, where most likely nothing is.
func (b *Backend) begin(ctx context.Context, c *conn, opts redirection.Options) (redirection.Families, error) {
	state, undo, err := c.route.Begin(ctx, opts.Allowed())
	if errors.Is(err, policyroute.ErrLoopbackDown) {
		return 0, errors.Join(err, b.shut(c, opts, sighting{}))
	}
	if err != nil {
		return 0, err
	}
	families := state.Families(opts.Allowed())
	set, err := b.rules.get(opts, families)
	var after sighting
	if err == nil {
		// Where there was a transaction before, that ends at once. One that fails on a table which is there takes the kernel
		// a grace period, some 10 ms (__nf_tables_abort, net/netfilter/nf_tables_api.c).
		after, err = set.create(c.packet, firstGeneration)
		c.quiet = err == nil
	}
	if errors.Is(err, unix.ERESTART) {
		after, err = b.install(c, set, sighting{})
	}
	if err != nil {
		return 0, errors.Join(err, undo.Undo())
	}
	b.note(c, after)
	return families, nil
}

// change applies to a namespace of which something is known.
func (b *Backend) change(ctx context.Context, c *conn, opts redirection.Options, known sighting) (redirection.Families, error) {
	state, err := c.route.Read()
	if err != nil {
		return 0, err
	}
	families := state.Families(opts.Allowed())
	set, err := b.rules.get(opts, families)
	if err != nil {
		return 0, err
	}
	undo, err := c.route.Apply(ctx, state, families)
	if errors.Is(err, policyroute.ErrLoopbackDown) {
		return 0, errors.Join(err, b.shut(c, opts, known))
	}
	if err != nil {
		return 0, err
	}
	after, err := b.install(c, set, known)
	if err != nil {
		return 0, errors.Join(err, undo.Undo())
	}
	b.note(c, after)
	return families, nil
}

// shut makes the packet rules right where policy routing cannot be, since lo is down: they lead to the proxy, which cannot be
// reached then, and without them the pod would talk past it.
func (b *Backend) shut(c *conn, opts redirection.Options, known sighting) error {
	state, err := c.route.Read()
	if err != nil {
		return err
	}
	set, err := b.rules.get(opts, state.Families(opts.Allowed()))
	if err != nil {
		return err
	}
	after, err := b.install(c, set, known)
	if err != nil {
		return err
	}
	b.note(c, after)
	return nil
}

// install makes the namespace hold the rule set, and returns what it held then. Where it is known what it holds, that is
// nothing to do, or only what differs is changed.
func (b *Backend) install(c *conn, set *ruleSet, known sighting) (sighting, error) {
	switch {
	case known.set == set:
		if now, err := readGeneration(c.packet); err != nil || now == known.generation {
			return known, err
		}
	case known.handles != nil:
		after, err := set.amend(c.packet, known)
		if !errors.Is(err, unix.ERESTART) && !errors.Is(err, unix.ENOENT) {
			return after, err
		}
		// Something changed meanwhile: it is no longer known.
	}
	before, err := readStatus(c.packet, redirection.NFTablesTable)
	if err != nil {
		return sighting{}, err
	}
	return set.install(c.packet, before)
}

// note remembers what a namespace holds, as far as that is certain: the kernel has said which generation it is, and has
// been seen to make of these messages what they are meant to say, and to count rules as we do. Otherwise Verify will look.
func (b *Backend) note(c *conn, after sighting) {
	if after.generation == 0 || !after.set.proven.Load() {
		return
	}
	if after.numbered = after.set.isInitial(after.handles); after.numbered && !b.counts.Load() {
		after.handles, after.numbered = nil, false
	}
	b.seen.record(c.cookie, after)
}

// SPDX-License-Identifier: Apache-2.0

// Package iptables owns the rendering of the redirection model as iptables rules,
// and their life in a pod's network namespace by iptables-restore: the backend
// for systems without usable nf_tables, or whose operators want it. It does the
// same for the rule that the host's namespace needs.
//
// In each table that has rows there are at most two chains of ours, jumped to
// by the first rule of the built-in chain of the same hook. First, because the
// earliest NAT rule that matches decides: a rule of the pod's own making before
// ours would let traffic by.
//
// It refuses to guess: what is in the kernel is read with iptables-save, and
// compared with what would be written. It touches nothing but its own chains and
// the jumps to them, starts at most two child processes for each family, and
// leaves the choice between nf_tables and x_tables to package backend. The
// programs and their locks are the business of package xtables, the policy rule
// and the route that of package policyroute, and what lies in nf_tables by other
// means that of package nftables.
package iptables

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"ambientd/iptables/nftables"
	"ambientd/iptables/policyroute"
	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
	"ambientd/iptables/xtables"
)

// Backend applies, verifies and removes redirection with one variant of the
// iptables programs. It keeps nothing of a netns between calls and may be used
// from many goroutines; calls for the same netns must not overlap.
type Backend struct {
	config   Config
	programs map[redirection.Families]xtables.Programs
	sockets  *rawnetlink.Sockets
	native   *nftables.Backend // for what others have in nf_tables
}

// legacy reports whether the rules are in x_tables.
func (b *Backend) legacy() bool { return b.programs[redirection.IPv4].Legacy() }

// Variant returns which programs are used.
func (b *Backend) Variant() Variant { return b.config.Variant }

// Apply makes the netns hold exactly the rules that opts call for, and returns
// the families that it captures: IPv4, and IPv6 where allowed and present.
//
// Where nothing of ours is there yet that is one restore per family. Otherwise
// the state is read, and the tables that differ are replaced in one transaction
// each, with the guardrail up meanwhile if the configuration says so. What captures
// (nat) comes after what it relies on. On an error policy rules and routes are put back, but
// tables that were written stay, and so does a guardrail: a pod that was in the
// mesh keeps failing closed, and whoever enrols a new one calls Remove. The same goes
// for rules that are written while loopback is down ([policyroute.ErrLoopbackDown]).
func (b *Backend) Apply(ctx context.Context, ns redirection.Netns, opts redirection.Options) (families redirection.Families, err error) {
	if err := opts.Validate(); err != nil {
		return 0, fmt.Errorf("redirection options: %w", err)
	}
	err = b.policyRouting(ns, func(conn *policyroute.Conn, state *policyroute.State) error {
		families = state.Families(opts.Allowed())
		before := enrolled(state, families)
		undo, err := conn.Apply(ctx, state, families)
		if errors.Is(err, policyroute.ErrLoopbackDown) {
			// Without rules the pod would talk past the proxy, with them it reaches nobody.
			return errors.Join(err, b.applyRules(ctx, ns.Do, opts, families, before))
		}
		if err != nil {
			return err
		}
		if err := b.applyRules(ctx, ns.Do, opts, families, before); err != nil {
			return errors.Join(err, undo.Undo())
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("applying redirection (iptables, variant %s): %w", b.config.Variant, err)
	}
	return families, nil
}

// enrolled returns the families in which policy rule and route are there already:
// whatever has become of the packet rules, the pod was captured before.
func enrolled(state *policyroute.State, families redirection.Families) redirection.Families {
	for _, d := range state.Differences(families) {
		if d.Got == "" {
			families &^= d.Family
		}
	}
	return families
}

func (b *Backend) applyRules(ctx context.Context, run redirection.Runner, opts redirection.Options, families, enrolled redirection.Families) error {
	for _, family := range redirection.DualStack.Each() {
		want, err := b.wanted(run, opts, families, family)
		switch {
		case err != nil:
		case want.empty():
			err = b.removeFamily(ctx, run, family)
		case enrolled.Has(family):
			err = b.replace(ctx, run, family, want)
		default:
			err = b.create(ctx, run, family, want)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// wanted returns what the netns should hold of one family, where those in families
// are captured. Without IPv6 in the kernel that is nothing.
func (b *Backend) wanted(run redirection.Runner, opts redirection.Options, families, family redirection.Families) (ruleset, error) {
	if !families.Has(family) {
		if has, err := xtables.HasIPv6(run); err != nil || !has {
			return ruleset{}, err
		}
	}
	return b.rendered(opts, families, family)
}

// rendered returns the rules with the guardrail that the configuration calls for.
func (b *Backend) rendered(opts redirection.Options, families, family redirection.Families) (ruleset, error) {
	want, err := render(opts, families, family)
	if b.config.OnRepair == RepairAllow {
		want.guard = nil
	}
	return want, err
}

// create first tries the script for a netns without chains of ours, which saves
// reading it: where there are any, that fails without effect.
func (b *Backend) create(ctx context.Context, run redirection.Runner, family redirection.Families, want ruleset) error {
	firstErr := b.programs[family].Restore(ctx, run, creation(want))
	if firstErr == nil || ctx.Err() != nil {
		return firstErr
	}
	got, err := b.programs[family].Save(ctx, run)
	if err != nil {
		return errors.Join(firstErr, err)
	}
	if !got.Has(redirection.IsOurChain) {
		return firstErr // so that was not the reason
	}
	return b.programs[family].Restore(ctx, run, transition(got, want))
}

// replace reads what is there, since something should be.
func (b *Backend) replace(ctx context.Context, run redirection.Runner, family redirection.Families, want ruleset) error {
	got, err := b.programs[family].Save(ctx, run)
	if err != nil {
		return err
	}
	return b.programs[family].Restore(ctx, run, transition(got, want))
}

// Verify reports the families that the netns should have redirection for, and
// every point in which rules, policy rule or route differ from what opts call
// for there. It reads only, with one iptables-save per family.
func (b *Backend) Verify(ctx context.Context, ns redirection.Netns, opts redirection.Options) (families redirection.Families, differences []redirection.Difference, err error) {
	if err := opts.Validate(); err != nil {
		return 0, nil, fmt.Errorf("redirection options: %w", err)
	}
	err = b.policyRouting(ns, func(_ *policyroute.Conn, state *policyroute.State) error {
		families = state.Families(opts.Allowed())
		differences = state.Differences(families)
		return nil
	})
	for _, family := range redirection.DualStack.Each() {
		if err != nil {
			break
		}
		var found []redirection.Difference
		found, err = b.verifyFamily(ctx, ns.Do, opts, families, family)
		differences = append(differences, found...)
	}
	if err != nil {
		return 0, nil, fmt.Errorf("verifying redirection (iptables, variant %s): %w", b.config.Variant, err)
	}
	return families, differences, nil
}

// verifyFamily compares the rules of one family.
func (b *Backend) verifyFamily(ctx context.Context, run redirection.Runner, opts redirection.Options, families, family redirection.Families) ([]redirection.Difference, error) {
	want, err := b.wanted(run, opts, families, family)
	if err != nil {
		return nil, err
	}
	got, err := b.programs[family].Save(ctx, run)
	if err != nil {
		return nil, err
	}
	differences := compare(got, want.tables)
	for i := range differences {
		differences[i].Family = family
	}
	return differences, nil
}

// Remove takes out everything of ours, however little of it is there: chains,
// every rule that leads to them, policy rule and route. Tables of iptables-nft that
// hold nothing after that go too; x_tables never gives up a table.
func (b *Backend) Remove(ctx context.Context, ns redirection.Netns) error {
	var errs []error // one part's failure is no reason to leave the others
	if b.legacy() {
		for _, family := range redirection.DualStack.Each() {
			errs = append(errs, b.removeFamily(ctx, ns.Do, family))
		}
	} else {
		// By a restore this takes a transaction per table and family, and the kernel's
		// grace period for each.
		_, err := b.native.RemoveNFTChains(ctx, ns.Do)
		_, emptyErr := b.native.RemoveEmptyTables(ctx, ns.Do)
		errs = append(errs, err, emptyErr)
	}
	errs = append(errs, b.policyRouting(ns, func(conn *policyroute.Conn, state *policyroute.State) error {
		return conn.Remove(state)
	}))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("removing redirection (iptables, variant %s): %w", b.config.Variant, err)
	}
	return nil
}

func (b *Backend) removeFamily(ctx context.Context, run redirection.Runner, family redirection.Families) error {
	got, err := b.programs[family].Save(ctx, run)
	if err != nil || !got.Has(redirection.IsOurChain) {
		return err
	}
	return b.programs[family].Restore(ctx, run, transition(got, ruleset{}))
}

// policyRouting calls fn with the netns's state, and gives the socket back after it.
func (b *Backend) policyRouting(ns redirection.Netns, fn func(*policyroute.Conn, *policyroute.State) error) (err error) {
	sockets, err := b.sockets.Open(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sockets[0].Close()) }()
	conn, err := policyroute.New(sockets[0])
	if err != nil {
		return err
	}
	state, err := conn.Read()
	if err != nil {
		return err
	}
	return fn(conn, state)
}

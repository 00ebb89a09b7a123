// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"

	"ambientd/iptables/redirection"
	"ambientd/iptables/xtables"
)

// # Rules of others, and of other means
//
// Rules of x_tables and of nf_tables cannot be swapped in one transaction. So Apply
// first puts in this backend's, and then the others go. NAT is decided once per
// connection: each new one is redirected once, whichever rules see it first, and
// those that are redirected already keep their translation as long as some chain
// of NAT is left. The other way round they would lose it.
//
// What lies in nf_tables, be it native or made by iptables-nft, is found and taken
// out over netlink, which is the business of package nftables; what lies in
// x_tables takes the programs, which are only run where x_tables has tables.

// part is a look, or a removal, by one means; it reports whether there was
// anything.
type part func(ctx context.Context, run redirection.Runner) (bool, error)

// HasForeign reports whether the pod's netns holds rules of another ambient agent,
// by whatever means they were made. It reads only, and makes no table by that.
func (b *Backend) HasForeign(ctx context.Context, run redirection.Runner) (bool, error) {
	return b.native.HasForeign(ctx, run)
}

// RemoveForeign takes such rules out of the pod's netns and leaves everybody
// else's. It reports whether there were any.
func (b *Backend) RemoveForeign(ctx context.Context, run redirection.Runner) (bool, error) {
	return b.native.RemoveForeign(ctx, run)
}

// HasOwn reports whether the pod's netns holds chains of this backend's and its
// variant, whatever they say. It reads only, and makes no table by that.
func (b *Backend) HasOwn(ctx context.Context, run redirection.Runner) (bool, error) {
	own := b.native.HasNFTChains
	if b.legacy() {
		own = inLegacy(xtables.HasLegacy, xtables.Ours)
	}
	return b.first(ctx, run, "looking for our rules", own)
}

// RemoveOther takes rules of our own by another means than this backend's out of the
// pod's netns: the nftables backend's table, and the other variant's chains. Policy
// rule and route, which all backends share, stay. It reports whether there were any.
func (b *Backend) RemoveOther(ctx context.Context, run redirection.Runner) (bool, error) {
	variant := inLegacy(xtables.RemoveLegacy, xtables.Ours)
	if b.legacy() {
		variant = b.native.RemoveNFTChains
	}
	return b.each(ctx, run, "removing rules of another backend", b.native.RemoveTable, variant)
}

// RemoveForeignFromHost takes the rule that other agents have for probes out of
// the host's netns. Where that is in x_tables, it waits for their lock, up to
// [xtables.HostLockWait].
func (b *Backend) RemoveForeignFromHost(ctx context.Context, run redirection.Runner) (bool, error) {
	return b.native.RemoveForeignFromHost(ctx, run)
}

func inLegacy(what func(context.Context, redirection.Runner, xtables.Whose) (bool, error), whose xtables.Whose) part {
	return func(ctx context.Context, run redirection.Runner) (bool, error) { return what(ctx, run, whose) }
}

// first stops at the first part that finds something.
func (b *Backend) first(ctx context.Context, run redirection.Runner, doing string, parts ...part) (bool, error) {
	for _, p := range parts {
		if found, err := p(ctx, run); found || err != nil {
			return found, b.wrap(doing, err)
		}
	}
	return false, nil
}

// each does every part, whatever becomes of the others.
func (b *Backend) each(ctx context.Context, run redirection.Runner, doing string, parts ...part) (bool, error) {
	var found bool
	var errs []error
	for _, p := range parts {
		there, err := p(ctx, run)
		found = found || there
		errs = append(errs, err)
	}
	return found, b.wrap(doing, errors.Join(errs...))
}

// wrap adds what an operator needs to an error, if it is one.
func (b *Backend) wrap(doing string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s (iptables, variant %s): %w", doing, b.config.Variant, err)
}

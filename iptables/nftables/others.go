// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
	"ambientd/iptables/xtables"
)

// HasForeign reports whether the namespace that run enters holds chains or tables of another ambient agent: native ones,
// and what iptables made, of either variant. It reads only, creates nothing, and takes a child process only where the
// tables of x_tables hold something.
func (b *Backend) HasForeign(ctx context.Context, run redirection.Runner) (bool, error) {
	found, err := b.has(ctx, run, foreign())
	if err == nil && !found {
		found, err = xtables.HasLegacy(ctx, run, xtables.Foreign)
	}
	if err != nil {
		return false, fmt.Errorf("looking for another agent's rules (nftables): %w", err)
	}
	return found, nil
}

// RemoveForeign deletes what [Backend.HasForeign] reports, that of nf_tables in one transaction: the other agent's
// tables, its chains, the rules that jump to them, and tables of iptables' own layout that hold nothing after that. It
// reports whether there was any. Its policy rules and routes are no matter here: [Backend.Apply] takes those for ours that
// are the same, and deletes the others.
//
// On a pod with live connections, ours go in first and theirs go out after. Our NAT chains come before theirs, and NAT is
// decided once per connection, so each new connection is redirected once throughout; and a namespace whose last NAT chain
// goes loses the translation of connections that are established.
func (b *Backend) RemoveForeign(ctx context.Context, run redirection.Runner) (bool, error) {
	found, err := b.removeOthers(ctx, run, foreign())
	legacy, legacyErr := xtables.RemoveLegacy(ctx, run, xtables.Foreign)
	if err := errors.Join(err, legacyErr); err != nil {
		return found || legacy, fmt.Errorf("removing another agent's rules (nftables): %w", err)
	}
	return found || legacy, nil
}

// HasOther reports whether the namespace that run enters holds rules that our own iptables backend made, with either
// variant. It reads only, as [Backend.HasForeign] does.
func (b *Backend) HasOther(ctx context.Context, run redirection.Runner) (bool, error) {
	found, err := b.HasNFTChains(ctx, run)
	if err == nil && !found {
		found, err = xtables.HasLegacy(ctx, run, xtables.Ours)
	}
	if err != nil {
		return false, fmt.Errorf("looking for rules of the iptables backend (nftables): %w", err)
	}
	return found, nil
}

// RemoveOther deletes what [Backend.HasOther] reports, as [Backend.RemoveForeign] does, and reports whether there was any.
// The policy rules and routes stay: both backends use the same ones.
func (b *Backend) RemoveOther(ctx context.Context, run redirection.Runner) (bool, error) {
	found, err := b.RemoveNFTChains(ctx, run)
	legacy, legacyErr := xtables.RemoveLegacy(ctx, run, xtables.Ours)
	if err := errors.Join(err, legacyErr); err != nil {
		return found || legacy, fmt.Errorf("removing rules of the iptables backend (nftables): %w", err)
	}
	return found || legacy, nil
}

// RemoveForeignFromHost does what [Backend.RemoveForeign] does in the host's namespace, which run enters: other agents have
// a rule for probes there. Where that is in x_tables, it waits for their lock, up to [xtables.HostLockWait].
func (b *Backend) RemoveForeignFromHost(ctx context.Context, run redirection.Runner) (bool, error) {
	found, err := b.removeOthers(ctx, run, foreign())
	legacy, legacyErr := xtables.RemoveLegacyFromHost(ctx, run, xtables.Foreign, xtables.HostLockWait)
	if err := errors.Join(err, legacyErr); err != nil {
		return found || legacy, fmt.Errorf("removing another agent's rules from the host (nftables): %w", err)
	}
	return found || legacy, nil
}

// RemoveOtherFromHost takes out of the host's namespace what our iptables backend has left there, of either variant: its
// rule, and its sets. It reports whether there were any.
func (b *Backend) RemoveOtherFromHost(ctx context.Context, run redirection.Runner) (bool, error) {
	found, err := b.RemoveNFTChains(ctx, run)
	legacy, legacyErr := xtables.RemoveLegacyFromHost(ctx, run, xtables.Ours, xtables.HostLockWait)
	var destroyErr error
	if found {
		destroyErr = b.awaitDestruction(run)
	}
	sets, setsErr := xtables.RemoveProbeSets(run)
	found = found || legacy || sets
	if err := errors.Join(err, legacyErr, destroyErr, setsErr); err != nil {
		return found, fmt.Errorf("removing the iptables backend's rule from the host (nftables): %w", err)
	}
	return found, nil
}

// awaitDestruction waits until the kernel has destroyed what was deleted in the namespace that run enters, and so no longer
// counts what that used: a socket that was in use is closed after it.
func (b *Backend) awaitDestruction(run redirection.Runner) error {
	opened, err := b.sockets.Open(run, unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	_, err = readGeneration(opened[0])
	return errors.Join(err, b.sockets.CloseNow(opened...))
}

// HasNFTChains reports whether the namespace that run enters holds rules that our iptables backend made with iptables-nft.
// It is for that backend where it uses the other variant.
func (b *Backend) HasNFTChains(ctx context.Context, run redirection.Runner) (bool, error) {
	return b.has(ctx, run, ownChains())
}

// RemoveNFTChains deletes what [Backend.HasNFTChains] reports, and reports whether there was any.
func (b *Backend) RemoveNFTChains(ctx context.Context, run redirection.Runner) (bool, error) {
	return b.removeOthers(ctx, run, ownChains())
}

// HasOwn reports whether the namespace that run enters holds our table, whatever it says. It reads only.
func (b *Backend) HasOwn(ctx context.Context, run redirection.Runner) (bool, error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	var there bool
	err := b.packetRules(run, func(socket *rawnetlink.Socket) error {
		s, err := readStatus(socket, redirection.NFTablesTable)
		there = s.exists
		return err
	})
	if err != nil {
		return false, fmt.Errorf("looking for table %s: %w", redirection.NFTablesTable, err)
	}
	return there, nil
}

// RemoveTable deletes our table alone, for a pod that the iptables backend has taken over: the policy rules and routes
// stay. It reports whether there was one.
func (b *Backend) RemoveTable(ctx context.Context, run redirection.Runner) (bool, error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	var found bool
	err := b.packetRules(run, func(socket *rawnetlink.Socket) (err error) {
		found, err = removeTableIfThere(socket, redirection.NFTablesTable, b.removal)
		return err
	})
	if err != nil {
		return false, fmt.Errorf("removing table %s: %w", redirection.NFTablesTable, err)
	}
	return found, nil
}

// RemoveEmptyTables deletes the tables in the namespace that run enters which are laid out as iptables' own and hold
// nothing: iptables-nft makes them, and nobody ever deletes them. It reports whether there were any. It is for a pod that
// is taken out of the mesh; to whoever uses iptables there next, an absent table is the same as an empty one.
func (b *Backend) RemoveEmptyTables(ctx context.Context, run redirection.Runner) (bool, error) {
	found, err := b.removeOthers(ctx, run, emptyTables())
	if err != nil {
		return found, fmt.Errorf("removing empty tables: %w", err)
	}
	return found, nil
}

// owner tells by name what belongs to somebody.
type owner struct {
	table func(name string) bool // native tables, of family ip, ip6 or inet
	chain func(name string) bool // chains in tables of iptables' own layout
	spare func(name string) bool // a table that holds such a chain is somebody else's, whatever its other chains' names
	empty bool                   // so do tables of that layout that hold nothing, whoever made them
}

func foreign() owner {
	return owner{table: redirection.IsForeignTable, chain: redirection.IsForeignChain, spare: redirection.IsSidecarChain}
}

func ownChains() owner { return owner{table: none, chain: redirection.IsOurChain, spare: none} }

func emptyTables() owner { return owner{table: none, chain: none, spare: none, empty: true} }

func none(string) bool { return false }

func (b *Backend) has(ctx context.Context, run redirection.Runner, whose owner) (found bool, err error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	err = b.packetRules(run, func(socket *rawnetlink.Socket) error {
		here, err := readInventory(ctx, socket, whose)
		found = len(here.removal()) > 0
		return err
	})
	return found, err
}

// removeOthers deletes what belongs to whose. What is deleted is what was read: the kernel refuses the transaction if
// there was another in between, and it is all read again.
func (b *Backend) removeOthers(ctx context.Context, run redirection.Runner, whose owner) (found bool, err error) {
	err = b.packetRules(run, func(socket *rawnetlink.Socket) error {
		for range readAttempts {
			if err := ctx.Err(); err != nil {
				return err
			}
			here, err := readInventory(ctx, socket, whose)
			if err != nil {
				return err
			}
			changes := here.removal()
			if len(changes) == 0 {
				return nil
			}
			found = true
			err = commit(socket, assembleAt(here.generation, changes))
			if !errors.Is(err, unix.ERESTART) {
				return err
			}
		}
		return fmt.Errorf("%w, %d times in a row", rawnetlink.ErrInterrupted, readAttempts)
	})
	return found, err
}

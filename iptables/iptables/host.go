// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
	"ambientd/iptables/xtables"
)

// # The host's rule
//
// What locally generated probes need is one rule of NAT's postrouting in a chain of
// ours, for each family, and an ipset that says whose probes. Every run of a
// program takes x_tables' lock, as everybody's does there, and waits for it as long
// as the configuration allows; ipsets have no such lock. Calls that change the rule
// must not overlap.

// Where the rule is.
const (
	hostTable = "nat"
	hostChain = "POSTROUTING"
)

// hostChainOf returns our chain, with the rule.
func hostChainOf(rule redirection.HostRule) chain {
	_, match := kindOf(rule.Scope)
	return chain{name: redirection.IPTablesPostrouting, builtins: []string{hostChain}, rules: []string{fmt.Sprintf(
		"-p tcp -m owner --socket-exists -m set --match-set %s %s -j SNAT --to-source %s", rule.Set, match, rule.Source)}}
}

// EnsureHost makes the host's netns, which run enters, hold the sets and the rule
// that the options call for, and writes nothing where that is so. Sets that fit the
// options keep their entries; which there should be is for SetEntries.
func (b *Backend) EnsureHost(ctx context.Context, run redirection.Runner, opts redirection.HostOptions) error {
	if err := opts.Validate(); err != nil {
		return fmt.Errorf("host options: %w", err)
	}
	families, err := hostFamilies(run, opts)
	if err != nil {
		return b.wrap("setting up the probes' rule", err)
	}
	for _, rule := range redirection.HostRules(opts) {
		if families.Has(rule.Family) {
			err = errors.Join(err, b.ensureHostFamily(ctx, run, rule))
		}
	}
	for _, family := range (redirection.DualStack &^ opts.Families()).Each() {
		err = errors.Join(err, b.removeHostFamily(ctx, run, family))
	}
	return b.wrap("setting up the probes' rule", err)
}

// hostFamilies returns the families of the options that the kernel has.
func hostFamilies(run redirection.Runner, opts redirection.HostOptions) (redirection.Families, error) {
	families := opts.Families()
	has, err := xtables.HasIPv6(run)
	if !has {
		families &^= redirection.IPv6
	}
	return families, err
}

func (b *Backend) ensureHostFamily(ctx context.Context, run redirection.Runner, rule redirection.HostRule) error {
	set := probeSetOf(rule)
	fits, exists, err := set.look(run)
	if err != nil {
		return err
	}
	if exists && !fits {
		// A set that a rule uses cannot be replaced by one of another kind.
		if err := b.removeHostRule(ctx, run, rule.Family); err != nil {
			return err
		}
		if err := run(set.destroy); err != nil {
			return err
		}
	}
	if !fits {
		if err := run(set.create); err != nil {
			return err
		}
	}
	got, err := b.readHost(ctx, run, rule.Family)
	if err != nil {
		return err
	}
	want := hostChainOf(rule)
	if len(compareHost(got, want)) == 0 {
		return nil
	}
	return b.restoreHost(ctx, run, rule.Family, got, &want)
}

// look reports whether there is a set of that name, and whether it is this one.
func (s probeSet) look(run redirection.Runner) (fits, exists bool, err error) {
	err = run(func() error {
		got, _, there, err := s.read()
		fits, exists = there && got == s, there
		return err
	})
	return fits, exists, err
}

// readHost reads our chain and the built-in one that leads to it.
func (b *Backend) readHost(ctx context.Context, run redirection.Runner, family redirection.Families) (*xtables.Table, error) {
	t := &xtables.Table{Rules: map[string][]string{}}
	for _, name := range []string{hostChain, redirection.IPTablesPostrouting} {
		rules, err := b.programs[family].ListOnHost(ctx, run, hostTable, name, b.config.HostLockWait)
		if errors.Is(err, xtables.ErrNoChain) {
			continue
		}
		if err != nil {
			return nil, err
		}
		t.Chains = append(t.Chains, name)
		t.Rules[name] = rules
	}
	return t, nil
}

// compareHost returns in what our chain and the way into it differ from want.
func compareHost(got *xtables.Table, want chain) []redirection.Difference {
	differences := compareChain(hostTable, got, want)
	jump := "-j " + want.name
	rules := got.Rules[hostChain]
	var positions []string
	decided := 0 // position of the first rule before the jump that decides by itself
	for i, rule := range rules {
		switch {
		case rule == jump:
			positions = append(positions, fmt.Sprintf("as rule %d", i+1))
		case len(positions) == 0 && decided == 0 && decides(xtables.Target(rule)):
			decided = i + 1
		}
	}
	d := redirection.Difference{What: fmt.Sprintf("table %s, jump from %s to %s", hostTable, hostChain, want.name), Want: "once"}
	switch {
	case len(positions) != 1:
		d.Got = strings.Join(positions, ", ")
	case decided > 0:
		d.Want, d.Got = "before rules that decide by themselves", fmt.Sprintf("after rule %d: %s", decided, rules[decided-1])
	default:
		return differences
	}
	return append(differences, d)
}

// decides reports whether a rule of NAT's postrouting with that target ends the
// table's traversal. Chains of others may stand before ours: kube-proxy and CNI
// plugins insert theirs first, too, and two that insist would never rest. That
// theirs decide about probes is not to be expected; the source prober would show
// it.
func decides(target string) bool {
	return slices.Contains([]string{"ACCEPT", "DROP", "RETURN", "MASQUERADE", "SNAT", "NETMAP", "NFQUEUE", "QUEUE"}, target)
}

// restoreHost changes got into want, or with nil takes it out, in one transaction.
func (b *Backend) restoreHost(ctx context.Context, run redirection.Runner, family redirection.Families, got *xtables.Table, want *chain) error {
	var s script
	s.line("*%s", hostTable)
	if want == nil {
		s.clear(got)
	} else {
		s.clear(got, want.name)
		if !slices.Contains(got.Chains, want.name) {
			s.line("-N %s", want.name)
		}
		s.fill(*want)
	}
	s.line("COMMIT")
	return b.programs[family].RestoreOnHost(ctx, run, s.String(), b.config.HostLockWait)
}

// VerifyHost compares the host's netns with what EnsureHost makes of the options,
// and the sets with exactly these entries. It writes nothing.
func (b *Backend) VerifyHost(ctx context.Context, run redirection.Runner, opts redirection.HostOptions, entries []redirection.HostEntry) ([]redirection.Difference, error) {
	if err := validateHost(opts, entries); err != nil {
		return nil, err
	}
	families, err := hostFamilies(run, opts)
	if err != nil {
		return nil, b.wrap("verifying the probes' rule", err)
	}
	var differences []redirection.Difference
	for _, rule := range redirection.HostRules(opts) {
		if !families.Has(rule.Family) {
			continue
		}
		found, err := b.verifyHostFamily(ctx, run, rule, entriesOf(entries, rule.Family))
		if err != nil {
			return nil, b.wrap("verifying the probes' rule", err)
		}
		differences = append(differences, found...)
	}
	return differences, nil
}

func (b *Backend) verifyHostFamily(ctx context.Context, run redirection.Runner, rule redirection.HostRule, entries []redirection.HostEntry) ([]redirection.Difference, error) {
	got, err := b.readHost(ctx, run, rule.Family)
	if err != nil {
		return nil, err
	}
	differences := compareHost(got, hostChainOf(rule))
	for i := range differences {
		differences[i].Family = rule.Family
	}
	err = run(func() error {
		found, err := probeSetOf(rule).differences(entries)
		differences = append(differences, found...)
		return err
	})
	return differences, err
}

func entriesOf(entries []redirection.HostEntry, family redirection.Families) []redirection.HostEntry {
	return slices.DeleteFunc(slices.Clone(entries), func(e redirection.HostEntry) bool { return redirection.FamilyOf(e.Addr) != family })
}

func validateHost(opts redirection.HostOptions, entries []redirection.HostEntry) error {
	if err := opts.Validate(); err != nil {
		return fmt.Errorf("host options: %w", err)
	}
	for _, entry := range entries {
		if err := opts.ValidateEntry(entry); err != nil {
			return err
		}
	}
	return nil
}

// SetEntries makes the sets hold exactly these entries; those that stay are there
// throughout. The sets must be there.
func (b *Backend) SetEntries(ctx context.Context, run redirection.Runner, opts redirection.HostOptions, entries []redirection.HostEntry) error {
	if err := validateHost(opts, entries); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	families, err := hostFamilies(run, opts)
	for _, rule := range redirection.HostRules(opts) {
		if err == nil && families.Has(rule.Family) {
			err = run(func() error { return probeSetOf(rule).fill(entriesOf(entries, rule.Family)) })
		}
	}
	return b.wrap("setting the entries of probes", err)
}

// AddEntries adds entries to their sets; one that is there already is fine. The sets
// must be there. After an error some may have been added.
func (b *Backend) AddEntries(ctx context.Context, run redirection.Runner, opts redirection.HostOptions, entries ...redirection.HostEntry) error {
	err := b.eachEntry(ctx, run, opts, entries, func(entry redirection.HostEntry) error { return setFor(opts, entry).add(entry) })
	return b.wrap("adding entries of probes", err)
}

// eachEntry calls change for each of the entries, in the host's netns, until one fails.
func (b *Backend) eachEntry(ctx context.Context, run redirection.Runner, opts redirection.HostOptions, entries []redirection.HostEntry,
	change func(redirection.HostEntry) error,
) error {
	for _, entry := range entries {
		if err := opts.ValidateEntry(entry); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return run(func() error {
		for _, entry := range entries {
			if err := change(entry); err != nil {
				return err
			}
		}
		return nil
	})
}

// DelEntries takes entries out of their sets; one that is not there is fine, and so is
// no set at all. Each is tried, whatever becomes of the others.
func (b *Backend) DelEntries(ctx context.Context, run redirection.Runner, opts redirection.HostOptions, entries ...redirection.HostEntry) error {
	var failures []error
	err := b.eachEntry(ctx, run, opts, entries, func(entry redirection.HostEntry) error {
		if err := setFor(opts, entry).del(entry); !errors.Is(err, unix.ENOENT) {
			failures = append(failures, err)
		}
		return nil
	})
	return b.wrap("taking out entries of probes", errors.Join(append(failures, err)...))
}

// setFor returns the set that holds a valid entry.
func setFor(opts redirection.HostOptions, entry redirection.HostEntry) probeSet {
	rules := redirection.HostRules(opts)
	i := slices.IndexFunc(rules, func(r redirection.HostRule) bool { return r.Family == redirection.FamilyOf(entry.Addr) })
	return probeSetOf(rules[i])
}

// RemoveHost takes out rule, chain and sets. Where there are none it succeeds.
func (b *Backend) RemoveHost(ctx context.Context, run redirection.Runner) error {
	var err error
	for _, family := range redirection.DualStack.Each() {
		err = errors.Join(err, b.removeHostFamily(ctx, run, family))
	}
	return b.wrap("removing the probes' rule", err)
}

// removeHostFamily removes the rule first: a set that is used stays.
func (b *Backend) removeHostFamily(ctx context.Context, run redirection.Runner, family redirection.Families) error {
	if err := b.removeHostRule(ctx, run, family); err != nil {
		return err
	}
	name := redirection.ProbeSetIPv4
	if family == redirection.IPv6 {
		name = redirection.ProbeSetIPv6
	}
	return run(probeSet{name: name}.destroy)
}

func (b *Backend) removeHostRule(ctx context.Context, run redirection.Runner, family redirection.Families) error {
	got, err := b.readHost(ctx, run, family)
	if err != nil || !slices.Contains(got.Chains, redirection.IPTablesPostrouting) {
		return err
	}
	return b.restoreHost(ctx, run, family, got, nil)
}

// RemoveOtherFromHost takes out what another backend of ours has left in the host's
// netns: the nftables backend's table, or the other variant's rule. The sets stay:
// both variants use the same.
func (b *Backend) RemoveOtherFromHost(ctx context.Context, run redirection.Runner) (bool, error) {
	variant := part(func(ctx context.Context, run redirection.Runner) (bool, error) {
		return xtables.RemoveLegacyFromHost(ctx, run, xtables.Ours, b.config.HostLockWait)
	})
	if b.legacy() {
		variant = b.native.RemoveNFTChains
	}
	return b.each(ctx, run, "removing another backend's rule from the host", variant,
		func(ctx context.Context, run redirection.Runner) (bool, error) {
			return false, b.native.RemoveHost(ctx, run)
		})
}

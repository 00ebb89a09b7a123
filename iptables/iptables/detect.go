// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"time"

	"ambientd/iptables/nftables"
	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
	"ambientd/iptables/xtables"
)

// Variant is a flavour of the iptables programs.
type Variant = xtables.Variant

// The variants, for callers that need nothing else of package xtables.
const (
	NFTables = xtables.NFTables
	Legacy   = xtables.Legacy
	Plain    = xtables.Plain
)

// OnRepair says what becomes of traffic that is to be captured while its rules are
// being replaced or repaired.
type OnRepair string

// What can become of it.
const (
	// RepairDrop discards it until the rules are there (see guard.go): a client tries
	// again, and nothing leaves in plaintext.
	RepairDrop OnRepair = "drop"
	// RepairAllow lets it by, for operators who prefer a leak to a lost packet.
	RepairAllow OnRepair = "allow"
)

// Config is what a Backend is made from. The zero value is usable except for the
// Variant, which only [Detect] can do without.
type Config struct {
	// Variant chooses the programs.
	Variant Variant
	// OnRepair is RepairDrop unless set.
	OnRepair OnRepair
	// HostLockWait bounds the wait for x_tables' lock in the host's netns, in whole
	// seconds; [xtables.HostLockWait] unless set. Work inside pods never waits for it.
	HostLockWait time.Duration
}

// complete returns the configuration with defaults filled in, or an error that
// names what cannot be.
func (c Config) complete() (Config, error) {
	if c.OnRepair == "" {
		c.OnRepair = RepairDrop
	}
	if c.OnRepair != RepairDrop && c.OnRepair != RepairAllow {
		return Config{}, fmt.Errorf("on repair: %q is neither %q nor %q", c.OnRepair, RepairDrop, RepairAllow)
	}
	if c.HostLockWait == 0 {
		c.HostLockWait = xtables.HostLockWait
	}
	if c.HostLockWait < 0 {
		return Config{}, fmt.Errorf("wait for the host's lock: %s is negative", c.HostLockWait)
	}
	return c, nil
}

// New returns the backend that uses the programs of one variant, for both
// families. It says which program is missing; whether the kernel takes their
// rules, only using them shows (see [Detect]).
func New(ctx context.Context, config Config) (*Backend, error) {
	config, err := config.complete()
	if err != nil {
		return nil, err
	}
	native, err := nftables.New()
	if err != nil {
		return nil, err
	}
	b := &Backend{config: config, programs: map[redirection.Families]xtables.Programs{}, sockets: rawnetlink.New(), native: native}
	for _, family := range redirection.DualStack.Each() {
		if b.programs[family], err = xtables.Find(ctx, config.Variant, family); err != nil {
			return nil, err
		}
	}
	return b, nil
}

// Detect returns the backend of the first variant whose rules the kernel takes
// and shows again, tried in an empty netns, which is left empty. The
// configuration's own variant does not count. The error says what each variant
// lacked.
func Detect(ctx context.Context, run redirection.Runner, config Config) (*Backend, error) {
	var errs []error
	for _, variant := range xtables.Variants() {
		config.Variant = variant
		b, err := New(ctx, config)
		if err == nil {
			err = b.probe(ctx, run)
		}
		if err == nil {
			return b, nil
		}
		errs = append(errs, fmt.Errorf("variant %s: %w", variant, err))
	}
	return nil, fmt.Errorf("no variant of iptables works here: %w", errors.Join(errs...))
}

// probeOptions call for every kind of rule that options can call for.
func probeOptions() redirection.Options {
	opts := redirection.DefaultOptions()
	opts.RerouteInterfaces = []string{"probe0"}
	opts.KeepEstablished = true
	opts.ExcludeInboundPorts = []redirection.PortRange{{First: 1, Last: 2}}
	opts.ExcludeInterfaces = []string{"probe1"}
	return opts
}

// probe writes, replaces, reads back and takes out the rules of each family, and
// those that keep IPv6 shut.
func (b *Backend) probe(ctx context.Context, run redirection.Runner) error {
	has, err := xtables.HasIPv6(run)
	if err != nil {
		return err
	}
	families := redirection.IPv4
	if has {
		families = redirection.DualStack
	}
	for _, family := range families.Each() {
		if err := b.probeFamily(ctx, run, families, family); err != nil {
			return err
		}
	}
	if !has {
		return nil
	}
	return b.probeFamily(ctx, run, redirection.IPv4, redirection.IPv6)
}

// probeFamily replaces rules by others, which takes the guardrail where there is
// one.
func (b *Backend) probeFamily(ctx context.Context, run redirection.Runner, captured, family redirection.Families) (err error) {
	defer func() { err = errors.Join(err, b.removeFamily(ctx, run, family)) }()
	others := redirection.DefaultOptions()
	others.DNSCapture = false
	first, err := b.rendered(others, captured, family)
	if err != nil {
		return err
	}
	want, err := b.rendered(probeOptions(), captured, family)
	if err != nil {
		return err
	}
	if err := b.create(ctx, run, family, first); err != nil {
		return err
	}
	if err := b.replace(ctx, run, family, want); err != nil {
		return err
	}
	got, err := b.programs[family].Save(ctx, run)
	if err != nil {
		return err
	}
	if differences := compare(got, want.tables); len(differences) > 0 {
		return fmt.Errorf("rules read back differ from those written: %s", differences[0])
	}
	return nil
}

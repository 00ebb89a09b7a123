// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os/exec"

	"ambientd/iptables/iptables"
	"ambientd/iptables/nftables"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/podnetns"
)

// rules measures both backends against the yardstick, in turns, each in fresh network
// namespaces, and entered as the agent does.
func (b *bench) rules(ctx context.Context) error {
	b.say("measuring rules, %d rounds", b.cfg.rounds)
	counted, err := newCounter(b.dir)
	if err != nil {
		return err
	}
	iptablesBackend, err := iptables.New(ctx, iptables.Config{Variant: iptables.NFTables})
	if err != nil {
		return err
	}
	nftablesBackend, err := nftables.New()
	if err != nil {
		return err
	}
	stranger, err := nftables.New()
	if err != nil {
		return err
	}
	if b.yardstick, err = newYardstick(ctx, b.dir, iptablesBackend); err != nil {
		return err
	}
	m := &rulesMeasure{
		namespaces: b.yardstick.namespaces, opts: redirection.DefaultOptions(),
		nft: nftablesBackend, stranger: stranger, ipt: iptablesBackend,
	}
	m.other = m.opts
	m.other.ExcludeOutboundPorts = []redirection.PortRange{redirection.SinglePort(3306)}
	if err := m.neighbour(ctx); err != nil {
		return err
	}
	for round := range b.cfg.rounds {
		for _, step := range []func(context.Context) error{b.sampleR, m.startTwice, m.nftables, m.iptables} {
			if err := step(ctx); err != nil {
				return fmt.Errorf("round %d: %w", round+1, err)
			}
		}
	}
	if err := m.countChildren(ctx, counted); err != nil {
		return err
	}
	b.addRules(m)
	return nil
}

// rulesMeasure holds the figures of the rules.
type rulesMeasure struct {
	*namespaces
	nft      *nftables.Backend
	stranger *nftables.Backend // that has never seen the namespaces before
	ipt      *iptables.Backend
	opts     redirection.Options
	other    redirection.Options // what opts are replaced by, as when an annotation changes

	trueTwice                     figure
	nftLife, iptLife              life
	applyChildren, verifyChildren int
}

func (b *bench) addRules(m *rulesMeasure) {
	r := b.r.median()
	b.rows = append(b.rows,
		duration("two starts of a program that does nothing, /bin/true", m.trueTwice, yardstickName, r, 0, ""),
		duration("nftables: apply, dual stack, policy rule and route, fresh netns", m.nftLife.apply, yardstickName, r, 1.0/60, "R/60"),
		duration("nftables: verify, nothing changed", m.nftLife.verify, yardstickName, r, 1.0/100, "R/100"),
		duration("nftables: replace a pod's rules, as one more port is excluded", m.nftLife.replace, yardstickName, r, 1.0/60, "R/60"),
		duration("nftables: replace all rules, as nothing is known of what is there", m.nftLife.renew, yardstickName, r, 0, ""),
		duration("nftables: remove", m.nftLife.remove, yardstickName, r, 1.0/60, "R/60"),
		duration("iptables: apply", m.iptLife.apply, yardstickName, r, 1.2, "1.2 R"),
		duration("iptables: verify", m.iptLife.verify, yardstickName, r, 0, ""),
		duration("iptables: replace a pod's rules, as one more port is excluded", m.iptLife.replace, yardstickName, r, 0, ""),
		duration("iptables: remove", m.iptLife.remove, yardstickName, r, 0, ""),
		amount("iptables: child processes of an apply", float64(m.applyChildren), "", 0, ""),
		amount("iptables: child processes of a verify", float64(m.verifyChildren), "", 2, "1 a family"),
	)
}

// neighbour applies the rules of both backends, as pods have them that were there
// before. The first user of a netfilter hook on a machine, and the last, makes the
// kernel patch its own code, for milliseconds: no backend's business, and with another
// pod on the node nobody's.
func (m *rulesMeasure) neighbour(ctx context.Context) error {
	return m.one(ctx, func(ns *podnetns.Netns) error {
		for _, backend := range []backend{m.nft, m.ipt} {
			if _, err := backend.Apply(ctx, ns, m.opts); err != nil {
				return err
			}
		}
		return nil
	})
}

// startTwice takes a sample of what starting two processes costs here. The yardstick is
// mostly that, which is why its ratio to this says how the limits compare with those of
// another machine.
func (m *rulesMeasure) startTwice(ctx context.Context) error {
	return m.timeIn(ctx, &m.trueTwice, func() error {
		for range 2 {
			if err := exec.CommandContext(ctx, "true").Run(); err != nil {
				return fmt.Errorf("running true: %w", err)
			}
		}
		return nil
	})
}

// backend is what both backends are to the bench.
type backend interface {
	Apply(ctx context.Context, ns redirection.Netns, opts redirection.Options) (redirection.Families, error)
	Verify(ctx context.Context, ns redirection.Netns, opts redirection.Options) (redirection.Families, []redirection.Difference, error)
	Remove(ctx context.Context, ns redirection.Netns) error
}

// life holds the figures of what is done to a pod's rules, one after the other.
type life struct {
	apply, verify, replace, renew, remove figure
}

// nftables measures several in a row: after a pause everything would be found cold.
func (m *rulesMeasure) nftables(ctx context.Context) error {
	return m.lives(ctx, m.nft, m.stranger, 5, &m.nftLife)
}

func (m *rulesMeasure) iptables(ctx context.Context) error {
	return m.lives(ctx, m.ipt, m.ipt, 1, &m.iptLife)
}

// lives takes n samples of each, of renewal by a backend that may be another one. The verify comes after a first one that is not counted:
// "nothing changed" is since the last look.
func (m *rulesMeasure) lives(ctx context.Context, backend, renewer backend, n int, into *life) error {
	return m.several(ctx, n, func(all []*podnetns.Netns) error {
		for _, step := range []struct {
			figure *figure // nil: not counted
			do     func(*podnetns.Netns) error
		}{
			{&into.apply, func(ns *podnetns.Netns) error { return apply(ctx, backend, ns, m.opts) }},
			{nil, func(ns *podnetns.Netns) error { return verify(ctx, backend, ns, m.opts) }},
			{&into.verify, func(ns *podnetns.Netns) error { return verify(ctx, backend, ns, m.opts) }},
			{&into.replace, func(ns *podnetns.Netns) error { return apply(ctx, backend, ns, m.other) }},
			{&into.renew, func(ns *podnetns.Netns) error { return apply(ctx, renewer, ns, m.opts) }},
			{nil, func(ns *podnetns.Netns) error { return verify(ctx, backend, ns, m.opts) }},
			{&into.remove, func(ns *podnetns.Netns) error { return backend.Remove(ctx, ns) }},
		} {
			if step.figure == nil {
				step.figure = &figure{}
			}
			for _, ns := range all {
				if err := step.figure.time(func() error { return step.do(ns) }); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

func apply(ctx context.Context, backend backend, ns *podnetns.Netns, opts redirection.Options) error {
	families, err := backend.Apply(ctx, ns, opts)
	if err == nil && families != redirection.DualStack {
		err = fmt.Errorf("only %s was applied: the figures are for both families", families)
	}
	return err
}

func verify(ctx context.Context, backend backend, ns *podnetns.Netns, opts redirection.Options) error {
	_, differences, err := backend.Verify(ctx, ns, opts)
	if err == nil && len(differences) > 0 {
		err = fmt.Errorf("verifying what was just applied finds %v", differences)
	}
	return err
}

// countChildren counts the processes that the iptables backend starts.
func (m *rulesMeasure) countChildren(ctx context.Context, c *counter) error {
	backend, err := c.backend(ctx)
	if err != nil {
		return err
	}
	return m.one(ctx, func(ns *podnetns.Netns) (err error) {
		if m.applyChildren, err = c.count(func() error { return apply(ctx, backend, ns, m.opts) }); err != nil {
			return err
		}
		m.verifyChildren, err = c.count(func() error { return verify(ctx, backend, ns, m.opts) })
		return err
	})
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"ambientd/iptables/iptables"
	"ambientd/iptables/nftables"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/podnetns"
	"ambientd/tools/enclave"
)

// family is one of the two restore runs of the yardstick: its programs, and the
// script that makes the rules in a netns without any.
type family struct {
	restore, save string
	script        string
}

// rules measures both backends against the yardstick, in turns, each in fresh network
// namespaces, and entered as the agent does.
func (b *bench) rules(ctx context.Context) error {
	b.say("measuring rules, %d rounds", b.cfg.rounds)
	host, err := podnetns.OpenHost()
	if err != nil {
		return err
	}
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
	m := &rulesMeasure{bench: b, host: host, nft: nftablesBackend, ipt: iptablesBackend, opts: redirection.DefaultOptions()}
	if err := m.renderYardstick(ctx); err != nil {
		return err
	}
	if err := m.neighbour(ctx); err != nil {
		return err
	}
	for round := range b.cfg.rounds {
		for _, step := range []func(context.Context) error{m.restoreTwice, m.startTwice, m.nftables, m.iptables} {
			if err := step(ctx); err != nil {
				return fmt.Errorf("round %d: %w", round+1, err)
			}
		}
	}
	if err := m.countChildren(ctx, counted); err != nil {
		return err
	}
	b.addRules(m)
	return errors.Join(m.discard(), host.Close())
}

// rulesMeasure holds the figures of the rules.
type rulesMeasure struct {
	bench *bench
	host  *podnetns.Host
	nft   *nftables.Backend
	ipt   *iptables.Backend
	opts  redirection.Options

	families []family
	made     []*enclave.Netns

	trueTwice                      figure
	nftApply, nftVerify, nftRemove figure
	iptApply, iptVerify, iptRemove figure
	applyChildren, verifyChildren  int
}

func (b *bench) addRules(m *rulesMeasure) {
	r := b.yardstick.median()
	b.rows = append(b.rows,
		duration("two starts of a program that does nothing, /bin/true", m.trueTwice, yardstickName, r, 0, ""),
		duration("nftables: apply, dual stack, policy rule and route, fresh netns", m.nftApply, yardstickName, r, 1.0/60, "R/60"),
		duration("nftables: verify, nothing changed", m.nftVerify, yardstickName, r, 1.0/100, "R/100"),
		duration("nftables: remove", m.nftRemove, yardstickName, r, 1.0/60, "R/60"),
		duration("iptables: apply", m.iptApply, yardstickName, r, 1.2, "1.2 R"),
		duration("iptables: verify", m.iptVerify, yardstickName, r, 0, ""),
		duration("iptables: remove", m.iptRemove, yardstickName, r, 0, ""),
		amount("iptables: child processes of an apply", float64(m.applyChildren), "", 0, ""),
		amount("iptables: child processes of a verify", float64(m.verifyChildren), "", 2, "1 a family"),
	)
}

// neighbour applies the rules of both backends, as pods have them that were there
// before. The first user of a netfilter hook on a machine, and the last, makes the
// kernel patch its own code, for milliseconds: no backend's business, and with another
// pod on the node nobody's.
func (m *rulesMeasure) neighbour(ctx context.Context) error {
	return m.inFreshNetns(ctx, func(ns *podnetns.Netns) error {
		for _, backend := range []backend{m.nft, m.ipt} {
			if _, err := backend.Apply(ctx, ns.Do, m.opts); err != nil {
				return err
			}
		}
		return nil
	})
}

// inFreshNetns runs fn with a network namespace of freshNetns.
func (m *rulesMeasure) inFreshNetns(ctx context.Context, fn func(*podnetns.Netns) error) error {
	return m.freshNetns(ctx, 1, func(all []*podnetns.Netns) error { return fn(all[0]) })
}

// freshNetns runs fn with n network namespaces as pods have them: lo up, no rule. They
// stay until discard: the kernel takes one apart in the background, under locks that
// the next measurement would wait for.
func (m *rulesMeasure) freshNetns(ctx context.Context, n int, fn func([]*podnetns.Netns) error) (err error) {
	var fresh []*podnetns.Netns
	defer func() {
		for _, ns := range fresh {
			err = errors.Join(err, ns.Close())
		}
	}()
	for range n {
		made, err := enclave.MakeNetns(fmt.Sprintf("bench-%d", len(m.made)))
		if err != nil {
			return err
		}
		m.made = append(m.made, made)
		if err := made.Do(loopbackUp); err != nil {
			return err
		}
		ns, err := m.adopt(made)
		if err != nil {
			return err
		}
		fresh = append(fresh, ns)
	}
	if err := settle(ctx); err != nil {
		return err
	}
	return fn(fresh)
}

func (m *rulesMeasure) adopt(made *enclave.Netns) (*podnetns.Netns, error) {
	f, err := os.Open(made.Path())
	if err != nil {
		return nil, fmt.Errorf("opening a network namespace: %w", err)
	}
	defer f.Close()
	return m.host.Adopt(f)
}

// settle waits until this process has no socket open any more. Backends close theirs in
// the background after a removal: the kernel makes closing wait for an RCU grace
// period, and holds up what comes next in another netns meanwhile.
func settle(ctx context.Context) error {
	for {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			return fmt.Errorf("listing our descriptors: %w", err)
		}
		open := false
		for _, entry := range entries {
			target, err := os.Readlink("/proc/self/fd/" + entry.Name())
			open = open || err == nil && strings.HasPrefix(target, "socket:")
		}
		if !open {
			return nil
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// discard takes all network namespaces away.
func (m *rulesMeasure) discard() error {
	var errs []error
	for _, netns := range m.made {
		errs = append(errs, netns.Remove())
	}
	return errors.Join(errs...)
}

// renderYardstick has the iptables backend write its rules once, and makes scripts for
// bare restore runs of what the kernel then has.
func (m *rulesMeasure) renderYardstick(ctx context.Context) error {
	m.families = []family{
		{restore: "iptables-nft-restore", save: "iptables-nft-save"},
		{restore: "ip6tables-nft-restore", save: "ip6tables-nft-save"},
	}
	return m.inFreshNetns(ctx, func(ns *podnetns.Netns) error {
		if _, err := m.ipt.Apply(ctx, ns.Do, m.opts); err != nil {
			return err
		}
		for i := range m.families {
			f := &m.families[i]
			cmd := exec.CommandContext(ctx, f.save)
			var saved []byte
			if err := ns.Do(func() (err error) { saved, err = cmd.Output(); return err }); err != nil {
				return fmt.Errorf("running %s: %w", f.save, err)
			}
			f.script = creation(string(saved))
			if !strings.Contains(f.script, "-N "+redirection.IPTablesOutput) {
				return fmt.Errorf("%s shows none of our chains", f.save)
			}
		}
		return nil
	})
}

// creation turns what iptables-save prints into the script that makes it where nothing
// is. Built-in chains are left out: naming them makes restore create and hook up all
// five of a table, which costs several times what the rules do and nobody needs.
func creation(saved string) string {
	var script strings.Builder
	for line := range strings.Lines(saved) {
		name, declared := strings.CutPrefix(line, ":")
		name, _, _ = strings.Cut(name, " ")
		switch {
		case strings.HasPrefix(line, "#"):
		case declared && strings.Contains(line, " - "): // a user's chain has no policy
			fmt.Fprintf(&script, "-N %s\n", name)
		case declared:
		default:
			script.WriteString(line)
		}
	}
	return script.String()
}

// restoreTwice takes one sample of the yardstick.
func (m *rulesMeasure) restoreTwice(ctx context.Context) error {
	var stdin []*os.File
	for _, f := range m.families {
		path := filepath.Join(m.bench.dir, f.restore+".rules")
		if err := os.WriteFile(path, []byte(f.script), 0o600); err != nil {
			return fmt.Errorf("writing the yardstick's rules: %w", err)
		}
		in, err := os.Open(path)
		if err != nil {
			return fmt.Errorf("opening the yardstick's rules: %w", err)
		}
		defer in.Close()
		stdin = append(stdin, in)
	}
	return m.timeInFreshNetns(ctx, &m.bench.yardstick, func() error {
		for i, f := range m.families {
			cmd := exec.CommandContext(ctx, f.restore, "--noflush")
			cmd.Stdin = stdin[i]
			if err := cmd.Run(); err != nil {
				return fmt.Errorf("running %s: %w", f.restore, err)
			}
		}
		return nil
	})
}

// startTwice takes a sample of what starting two processes costs here. The yardstick is
// mostly that, which is why its ratio to this says how the limits compare with those of
// another machine.
func (m *rulesMeasure) startTwice(ctx context.Context) error {
	return m.timeInFreshNetns(ctx, &m.trueTwice, func() error {
		for range 2 {
			if err := exec.CommandContext(ctx, "true").Run(); err != nil {
				return fmt.Errorf("running true: %w", err)
			}
		}
		return nil
	})
}

// timeInFreshNetns times fn, without the way in.
func (m *rulesMeasure) timeInFreshNetns(ctx context.Context, f *figure, fn func() error) error {
	return m.inFreshNetns(ctx, func(ns *podnetns.Netns) error {
		return ns.Do(func() error { return f.time(fn) })
	})
}

// backend is what both backends are to the bench.
type backend interface {
	Apply(ctx context.Context, run redirection.Runner, opts redirection.Options) (redirection.Families, error)
	Verify(ctx context.Context, run redirection.Runner, opts redirection.Options) (redirection.Families, []redirection.Difference, error)
	Remove(ctx context.Context, run redirection.Runner) error
}

// nftables measures several in a row: after a pause everything would be found cold.
func (m *rulesMeasure) nftables(ctx context.Context) error {
	return m.lives(ctx, m.nft, 5, &m.nftApply, &m.nftVerify, &m.nftRemove)
}

func (m *rulesMeasure) iptables(ctx context.Context) error {
	return m.lives(ctx, m.ipt, 1, &m.iptApply, &m.iptVerify, &m.iptRemove)
}

// lives takes n samples of each of apply, verify and remove. The verify comes after a
// first one that is not counted: "nothing changed" is since the last look.
func (m *rulesMeasure) lives(ctx context.Context, backend backend, n int, apply, verify, remove *figure) error {
	return m.freshNetns(ctx, n, func(all []*podnetns.Netns) error {
		for _, step := range []struct {
			figure *figure // nil: not counted
			do     func(*podnetns.Netns) error
		}{
			{apply, func(ns *podnetns.Netns) error { return m.apply(ctx, backend, ns) }},
			{nil, func(ns *podnetns.Netns) error { return m.verify(ctx, backend, ns) }},
			{verify, func(ns *podnetns.Netns) error { return m.verify(ctx, backend, ns) }},
			{remove, func(ns *podnetns.Netns) error { return backend.Remove(ctx, ns.Do) }},
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

func (m *rulesMeasure) apply(ctx context.Context, backend backend, ns *podnetns.Netns) error {
	families, err := backend.Apply(ctx, ns.Do, m.opts)
	if err == nil && families != redirection.DualStack {
		err = fmt.Errorf("only %s was applied: the figures are for both families", families)
	}
	return err
}

func (m *rulesMeasure) verify(ctx context.Context, backend backend, ns *podnetns.Netns) error {
	_, differences, err := backend.Verify(ctx, ns.Do, m.opts)
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
	return m.inFreshNetns(ctx, func(ns *podnetns.Netns) (err error) {
		if m.applyChildren, err = c.count(func() error { return m.apply(ctx, backend, ns) }); err != nil {
			return err
		}
		m.verifyChildren, err = c.count(func() error { return m.verify(ctx, backend, ns) })
		return err
	})
}

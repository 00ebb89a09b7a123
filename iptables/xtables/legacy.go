// SPDX-License-Identifier: Apache-2.0

package xtables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"time"

	"ambientd/iptables/redirection"
)

// Whose selects the chains of a table that belong to somebody.
type Whose func(chains []string) []string

// Ours selects our own chains.
func Ours(chains []string) []string { return pick(chains, redirection.IsOurChain) }

// Foreign selects the chains of other ambient agents. The redirection of an
// injected sidecar proxy uses one of their names, but not without others of its
// own: it is no ambient agent's.
func Foreign(chains []string) []string {
	if slices.ContainsFunc(chains, redirection.IsSidecarChain) {
		return nil
	}
	return pick(chains, redirection.IsForeignChain)
}

func pick(chains []string, match func(string) bool) []string {
	return slices.DeleteFunc(slices.Clone(chains), func(c string) bool { return !match(c) })
}

// HasLegacy reports whether x_tables has chains of somebody's in a pod's netns. It
// reads only, takes no child process where the tables of x_tables are empty or
// there are none, and makes none.
func HasLegacy(ctx context.Context, run redirection.Runner, whose Whose) (bool, error) {
	for _, family := range redirection.DualStack.Each() {
		_, got, err := readLegacy(ctx, run, family)
		if err != nil {
			return false, err
		}
		if removal(got, whose) != "" {
			return true, nil
		}
	}
	return false, nil
}

// RemoveLegacy takes chains of somebody's out of x_tables in a pod's netns, and
// the rules that lead into them, and nothing else. It reports whether there were
// any.
func RemoveLegacy(ctx context.Context, run redirection.Runner, whose Whose) (found bool, err error) {
	for _, family := range redirection.DualStack.Each() {
		programs, got, err := readLegacy(ctx, run, family)
		if err != nil {
			return found, err
		}
		script := removal(got, whose)
		if script == "" {
			continue
		}
		found = true
		if err := programs.Restore(ctx, run, script); err != nil {
			return found, err
		}
	}
	return found, nil
}

func readLegacy(ctx context.Context, run redirection.Runner, family redirection.Families) (Programs, Saved, error) {
	tables, err := LegacyTables(run, family)
	if err != nil || len(tables) == 0 {
		return Programs{}, nil, err
	}
	if empty, err := tablesAreEmpty(run, family, tables); err != nil || empty {
		return Programs{}, nil, err
	}
	programs, err := legacyPrograms(ctx, family)
	if err != nil {
		return Programs{}, nil, fmt.Errorf("x_tables has tables for %s (%s): %w", family, strings.Join(tables, ", "), err)
	}
	got, err := programs.Save(ctx, run)
	return programs, got, err
}

// legacyPrograms finds those that speak to x_tables, under either name.
func legacyPrograms(ctx context.Context, family redirection.Families) (Programs, error) {
	programs, err := Find(ctx, Legacy, family)
	if !errors.Is(err, exec.ErrNotFound) {
		return programs, err
	}
	plain, plainErr := Find(ctx, Plain, family)
	if plainErr != nil || !plain.Legacy() {
		return Programs{}, err
	}
	return plain, nil
}

// removal returns the restore script that takes somebody's chains out, "" where
// there are none. Each table changes at once; their order does not matter while
// the rules of the backend in use are in place.
func removal(got Saved, whose Whose) string {
	var script strings.Builder
	for _, name := range slices.Sorted(maps.Keys(got)) {
		table := got[name]
		chains := whose(table.Chains)
		if len(chains) == 0 {
			continue
		}
		fmt.Fprintf(&script, "*%s\n", name)
		for _, r := range table.References(func(c string) bool { return slices.Contains(chains, c) }) {
			fmt.Fprintf(&script, "-D %s %s\n", r.From, r.Rule)
		}
		script.WriteString(deletion(chains))
	}
	return script.String()
}

// deletion returns the lines that delete chains to which no rule outside them
// leads: emptied first, since a rule of one may lead to another.
func deletion(chains []string) string {
	var lines strings.Builder
	for _, option := range []string{"-F", "-X"} {
		for _, c := range chains {
			fmt.Fprintf(&lines, "%s %s\n", option, c)
		}
	}
	lines.WriteString("COMMIT\n")
	return lines.String()
}

// Where agents have their rule in the host's netns.
const (
	hostTable = "nat"
	hostChain = "POSTROUTING"
)

// RemoveLegacyFromHost does what RemoveLegacy does in the host's netns, where
// agents have one rule: it reads chain by chain, since a host's tables may be long,
// and waits for x_tables' lock as long as wait, in whole seconds.
func RemoveLegacyFromHost(ctx context.Context, run redirection.Runner, whose Whose, wait time.Duration) (found bool, err error) {
	for _, family := range redirection.DualStack.Each() {
		tables, err := LegacyTables(run, family)
		if err != nil {
			return found, err
		}
		if !slices.Contains(tables, hostTable) {
			continue
		}
		programs, err := legacyPrograms(ctx, family)
		if err != nil {
			return found, fmt.Errorf("x_tables has table %s for %s: %w", hostTable, family, err)
		}
		removed, err := programs.removeFromHost(ctx, run, whose, wait)
		found = found || removed
		if err != nil {
			return found, err
		}
	}
	return found, nil
}

// removeFromHost works with either variant.
func (p Programs) removeFromHost(ctx context.Context, run redirection.Runner, whose Whose, wait time.Duration) (bool, error) {
	var chains []string
	for _, name := range whose(append(redirection.ForeignChains(), redirection.IPTablesPostrouting)) {
		_, err := p.ListOnHost(ctx, run, hostTable, name, wait)
		if errors.Is(err, ErrNoChain) {
			continue
		}
		if err != nil {
			return false, err
		}
		chains = append(chains, name)
	}
	if len(chains) == 0 {
		return false, nil
	}
	rules, err := p.ListOnHost(ctx, run, hostTable, hostChain, wait)
	if err != nil {
		return true, err
	}
	var script strings.Builder
	fmt.Fprintf(&script, "*%s\n", hostTable)
	for _, rule := range rules {
		if slices.Contains(chains, Target(rule)) {
			fmt.Fprintf(&script, "-D %s %s\n", hostChain, rule)
		}
	}
	script.WriteString(deletion(chains))
	return true, p.RestoreOnHost(ctx, run, script.String(), wait)
}

// SPDX-License-Identifier: Apache-2.0

package foreign

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
	"ambientd/iptables/xtables"
)

// condemned returns which chains of iptables are to go, where the means given and
// the one that has made them are the same or not.
func condemned(own, written Means) func(chain string) bool {
	return func(chain string) bool {
		return redirection.IsForeignChain(chain) || redirection.IsOurChain(chain) && own != written
	}
}

// hasLegacy looks in x_tables.
func hasLegacy(ctx context.Context, run redirection.Runner, own Means) (bool, error) {
	for _, family := range redirection.DualStack.Each() {
		_, got, err := readLegacy(ctx, run, family)
		if err != nil {
			return false, err
		}
		if got.Has(condemned(own, IPTablesLegacy)) {
			return true, nil
		}
	}
	return false, nil
}

// removeLegacy removes chains of x_tables, and the rules that lead into them.
func removeLegacy(ctx context.Context, run redirection.Runner, own Means) (found bool, err error) {
	for _, family := range redirection.DualStack.Each() {
		programs, got, err := readLegacy(ctx, run, family)
		if err != nil {
			return found, err
		}
		script := removal(got, condemned(own, IPTablesLegacy))
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

// readLegacy returns nothing where x_tables has no tables, for which it takes no
// child process.
func readLegacy(ctx context.Context, run redirection.Runner, family redirection.Families) (xtables.Programs, xtables.Saved, error) {
	tables, err := xtables.LegacyTables(run, family)
	if err != nil || len(tables) == 0 {
		return xtables.Programs{}, nil, err
	}
	programs, err := legacyPrograms(ctx, family)
	if err != nil {
		return xtables.Programs{}, nil, fmt.Errorf("x_tables has tables for %s (%s): %w", family, strings.Join(tables, ", "), err)
	}
	got, err := programs.Save(ctx, run)
	return programs, got, err
}

// legacyPrograms finds those that speak to x_tables, under either name.
func legacyPrograms(ctx context.Context, family redirection.Families) (xtables.Programs, error) {
	programs, err := xtables.Find(ctx, xtables.Legacy, family)
	if !errors.Is(err, exec.ErrNotFound) {
		return programs, err
	}
	plain, plainErr := xtables.Find(ctx, xtables.Plain, family)
	if plainErr != nil || !plain.Legacy() {
		return xtables.Programs{}, err
	}
	return plain, nil
}

// removal returns the restore script that takes the condemned chains out, "" where
// there are none. Each table changes at once; their order does not matter while the
// rules of the backend in use are in place.
func removal(got xtables.Saved, condemned func(chain string) bool) string {
	var script strings.Builder
	tables := slices.Sorted(maps.Keys(got))
	for _, name := range tables {
		table := got[name]
		chains := slices.DeleteFunc(slices.Clone(table.Chains), func(c string) bool { return !condemned(c) })
		if len(chains) == 0 {
			continue
		}
		fmt.Fprintf(&script, "*%s\n", name)
		for _, r := range table.References(condemned) {
			fmt.Fprintf(&script, "-D %s %s\n", r.From, r.Rule)
		}
		script.WriteString(deletion(chains))
		script.WriteString("COMMIT\n")
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
	return lines.String()
}

// Where agents have their rule in the host's netns.
const (
	hostTable = "nat"
	hostChain = "POSTROUTING"
)

// removeLegacyFromHost reads chain by chain: a host's table may be long.
func removeLegacyFromHost(ctx context.Context, run redirection.Runner, own Means, wait time.Duration) (found bool, err error) {
	for _, family := range redirection.DualStack.Each() {
		removed, err := removeLegacyFromHostFamily(ctx, run, family, own, wait)
		found = found || removed
		if err != nil {
			return found, err
		}
	}
	return found, nil
}

func removeLegacyFromHostFamily(ctx context.Context, run redirection.Runner, family redirection.Families, own Means, wait time.Duration) (bool, error) {
	tables, err := xtables.LegacyTables(run, family)
	if err != nil || !slices.Contains(tables, hostTable) {
		return false, err
	}
	programs, err := legacyPrograms(ctx, family)
	if err != nil {
		return false, fmt.Errorf("x_tables has table %s for %s: %w", hostTable, family, err)
	}
	var chains []string
	for _, name := range append(redirection.ForeignChains(), redirection.IPTablesPostrouting) {
		if !condemned(own, IPTablesLegacy)(name) {
			continue
		}
		_, err := programs.ListOnHost(ctx, run, hostTable, name, wait)
		if errors.Is(err, xtables.ErrNoChain) {
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
	rules, err := programs.ListOnHost(ctx, run, hostTable, hostChain, wait)
	if err != nil {
		return true, err
	}
	var script strings.Builder
	fmt.Fprintf(&script, "*%s\n", hostTable)
	for _, rule := range rules {
		if slices.Contains(chains, xtables.Target(rule)) {
			fmt.Fprintf(&script, "-D %s %s\n", hostChain, rule)
		}
	}
	script.WriteString(deletion(chains) + "COMMIT\n")
	return true, programs.RestoreOnHost(ctx, run, script.String(), wait)
}

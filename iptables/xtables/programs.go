// SPDX-License-Identifier: Apache-2.0

package xtables

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
)

// maxSave bounds what a pod can make the agent hold: a privileged pod may have
// any number of rules of its own.
const maxSave = 4 << 20

// HostLockWait is how long work in the host's netns waits for x_tables' lock where
// nothing else is configured: kube-proxy holds it for seconds on large clusters.
const HostLockWait = 5 * time.Second

// Variant names one flavour of the programs by what stands between "iptables-"
// and "restore" in their names.
type Variant string

// The variants. Distributions ship the first two side by side, or only the
// third; which of the two that is, its version says.
const (
	NFTables Variant = "nft"    // translates to nf_tables
	Legacy   Variant = "legacy" // speaks to x_tables
	Plain    Variant = "plain"  // iptables-restore, whatever that is here
)

// Variants lists the variants, the one to prefer first: nf_tables needs no lock,
// and reading with it changes nothing.
func Variants() []Variant { return []Variant{NFTables, Plain, Legacy} }

// Programs are the programs of one variant and family. Find makes them.
type Programs struct {
	restore, save string // paths
	list          string // name: only work in the host's netns needs it
	family        redirection.Families
	legacy        bool
}

// Find looks the programs up in PATH and where administrators' programs are. It
// says which one is missing (wrapping exec.ErrNotFound); whether the kernel takes
// their rules, only using them shows.
func Find(ctx context.Context, variant Variant, family redirection.Families) (Programs, error) {
	name, infix := "iptables", "-"+string(variant)
	if family == redirection.IPv6 {
		name = "ip6tables"
	}
	if variant == Plain {
		infix = ""
	}
	p := Programs{list: name + infix, family: family, legacy: variant == Legacy}
	var err error
	if p.restore, err = find(name + infix + "-restore"); err != nil {
		return Programs{}, err
	}
	if p.save, err = find(name + infix + "-save"); err != nil {
		return Programs{}, err
	}
	if variant == Plain {
		if p.legacy, err = isLegacy(ctx, p.restore); err != nil {
			return Programs{}, err
		}
	}
	return p, nil
}

// Legacy reports whether the programs speak to x_tables.
func (p Programs) Legacy() bool { return p.legacy }

// Files that show the netns of the thread that reads them; those of /proc/net
// show the main thread's.
const (
	// ipv6Addresses exists with IPv6 in the kernel.
	ipv6Addresses = "/proc/thread-self/net/if_inet6"
	// Each lists the tables that x_tables has for one family, and exists once the
	// kernel module is there.
	legacyTables4 = "/proc/thread-self/net/ip_tables_names"
	legacyTables6 = "/proc/thread-self/net/ip6_tables_names"
)

// Restore applies a script inside a pod's netns; other chains and rules stay
// (--noflush). Each table changes in one transaction. It takes no lock that
// anybody else could hold.
func (p Programs) Restore(ctx context.Context, run redirection.Runner, script string) error {
	return p.feed(ctx, run, script, child{path: p.restore, args: []string{"--noflush"}, lock: privateLock})
}

// RestoreOnHost does so inside the host's netns, where x_tables' lock is taken:
// others program the same tables. It waits for the lock as long as wait, in whole
// seconds, at least one.
func (p Programs) RestoreOnHost(ctx context.Context, run redirection.Runner, script string, wait time.Duration) error {
	return p.feed(ctx, run, script, child{path: p.restore, args: []string{"--noflush", "--wait", seconds(wait)}, lock: hostsLock})
}

func (p Programs) feed(ctx context.Context, run redirection.Runner, script string, c child) error {
	if script == "" {
		return nil
	}
	stdin, err := memfd(script)
	if err != nil {
		return fmt.Errorf("writing the script for %s: %w", filepath.Base(c.path), err)
	}
	c.stdin, c.stdout = stdin, io.Discard
	return errors.Join(c.run(ctx, run), stdin.Close())
}

// seconds spells a duration as --wait takes it, rounded up. 0 would mean to wait
// for ever.
func seconds(d time.Duration) string {
	return strconv.FormatInt(max(1, int64((d+time.Second-1)/time.Second)), 10)
}

// Save reads the rules of all tables. It makes none: x_tables would register an
// empty table just for being asked about it, which costs every packet of the pod
// and misleads whoever later looks for the variant in use. So it asks only where
// tables are. It is for a pod's netns: a host may have more rules than Save takes.
func (p Programs) Save(ctx context.Context, run redirection.Runner) (Saved, error) {
	present, err := p.present(run)
	if err != nil || !present {
		return Saved{}, err
	}
	out := &bounded{limit: maxSave}
	if err := (child{path: p.save, stdout: out, lock: privateLock}).run(ctx, run); err != nil {
		return nil, err
	}
	if out.exceeded {
		return nil, fmt.Errorf("running %s: more than %d bytes of rules", filepath.Base(p.save), maxSave)
	}
	return Parse(out.kept.String())
}

// ErrNoChain means that a chain is not there, or, which iptables-nft does not tell
// apart in chains that are not built in, holds what has no equal in iptables.
var ErrNoChain = errors.New("no such chain of iptables")

// ListOnHost reads the rules of one chain inside the host's netns, each as [Table]
// has them, without the rest of a table that may be long. For wait see
// [Programs.RestoreOnHost].
func (p Programs) ListOnHost(ctx context.Context, run redirection.Runner, table, chain string, wait time.Duration) ([]string, error) {
	has, err := p.hasTable(run, table)
	if err != nil {
		return nil, err
	}
	if !has {
		return nil, fmt.Errorf("listing chain %s of table %s: %w", chain, table, ErrNoChain)
	}
	path, err := find(p.list)
	if err != nil {
		return nil, err
	}
	out := &bounded{limit: maxSave}
	c := child{path: path, args: []string{"--wait", seconds(wait), "-t", table, "-S", chain}, stdout: out, lock: hostsLock}
	if err := c.run(ctx, run); err != nil {
		if isNoChain(err, chain) {
			err = fmt.Errorf("%w: %w", ErrNoChain, err)
		}
		return nil, fmt.Errorf("listing chain %s of table %s: %w", chain, table, err)
	}
	if out.exceeded {
		return nil, fmt.Errorf("listing chain %s of table %s: more than %d bytes of rules", chain, table, maxSave)
	}
	var rules []string
	for line := range strings.Lines(out.kept.String()) {
		if rule, ok := strings.CutPrefix(strings.TrimRight(line, "\n"), "-A "+chain+" "); ok {
			rules = append(rules, rule)
		}
	}
	return rules, nil
}

// isNoChain reports whether -S failed for want of the chain, by the words of
// iptables-legacy 1.4 to 1.8 and of iptables-nft 1.8.
func isNoChain(err error, chain string) bool {
	if strings.Contains(err.Error(), "No chain/target/match by that name") {
		return true
	}
	builtin := slices.Contains([]string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}, chain)
	return !builtin && strings.Contains(err.Error(), "is incompatible, use 'nft' tool")
}

// present reports, without a child process, whether the netns can have rules
// that save would show.
func (p Programs) present(run redirection.Runner) (bool, error) {
	if p.family == redirection.IPv6 {
		if has, err := HasIPv6(run); err != nil || !has {
			return false, err
		}
	}
	if !p.legacy {
		return true, nil
	}
	tables, err := LegacyTables(run, p.family)
	return len(tables) > 0, err
}

// hasTable does so for one table.
func (p Programs) hasTable(run redirection.Runner, table string) (bool, error) {
	has, err := p.present(run)
	if err != nil || !has || !p.legacy {
		return has, err
	}
	tables, err := LegacyTables(run, p.family)
	return slices.Contains(tables, table), err
}

// LegacyTables returns the tables that x_tables has for the family in the netns,
// without making any. They may be empty, and others' doing.
func LegacyTables(run redirection.Runner, family redirection.Families) ([]string, error) {
	path := legacyTables4
	if family == redirection.IPv6 {
		path = legacyTables6
	}
	var text []byte
	err := run(func() (err error) {
		if text, err = os.ReadFile(path); errors.Is(err, os.ErrNotExist) {
			return nil // the kernel has no x_tables for this family, or not yet
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("looking for tables of x_tables for %s: %w", family, err)
	}
	return strings.Fields(string(text)), nil
}

// TablesHere reports whether x_tables has a table of either family in the netns of the
// calling thread, be it empty. It makes none.
func TablesHere() (bool, error) {
	for _, path := range []string{legacyTables4, legacyTables6} {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.ENOENT) {
			continue // the kernel has no x_tables for this family, or not yet
		}
		if err != nil {
			return false, &os.PathError{Op: "open", Path: path, Err: err}
		}
		var first [1]byte
		n, err := unix.Read(fd, first[:])
		_ = unix.Close(fd) // nothing was written
		if n > 0 || err != nil {
			return n > 0, err
		}
	}
	return false, nil
}

// HasIPv6 reports whether the kernel has IPv6 for the netns, on or off.
func HasIPv6(run redirection.Runner) (has bool, err error) {
	err = run(func() error {
		_, err := os.Stat(ipv6Addresses)
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		has = err == nil
		return err
	})
	if err != nil {
		return false, fmt.Errorf("looking for IPv6: %w", err)
	}
	return has, nil
}

// find looks in PATH, and where administrators' programs are: an ordinary user's
// PATH does not go there.
func find(name string) (string, error) {
	for _, candidate := range []string{name, filepath.Join("/usr/sbin", name), filepath.Join("/sbin", name)} {
		if path, err := exec.LookPath(candidate); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s is neither in PATH nor in /usr/sbin or /sbin: install the iptables package: %w", name, exec.ErrNotFound)
}

// isLegacy asks the program: "iptables-restore v1.8.9 (nf_tables)". Versions
// before 1.8 say nothing and know x_tables only.
func isLegacy(ctx context.Context, path string) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, maxRun)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, "--version").Output()
	if err != nil {
		return false, fmt.Errorf("asking %s for its version: %w", path, err)
	}
	return !strings.Contains(string(out), "nf_tables"), nil
}

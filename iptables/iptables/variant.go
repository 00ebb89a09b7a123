// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
)

// Variant names one flavour of the iptables programs by what stands between
// "iptables-" and "restore" in their names.
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

// New returns the backend that uses the programs of one variant, for both
// families. It says which program is missing; whether the kernel takes their
// rules, only using them shows (see [Detect]).
func New(ctx context.Context, variant Variant) (*Backend, error) {
	infix := string(variant) + "-"
	if variant == Plain {
		infix = ""
	}
	b := &Backend{variant: variant, programs: map[redirection.Families]programs{}, sockets: rawnetlink.New()}
	for family, prefix := range map[redirection.Families]string{redirection.IPv4: "iptables-", redirection.IPv6: "ip6tables-"} {
		restore, err := find(prefix + infix + "restore")
		if err != nil {
			return nil, err
		}
		save, err := find(prefix + infix + "save")
		if err != nil {
			return nil, err
		}
		legacy := variant == Legacy
		if variant == Plain {
			if legacy, err = isLegacy(ctx, restore); err != nil {
				return nil, err
			}
		}
		b.programs[family] = programs{restorePath: restore, savePath: save, family: family, legacy: legacy}
	}
	return b, nil
}

// Detect returns the backend of the first variant whose rules the kernel takes
// and shows again, tried in an empty netns, which is left empty. The error says
// what each variant lacked.
func Detect(ctx context.Context, run redirection.Runner) (*Backend, error) {
	var errs []error
	for _, variant := range Variants() {
		b, err := New(ctx, variant)
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

// probe writes every kind of rule that options can call for, reads them back and
// takes them out.
func (b *Backend) probe(ctx context.Context, run redirection.Runner) error {
	opts := redirection.DefaultOptions()
	opts.RerouteInterfaces = []string{"probe0"}
	for _, family := range redirection.DualStack.Each() {
		if family == redirection.IPv6 {
			if has, err := hasIPv6(run); err != nil || !has {
				return err
			}
		}
		if err := b.probeFamily(ctx, run, opts, family); err != nil {
			return err
		}
	}
	return nil
}

func (b *Backend) probeFamily(ctx context.Context, run redirection.Runner, opts redirection.Options, family redirection.Families) (err error) {
	defer func() { err = errors.Join(err, b.removeFamily(ctx, run, family)) }()
	if err := b.applyFamily(ctx, run, opts, family); err != nil {
		return err
	}
	want, err := render(opts, family)
	if err != nil {
		return err
	}
	got, err := b.programs[family].save(ctx, run)
	if err != nil {
		return err
	}
	if differences := compare(got, want); len(differences) > 0 {
		return fmt.Errorf("rules read back differ from those written: %s", differences[0])
	}
	return nil
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

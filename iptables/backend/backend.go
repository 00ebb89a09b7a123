// SPDX-License-Identifier: Apache-2.0

// Package backend owns the choice of what programs redirection on this node: the nftables backend, or the iptables one.
// It chooses by trying, in a namespace that exists for nothing else: whether modules are listed, programs installed or
// tables present says little, and reading with iptables-legacy creates the tables that the next look would find. It
// refuses to look at the host's namespace or a pod's, and to switch while the agent runs.
package backend

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"golang.org/x/sys/unix"

	"ambientd/iptables/iptables"
	"ambientd/iptables/nftables"
	"ambientd/iptables/redirection"
)

// Modes that an operator can ask for. The last two are also the names of the backends.
const (
	Auto     = "auto"     // nftables where it works, else iptables
	NFTables = "nftables" // over netlink, without a child process
	IPTables = "iptables" // by iptables-restore
)

// Backend programs redirection in network namespaces.
type Backend interface {
	// Apply makes redirection there exactly what opts call for and returns the families that it covers.
	Apply(ctx context.Context, ns redirection.Netns, opts redirection.Options) (redirection.Families, error)
	// Verify returns the families that it should cover there, and in what the kernel's state differs. It writes nothing.
	Verify(ctx context.Context, ns redirection.Netns, opts redirection.Options) (redirection.Families, []redirection.Difference, error)
	// HasOwn tells whether there are packet rules of its own there, whatever they say. It writes nothing, and starts no
	// process where there are none of anybody's.
	HasOwn(ctx context.Context, run redirection.Runner) (bool, error)
	// Remove leaves nothing of redirection there. It succeeds where there is nothing.
	Remove(ctx context.Context, ns redirection.Netns) error
}

// Both are asserted here, where they are put to the same use.
var (
	_ Backend = (*nftables.Backend)(nil)
	_ Backend = (*iptables.Backend)(nil)
)

// Chosen is a backend that has been seen to work.
type Chosen struct {
	Backend Backend
	Name    string // NFTables or IPTables
	Reason  string // why this one, as a sentence for an operator
}

// Scratch makes a fresh namespace with lo up. The function that it returns gives it back.
type Scratch = func() (run redirection.Runner, release func() error, err error)

// Choose returns the backend that mode stands for, after it has applied, verified and removed every kind of rule in a
// scratch namespace. An error names what did not work and what an operator can do.
func Choose(ctx context.Context, mode string, scratch Scratch, logger *slog.Logger) (Chosen, error) {
	switch mode {
	case NFTables:
		return explicit(ctx, NFTables, tryNFTables, scratch)
	case IPTables:
		return explicit(ctx, IPTables, tryIPTables, scratch)
	case Auto:
		return automatic(ctx, scratch, logger)
	default:
		return Chosen{}, fmt.Errorf("redirection mode %q is none of %s, %s, %s", mode, Auto, NFTables, IPTables)
	}
}

// attempt tries one backend in a fresh namespace.
type attempt func(ctx context.Context, run redirection.Runner) (Chosen, error)

func explicit(ctx context.Context, mode string, try attempt, scratch Scratch) (Chosen, error) {
	chosen, err := inScratch(ctx, try, scratch)
	if err != nil {
		return Chosen{}, fmt.Errorf("redirection mode %s does not work on this node: %w; %s", mode, err, advice(mode, err))
	}
	chosen.Reason = "asked for by configuration; " + chosen.Reason
	return chosen, nil
}

func automatic(ctx context.Context, scratch Scratch, logger *slog.Logger) (Chosen, error) {
	chosen, nftErr := inScratch(ctx, tryNFTables, scratch)
	if nftErr == nil {
		return chosen, nil
	}
	if err := ctx.Err(); err != nil {
		return Chosen{}, fmt.Errorf("probing nftables: %w", err)
	}
	logger.Info("nftables does not work on this node, trying iptables", "step", "probe", "err", nftErr)
	chosen, iptErr := inScratch(ctx, tryIPTables, scratch)
	if iptErr != nil {
		return Chosen{}, fmt.Errorf("no way to program redirection works on this node: nftables: %w (%s); iptables: %w (%s)",
			nftErr, advice(NFTables, nftErr), iptErr, advice(IPTables, iptErr))
	}
	chosen.Reason = fmt.Sprintf("nftables does not work here (%v); %s", nftErr, chosen.Reason)
	return chosen, nil
}

func inScratch(ctx context.Context, try attempt, scratch Scratch) (chosen Chosen, err error) {
	run, release, err := scratch()
	if err != nil {
		return Chosen{}, fmt.Errorf("making a network namespace to probe in: %w", err)
	}
	defer func() {
		if releaseErr := release(); releaseErr != nil {
			err = errors.Join(err, fmt.Errorf("releasing the network namespace of the probe: %w", releaseErr))
		}
	}()
	return try(ctx, run)
}

func tryNFTables(ctx context.Context, run redirection.Runner) (Chosen, error) {
	b, err := nftables.New()
	if err != nil {
		return Chosen{}, err
	}
	families, err := probeAll(ctx, b, b, run)
	if err != nil {
		return Chosen{}, err
	}
	return Chosen{Backend: b, Name: NFTables, Reason: fmt.Sprintf(
		"the kernel took, showed and removed every kind of rule over netlink, for %s", families)}, nil
}

func tryIPTables(ctx context.Context, run redirection.Runner) (Chosen, error) {
	b, err := iptables.Detect(ctx, run, iptables.Config{})
	if err != nil {
		return Chosen{}, err
	}
	families, err := probeAll(ctx, b, b, run)
	if err != nil {
		return Chosen{}, err
	}
	return Chosen{Backend: b, Name: IPTables, Reason: fmt.Sprintf(
		"the iptables programs (variant %s) wrote, showed and removed every kind of rule, for %s", b.Variant(), families)}, nil
}

// probeAll probes a backend's work in a pod's namespace and in the host's.
func probeAll(ctx context.Context, b Backend, host Host, run redirection.Runner) (redirection.Families, error) {
	families, err := probe(ctx, b, run)
	if err != nil {
		return 0, err
	}
	return families, probeHost(ctx, host, run, families)
}

// advice says what an operator can do about the failure of a mode.
func advice(mode string, err error) string {
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return "run the agent with CAP_NET_ADMIN and CAP_SYS_ADMIN in the user namespace that owns the network namespaces"
	case mode == NFTables:
		return "load nf_tables, nft_ct, nft_redir, nft_nat and nft_chain_nat, or choose mode " + IPTables
	default:
		return "install iptables 1.8 or newer and load ip_set, or choose mode " + NFTables
	}
}

// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"ambientd/iptables/redirection"
)

// probe puts a backend through what a pod's life asks of it, with every row of the model present, and returns the
// families that it worked for. It leaves nothing behind, also when it fails.
func probe(ctx context.Context, b Backend, run redirection.Runner) (families redirection.Families, err error) {
	removed := false
	defer func() {
		if removed {
			return
		}
		// Also after ctx has ended: what is left would be in the way of the next attempt.
		if removeErr := b.Remove(context.WithoutCancel(ctx), run); removeErr != nil {
			err = errors.Join(err, removeErr)
		}
	}()
	if families, err = applyAndVerify(ctx, b, run); err != nil {
		return 0, err
	}
	if err := b.Remove(ctx, run); err != nil {
		return 0, err
	}
	removed = true
	return families, verifyGone(ctx, b, run)
}

// fullOptions switch every row on that can be together.
func fullOptions() redirection.Options {
	opts := redirection.DefaultOptions()
	opts.KeepEstablished = true
	opts.RerouteInterfaces, opts.ExcludeInterfaces = []string{"probe0"}, []string{"probe1"}
	opts.ExcludeInboundPorts = []redirection.PortRange{{First: 8000, Last: 8010}}
	opts.ExcludeOutboundPorts = []redirection.PortRange{{First: 8000, Last: 8000}}
	opts.ExcludeOutboundCIDRs = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/25"), netip.MustParsePrefix("2001:db8::/33")}
	return opts
}

// shutOptions have the rows that drop IPv6 instead of those that capture it.
func shutOptions() redirection.Options {
	opts := redirection.DefaultOptions()
	opts.IPv6 = false
	return opts
}

// applyAndVerify applies several times: replacing is another transaction than creating.
func applyAndVerify(ctx context.Context, b Backend, run redirection.Runner) (redirection.Families, error) {
	var applied redirection.Families
	for _, opts := range []redirection.Options{redirection.DefaultOptions(), shutOptions(), fullOptions()} {
		var err error
		if applied, err = b.Apply(ctx, run, opts); err != nil {
			return 0, err
		}
		verified, differences, err := b.Verify(ctx, run, opts)
		if err != nil {
			return 0, err
		}
		if verified != applied {
			return 0, fmt.Errorf("rules were applied for %s, and verified for %s", applied, verified)
		}
		if len(differences) > 0 {
			return 0, fmt.Errorf("the kernel shows other rules than were applied: %s", join(differences))
		}
	}
	return applied, nil
}

// probeHost puts a backend through what the host's namespace asks of it, with both kinds of sets, in a scratch namespace:
// the host's own is not for trying things.
func probeHost(ctx context.Context, b Host, run redirection.Runner, families redirection.Families) (err error) {
	defer func() {
		if removeErr := b.RemoveHost(context.WithoutCancel(ctx), run); removeErr != nil {
			err = errors.Join(err, removeErr)
		}
	}()
	pods := redirection.DefaultOptions()
	opts := redirection.HostOptions{
		ProbeSourceIPv4: pods.ProbeSourceIPv4, ProbeSourceIPv6: pods.ProbeSourceIPv6, IPv6: families.Has(redirection.IPv6),
	}
	for scope, port := range map[redirection.ProbeScope]uint16{redirection.ProbeScopePod: 0, redirection.ProbeScopeDeclared: 80} {
		opts.Scope = scope
		entries := []redirection.HostEntry{{Addr: netip.MustParseAddr("192.0.2.1"), Port: port}}
		if opts.IPv6 {
			entries = append(entries, redirection.HostEntry{Addr: netip.MustParseAddr("2001:db8::1"), Port: port})
		}
		if err := b.EnsureHost(ctx, run, opts); err != nil {
			return err
		}
		if err := b.SetEntries(ctx, run, opts, entries); err != nil {
			return err
		}
		differences, err := b.VerifyHost(ctx, run, opts, entries)
		if err != nil {
			return err
		}
		if len(differences) > 0 {
			return fmt.Errorf("the kernel shows another rule for probes than was made: %s", join(differences))
		}
	}
	return nil
}

// verifyGone returns an error if Verify still finds anything: all that it may report is missing.
func verifyGone(ctx context.Context, b Backend, run redirection.Runner) error {
	_, differences, err := b.Verify(ctx, run, fullOptions())
	if err != nil {
		return err
	}
	if len(differences) == 0 {
		return errors.New("rules that were removed are still there")
	}
	for _, d := range differences {
		if d.Got != "" {
			return fmt.Errorf("rules that were removed left something: %s", d)
		}
	}
	return nil
}

func join(differences []redirection.Difference) string {
	texts := make([]string, len(differences))
	for i, d := range differences {
		texts[i] = d.String()
	}
	return strings.Join(texts, "; ")
}

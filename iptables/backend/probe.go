// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"errors"
	"fmt"
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

// fullOptions switch every row on.
func fullOptions() redirection.Options {
	opts := redirection.DefaultOptions()
	opts.RerouteInterfaces = []string{"probe0"}
	return opts
}

// applyAndVerify applies twice: replacing is another transaction than creating.
func applyAndVerify(ctx context.Context, b Backend, run redirection.Runner) (redirection.Families, error) {
	opts := fullOptions()
	opts.RerouteInterfaces = nil
	if _, err := b.Apply(ctx, run, opts); err != nil {
		return 0, err
	}
	opts = fullOptions()
	applied, err := b.Apply(ctx, run, opts)
	if err != nil {
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
	return applied, nil
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

// SPDX-License-Identifier: Apache-2.0

package certfetch

import (
	"context"
	"crypto/x509"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

const (
	// rootsEvery is how often the source is asked for its roots, give or take a tenth.
	rootsEvery = 5 * time.Minute

	// rootsLead is how long before the first leaf under them new roots are published, for every
	// consumer to have them before it meets such a leaf at a peer.
	rootsLead = 500 * time.Millisecond

	// rotationSpread is the time over which a node's leaves are renewed when their root is no longer
	// among those that peers trust.
	rotationSpread = 30 * time.Second
)

// keepRoots asks for the roots until ctx ends: soon again while there are failures, else rarely.
func (f *Fetcher) keepRoots(ctx context.Context) {
	var failures int
	for {
		wait := rootsEvery - rootsEvery/10 + rand.N(rootsEvery/5)
		if err := f.refreshRoots(ctx); err != nil && ctx.Err() == nil {
			failures++
			wait = backoff(failures)
			if failures == 1 {
				f.cfg.Logger.Warn("no roots from the CA", "err", err, "retry_in", wait)
			}
		} else {
			failures = 0
		}
		if sleep(ctx, wait) != nil {
			return
		}
	}
}

func (f *Fetcher) refreshRoots(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, f.cfg.IssueTimeout)
	defer cancel()
	known := f.Bundle().Version
	roots, err := f.cfg.Source.Roots(ctx)
	if err != nil {
		return fmt.Errorf("asking the CA for its roots: %w", err)
	}
	if err := checkRoots(roots); err != nil {
		return fmt.Errorf("discarding the roots that the CA returned: %w", err)
	}
	f.adoptRoots(roots, known)
	return nil
}

// adoptRoots publishes roots if they are not those of today, unless there have been others since
// the CA was asked, when the bundle had the version known: an answer that was long under way must
// not bring old roots back. It returns how long a leaf of the same answer has still to wait until
// everybody has had time to take the roots up: nothing unless they just changed.
//
// Leaves under a root that is gone are still served, and soon renewed: peers that have the new
// roots already refuse them.
func (f *Fetcher) adoptRoots(roots []*x509.Certificate, known uint64) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := wallNow()
	if f.bundle.Version != known || sameRoots(f.bundle.Roots, roots) {
		return min(f.leadUntil.Sub(now), rootsLead) // more only if the clock was set back since
	}
	first := f.bundle.Version == 0
	f.version++
	f.bundle = Bundle{Roots: distinct(roots), Version: f.version}
	for s := range f.subscriptions {
		s.signal()
	}
	if first {
		// Nobody has trusted anything before, so nobody can be behind.
		return 0
	}
	f.cfg.Logger.Info("the CA's roots changed", "roots", len(f.bundle.Roots))
	f.leadUntil = now.Add(rootsLead)
	for _, e := range f.entries {
		if e.svid == nil || f.bundle.has(e.svid.anchor) {
			continue
		}
		if soon := now.Add(rotationDelay()); soon.Before(e.askAt) {
			e.askAt = soon
			f.schedule(e)
		}
	}
	f.wakeUp()
	return rootsLead
}

// has reports whether cert is one of the roots.
func (b Bundle) has(cert *x509.Certificate) bool {
	return slices.ContainsFunc(b.Roots, cert.Equal)
}

func rotationDelay() time.Duration {
	return rootsLead + rand.N(rotationSpread)
}

// sameRoots compares two lists as sets: a CA that only changes their order changes nothing.
func sameRoots(a, b []*x509.Certificate) bool {
	return slices.Equal(a, b) || subset(a, b) && subset(b, a)
}

func subset(a, b []*x509.Certificate) bool {
	return !slices.ContainsFunc(a, func(cert *x509.Certificate) bool { return !slices.ContainsFunc(b, cert.Equal) })
}

func distinct(roots []*x509.Certificate) []*x509.Certificate {
	var set []*x509.Certificate
	for _, root := range roots {
		if !slices.ContainsFunc(set, root.Equal) {
			set = append(set, root)
		}
	}
	return set
}

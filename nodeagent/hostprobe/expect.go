// SPDX-License-Identifier: Apache-2.0

package hostprobe

import (
	"context"
	"errors"
	"iter"
	"net/netip"
	"slices"

	"ambientd/iptables/redirection"
)

// Expect has the entries of several pods that are about to be added, given by addresses and
// ports as for [Set.Add], written in as few transactions as it takes: one for each pod is most
// of what their Adds would cost. What none of those has made its own when done is called is
// taken out again; done is never nil. On an error nothing is expected, and each Add writes its
// own. A probe of a pod whose rules are not in place yet passes with such an entry as without.
func (s *Set) Expect(ctx context.Context, pods iter.Seq2[[]netip.Addr, []uint16]) (done func(context.Context) error, err error) {
	done = func(context.Context) error { return nil }
	release, err := s.take(ctx)
	if err != nil {
		return done, err
	}
	defer release()
	var entries []redirection.HostEntry
	for addrs, ports := range pods {
		of, err := s.entriesOf(addrs, ports)
		if err != nil || len(of) > MaxEntriesPerPod {
			continue // its Add says so
		}
		entries = append(entries, of...)
	}
	slices.SortFunc(entries, redirection.HostEntry.Compare)
	entries = slices.Compact(entries)
	entries = slices.DeleteFunc(entries, func(e redirection.HostEntry) bool { return s.owners[e] > 0 || s.expected[e] })
	if len(entries) == 0 || s.waiting {
		return done, nil
	}
	if err := s.ensure(ctx); err != nil {
		return done, err
	}
	for some := range slices.Chunk(entries, MaxEntriesPerPod) {
		if err := s.addElements(ctx, some); err != nil {
			return done, errors.Join(err, s.unexpect(context.WithoutCancel(ctx), entries))
		}
		for _, e := range some {
			s.expected[e] = true
		}
	}
	return func(ctx context.Context) error {
		release, err := s.take(ctx)
		if err != nil {
			return err
		}
		defer release()
		return s.unexpect(ctx, entries)
	}, nil
}

// unexpect takes out those of the entries that are expected still. The caller has the turn.
func (s *Set) unexpect(ctx context.Context, entries []redirection.HostEntry) error {
	left := slices.DeleteFunc(slices.Clone(entries), func(e redirection.HostEntry) bool { return !s.expected[e] })
	for _, e := range left {
		delete(s.expected, e)
	}
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	return s.delElements(ctx, left)
}

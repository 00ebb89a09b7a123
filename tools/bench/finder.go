// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"

	"ambientd/nodeagent/podnetns"
)

// finderLimit is what finding all pods may take, times finding one.
const finderLimit = 1.2

// finderTurns is how many turns a round has: of all samples only a tenth shows.
const finderTurns = 5

// finder measures finding the netns of running pods: one of them and all, in turns.
func (b *bench) finder(ctx context.Context, crowd *crowd) error {
	among := fmt.Sprintf("among %d processes", len(crowd.processes))
	b.say("measuring the finder %s", among)
	one, all, err := b.findInTurns(ctx, crowd)
	if err != nil {
		return err
	}
	// The best tenth of each: all pods keep two cores busy, one pod only one, so what else the
	// machine does weighs on the one side only. So does, on the other, that a core may run
	// faster for a moment while its neighbour is idle.
	b.rows = append(b.rows,
		duration("finder: one pod's netns "+among+", best tenth", one.undisturbed(), yardstickName, b.r.median(), 0, ""),
		duration(fmt.Sprintf("finder: %d pods' netns %s, best tenth", len(crowd.pods), among), all.undisturbed(), "one pod", one.undisturbed().median(), finderLimit, "1.2 × one pod"))
	return nil
}

func (b *bench) findInTurns(ctx context.Context, crowd *crowd) (one, all figure, err error) {
	host, err := podnetns.OpenHost()
	if err != nil {
		return one, all, err
	}
	defer func() { err = errors.Join(err, host.Close()) }()
	finder, err := podnetns.NewFinder(podnetns.FinderConfig{Host: host, Holders: podnetns.NewPins(), ProcRoot: crowd.proc})
	if err != nil {
		return one, all, err
	}
	wanted := crowd.wanted()
	var warmUp figure
	if err := search(ctx, finder, wanted, &warmUp); err != nil {
		return one, all, err
	}
	for i := range finderTurns * b.cfg.rounds {
		// Another one each time: where it is met in the pass must not matter.
		n := i * 7 % len(wanted)
		if err := search(ctx, finder, wanted[n:n+1], &one); err != nil {
			return one, all, err
		}
		if err := search(ctx, finder, wanted, &all); err != nil {
			return one, all, err
		}
	}
	return one, all, nil
}

// search takes a sample of one search, which must find all.
func search(ctx context.Context, finder *podnetns.Finder, wanted []podnetns.Wanted, f *figure) error {
	var found map[string]*podnetns.Netns
	var missing map[string]error
	err := f.time(func() error { found, missing = finder.Find(ctx, wanted); return nil })
	for _, netns := range found {
		err = errors.Join(err, netns.Close())
	}
	for uid, why := range missing {
		return errors.Join(err, fmt.Errorf("pod %s was not found: %w", uid, why))
	}
	return err
}

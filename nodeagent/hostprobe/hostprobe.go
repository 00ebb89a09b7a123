// SPDX-License-Identifier: Apache-2.0

package hostprobe

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"ambientd/iptables/redirection"
)

// MaxEntriesPerPod bounds what one pod's author can put into the host's set: two
// addresses times more probes than a pod has containers.
const MaxEntriesPerPod = 512

// undoTimeout bounds taking entries back for a caller that is out of time itself.
const undoTimeout = 3 * time.Second

// Rule keeps the host's rule and its sets as the options call for them. EnsureHost
// leaves entries alone, VerifyHost only reads, RemoveHost takes rule and sets away;
// all are idempotent.
type Rule interface {
	EnsureHost(ctx context.Context, run redirection.Runner, opts redirection.HostOptions) error
	VerifyHost(ctx context.Context, run redirection.Runner, opts redirection.HostOptions, entries []redirection.HostEntry) ([]redirection.Difference, error)
	RemoveHost(ctx context.Context, run redirection.Runner) error
}

// Elements changes what the sets hold: to exactly these entries, by some more, by some
// less. All are idempotent. Of entries to take out each is tried.
type Elements interface {
	SetEntries(ctx context.Context, run redirection.Runner, opts redirection.HostOptions, entries []redirection.HostEntry) error
	AddEntries(ctx context.Context, run redirection.Runner, opts redirection.HostOptions, entries ...redirection.HostEntry) error
	DelEntries(ctx context.Context, run redirection.Runner, opts redirection.HostOptions, entries ...redirection.HostEntry) error
}

// Kernel is the backend. It is one value, because what one backend's rule looks up
// another backend's sets do not hold.
type Kernel interface {
	Rule
	Elements
}

// Config is what a Set works with; every field is required.
type Config struct {
	Kernel  Kernel
	Run     redirection.Runner // into the host's netns
	Options redirection.HostOptions
}

// Set is the probe entries of this node's enrolled pods, in memory and in the kernel.
// It is safe for concurrent use: operations wait for each other, for as long as their
// contexts allow.
type Set struct {
	cfg  Config
	turn chan struct{} // holds one value while an operation is at work; guards all below

	up      bool                    // the rule is meant to be there, or may be still
	resting bool                    // it is meant not to be there until the next pod
	waiting bool                    // what is added is not in the kernel yet, see Together
	noted   []redirection.HostEntry // what that is
	settled bool                    // every enrolled pod has been added once
	pods    map[string]*pod
	owners  map[redirection.HostEntry]int // how many pods have the entry; never 0
	// expected are entries that are in the kernel and that nobody owns yet, see Expect.
	expected map[redirection.HostEntry]bool
}

// pod is what is known of one pod UID.
type pod struct {
	entries   map[redirection.HostEntry]bool
	addressed bool // at least one address of the pod is known, be there a set for it or not
}

// New returns a Set without pods. It does not look at the kernel: [Set.Repair] is for
// the start as well.
func New(cfg Config) (*Set, error) {
	if cfg.Kernel == nil || cfg.Run == nil {
		return nil, errors.New("hostprobe: a backend and a runner into the host's netns are needed")
	}
	if err := cfg.Options.Validate(); err != nil {
		return nil, fmt.Errorf("hostprobe: %w", err)
	}
	return &Set{
		cfg:    cfg,
		turn:   make(chan struct{}, 1),
		pods:   map[string]*pod{},
		owners: map[redirection.HostEntry]int{},

		expected: map[redirection.HostEntry]bool{},
	}, nil
}

// Add makes the pod an owner of the entries for its addresses, with the scope
// "declared" of each address with each of the ports. What it owns already stays: a
// list of addresses may be incomplete, and only [Set.Remove] takes an entry away. No
// addresses means that they are not known yet. The first Add makes the host's rule.
//
// On an error the pod owns what it did before, and the kernel's elements that this
// call has added are taken back, unless they may be those of a pod not added yet.
func (s *Set) Add(ctx context.Context, uid string, addrs []netip.Addr, ports []uint16) error {
	entries, err := s.entriesOf(addrs, ports)
	if err != nil {
		return err
	}
	release, err := s.take(ctx)
	if err != nil {
		return err
	}
	defer release()
	p := s.pods[uid]
	if p == nil {
		p = &pod{entries: map[redirection.HostEntry]bool{}}
	}
	entries = slices.DeleteFunc(entries, func(e redirection.HostEntry) bool { return p.entries[e] })
	if len(p.entries)+len(entries) > MaxEntriesPerPod {
		return fmt.Errorf("the pod has %d probe entries, of which at most %d are allowed", len(p.entries)+len(entries), MaxEntriesPerPod)
	}
	if err := s.ensure(ctx); err != nil {
		return err
	}
	if err := s.addElements(ctx, entries); err != nil {
		return err
	}
	for _, e := range entries {
		p.entries[e] = true
		s.owners[e]++
		delete(s.expected, e)
	}
	p.addressed = p.addressed || len(addrs) > 0
	s.pods[uid] = p
	return nil
}

// Together calls fn, during which Add notes entries in memory alone, and then writes what
// was noted in as few transactions as it takes: a new agent adds all pods of the one
// before. What the kernel refuses then is an error of no pod; it is a difference for
// [Set.Verify] to find.
func (s *Set) Together(ctx context.Context, fn func()) error {
	release, err := s.take(ctx)
	if err != nil {
		return err
	}
	s.waiting = true
	release()
	fn()
	if release, err = s.take(context.WithoutCancel(ctx)); err != nil {
		return err
	}
	defer release()
	s.waiting = false
	noted := slices.DeleteFunc(s.noted, func(e redirection.HostEntry) bool { return s.owners[e] == 0 })
	s.noted = nil
	for some := range slices.Chunk(noted, MaxEntriesPerPod) {
		if err := s.cfg.Kernel.AddEntries(ctx, s.cfg.Run, s.cfg.Options, some...); err != nil {
			return err
		}
	}
	return nil
}

// Remove makes the pod own nothing, and takes out of the kernel what no other pod
// owns. For an unknown pod it does nothing. When the kernel refuses, the pod is
// forgotten all the same: it may be gone for good, and what the kernel then has too
// much is for [Set.Verify] to find. Only if ctx ends before its turn comes nothing has
// happened.
func (s *Set) Remove(ctx context.Context, uid string) error {
	release, err := s.take(ctx)
	if err != nil {
		return err
	}
	defer release()
	p := s.pods[uid]
	if p == nil {
		return nil
	}
	delete(s.pods, uid)
	var orphans []redirection.HostEntry
	for _, e := range slices.SortedFunc(maps.Keys(p.entries), redirection.HostEntry.Compare) {
		if s.owners[e]--; s.owners[e] == 0 {
			delete(s.owners, e)
			orphans = append(orphans, e)
		}
	}
	return s.delElements(ctx, orphans)
}

// Settle says that every enrolled pod has been added: entries of pods that ended while
// no agent ran are taken out of the kernel, and from now on whatever nobody owns is a
// difference. On an error that is so as well, for the next Verify and Repair. It makes the
// rule also for no pod, so that the first one need not wait for whoever changes rules on the
// host meanwhile, but not after [Set.Rest].
func (s *Set) Settle(ctx context.Context) error {
	release, err := s.take(ctx)
	if err != nil {
		return err
	}
	defer release()
	s.settled = true
	if s.resting {
		return s.rest(ctx)
	}
	found, err := s.verify(ctx)
	if err != nil {
		return err
	}
	if s.up && len(found) == 0 {
		return nil
	}
	return s.repair(ctx)
}

// AllAdded says the same as Settle, and leaves what follows to Verify, Repair and Rest.
func (s *Set) AllAdded(ctx context.Context) error {
	release, err := s.take(ctx)
	if err != nil {
		return err
	}
	defer release()
	s.settled = true
	return nil
}

// Verify compares the kernel's rule and sets with what they should be, and returns
// every difference. It writes nothing. As long as pods may be missing here
// (see [Set.Settle]), something that is there beyond is no difference.
func (s *Set) Verify(ctx context.Context) ([]redirection.Difference, error) {
	release, err := s.take(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	return s.verify(ctx)
}

// Repair makes the kernel's rule and sets what they should be. As long as pods may be
// missing here (see [Set.Settle]) it takes no entry out. It is also how a Set starts.
// After [Set.Rest] there is nothing to repair, whatever Verify has found before, but for
// what that could not take out.
func (s *Set) Repair(ctx context.Context) error {
	release, err := s.take(ctx)
	if err != nil {
		return err
	}
	defer release()
	if s.resting {
		return s.rest(ctx)
	}
	return s.repair(ctx)
}

// Rest takes rule and sets out of the host's netns if it is sure that no pod needs them,
// none that is expected either, be they of this Set or of an earlier agent.
// The next Add makes them anew. On an error a second Rest tries again, or a Repair.
func (s *Set) Rest(ctx context.Context) error {
	release, err := s.take(ctx)
	if err != nil {
		return err
	}
	defer release()
	if !s.unneeded() {
		return nil
	}
	return s.rest(ctx)
}

// take waits for the turn. Whoever gets it calls release.
func (s *Set) take(ctx context.Context) (release func(), err error) {
	if err = ctx.Err(); err == nil {
		select {
		case s.turn <- struct{}{}:
			return func() { <-s.turn }, nil
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	return nil, fmt.Errorf("waiting to change the probe entries: %w", err)
}

// entriesOf returns the entries that stand for the addresses and ports, each once. An
// address of a family for which there is no set has none: nothing of it is captured.
func (s *Set) entriesOf(addrs []netip.Addr, ports []uint16) ([]redirection.HostEntry, error) {
	if s.cfg.Options.Scope == redirection.ProbeScopePod {
		ports = []uint16{0}
	}
	var entries []redirection.HostEntry
	for _, addr := range addrs {
		addr = addr.Unmap()
		if addr.IsValid() && !s.cfg.Options.Families().Has(redirection.FamilyOf(addr)) {
			continue
		}
		for _, port := range ports {
			entry := redirection.HostEntry{Addr: addr, Port: port}
			if err := s.cfg.Options.ValidateEntry(entry); err != nil {
				return nil, err
			}
			entries = append(entries, entry)
		}
	}
	slices.SortFunc(entries, redirection.HostEntry.Compare)
	return slices.Compact(entries), nil
}

// The methods below are for whoever has the turn.

// exact says whether the entries in memory are all there should be in the kernel.
func (s *Set) exact() bool {
	if !s.settled {
		return false
	}
	for _, p := range s.pods {
		if !p.addressed {
			return false
		}
	}
	return true
}

func (s *Set) entries() []redirection.HostEntry {
	entries := slices.AppendSeq(slices.Collect(maps.Keys(s.owners)), maps.Keys(s.expected))
	slices.SortFunc(entries, redirection.HostEntry.Compare)
	return entries
}

// unneeded says whether it is sure that no pod needs the rule.
func (s *Set) unneeded() bool {
	return s.settled && len(s.pods) == 0 && len(s.expected) == 0
}

// rest takes out rule and sets, once.
func (s *Set) rest(ctx context.Context) error {
	if s.resting && !s.up {
		return nil
	}
	s.resting = true
	err := s.cfg.Kernel.RemoveHost(ctx, s.cfg.Run)
	s.up = err != nil
	return err
}

func (s *Set) ensure(ctx context.Context) error {
	if s.up && !s.resting {
		return nil
	}
	if err := s.cfg.Kernel.EnsureHost(ctx, s.cfg.Run, s.cfg.Options); err != nil {
		return err
	}
	s.up, s.resting = true, false
	return nil
}

// addElements adds those of the entries that nobody owns yet, all or none.
func (s *Set) addElements(ctx context.Context, entries []redirection.HostEntry) error {
	unowned := slices.DeleteFunc(slices.Clone(entries), func(e redirection.HostEntry) bool { return s.owners[e] > 0 || s.expected[e] })
	if len(unowned) == 0 {
		return nil
	}
	if s.waiting {
		s.noted = append(s.noted, unowned...)
		return nil
	}
	if err := s.cfg.Kernel.AddEntries(ctx, s.cfg.Run, s.cfg.Options, unowned...); err != nil {
		// An error does not say that the kernel has done nothing.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		return errors.Join(err, s.delElements(ctx, unowned))
	}
	return nil
}

// delElements takes entries that nobody owns out of the kernel, as many as it can.
func (s *Set) delElements(ctx context.Context, entries []redirection.HostEntry) error {
	if !s.exact() {
		return nil // any of them may be that of a pod which is not known well enough
	}
	if len(entries) == 0 {
		return nil
	}
	return s.cfg.Kernel.DelEntries(ctx, s.cfg.Run, s.cfg.Options, entries...)
}

func (s *Set) verify(ctx context.Context) ([]redirection.Difference, error) {
	if !s.up {
		return nil, nil
	}
	found, err := s.cfg.Kernel.VerifyHost(ctx, s.cfg.Run, s.cfg.Options, s.entries())
	if err != nil {
		return nil, err
	}
	if !s.exact() {
		found = slices.DeleteFunc(found, func(d redirection.Difference) bool { return d.Want == "" })
	}
	return found, nil
}

func (s *Set) repair(ctx context.Context) error {
	// Whatever happens, the rule is meant to be there from now on.
	s.up = true
	if err := s.cfg.Kernel.EnsureHost(ctx, s.cfg.Run, s.cfg.Options); err != nil {
		return err
	}
	if s.exact() {
		return s.cfg.Kernel.SetEntries(ctx, s.cfg.Run, s.cfg.Options, s.entries())
	}
	if entries := s.entries(); len(entries) > 0 {
		return s.cfg.Kernel.AddEntries(ctx, s.cfg.Run, s.cfg.Options, entries...)
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package certfetch

import (
	"container/list"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"ambientd/certfetch/spiffeid"
)

// Fetcher is the registry and the engine. All its methods may be called from anywhere, also before
// Run has begun; but only while Run runs are certificates asked for.
type Fetcher struct {
	cfg Config
	// wake has Run look again; one signal is enough for any number of changes.
	wake chan struct{}

	// mu is never held while the CA is asked or anything is computed with a key.
	mu      sync.Mutex
	pods    map[string]spiffeid.ID // by pod UID
	entries map[spiffeid.ID]*entry
	due     timeline
	// urgent is where an identity queues that a pod is waiting for, normal where all others do.
	urgent, normal *list.List
	// running counts the calls that hold a worker, abandoned those that have lost theirs and have
	// not returned.
	running, abandoned int

	version   uint64 // of the SVID or bundle published last
	bundle    Bundle
	leadUntil time.Time // no leaf is published before; see adoptRoots

	subscriptions map[*Subscription]struct{}
	watchers      map[spiffeid.ID]map[*Subscription]struct{}
}

// New returns a fetcher with an empty registry. It does nothing until [Fetcher.Run] is called.
func New(cfg Config) (*Fetcher, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Fetcher{
		cfg:           cfg.withDefaults(),
		wake:          make(chan struct{}, 1),
		pods:          make(map[string]spiffeid.ID),
		entries:       make(map[spiffeid.ID]*entry),
		urgent:        list.New(),
		normal:        list.New(),
		subscriptions: make(map[*Subscription]struct{}),
		watchers:      make(map[spiffeid.ID]map[*Subscription]struct{}),
	}, nil
}

// Register counts the pod uid as one that runs as id. From here on, and only now, the CA may be
// asked for id; that begins at once and with priority, unless a valid certificate is held.
//
// Registering the same again changes nothing. Another identity under the same uid is an error: a
// pod's service account never changes.
func (f *Fetcher) Register(uid string, id spiffeid.ID) error {
	if uid == "" {
		return fmt.Errorf("registering %s: a pod UID is required", id)
	}
	if id.IsZero() {
		return fmt.Errorf("registering pod %q: an identity is required", uid)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if registered, ok := f.pods[uid]; ok {
		if registered != id {
			return fmt.Errorf("registering pod %q as %s: it is already registered as %s", uid, id, registered)
		}
		return nil
	}
	f.pods[uid] = id
	e := f.entries[id]
	if e == nil {
		e = &entry{id: id, index: notInTimeline}
		f.entries[id] = e
	}
	e.pods++
	now := wallNow()
	if e.pods == 1 {
		e.wipeAt = time.Time{}
		if !e.holds(now) {
			e.svid = nil
		}
		f.notify(id)
	}
	if !e.holds(now) {
		f.askForPod(e, now)
	}
	f.schedule(e)
	f.wakeUp()
	return nil
}

// askForPod has the CA asked for e at once, whatever it answered for earlier pods: it may know this
// one. A CSR that is in flight will do. It needs f.mu.
func (f *Fetcher) askForPod(e *entry, now time.Time) {
	e.denied = false
	switch {
	case e.attempt == nil:
		e.fresh, e.askAt = true, now
		f.enqueue(e)
	case e.attempt.abandoned:
		// Never two in flight: settle does it when this one has returned.
		e.fresh, e.askAt = true, now
	}
}

// Unregister takes the pod uid out; one that is not there is fine. With the last pod of an identity
// everything about it ends at once, and is signalled to those who watch it: it is refused, no
// longer listed, not renewed, and a CSR in flight is given up. Only the key stays for the linger,
// unreachable but by registering again.
func (f *Fetcher) Unregister(uid string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	id, ok := f.pods[uid]
	if !ok {
		return
	}
	delete(f.pods, uid)
	e := f.entries[id]
	if e.pods--; e.pods > 0 {
		return
	}
	f.dequeue(e)
	if e.attempt != nil {
		f.abandon(e.attempt)
	}
	e.wipeAt = wallNow().Add(f.cfg.Linger)
	e.signal()
	f.notify(id)
	if e.svid == nil || f.cfg.Linger == 0 {
		f.drop(e)
	}
	f.schedule(e)
	f.wakeUp()
}

// Wait returns nil as soon as a valid certificate for id is held. Its errors wrap [ErrDenied] as
// soon as the CA has denied id and there is no older certificate, [ErrNotRegistered] as soon as
// there is no pod for it, or else ctx's error, with what has hindered the CA as its text. While it
// waits, id has priority.
func (f *Fetcher) Wait(ctx context.Context, id spiffeid.ID) error {
	for {
		pending, err := f.look(id)
		if pending == nil {
			return err
		}
		select {
		case <-pending.outcome:
			f.looked(pending.entry)
		case <-ctx.Done():
			return fmt.Errorf("waiting for a certificate for %s: %w; until then: %s", id, ctx.Err(), f.looked(pending.entry))
		}
	}
}

// pendingWait is an entry that a Wait waits for, and the channel that ends the waiting.
type pendingWait struct {
	entry   *entry
	outcome <-chan struct{}
}

// look returns what to wait for, and looked is to be called after; or nil and Wait's result.
func (f *Fetcher) look(id spiffeid.ID) (*pendingWait, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	e, err := f.registered(id)
	switch {
	case err != nil:
		return nil, err
	case e.holds(wallNow()):
		return nil, nil
	case e.denied:
		return nil, fmt.Errorf("certificate for %s: %w", id, e.err)
	}
	e.waiters++
	if e.place != nil {
		f.enqueue(e)
	}
	if e.outcome == nil {
		e.outcome = make(chan struct{})
	}
	return &pendingWait{entry: e, outcome: e.outcome}, nil
}

// looked ends what look began. It returns the last failure, as a text: an earlier pod's denial is
// no denial for this one, so that no error of it may be in Wait's chain.
func (f *Fetcher) looked(e *entry) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	e.waiters--
	if e.err == nil {
		return "the CA has not answered"
	}
	return e.err.Error()
}

// SVID returns the certificate and key that id has now, the same value until there is a newer one.
// The errors wrap [ErrNotRegistered], or [ErrPending] where the CA has not signed yet or the
// certificate has ended: an expired one is never returned.
func (f *Fetcher) SVID(id spiffeid.ID) (*SVID, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	e, err := f.registered(id)
	if err != nil {
		return nil, err
	}
	if !e.holds(wallNow()) {
		return nil, fmt.Errorf("certificate for %s: %w", id, ErrPending)
	}
	return e.svid, nil
}

// registered returns the entry of an identity that a pod has. It needs f.mu.
func (f *Fetcher) registered(id spiffeid.ID) (*entry, error) {
	e := f.entries[id]
	if e == nil || e.pods == 0 {
		return nil, fmt.Errorf("certificate for %s: %w", id, ErrNotRegistered)
	}
	return e, nil
}

// Bundle returns the roots of today.
func (f *Fetcher) Bundle() Bundle {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.bundle
}

// Identities lists what is registered, sorted by identity.
func (f *Fetcher) Identities() []IdentityStatus {
	f.mu.Lock()
	now := wallNow()
	list := make([]IdentityStatus, 0, len(f.entries))
	for _, e := range f.entries {
		if e.pods > 0 {
			list = append(list, e.status(now))
		}
	}
	f.mu.Unlock()
	slices.SortFunc(list, func(a, b IdentityStatus) int { return strings.Compare(a.ID.String(), b.ID.String()) })
	return list
}

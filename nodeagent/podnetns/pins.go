// SPDX-License-Identifier: Apache-2.0

package podnetns

import (
	"fmt"
	"sync"
)

// TakenError says that another pod holds the netns that was to be pinned.
type TakenError struct {
	Key      Key    // the netns
	OtherUID string // the pod that holds it
}

// Error names the netns and the pod that holds it.
func (e *TakenError) Error() string {
	return fmt.Sprintf("netns %s belongs to the pod with UID %s", e.Key, e.OtherUID)
}

// Pins holds the netns of each pod open, found by pod UID and by netns key. A
// pod has at most one netns and a netns belongs to at most one pod. It is safe
// for concurrent use.
type Pins struct {
	mu    sync.Mutex
	byUID map[string]*Netns
	byKey map[Key]string
}

// NewPins returns Pins that hold nothing.
func NewPins() *Pins {
	return &Pins{byUID: map[string]*Netns{}, byKey: map[Key]string{}}
}

// Pin holds n for the pod and takes it over: [Pins.Unpin] closes it. An older
// netns of the same pod is let go and closed. If another pod holds n's key the
// error is a [*TakenError], nothing changes, and n stays the caller's. Any other
// error is of closing the older netns, and n is pinned.
func (p *Pins) Pin(uid string, n *Netns) error {
	old, err := p.put(uid, n)
	if err != nil || old == nil || old == n {
		return err
	}
	return old.Close()
}

// put stores n for the pod and returns what it had before, or nil.
func (p *Pins) put(uid string, n *Netns) (*Netns, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if other, ok := p.byKey[n.key]; ok && other != uid {
		return nil, &TakenError{Key: n.key, OtherUID: other}
	}
	old := p.byUID[uid]
	if old != nil {
		delete(p.byKey, old.key)
	}
	p.byUID[uid] = n
	p.byKey[n.key] = uid
	return old, nil
}

// Unpin lets the pod's netns go and closes it; without one it does nothing.
func (p *Pins) Unpin(uid string) error {
	n := p.take(uid)
	if n == nil {
		return nil
	}
	return n.Close()
}

func (p *Pins) take(uid string) *Netns {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.byUID[uid]
	if n != nil {
		delete(p.byUID, uid)
		delete(p.byKey, n.key)
	}
	return n
}

// Get returns the pod's netns. It stays owned by Pins.
func (p *Pins) Get(uid string) (*Netns, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n, ok := p.byUID[uid]
	return n, ok
}

// ByKey returns the UID of the pod that holds the netns.
func (p *Pins) ByKey(k Key) (uid string, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	uid, ok = p.byKey[k]
	return uid, ok
}

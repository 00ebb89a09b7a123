// SPDX-License-Identifier: Apache-2.0

package certfetch

import "ambientd/certfetch/spiffeid"

// Subscription tells one consumer that something it watches changed. It says that, not what: the
// consumer reads [Fetcher.SVID] and [Fetcher.Bundle] anew, so that a slow one misses steps in
// between and never the last one, and costs no memory.
type Subscription struct {
	fetcher *Fetcher
	changed chan struct{}
	// ids is guarded by fetcher.mu.
	ids map[spiffeid.ID]struct{}
}

// Subscribe returns a subscription that watches the roots, and the identities that Watch names. It
// must be closed.
func (f *Fetcher) Subscribe() *Subscription {
	s := &Subscription{fetcher: f, changed: make(chan struct{}, 1), ids: make(map[spiffeid.ID]struct{})}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.subscriptions[s] = struct{}{}
	return s
}

// Changed receives after every change of the roots or of a watched identity: a new certificate, the
// end of one, the first pod, the last pod. Changes that were not picked up yet are one.
func (s *Subscription) Changed() <-chan struct{} { return s.changed }

// Watch adds id, registered or not. Watch first and read after, and no change is missed. It does
// nothing after Close.
func (s *Subscription) Watch(id spiffeid.ID) {
	f := s.fetcher
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, open := f.subscriptions[s]; !open {
		return
	}
	s.ids[id] = struct{}{}
	if f.watchers[id] == nil {
		f.watchers[id] = make(map[*Subscription]struct{})
	}
	f.watchers[id][s] = struct{}{}
}

// Unwatch takes id out again; a change before that may still be signalled.
func (s *Subscription) Unwatch(id spiffeid.ID) {
	s.fetcher.mu.Lock()
	defer s.fetcher.mu.Unlock()
	s.unwatch(id)
}

// Close ends the subscription; it may be called again. Changed is not closed.
func (s *Subscription) Close() {
	s.fetcher.mu.Lock()
	defer s.fetcher.mu.Unlock()
	for id := range s.ids {
		s.unwatch(id)
	}
	delete(s.fetcher.subscriptions, s)
}

// unwatch needs fetcher.mu.
func (s *Subscription) unwatch(id spiffeid.ID) {
	delete(s.ids, id)
	delete(s.fetcher.watchers[id], s)
	if len(s.fetcher.watchers[id]) == 0 {
		delete(s.fetcher.watchers, id)
	}
}

// signal never waits: one that is there already stands for this change too.
func (s *Subscription) signal() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// notify tells those who watch id. It needs f.mu.
func (f *Fetcher) notify(id spiffeid.ID) {
	for s := range f.watchers[id] {
		s.signal()
	}
}

// SPDX-License-Identifier: Apache-2.0

package netnswatch

import (
	"context"
	"time"
)

// packetPause is between two looks at the packet rules of all watched namespaces: how late a change is noticed at most.
const packetPause = 400 * time.Millisecond

// watched is a namespace that is watched.
type watched struct {
	id ID
	ns Netns
	// generation is the number of the last transaction on its packet rules that is known of, 0 if it could not be read.
	// Watcher.mu guards it.
	generation uint64
}

// look asks for the packet rules of all watched namespaces again and again, until the context ends.
func (w *Watcher) look(ctx context.Context) {
	ticker := time.NewTicker(packetPause)
	defer ticker.Stop()
	var all []*watched
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		all = w.appendWatched(all[:0])
		for _, one := range all {
			w.lookAt(ctx, one)
		}
		clear(all) // what is let go meanwhile is not held by this
	}
}

// lookAt notes a change if there has been a transaction since the last look.
func (w *Watcher) lookAt(ctx context.Context, one *watched) {
	generation, err := w.rules.Generation(ctx, one.ns)
	if err != nil {
		// Its owner lets it go, as a rule, and ends watching. Otherwise an audit will say what is wrong, once.
		generation = 0
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.watched[one.id] != one || one.generation == generation || ctx.Err() != nil {
		return
	}
	one.generation = generation
	w.note(one.id)
}

func (w *Watcher) appendWatched(to []*watched) []*watched {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, one := range w.watched {
		to = append(to, one)
	}
	return to
}

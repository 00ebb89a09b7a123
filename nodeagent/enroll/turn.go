// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"context"
	"sync"

	"ambientd/cni-plugin/podevent"
)

// turns serialises work per pod UID: one holder at a time, the others wait
// with their own deadline. A UID costs memory only while somebody wants it.
type turns struct {
	mu   sync.Mutex
	byID map[string]*turn
}

type turn struct {
	held   chan struct{} // holds one token while somebody has the turn
	wanted int           // holders and waiters
}

// take waits for the turn of uid. The returned function gives it back.
func (t *turns) take(ctx context.Context, uid string) (release func(), err error) {
	t.mu.Lock()
	if t.byID == nil {
		t.byID = map[string]*turn{}
	}
	mine, ok := t.byID[uid]
	if !ok {
		mine = &turn{held: make(chan struct{}, 1)}
		t.byID[uid] = mine
	}
	mine.wanted++
	t.mu.Unlock()

	select {
	case mine.held <- struct{}{}:
		return func() {
			<-mine.held
			t.leave(uid, mine)
		}, nil
	case <-ctx.Done():
		t.leave(uid, mine)
		return nil, context.Cause(ctx)
	}
}

func (t *turns) leave(uid string, left *turn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	left.wanted--
	if left.wanted == 0 {
		delete(t.byID, uid)
	}
}

// flights knows the ADDs at work, so that a DEL of the same attachment can end
// them: a runtime that gave up on an ADD sends its DEL at once.
type flights struct {
	mu sync.Mutex
	of map[podevent.Attachment]map[*flight]struct{}
}

type flight struct {
	cancel context.CancelCauseFunc
	ended  chan struct{}
}

// begin marks an ADD as in flight until end is called; the returned context
// is cancelled by stop.
func (f *flights) begin(ctx context.Context, of podevent.Attachment) (_ context.Context, end func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	mine := &flight{cancel: cancel, ended: make(chan struct{})}
	f.mu.Lock()
	if f.of == nil {
		f.of = map[podevent.Attachment]map[*flight]struct{}{}
	}
	if f.of[of] == nil {
		f.of[of] = map[*flight]struct{}{}
	}
	f.of[of][mine] = struct{}{}
	f.mu.Unlock()

	return ctx, func() {
		f.mu.Lock()
		delete(f.of[of], mine)
		if len(f.of[of]) == 0 {
			delete(f.of, of)
		}
		f.mu.Unlock()
		cancel(nil)
		close(mine.ended)
	}
}

// stop cancels every ADD in flight of an attachment and waits until each has
// undone its work, or ctx ends.
func (f *flights) stop(ctx context.Context, of podevent.Attachment) error {
	f.mu.Lock()
	var ended []<-chan struct{}
	for running := range f.of[of] {
		running.cancel(errDeleted)
		ended = append(ended, running.ended)
	}
	f.mu.Unlock()
	for _, end := range ended {
		select {
		case <-end:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

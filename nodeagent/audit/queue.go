// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"container/heap"
	"time"
)

// queue has the subjects that wait for their audit, the next one first: a node may have
// a thousand, and what happens to one must not cost a look at all.
type queue struct{ byTime }

// put puts a subject where its time belongs, whether it is in the queue or not.
func (q *queue) put(s *subject) {
	s.next = s.at()
	if s.queued {
		heap.Fix(&q.byTime, s.index)
		return
	}
	heap.Push(&q.byTime, s)
}

// remove takes a subject out, if it is there.
func (q *queue) remove(s *subject) {
	if s.queued {
		heap.Remove(&q.byTime, s.index)
	}
}

// due takes out the next subject if its time has come. Without one it returns how long
// that takes, at most the given time.
func (q *queue) due(now time.Time, most time.Duration) (*subject, time.Duration) {
	if len(q.byTime) == 0 {
		return nil, most
	}
	if wait := q.byTime[0].next.Sub(now); wait > 0 {
		return nil, min(wait, most)
	}
	s := q.byTime[0]
	heap.Pop(&q.byTime)
	return s, 0
}

// byTime is what package heap works on.
type byTime []*subject

func (b byTime) Len() int           { return len(b) }
func (b byTime) Less(i, j int) bool { return b[i].next.Before(b[j].next) }

func (b byTime) Swap(i, j int) {
	b[i], b[j] = b[j], b[i]
	b[i].index, b[j].index = i, j
}

// Push is part of heap.Interface.
func (b *byTime) Push(x any) {
	s, ok := x.(*subject)
	if !ok {
		return
	}
	s.index, s.queued = len(*b), true
	*b = append(*b, s)
}

// Pop is part of heap.Interface.
func (b *byTime) Pop() any {
	last := len(*b) - 1
	s := (*b)[last]
	s.queued = false
	(*b)[last] = nil
	*b = (*b)[:last]
	return s
}

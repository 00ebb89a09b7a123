// SPDX-License-Identifier: Apache-2.0

package certfetch

import (
	"container/heap"
	"time"
)

// timeline orders entries by the time at which something is due for them, earliest first. One
// timer serves all of them, and every change costs O(log n). It implements [heap.Interface]; only
// place and remove are used outside.
type timeline []*entry

// notInTimeline is the index of an entry for which nothing is due.
const notInTimeline = -1

// place puts e where due says; the zero time means nowhere.
func (t *timeline) place(e *entry, due time.Time) {
	switch {
	case due.IsZero():
		t.remove(e)
	case e.index == notInTimeline:
		e.due = due
		heap.Push(t, e)
	case !e.due.Equal(due):
		e.due = due
		heap.Fix(t, e.index)
	}
}

func (t *timeline) remove(e *entry) {
	if e.index != notInTimeline {
		heap.Remove(t, e.index)
	}
}

// first is the entry that is due next, or nil.
func (t timeline) first() *entry {
	if len(t) == 0 {
		return nil
	}
	return t[0]
}

func (t timeline) Len() int           { return len(t) }
func (t timeline) Less(i, j int) bool { return t[i].due.Before(t[j].due) }

func (t timeline) Swap(i, j int) {
	t[i], t[j] = t[j], t[i]
	t[i].index, t[j].index = i, j
}

// Push is heap.Interface's.
func (t *timeline) Push(x any) {
	e := x.(*entry) // only place pushes
	e.index = len(*t)
	*t = append(*t, e)
}

// Pop is heap.Interface's.
func (t *timeline) Pop() any {
	last := len(*t) - 1
	e := (*t)[last]
	(*t)[last] = nil
	*t = (*t)[:last]
	e.index = notInTimeline
	return e
}

// SPDX-License-Identifier: Apache-2.0

package podnetns

import (
	"errors"
	"os"
	"slices"
	"sync"
)

const (
	// judgedAtOnce is how many leads are looked into in one visit.
	judgedAtOnce = 8

	// maxWaiting is how many leads may wait, each with a descriptor, before whoever looks for
	// more judges some: to look is all that takes its time, if the other keeps pace on the whole.
	maxWaiting = 4 * judgedAtOnce
)

// judging looks into leads while others are still being looked for. From the first full
// batch on it has a goroutine of its own for that. Besides those of what was found,
// maxWaiting descriptors are open at most, and two for each lead that is looked into.
type judging struct {
	search *search

	mu      sync.Mutex
	filled  sync.Cond     // there is a batch, or the end
	waiting []lead        // in the order that they are looked into
	ended   bool          // no more will come
	done    chan struct{} // closed when the other goroutine ends; nil while there is none
}

// judging runs look, which hands over leads, and judges them meanwhile. Whoever looks
// judges as well when there is more than the other gets done, and at the end. It returns
// when all are judged.
func (s *search) judging(look func(found func(lead)) error) error {
	j := &judging{search: s, waiting: make([]lead, 0, maxWaiting)}
	j.filled.L = &j.mu
	err := look(j.found)
	j.mu.Lock()
	j.ended = true
	j.mu.Unlock()
	j.filled.Signal()
	j.work(s.surveyor)
	if j.done != nil {
		<-j.done
	}
	return err
}

// found takes one lead.
func (j *judging) found(l lead) {
	j.mu.Lock()
	if len(j.waiting) == maxWaiting {
		batch := j.take()
		j.mu.Unlock()
		j.search.judge(j.search.surveyor, batch)
		j.mu.Lock()
	}
	j.waiting = append(j.waiting, l)
	full := len(j.waiting) == judgedAtOnce
	j.mu.Unlock()
	switch {
	case !full:
	case j.done == nil:
		j.done = make(chan struct{})
		go func() {
			defer close(j.done)
			j.work(newSurveyor(j.search.host, j.search.sockets, j.search.byIP))
		}()
	default:
		j.filled.Signal()
	}
}

// work judges until the end. Few leads are not worth waking somebody up for: then it is whoever
// looks that judges them.
func (j *judging) work(with *surveyor) {
	for {
		j.mu.Lock()
		for len(j.waiting) < judgedAtOnce && !j.ended {
			j.filled.Wait()
		}
		batch := j.take()
		j.mu.Unlock()
		if len(batch) == 0 {
			return
		}
		j.search.judge(with, batch)
	}
}

// take takes out a batch, at the end half of what is left so that both get done at the same
// time. The caller holds j.mu.
func (j *judging) take() []lead {
	n := min(judgedAtOnce, len(j.waiting))
	if j.ended && j.done != nil {
		n = min(judgedAtOnce, (len(j.waiting)+1)/2)
	}
	batch := slices.Clone(j.waiting[:n])
	j.waiting = slices.Delete(j.waiting, 0, n)
	return batch
}

// judge claims the netns of each lead for its pod, or notes why it is not the pod's.
// Only looking into them happens side by side.
func (s *search) judge(with *surveyor, batch []lead) {
	files := make([]*os.File, 0, judgedAtOnce)
	of := make([]lead, 0, judgedAtOnce)
	for _, l := range batch {
		file, err := l.open(s.host)
		if err != nil {
			s.claiming.Lock()
			l.wanted().note(l.name(), err)
			s.claiming.Unlock()
			continue
		}
		files, of = append(files, file), append(of, l)
	}
	found := with.survey(files...)
	s.claiming.Lock()
	defer s.claiming.Unlock()
	for i, v := range found {
		if err := s.follow(of[i], v); err != nil {
			of[i].wanted().note(of[i].name(), err)
		}
	}
}

// follow claims what a lead led to for its pod, or says why it is not the pod's and closes it.
func (s *search) follow(l lead, v surveyed) error {
	err := l.confirm(s, v)
	if err == nil {
		err = s.claim(l.wanted(), v.netns)
	}
	if err != nil && v.netns != nil {
		err = errors.Join(err, v.netns.Close())
	}
	return err
}

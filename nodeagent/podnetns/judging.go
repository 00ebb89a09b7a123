// SPDX-License-Identifier: Apache-2.0

package podnetns

import (
	"errors"
	"os"
)

// judgedAtOnce is how many leads are looked into in one visit. Five times as many
// descriptors are open at most besides those of what was found: a batch that waits, and
// two whose netns and sockets are open.
const judgedAtOnce = 8

// judging looks into leads while others are still being looked for. From the first full
// batch on it has a goroutine of its own for that.
type judging struct {
	search  *search
	batch   []lead
	batches chan []lead // to the other goroutine; nil while there is none
	done    chan struct{}
}

// judging runs look, which hands over leads, and judges them meanwhile. Whoever looks
// judges as well when there is more than the other gets done. It returns when all are
// judged.
func (s *search) judging(look func(found func(lead)) error) error {
	j := &judging{search: s, batch: make([]lead, 0, judgedAtOnce)}
	err := look(j.found)
	j.finish()
	return err
}

// found takes one lead.
func (j *judging) found(l lead) {
	if j.batch = append(j.batch, l); len(j.batch) < cap(j.batch) {
		return
	}
	if j.batches == nil {
		j.begin()
	}
	select {
	case j.batches <- j.batch:
		j.batch = make([]lead, 0, judgedAtOnce)
	default:
		j.search.judge(j.search.surveyor, j.batch)
		j.batch = j.batch[:0]
	}
}

// begin starts the other goroutine.
func (j *judging) begin() {
	j.batches, j.done = make(chan []lead, 1), make(chan struct{})
	go func() {
		defer close(j.done)
		own := newSurveyor(j.search.host)
		for batch := range j.batches {
			j.search.judge(own, batch)
		}
	}()
}

// finish judges what is left, together with the other goroutine if there is one. What
// few leads there are as a rule are not worth waking somebody up for.
func (j *judging) finish() {
	if len(j.batch) > 0 {
		j.search.judge(j.search.surveyor, j.batch)
	}
	if j.batches == nil {
		return
	}
	close(j.batches)
	for batch := range j.batches {
		j.search.judge(j.search.surveyor, batch)
	}
	<-j.done
}

// judge claims the netns of each lead for its pod, or notes why it is not the pod's.
// Only looking into them happens side by side.
func (s *search) judge(with *surveyor, batch []lead) {
	files := make([]*os.File, 0, judgedAtOnce)
	of := make([]lead, 0, judgedAtOnce)
	for _, l := range batch {
		file, err := l.open()
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
		v.netns.path = l.path()
		err = s.claim(l.wanted(), v.netns)
	}
	if err != nil && v.netns != nil {
		err = errors.Join(err, v.netns.Close())
	}
	return err
}

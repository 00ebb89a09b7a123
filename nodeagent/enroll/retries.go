// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"

	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/workload"
)

const (
	// atOnce bounds how many running pods are worked on at the same time.
	atOnce = 8

	// firstRetry and lastRetry bound the pause after a running pod could not be
	// enrolled; it doubles from one to the other.
	firstRetry = 500 * time.Millisecond
	lastRetry  = 30 * time.Second

	// searchTick is when pods that were not found running are looked for again: all at
	// the same time, because one pass over the processes costs the same for all. A pod
	// that is yet to start is not found, as a rule, and its ADD does not wait for this.
	searchTick = 30 * time.Second

	// searchesToTell is after how many of them a pod that should have been found is told of.
	searchesToTell = 2
)

// retries knows by pod UID when it is to be tried again.
type retries map[string]retry

type retry struct {
	at       time.Time
	pause    time.Duration
	why      error // the last attempt failed
	searches int   // in a row that did not find it running
	told     bool  // of them
}

// note counts an attempt that left the pod outside for the reason given.
func (r retries) note(uid string, why error, now time.Time) {
	if errors.Is(why, podnetns.ErrNotFound) {
		r[uid] = retry{
			at: now.Truncate(searchTick).Add(searchTick), pause: searchTick,
			searches: r[uid].searches + 1, told: r[uid].told, why: why,
		}
		return
	}
	r[uid] = r.postponed(uid, why, now)
}

// postponed is the next attempt, after a pause that grows from one to another.
func (r retries) postponed(uid string, why error, now time.Time) retry {
	pause := firstRetry
	if last, ok := r[uid]; ok {
		pause = min(2*last.pause, lastRetry)
	}
	// Spread by a fifth either way, so that pods that failed together part.
	jittered := pause*4/5 + rand.N(pause*2/5)
	return retry{at: now.Add(jittered), pause: pause, why: why}
}

// unfound returns the pods that run, as their objects say, and were not found when that was
// so for a while: one search comes too early now and then. Each is returned once. A pod
// whose object does not say is yet to start, as a rule.
func (r retries) unfound(pods []workload.Pod) []workload.Pod {
	var unfound []workload.Pod
	for _, pod := range pods {
		next := r[pod.UID]
		if next.searches < searchesToTell || next.told || !saysThatItRuns(pod) {
			continue
		}
		next.told = true
		r[pod.UID] = next
		unfound = append(unfound, pod)
	}
	return unfound
}

// saysThatItRuns tells whether the pod's object does.
func saysThatItRuns(pod workload.Pod) bool {
	return pod.Phase == corev1.PodRunning && len(pod.IPs) > 0
}

// keep forgets all pods but those given.
func (r retries) keep(pods []workload.Pod) {
	waiting := make(map[string]struct{}, len(pods))
	for _, pod := range pods {
		waiting[pod.UID] = struct{}{}
	}
	for uid := range r {
		if _, ok := waiting[uid]; !ok {
			delete(r, uid)
		}
	}
}

// due returns the pods whose pause is over, or who have not been tried yet.
func (r retries) due(pods []workload.Pod, now time.Time) []workload.Pod {
	var due []workload.Pod
	for _, pod := range pods {
		if !r[pod.UID].at.After(now) {
			due = append(due, pod)
		}
	}
	return due
}

// pause is the time until the next pod is due, an hour where there is none.
func (r retries) pause(now time.Time) time.Duration {
	pause := time.Hour
	for _, next := range r {
		pause = min(pause, max(next.at.Sub(now), 0))
	}
	return pause
}

// work runs tasks about pods in parallel and gathers their outcomes by UID.
type work struct {
	tasks    errgroup.Group
	mu       sync.Mutex
	outcomes map[string]error

	last []func() // called when all tasks have ended
}

func newWork() *work {
	w := &work{outcomes: map[string]error{}}
	w.tasks.SetLimit(atOnce)
	return w
}

// do runs task as soon as there is a place for it.
func (w *work) do(uid string, task func() error) {
	w.tasks.Go(func() error {
		w.note(uid, task())
		return nil
	})
}

func (w *work) note(uid string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.outcomes[uid] = err
}

// atEnd has fn called when all tasks have ended.
func (w *work) atEnd(fn func()) { w.last = append(w.last, fn) }

// wait returns the outcomes once all tasks have ended.
func (w *work) wait() map[string]error {
	_ = w.tasks.Wait() // the tasks' errors are in outcomes
	for _, fn := range w.last {
		fn()
	}
	return w.outcomes
}

// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"context"
	"time"
)

// recordPatience bounds how long pods that are enrolled go without a record because others
// are yet to be enrolled.
const recordPatience = 100 * time.Millisecond

// recordings writes the records of running pods that are enrolled together, once none of them
// waits to begin any more: a record is of no use before the agent's next start, which without
// it looks for the pod among the processes, while each pod that waits is outside the mesh.
type recordings struct {
	uids chan string
	now  chan struct{} // closed when there is time
	done chan struct{}
}

// recordLater returns recordings of at most so many pods.
func (e *Enroller) recordLater(ctx context.Context, pods int) *recordings {
	r := &recordings{uids: make(chan string, pods), now: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(r.done)
		patience := time.NewTimer(recordPatience)
		defer patience.Stop()
		select {
		case <-r.now:
		case <-patience.C:
		}
		for uid := range r.uids {
			e.recordEnrolled(ctx, uid)
		}
	}()
	return r
}

// add notes a pod that is enrolled. It does not wait.
func (r *recordings) add(uid string) { r.uids <- uid }

// begin says that there is time.
func (r *recordings) begin() { close(r.now) }

// wait returns when all records are written. Nothing is added afterwards.
func (r *recordings) wait() {
	close(r.uids)
	<-r.done
}

// recordEnrolled writes what is known of the pod by now. Also at the end of the agent: it
// waits for nobody but who is at work on the pod.
func (e *Enroller) recordEnrolled(ctx context.Context, uid string) {
	release, err := e.turns.take(context.WithoutCancel(ctx), uid)
	if err != nil {
		return // its context does not end
	}
	defer release()
	e.remember(uid)
}

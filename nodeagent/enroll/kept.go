// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"ambientd/iptables/redirection"
	"ambientd/nodeagent/admin"
)

const (
	// keptFor is how long a count is shown again: whoever watches the status, or the
	// metrics, does not have every pod's connections read each time.
	keptFor = 5 * time.Second

	// countTimeout bounds all counts of one status. What is not counted by then is not
	// shown.
	countTimeout = 200 * time.Millisecond
)

// Connections counts the established connections that a pod has kept from the time
// before it was enrolled.
type Connections interface {
	Kept(ctx context.Context, ns redirection.Netns) (int, error)
}

// counts are what was counted last.
type counts struct {
	mu   sync.Mutex // held while there is counted: who asks meanwhile gets the same
	last map[string]count
}

type count struct {
	at    time.Time
	kept  int
	known bool
}

// countKept adds to the status of pods that were enrolled while they ran how many of
// their connections are left.
func (e *Enroller) countKept(pods []admin.PodStatus, keepers map[string]struct{}) {
	if e.cfg.Connections == nil || len(keepers) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), countTimeout)
	defer cancel()
	e.counts.mu.Lock()
	defer e.counts.mu.Unlock()
	counted := make(map[string]count, len(keepers)) // pods that have gone are forgotten
	var mu sync.Mutex
	var work errgroup.Group
	work.SetLimit(atOnce)
	for uid := range keepers {
		if last, ok := e.counts.last[uid]; ok && time.Since(last.at) < keptFor {
			mu.Lock()
			counted[uid] = last
			mu.Unlock()
			continue
		}
		work.Go(func() error {
			c := count{at: time.Now()}
			if ns, pinned := e.pins.Get(uid); pinned {
				kept, err := e.cfg.Connections.Kept(ctx, ns)
				c.kept, c.known = kept, err == nil
			}
			mu.Lock()
			defer mu.Unlock()
			counted[uid] = c
			return nil
		})
	}
	_ = work.Wait() // a pod that could not be counted is shown without
	e.counts.last = counted
	for i := range pods {
		if c := counted[pods[i].UID]; c.known {
			pods[i].KeptConnections = &c.kept
		}
	}
}

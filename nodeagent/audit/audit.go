// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"ambientd/iptables/netnswatch"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/enroll"
	"ambientd/nodeagent/podnetns"
)

const (
	// atOnce bounds how many audits are at work at the same time, so that a node with
	// many damaged pods still has time for those that start.
	atOnce = 4

	// auditTimeout bounds one audit: moving a pod to another netns waits for the node
	// proxy's ack.
	auditTimeout = 20 * time.Second
)

// Pods are the enrolled pods. [*enroll.Enroller] has them.
type Pods interface {
	// Enrolled returns their UIDs.
	Enrolled() []string
	// Audit compares a pod with what was meant, and puts right what differs; false if
	// the pod is not enrolled, or busy until ctx ends.
	Audit(ctx context.Context, uid string) (enroll.Finding, bool)
}

// Changes tells which pods have come, moved and gone. [*enroll.Enroller] does.
type Changes interface {
	// Changed receives after there have been some.
	Changed() <-chan struct{}
	// Changes returns the pods concerned since the last call, by UID, as they are now.
	Changes() (gone, enrolled []string)
}

// Pins know each pod's netns. [*podnetns.Pins] does.
type Pins interface {
	Get(uid string) (*podnetns.Netns, bool)
}

// Host is the host's rule and set for probes. [*hostprobe.Set] is.
type Host interface {
	Verify(ctx context.Context) ([]redirection.Difference, error)
	Repair(ctx context.Context) error
}

// Watcher tells of changes in network namespaces. [*netnswatch.Watcher] does.
type Watcher interface {
	Watch(ctx context.Context, ns netnswatch.Netns) (netnswatch.ID, error)
	Unwatch(id netnswatch.ID)
	Events() <-chan netnswatch.ID
}

// Recorder counts.
type Recorder interface {
	// Audited counts an audit of a subject, "pod" or "host", repair included.
	Audited(subject string, took time.Duration)
	// Repaired counts the repair of a part.
	Repaired(part string)
	// RepairFailed counts an audit of a subject that failed.
	RepairFailed(subject string)
}

// Config is what an Auditor works with. Every field but Watcher is required.
type Config struct {
	Pods     Pods
	Changes  Changes
	Pins     Pins
	Host     Host
	Watcher  Watcher       // its own netns is the host's; nil: changes are noticed once an interval only
	Interval time.Duration // between two regular audits of the same subject
	Recorder Recorder
	Logger   *slog.Logger
}

func (c Config) validate() error {
	for name, missing := range map[string]bool{
		"Pods": c.Pods == nil, "Changes": c.Changes == nil, "Pins": c.Pins == nil, "Host": c.Host == nil, "Recorder": c.Recorder == nil, "Logger": c.Logger == nil,
	} {
		if missing {
			return fmt.Errorf("audit: no %s given", name)
		}
	}
	if c.Interval <= 0 {
		return fmt.Errorf("audit: interval %s must be positive", c.Interval)
	}
	return nil
}

// Auditor audits. Its methods may be used concurrently, Run once.
type Auditor struct {
	cfg     Config
	results results
	slots   chan struct{} // holds a token for each audit at work
	host    chan struct{} // holds a token while the host is audited: two would both find the same
}

// New returns an Auditor that has looked at nothing yet.
func New(cfg Config) (*Auditor, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &Auditor{cfg: cfg, results: results{pods: map[string]*result{}}, slots: make(chan struct{}, atOnce), host: make(chan struct{}, 1)}, nil
}

// Pods audits pods at once, all that are enrolled if none is named, and returns what
// was found, in the order of uids, without those that are not enrolled (any more).
func (a *Auditor) Pods(ctx context.Context, uids []string) []enroll.Finding {
	if len(uids) == 0 {
		uids = a.cfg.Pods.Enrolled()
	}
	findings := make([]*enroll.Finding, len(uids))
	// A goroutine for each place, not for each pod: a healthy one is looked at in some microseconds.
	var next atomic.Int64
	var work sync.WaitGroup
	for range min(atOnce, len(uids)) {
		work.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(uids)); i = next.Add(1) - 1 {
				if f, ok := a.auditPod(ctx, uids[i]); ok {
					findings[i] = &f
				}
			}
		})
	}
	work.Wait()
	// Of those that went while they were audited nobody else would take the result away.
	enrolled := a.cfg.Pods.Enrolled()
	slices.Sort(enrolled)
	var found []enroll.Finding
	for _, f := range findings {
		if f == nil {
			continue
		}
		found = append(found, *f)
		if _, still := slices.BinarySearch(enrolled, f.UID); !still {
			a.results.forget(f.UID)
		}
	}
	return found
}

// Host audits the host's rule and set at once.
func (a *Auditor) Host(ctx context.Context) (differences []string, err error) {
	return a.auditHost(ctx)
}

// take waits for a place.
func take(ctx context.Context, places chan struct{}) (giveBack func(), err error) {
	select {
	case places <- struct{}{}:
		return func() { <-places }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// auditPod audits one pod and keeps, counts and logs what came of it.
func (a *Auditor) auditPod(ctx context.Context, uid string) (enroll.Finding, bool) {
	end, err := take(ctx, a.slots)
	if err != nil {
		return enroll.Finding{}, false
	}
	defer end()
	ctx, cancel := context.WithTimeout(ctx, auditTimeout)
	defer cancel()
	started := time.Now()
	f, ok := a.cfg.Pods.Audit(ctx, uid)
	if !ok || errors.Is(f.Err, context.Canceled) && ctx.Err() != nil {
		return enroll.Finding{}, false
	}
	a.report(a.results.pod(uid), outcome{
		subject: "pod", attrs: []any{"pod", f.Pod, "uid", uid},
		differences: f.Differences, parts: f.Parts, err: f.Err, started: started,
	})
	return f, true
}

// auditHost does so for the host.
func (a *Auditor) auditHost(ctx context.Context) ([]string, error) {
	next, err := take(ctx, a.host)
	if err != nil {
		return nil, err
	}
	defer next()
	end, err := take(ctx, a.slots)
	if err != nil {
		return nil, err
	}
	defer end()
	ctx, cancel := context.WithTimeout(ctx, auditTimeout)
	defer cancel()
	o := outcome{subject: "host", parts: []string{"host probes"}, started: time.Now()}
	found, err := a.cfg.Host.Verify(ctx)
	for _, d := range found {
		o.differences = append(o.differences, d.String())
	}
	if err == nil && len(found) > 0 {
		err = a.cfg.Host.Repair(ctx)
	}
	if errors.Is(err, context.Canceled) && ctx.Err() != nil {
		return nil, err
	}
	o.err = err
	a.report(&a.results.host, o)
	return o.differences, err
}

// results are what audits have shown.
type results struct {
	mu   sync.Mutex
	pods map[string]*result // by UID
	host result
}

// pod returns the pod's result, to be changed with mu held.
func (r *results) pod(uid string) *result {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.pods[uid] == nil {
		r.pods[uid] = &result{}
	}
	return r.pods[uid]
}

// forget forgets a pod.
func (r *results) forget(uid string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.pods, uid)
}

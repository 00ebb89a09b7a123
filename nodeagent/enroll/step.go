// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"context"
	"errors"
	"fmt"
	"time"

	"ambientd/iptables/policyroute"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/workload"
	"ambientd/nodeagent/zds"
)

// The steps of an enrolment, as they are named in errors, logs and replies.
const (
	stepLookup      = "pod lookup"
	stepTurn        = "turn" // waiting for earlier work on the same pod
	stepNetns       = "netns"
	stepIdentity    = "identity"
	stepRedirection = "redirection"
	stepProxy       = "node proxy"
	stepProbes      = "host probes"
	stepCertificate = "certificate"
	stepRecord      = "record"
)

// errDeleted is the cause with which a DEL cancels the ADD of its attachment.
var errDeleted = errors.New("a DEL of the same attachment came meanwhile")

// StepError says in which step an operation on a pod ended.
type StepError struct {
	Step string
	Err  error
}

func (e *StepError) Error() string { return e.Step + ": " + e.Err.Error() }

// Unwrap returns the cause.
func (e *StepError) Unwrap() error { return e.Err }

// step is one part of an enrolment. undo is called when do or a later step
// failed, so it must be right also for a part that was never, or only half,
// put in place.
type step struct {
	name string
	do   func(context.Context) error
	undo func(context.Context) error
}

// way is what differs between the ways into the mesh: through an ADD, while the
// pod runs already, or again when the agent starts.
type way struct {
	redirect func(context.Context, *enrolment, *podnetns.Netns) error
	announce func(context.Context, *enrolment, *podnetns.Netns) error
	certify  func(context.Context, *enrolment) error
	commit   func()
	record   func(uid string) // nil: the record is written at once
}

// steps lists the parts in the order in which they are put in place. The
// identity comes before the rules so that the certificate is fetched while they
// are written; the proxy comes after them because its ack is the longest wait.
func (e *Enroller) steps(p *enrolment, ns *podnetns.Netns, w way) []step {
	uid := p.pod.UID
	record := w.record
	if record == nil {
		record = e.remember
	}
	return []step{
		{
			name: stepNetns,
			do:   func(context.Context) error { return e.pin(uid, ns) },
			undo: func(context.Context) error { return e.pins.Unpin(uid) },
		}, {
			name: stepIdentity,
			do:   func(context.Context) error { return e.cfg.Identities.Register(uid, p.identity) },
			undo: func(context.Context) error { e.cfg.Identities.Unregister(uid); return nil },
		}, {
			name: stepRedirection,
			do:   func(ctx context.Context) error { return w.redirect(ctx, p, ns) },
			undo: func(ctx context.Context) error {
				if p.captured {
					return nil
				}
				return e.remove(ctx, uid, ns)
			},
		}, {
			name: stepProxy,
			do:   func(ctx context.Context) error { return w.announce(ctx, p, ns) },
			undo: func(ctx context.Context) error { return e.retract(ctx, uid) },
		}, {
			name: stepProbes,
			do:   func(ctx context.Context) error { return e.cfg.Probes.Add(ctx, uid, p.ips, p.pod.Probes) },
			undo: func(ctx context.Context) error { return e.cfg.Probes.Remove(ctx, uid) },
		}, {
			name: stepCertificate,
			do:   func(ctx context.Context) error { return w.certify(ctx, p) },
			undo: func(context.Context) error { return nil },
		}, {
			name: stepRecord,
			do: func(ctx context.Context) error {
				if ctx.Err() != nil {
					return context.Cause(ctx)
				}
				w.commit()
				record(uid)
				return nil
			},
			undo: func(context.Context) error { return nil },
		},
	}
}

// runWhole puts all parts in place, or none: when one fails, it and all before
// it are undone, last first. What could not be undone is told with the cause.
func runWhole(ctx context.Context, steps []step) error {
	for i, s := range steps {
		if err := s.run(ctx); err != nil {
			if left := undo(ctx, steps[:i+1]); left != nil {
				return fmt.Errorf("%w; %w", err, left)
			}
			return err
		}
	}
	return nil
}

// undo takes parts back, last first. Each has a deadline of its own, apart from
// the caller's, which may be what made the enrolment fail: a proxy that does not
// answer must not keep the rules in the kernel.
func undo(ctx context.Context, steps []step) error {
	ctx = context.WithoutCancel(ctx)
	var errs []error
	for i := len(steps) - 1; i >= 0; i-- {
		ctx, cancel := context.WithTimeout(ctx, undoTimeout)
		if err := steps[i].undo(ctx); err != nil {
			errs = append(errs, fmt.Errorf("undoing %s: %w", steps[i].name, err))
		}
		cancel()
	}
	return errors.Join(errs...)
}

// runOn puts parts in place again for a pod that has them already. It undoes
// nothing: a pod in the mesh that loses a part keeps the rest.
func runOn(ctx context.Context, steps []step) error {
	for _, s := range steps {
		if err := s.run(ctx); err != nil {
			return err
		}
	}
	return nil
}

// run does the step. When the operation was cancelled the error says by what,
// which the step itself cannot know.
func (s step) run(ctx context.Context) error {
	err := s.do(ctx)
	if err == nil {
		return nil
	}
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		err = fmt.Errorf("%w (%w)", cause, err)
	}
	return &StepError{Step: s.name, Err: err}
}

// pin hands ns over to the pins; a netns that they refuse is closed.
func (e *Enroller) pin(uid string, ns *podnetns.Netns) error {
	if err := e.pins.Pin(uid, ns); err != nil {
		return errors.Join(err, ns.Close())
	}
	return nil
}

const (
	// loopbackTime is how long the loopback device of a pod that starts may be down. containerd
	// attaches a pod to its networks at the same time, loopback among them.
	loopbackTime = 2 * time.Second
	loopbackLook = 20 * time.Millisecond
)

// redirectStarting is redirect for a pod whose loopback device may be coming up yet.
func (e *Enroller) redirectStarting(ctx context.Context, p *enrolment, ns *podnetns.Netns) error {
	ticker := time.NewTicker(loopbackLook)
	defer ticker.Stop()
	for end := time.Now().Add(loopbackTime); ; {
		err := e.redirect(ctx, p, ns)
		if !errors.Is(err, policyroute.ErrLoopbackDown) || time.Now().After(end) {
			return err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), err)
		}
	}
}

func (e *Enroller) redirect(ctx context.Context, p *enrolment, ns *podnetns.Netns) error {
	select {
	case e.applying <- struct{}{}:
		defer func() { <-e.applying }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	e.noteHolding(p.pod.UID, holdsOurs)
	families, err := e.cfg.Redirection.Apply(ctx, ns, p.options)
	if err != nil {
		return err
	}
	e.setFamilies(p, families)
	return nil
}

// settle is redirect for a netns that may have rules already: ours, as they should
// be, which stay untouched; or those of another agent or of our other backend,
// which go once ours are in. So every new connection is redirected once, and none
// is uncaptured, also if a later step fails.
func (e *Enroller) settle(ctx context.Context, p *enrolment, ns *podnetns.Netns) (err error) {
	if p.captured, err = e.hasRules(ctx, p.pod.UID, ns); err != nil {
		return err
	}
	settled := false
	if p.place.ours { // else there is nothing to compare
		families, differences, err := e.cfg.Redirection.Verify(ctx, ns, p.options)
		if settled = err == nil && len(differences) == 0; settled {
			e.setFamilies(p, families)
		}
	}
	if !settled {
		if err := e.redirect(ctx, p, ns); err != nil {
			return err
		}
	}
	replaced, err := e.cfg.Predecessors.RemovePredecessors(ctx, ns)
	p.captured = p.captured || replaced
	if err != nil {
		return fmt.Errorf("removing what another agent or backend has set up: %w", err)
	}
	if replaced {
		e.cfg.Logger.Info("pod taken over from another agent or backend", "pod", p.pod.String(), "uid", p.pod.UID, "netns", p.netns.String())
	}
	return nil
}

func (e *Enroller) setFamilies(p *enrolment, families redirection.Families) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p.families = families
}

func (e *Enroller) announce(ctx context.Context, p *enrolment, ns *podnetns.Netns) error {
	ctx, cancel := context.WithTimeoutCause(ctx, e.cfg.ProxyTimeout, proxyOverdueError(e.cfg.ProxyTimeout))
	defer cancel()
	return e.cfg.NodeProxy.Add(ctx, proxyWorkload(p.pod), ns.File())
}

// proxyOverdueError says for how long a node proxy was waited for. Operators and pods' owners read it.
type proxyOverdueError time.Duration

// Error names the flag by which the time can be changed.
func (d proxyOverdueError) Error() string {
	return fmt.Sprintf("waited %s for it (--proxy-timeout)", time.Duration(d))
}

// Is makes it what the end of a context's time is.
func (proxyOverdueError) Is(target error) bool { return target == context.DeadlineExceeded }

// present is announce at the start of the agent: nobody waits for an ack, and the
// proxy gets the pod with its snapshot.
func (e *Enroller) present(_ context.Context, p *enrolment, ns *podnetns.Netns) error {
	return e.cfg.NodeProxy.Put(proxyWorkload(p.pod), ns.File())
}

func proxyWorkload(pod workload.Pod) zds.Workload {
	return zds.Workload{UID: pod.UID, Name: pod.Name, Namespace: pod.Namespace, ServiceAccount: pod.ServiceAccount}
}

// retract tells the proxy to let the pod go. The proxy's set no longer has the
// pod when it returns; the ack may be outstanding, and that is no error.
func (e *Enroller) retract(ctx context.Context, uid string) error {
	ctx, cancel := context.WithTimeout(ctx, e.cfg.DelProxyWait)
	defer cancel()
	err := e.cfg.NodeProxy.Del(ctx, uid)
	if errors.Is(err, context.DeadlineExceeded) {
		return nil
	}
	return err
}

// awaitCertificate returns nil also when CertWait passes first: the pod then
// starts without, and the proxy refuses its traffic until the certificate is
// there. A refusal by the CA is final and fails the enrolment.
func (e *Enroller) awaitCertificate(ctx context.Context, p *enrolment) error {
	wait, cancel := context.WithTimeout(ctx, e.cfg.CertWait)
	defer cancel()
	err := e.cfg.Identities.Wait(wait, p.identity)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case wait.Err() != nil && errors.Is(err, context.DeadlineExceeded):
		e.cfg.Logger.Warn("certificate still pending; the pod starts, its traffic waits for it",
			"pod", p.pod.String(), "uid", p.pod.UID, "identity", p.identity.String(), "waited", e.cfg.CertWait)
		return nil
	default:
		return err
	}
}

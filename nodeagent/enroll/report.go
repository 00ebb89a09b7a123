// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"context"
	"errors"
	"strings"

	"ambientd/certfetch"
	"ambientd/nodeagent/workload"
)

// State is how a pod stands with the mesh, for those who look at its object.
type State string

// States of a pod.
const (
	StateEnabled State = "enabled" // all parts are in place
	StatePending State = "pending" // its rules are, and the node proxy has not acked it yet
	StateOut     State = "out"     // no part is
)

// Reason is what happened to a pod, in the form in which Kubernetes' Events name it.
type Reason string

// Reasons.
const (
	ReasonEnrolled  Reason = "Enrolled"           // while it ran already
	ReasonFailed    Reason = "EnrolmentFailed"    // it could not be enrolled, or not be repaired
	ReasonRepaired  Reason = "Repaired"           // an audit has put back what it had lost
	ReasonMalformed Reason = "MalformedOption"    // one of its annotations counts as absent
	ReasonRefused   Reason = "CertificateRefused" // the CA denies its identity
)

// Reporter tells those who look at a pod's object what became of the pod. Its methods
// return at once: what they are told arrives later, and where nobody can be reached
// never.
type Reporter interface {
	State(pod workload.Pod, state State)
	Event(pod workload.Pod, reason Reason, message string)
}

// silent is the Reporter of pods that nobody looks at.
type silent struct{}

// State is part of Reporter, as the next.
func (silent) State(workload.Pod, State) {}

// Event says nothing.
func (silent) Event(workload.Pod, Reason, string) {}

// reportState tells how an enrolled pod stands.
func (e *Enroller) reportState(p *enrolment) {
	state := StateEnabled
	if !e.cfg.ProxySet.Acked(p.pod.UID) {
		state = StatePending
	}
	e.cfg.Reporter.State(p.pod, state)
}

// reportFailure tells why a pod is not in the mesh, or not wholly. One that was ended by its own DEL,
// or by the end of the agent, has not failed.
func (e *Enroller) reportFailure(pod workload.Pod, err error) {
	if _, enrolled := e.enrolment(pod.UID); !enrolled {
		e.cfg.Reporter.State(pod, StateOut)
	}
	if errors.Is(err, errDeleted) || errors.Is(err, context.Canceled) {
		return
	}
	e.cfg.Reporter.Event(pod, failureReason(err), err.Error())
}

func failureReason(err error) Reason {
	if errors.Is(err, certfetch.ErrDenied) {
		return ReasonRefused
	}
	return ReasonFailed
}

// reportFinding tells what an audit has found and done.
func (e *Enroller) reportFinding(p *enrolment, f Finding) {
	switch {
	case f.Err != nil:
		e.cfg.Reporter.Event(p.pod, ReasonFailed, "it cannot be audited or repaired: "+f.Err.Error())
	case len(f.Differences) > 0:
		e.cfg.Reporter.Event(p.pod, ReasonRepaired, "put back in place: "+strings.Join(f.Parts, ", "))
	}
	// Only the good news: a proxy that is away for a moment is not told of in every pod.
	if f.Err == nil && e.cfg.ProxySet.Acked(p.pod.UID) {
		e.cfg.Reporter.State(p.pod, StateEnabled)
	}
}

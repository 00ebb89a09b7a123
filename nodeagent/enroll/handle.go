// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"context"
	"errors"
	"fmt"
	"os"

	"ambientd/certfetch"
	"ambientd/cni-plugin/podevent"
	"ambientd/nodeagent/podnetns"
)

// Handle serves one event of the plugin. netns is the descriptor that came with
// it, nil without one; Handle keeps no reference to it. An error becomes a CNI
// error in the reply, which the caller logs. A DEL and a GC are always told
// success, because the runtime would otherwise repeat them for ever: what went
// wrong in them is logged here.
func (e *Enroller) Handle(ctx context.Context, req podevent.Request, netns *os.File) podevent.Reply {
	var reply podevent.Reply
	var err error
	switch req.Command {
	case podevent.CommandAdd:
		reply, err = e.add(ctx, req, netns)
	case podevent.CommandDel:
		reply, err = e.del(ctx, req, netns)
	case podevent.CommandCheck:
		reply, err = e.check(ctx, req, netns)
	case podevent.CommandGC:
		reply, err = e.gc(ctx, req)
	case podevent.CommandStatus:
		reply = podevent.Reply{Result: podevent.ResultOK}
	default:
		err = fmt.Errorf("the agent knows no command %q", req.Command)
	}
	if err == nil {
		return reply
	}
	if req.Command != podevent.CommandDel && req.Command != podevent.CommandGC {
		return podevent.Reply{Error: cniError(req, err)}
	}
	e.cfg.Logger.Warn("not everything could be taken back", "command", req.Command, "pod", req.Pod.String(), "uid", req.Pod.UID, "err", err)
	if reply.Result == "" {
		reply.Result = podevent.ResultWithdrawn
	}
	return reply
}

// advice is what an operator can do about a step that failed.
func advice(step string) string {
	switch step {
	case stepLookup:
		return "the runtime tries again; if it goes on, see that the pod source has the pod"
	case stepTurn:
		return "the runtime tries again; an earlier operation on this pod is still at work or was cancelled"
	case stepNetns:
		return "see which process made or shares the network namespace; the runtime makes a new one when it tries again"
	case stepIdentity:
		return "see the pod's service account and the trust domain of the agent"
	case stepRedirection:
		return "see the agent's log, and `ambientd status` for the backend and the reason it was chosen"
	case stepProxy:
		return "see that the node proxy runs, is connected (`ambientd status`) and what it logs about this pod; the runtime tries again"
	case stepProbes:
		return "see the agent's log for the host's rule and set; `ambientd status` names the backend"
	case stepCertificate:
		return "see the CA's log for this identity"
	case stepRecord:
		return "the runtime tries again"
	default:
		return "see the agent's log"
	}
}

// cniError is the one place where an error becomes a CNI error code.
func cniError(req podevent.Request, err error) *podevent.Error {
	step := ""
	if s := (*StepError)(nil); errors.As(err, &s) {
		step = s.Step
	}
	details := advice(step)
	if d := (*DifferenceError)(nil); errors.As(err, &d) {
		details = "`ambientd verify` shows all that differs, and puts it right"
	}
	return &podevent.Error{Code: cniCode(step, err), Msg: fmt.Sprintf("pod %s: %v", req.Pod, err), Details: details}
}

func cniCode(step string, err error) uint {
	taken := (*podnetns.TakenError)(nil)
	switch {
	case errors.Is(err, certfetch.ErrDenied):
		return podevent.CodeIdentityDenied
	case errors.Is(err, podnetns.ErrNotNetns), errors.Is(err, podnetns.ErrHostNetns), errors.As(err, &taken),
		errors.Is(err, errOtherNetns):
		return podevent.CodeInvalidNetns
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded), errors.Is(err, errDeleted):
		return podevent.CodeTryAgain
	case step == stepRedirection:
		return podevent.CodeRedirection
	default:
		return podevent.CodeTryAgain
	}
}

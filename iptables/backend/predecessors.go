// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"errors"
	"log/slog"
	"os/exec"
	"sync"

	"ambientd/iptables/redirection"
)

// Predecessors takes out what redirected before the chosen backend did, in every form: rules of other ambient agents, and
// our own of the other backend or of another variant of the iptables programs; native tables, what iptables-nft made, and
// what is in x_tables. The backend's own rules are to be in place before: then each new connection is redirected once
// throughout. It may be used concurrently, for different namespaces.
//
// Native tables and those of iptables-nft are found and removed over netlink. Programs run only where tables of x_tables
// hold something, and reading makes none.
type Predecessors struct {
	foreign, other removal // in a pod
	onHost         []removal
	mayBe          lookup // may there be any in a pod? nil: look for each
	logger         *slog.Logger
	missing        sync.Once // for the one warning about programs that are not there
}

// removal takes out some of the rules and reports whether there were any.
type removal func(ctx context.Context, run redirection.Runner) (bool, error)

// lookup is one look at a namespace.
type lookup func(ctx context.Context, ns redirection.Netns) (bool, error)

// podTakeover and hostTakeover are what both backends know of others' rules.
type (
	podTakeover interface {
		RemoveForeign(ctx context.Context, run redirection.Runner) (bool, error)
		RemoveOther(ctx context.Context, run redirection.Runner) (bool, error)
	}
	hostTakeover interface {
		RemoveForeignFromHost(ctx context.Context, run redirection.Runner) (bool, error)
		RemoveOtherFromHost(ctx context.Context, run redirection.Runner) (bool, error)
	}
)

// predecessorsOf returns what was before a backend.
func predecessorsOf(pod podTakeover, host hostTakeover, logger *slog.Logger) *Predecessors {
	return &Predecessors{
		foreign: pod.RemoveForeign,
		other:   pod.RemoveOther,
		onHost:  []removal{host.RemoveForeignFromHost, host.RemoveOtherFromHost},
		logger:  logger,
	}
}

// lookingFirst makes of it one that takes a single look where there is nothing, as in most pods.
func (p *Predecessors) lookingFirst(mayBe lookup) *Predecessors {
	p.mayBe = mayBe
	return p
}

// RemovePredecessors takes them out of a pod's namespace, and reports whether there was anything. Each
// part is tried, whatever becomes of the others.
func (p *Predecessors) RemovePredecessors(ctx context.Context, ns redirection.Netns) (bool, error) {
	return p.removeFromPod(ctx, ns, p.foreign, p.other)
}

// RemoveOther is the same for our own alone: the pod may be in another agent's mesh.
func (p *Predecessors) RemoveOther(ctx context.Context, ns redirection.Netns) (bool, error) {
	return p.removeFromPod(ctx, ns, p.other)
}

func (p *Predecessors) removeFromPod(ctx context.Context, ns redirection.Netns, removals ...removal) (bool, error) {
	if p.mayBe != nil {
		if some, err := p.mayBe(ctx, ns); err == nil && !some {
			return false, nil
		}
	}
	return p.remove(ctx, ns.Do, removals)
}

// RemoveFromHost takes out of the host's namespace the rules that predecessors had there for kubelet's probes, and
// the ipsets of ours that nothing uses then.
func (p *Predecessors) RemoveFromHost(ctx context.Context, run redirection.Runner) (bool, error) {
	return p.remove(ctx, run, p.onHost)
}

func (p *Predecessors) remove(ctx context.Context, run redirection.Runner, removals []removal) (found bool, err error) {
	for _, r := range removals {
		there, failure := r(ctx, run)
		found = found || there
		if errors.Is(failure, exec.ErrNotFound) {
			// What is in there may be the pod's own. It must not stay outside for that, and NAT is decided by the rules that
			// come first, which are ours.
			p.missing.Do(func() {
				p.logger.Warn("x_tables has rules and its programs are not installed: what another agent may have left in there stays",
					"err", failure)
			})
			continue
		}
		err = errors.Join(err, failure)
	}
	return found, err
}

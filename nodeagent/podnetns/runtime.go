// SPDX-License-Identifier: Apache-2.0

package podnetns

import (
	"context"
	"slices"
)

// Runtime is a container runtime that can be asked where the host has the netns of pods.
type Runtime interface {
	// NetnsPaths returns paths by the pod's UID, the likeliest first. With an error it
	// returns what it has learnt nevertheless.
	NetnsPaths(ctx context.Context, uids []string) (map[string][]string, error)
}

// fromRuntime tries the paths that the container runtime names, the likeliest of each pod
// first. A runtime that does not answer ends nothing: the processes are looked at next.
func (s *search) fromRuntime(ctx context.Context) error {
	if s.runtime == nil {
		return nil
	}
	missing := s.missing()
	uids := make([]string, 0, len(missing))
	for _, p := range missing {
		uids = append(uids, p.UID)
	}
	paths, failure := s.runtime.NetnsPaths(ctx, uids)
	for _, p := range missing {
		if failure != nil && len(paths[p.UID]) == 0 {
			p.note("container runtime", failure)
		}
	}
	for rank := 0; ; rank++ {
		// An older sandbox's netns is not the pod's any more: no second one is looked for.
		missing = slices.DeleteFunc(missing, func(p *pursuit) bool { return !p.open() || rank >= len(paths[p.UID]) })
		if len(missing) == 0 {
			return nil
		}
		if err := s.judging(func(found func(lead)) error {
			for _, p := range missing {
				if ctx.Err() != nil {
					return context.Cause(ctx)
				}
				found(s.pathLead(p, "container runtime", paths[p.UID][rank], Key{}))
			}
			return nil
		}); err != nil {
			return err
		}
	}
}

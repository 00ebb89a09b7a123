// SPDX-License-Identifier: Apache-2.0

package podnetns

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
)

// Runtime is a container runtime that can be asked where the host has the netns of pods.
type Runtime interface {
	// NetnsPaths returns paths by the pod's UID, the likeliest first. With an error it
	// returns what it has learnt nevertheless.
	NetnsPaths(ctx context.Context, uids []string) (map[string][]string, error)
}

// fromRuntime tries the paths that the container runtime names. A runtime that does not
// answer ends nothing: the processes are looked at next.
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
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if failure != nil && len(paths[p.UID]) == 0 {
			p.note("container runtime", failure)
		}
		s.fromSandboxes(p, paths[p.UID])
	}
	return nil
}

// fromSandboxes claims the first netns at one of the paths that is the pod's. An older
// sandbox's is not the pod's any more, so that no second one is looked for.
func (s *search) fromSandboxes(p *pursuit, paths []string) {
	for _, path := range paths {
		if !p.open() {
			return
		}
		v := s.at(path)
		err := v.err
		if err == nil {
			err = s.claimHeld(p, v)
		}
		if err != nil {
			p.note("container runtime", fmt.Errorf("%s: %w", path, err))
		}
	}
}

// at surveys what is at a path of the host.
func (s *search) at(path string) surveyed {
	file, err := openNetns(s.hostPath(path))
	if err != nil {
		return surveyed{err: fmt.Errorf("opening it: %w", err)}
	}
	return s.surveyor.survey(file)[0]
}

// hostPath is where a path of the host is here: the host's /proc may show elsewhere.
func (s *search) hostPath(path string) string {
	if below, ok := strings.CutPrefix(path, "/proc/"); ok {
		return filepath.Join(s.procRoot, below)
	}
	return path
}

// claimHeld claims a netns that a path led to if it holds the pod's addresses, or closes it.
func (s *search) claimHeld(p *pursuit, v surveyed) error {
	err := holds(v.held, p.IPs)
	if err == nil {
		err = s.claim(p, v.netns)
	}
	if err != nil {
		return errors.Join(err, v.netns.Close())
	}
	return nil
}

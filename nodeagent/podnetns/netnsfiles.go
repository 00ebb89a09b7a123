// SPDX-License-Identifier: Apache-2.0

package podnetns

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// maxNetnsFiles bounds how many files of one directory are looked at.
const maxNetnsFiles = 4096

// fromFiles looks through the netns that runtimes keep as files. Nothing there names a pod:
// the addresses have to tell, and no process in the netns may be of another pod.
func (s *search) fromFiles(ctx context.Context) error {
	seen := map[nsID]bool{s.procs.host: true}
	for _, g := range s.procs.order {
		// What has been given to a pod is open and keeps its number.
		seen[g.id] = g.claimed
	}
	for _, dir := range s.netnsDirs {
		if err := s.fromDir(ctx, dir, seen); err != nil {
			return err
		}
	}
	return nil
}

// fromDir looks at the files of one directory, and marks in seen whose netns they are.
func (s *search) fromDir(ctx context.Context, path string, seen map[nsID]bool) error {
	names, err := list(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // a runtime that this node does not have
	}
	if err != nil {
		return fmt.Errorf("listing netns files: %w", err)
	}
	for _, name := range names {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		s.fromFile(filepath.Join(path, name), seen)
	}
	return nil
}

// list returns the names in a directory, which has at most maxNetnsFiles.
func list(path string) ([]string, error) {
	dir, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	names, err := dir.Readdirnames(maxNetnsFiles + 1)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	if len(names) > maxNetnsFiles {
		err = fmt.Errorf("%s has more than %d files", path, maxNetnsFiles)
	}
	return names, errors.Join(err, dir.Close())
}

// fromFile claims the netns in one file, or notes why it is not the pod's for the pods whose
// it could have been.
func (s *search) fromFile(path string, seen map[nsID]bool) {
	pods, err := s.tryFile(path, seen)
	if err == nil {
		return
	}
	for _, p := range pods {
		p.note(path, err)
	}
}

func (s *search) tryFile(path string, seen map[nsID]bool) ([]*pursuit, error) {
	file, id, err := s.host.openNetns(unix.AT_FDCWD, path)
	switch {
	case errors.Is(err, ErrNotNetns):
		return nil, err
	case err != nil:
		return s.missing(), err
	case seen[id]:
		return s.missing(), file.Close()
	}
	seen[id] = true
	v := s.surveyor.survey(file)[0]
	switch {
	case errors.Is(v.err, ErrNotNetns), errors.Is(v.err, ErrHostNetns):
		return nil, v.err
	case v.err != nil:
		return s.missing(), v.err
	}
	pods := s.holding(v.held)
	if len(pods) == 0 {
		return nil, v.netns.Close()
	}
	if err := s.claimFile(v.netns, id, pods); err != nil {
		return pods, errors.Join(err, v.netns.Close())
	}
	return nil, nil
}

// claimFile claims n for the one wanted pod whose addresses it holds, or says why it is
// not that pod's.
func (s *search) claimFile(n *Netns, id nsID, pods []*pursuit) error {
	if len(pods) > 1 {
		return fmt.Errorf("netns %s holds the addresses of %d wanted pods, and has no process of any", n.key, len(pods))
	}
	if g := s.procs.groups[id]; g != nil {
		// Every process in it has been looked at, since nobody has a claim to it and a
		// pod is missing.
		for _, uid := range g.uids {
			if uid != pods[0].UID {
				return fmt.Errorf("netns %s holds the pod's addresses, and has processes of the pod with UID %s", n.key, uid)
			}
		}
	}
	return s.claim(pods[0], n)
}

// holding returns the pods without a netns from an earlier stage whose addresses are held.
func (s *search) holding(held []netip.Addr) []*pursuit {
	var pods []*pursuit
	for _, ip := range held {
		for _, p := range s.byIP[ip] {
			if !p.settled && holds(held, p.IPs) == nil && !slices.Contains(pods, p) {
				pods = append(pods, p)
			}
		}
	}
	return pods
}

// missing returns the pods that no earlier stage has settled.
func (s *search) missing() []*pursuit {
	return slices.DeleteFunc(slices.Clone(s.order), func(p *pursuit) bool { return p.settled })
}

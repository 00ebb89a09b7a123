// SPDX-License-Identifier: Apache-2.0

package podnetns

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"

	"golang.org/x/sys/unix"

	"ambientd/nodeagent/podnetns/cgroup"
)

const (
	// maxProcesses bounds a pass. The kernel allows 4 million, of which a node that
	// works has few.
	maxProcesses = 1 << 18

	// maxCgroup bounds a /proc/PID/cgroup, in bytes: 14 hierarchies of version 1 with
	// paths of 1 KiB. A longer one is not a pod's.
	maxCgroup = 16 << 10

	// maxThreads bounds how many threads of one process are looked at, where that is needed. All
	// but the last are dead ones that somebody traces.
	maxThreads = 1 << 14

	// checkContextEvery is how many processes may be looked at before the context is
	// looked at again, some 2 ms.
	checkContextEvery = 256
)

// group is the processes that share a netns.
type group struct {
	id   nsID
	rest []string // processes that were not looked at, as groupOf names them
	uids []string // of the pods whose processes were

	// By whoever judges candidates.
	judged    []string // UIDs of the pods that it was judged for
	claimed   bool     // one of them has a claim to the netns
	contested bool     // another wanted pod's addresses are in it too
}

// processes is a pass over a proc file system.
type processes struct {
	root   string
	dir    int // descriptor of root
	host   nsID
	groups map[nsID]*group
	order  []*group // as they were met

	seen   int   // processes in the pass
	hidden int   // of them, those that the agent has no permission to look at
	short  error // a shortage for which one was not looked at
	buf    []byte
}

// fromProcesses looks at all processes once. From each netns it takes the first process
// it meets, which is the oldest as a rule, and reads its cgroup. That suffices, because
// the process that made a pod's netns is one of the pod's: any other has entered it. Only if
// a pod is still missing afterwards, or two wanted pods have their addresses in one netns,
// are the remaining processes there looked at as well. So it reads at most one cgroup a
// process, and usually one a netns.
//
// While the pass goes on, a second goroutine judges what it has come upon: looking into
// a netns costs several times what looking at a process does, so that with two CPUs many
// pods take hardly longer than one.
func (s *search) fromProcesses(ctx context.Context) error {
	procs, err := openProcesses(s.procRoot, s.host)
	if err != nil {
		return err
	}
	s.procs = procs
	if err := s.judging(func(found func(lead)) error {
		return procs.pass(ctx, func(g *group, pid string) { s.examine(g, pid, found) })
	}); err != nil {
		return err
	}
	unsure := slices.ContainsFunc(s.order, (*pursuit).unsure)
	for _, g := range procs.order {
		if !g.contested && (!unsure || g.claimed) {
			continue
		}
		if err := s.examineRest(ctx, g); err != nil {
			return err
		}
	}
	if procs.short != nil { // whose process that was is not known
		return fmt.Errorf("looking at the processes in %s: %w", s.procRoot, procs.short)
	}
	return nil
}

// examine looks at one process, and hands it over if it is a wanted pod's and its netns was
// not yet judged for that.
func (s *search) examine(g *group, pid string, found func(lead)) {
	// Through a descriptor of its directory, all is of one process: a PID is given again.
	dir, err := openat(s.procs.dir, pid, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		s.procs.skip(err)
		return
	}
	uid, err := s.procs.podOf(dir)
	if err != nil {
		s.procs.skip(err)
	}
	if uid != "" && !slices.Contains(g.uids, uid) {
		g.uids = append(g.uids, uid)
	}
	if p := s.pods[uid]; p != nil && !p.settled && !slices.Contains(g.judged, uid) {
		found(candidate{pod: p, pid: pid, dir: dir, group: g})
		return
	}
	_ = unix.Close(dir) // nothing was written
}

// examineRest looks at the processes in a netns that were not looked at yet.
func (s *search) examineRest(ctx context.Context, g *group) error {
	for i, pid := range g.rest {
		if i%checkContextEvery == 0 && ctx.Err() != nil {
			return context.Cause(ctx)
		}
		s.examine(g, pid, func(l lead) { s.judge(s.surveyor, []lead{l}) })
	}
	g.rest = nil
	return nil
}

func openProcesses(root string, host *Host) (*processes, error) {
	dir, err := openat(unix.AT_FDCWD, root, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", root, err)
	}
	return &processes{root: root, dir: dir, host: host.id, groups: map[nsID]*group{}, buf: make([]byte, maxCgroup)}, nil
}

func (p *processes) close() {
	_ = unix.Close(p.dir) // nothing was written
}

// pass looks once at the netns of every process outside of the host's. It calls first for
// the first one in each netns and keeps the others.
func (p *processes) pass(ctx context.Context, first func(*group, string)) error {
	for pid, err := range entriesOf(p.dir, make([]byte, 32<<10)) {
		if err != nil {
			return fmt.Errorf("listing %s: %w", p.root, err)
		}
		if pid[0] < '1' || pid[0] > '9' {
			continue
		}
		if p.seen%checkContextEvery == 0 && ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if p.seen++; p.seen > maxProcesses {
			return fmt.Errorf("%s has more than %d processes", p.root, maxProcesses)
		}
		g, name, isNew := p.groupOf(pid)
		switch {
		case isNew:
			first(g, name)
		case g != nil:
			g.rest = append(g.rest, name)
		}
	}
	return nil
}

// entriesOf reads a directory, a buffer at a time.
func entriesOf(dir int, buf []byte) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		var names []string
		for {
			n, err := retrying(func() (int, error) { return unix.ReadDirent(dir, buf) })
			if err != nil {
				yield("", err)
				return
			}
			if n == 0 {
				return
			}
			_, _, names = unix.ParseDirent(buf[:n], -1, names[:0])
			for _, name := range names {
				if !yield(name, nil) {
					return
				}
			}
		}
	}
}

// groupOf returns the group of the process' netns, the directory below p.dir in which the process
// shows it, and whether it is the first one there; no group for a process in the host's netns and
// for one that cannot be looked at.
func (p *processes) groupOf(pid string) (g *group, name string, isNew bool) {
	name = pid
	id, err := p.netnsOf(name)
	if errors.Is(err, unix.ENOENT) {
		name, id, err = p.liveThread(pid)
	}
	if err != nil {
		p.skip(err)
		return nil, "", false
	}
	if id == p.host {
		return nil, "", false
	}
	g = p.groups[id]
	if g != nil {
		return g, name, false
	}
	g = &group{id: id}
	p.groups[id] = g
	p.order = append(p.order, g)
	return g, name, true
}

func (p *processes) netnsOf(name string) (nsID, error) {
	var st unix.Stat_t
	err := unix.Fstatat(p.dir, name+"/ns/net", &st, 0)
	return nsID{dev: st.Dev, ino: st.Ino}, err
}

// liveThread finds the thread that stands in for a main thread which has ended before the others,
// and shows no netns any more, nor a cgroup of version 1. It is the first that lives: threads may be
// in different netns, and of a process one of them counts, as it does while the main thread lives.
func (p *processes) liveThread(pid string) (name string, id nsID, err error) {
	tasks := pid + "/task"
	dir, err := openat(p.dir, tasks, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return "", nsID{}, err
	}
	defer func() { _ = unix.Close(dir) }() // nothing was written
	left := maxThreads
	for tid, err := range entriesOf(dir, p.buf) {
		if err != nil {
			return "", nsID{}, err
		}
		name = tasks + "/" + tid
		id, err = p.netnsOf(name)
		if left--; left == 0 || !errors.Is(err, unix.ENOENT) {
			return name, id, err
		}
	}
	return "", nsID{}, unix.ENOENT // it is a zombie altogether
}

// podOf returns the UID of the pod that the process belongs to, or "".
func (p *processes) podOf(dir int) (string, error) {
	fd, err := openat(dir, "cgroup", unix.O_RDONLY)
	if err != nil {
		return "", err
	}
	// One read has all of it: the kernel writes the text when it is asked for.
	n, err := retrying(func() (int, error) { return unix.Read(fd, p.buf) })
	if err := errors.Join(err, unix.Close(fd)); err != nil {
		return "", err
	}
	if n == len(p.buf) {
		return "", nil
	}
	uid, _ := cgroup.PodUID(p.buf[:n])
	return uid, nil
}

// skip counts a process that cannot be looked at. One that has ended meanwhile is none.
func (p *processes) skip(err error) {
	switch {
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		p.hidden++
	case isShortage(err):
		p.short = err
	}
}

// SPDX-License-Identifier: Apache-2.0

package podnetns

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"

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

	// listedAtOnce is how much of the list of processes is read at once, in bytes: some 250
	// processes, so that what comes of the first is judged while the next are looked at.
	listedAtOnce = 8 << 10

	// maxLink is how long the text of a link to a netns may be, in bytes.
	maxLink = 64
)

// nsID is what a namespace shows in its file's stat. A number is given again when
// the namespace is gone.
type nsID struct{ dev, ino uint64 }

// processes is a pass over a proc file system.
type processes struct {
	root   string
	dir    int // descriptor of root
	host   nsID
	groups map[nsID]*group
	order  []*group // as they were met

	seen   int // processes in the pass
	hidden int // of them, those that the agent has no permission to look at
	buf    []byte
}

func openProcesses(root string, host *Host) (*processes, error) {
	id, err := idOf(host.file)
	if err != nil {
		return nil, fmt.Errorf("looking at the host's netns: %w", err)
	}
	dir, err := openat(unix.AT_FDCWD, root, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", root, err)
	}
	return &processes{root: root, dir: dir, host: id, groups: map[nsID]*group{}, buf: make([]byte, maxCgroup)}, nil
}

func (p *processes) close() {
	_ = unix.Close(p.dir) // nothing was written
}

// sight is a process with the netns that it is in.
type sight struct {
	pid string
	id  nsID
	err error
}

// pass looks once at the netns of every process outside of the host's. It calls first for
// the first one in each netns and keeps the others.
//
// A goroutine looks ahead. Most of what that takes is waiting for memory: of each process
// the kernel reads what was in no cache since the last pass.
func (p *processes) pass(ctx context.Context, first func(*group, string)) error {
	ahead := make(chan []sight, 1)
	ended := make(chan error, 1)
	go func() {
		defer close(ahead)
		ended <- p.lookAhead(ctx, func(some []sight) { ahead <- some })
	}()
	for some := range ahead {
		for _, one := range some {
			p.seen++
			if one.err != nil {
				p.skip(one.err)
				continue
			}
			g, isNew := p.groupOf(one.id)
			switch {
			case isNew:
				first(g, one.pid)
			case g != nil:
				g.rest = append(g.rest, one.pid)
			}
		}
	}
	return <-ended
}

// lookAhead hands over all processes, some at a time. Of the receiver it uses what does
// not change.
func (p *processes) lookAhead(ctx context.Context, hand func([]sight)) error {
	entries := make([]byte, listedAtOnce)
	var names []string
	seen := 0
	for {
		n, err := retrying(func() (int, error) { return unix.ReadDirent(p.dir, entries) })
		if err != nil {
			return fmt.Errorf("listing %s: %w", p.root, err)
		}
		if n == 0 {
			return nil
		}
		_, _, names = unix.ParseDirent(entries[:n], -1, names[:0])
		some := make([]sight, 0, len(names))
		for _, pid := range names {
			if pid[0] < '1' || pid[0] > '9' {
				continue
			}
			if seen%checkContextEvery == 0 && ctx.Err() != nil {
				return context.Cause(ctx)
			}
			if seen++; seen > maxProcesses {
				return fmt.Errorf("%s has more than %d processes", p.root, maxProcesses)
			}
			some = append(some, p.lookAt(pid))
		}
		hand(some)
	}
}

// lookAt tells which netns the process is in. The text of its link does so for half of what
// it takes to follow it: for that the kernel makes a file of each netns that nobody has open.
func (p *processes) lookAt(pid string) sight {
	link := pid + "/ns/net"
	var text [maxLink]byte
	n, err := retrying(func() (int, error) { return unix.Readlinkat(p.dir, link, text[:]) })
	if err != nil {
		return sight{pid: pid, err: err}
	}
	if ino, ok := netnsNumber(text[:n]); ok {
		return sight{pid: pid, id: nsID{dev: p.host.dev, ino: ino}} // all are on one file system
	}
	var st unix.Stat_t // not a process' own link, but one to such a link
	err = unix.Fstatat(p.dir, link, &st, 0)
	return sight{pid: pid, id: nsID{dev: st.Dev, ino: st.Ino}, err: err}
}

// netnsNumber reads the text of a link, "net:[4026531840]".
func netnsNumber(text []byte) (uint64, bool) {
	text, opened := bytes.CutPrefix(text, []byte("net:["))
	text, closed := bytes.CutSuffix(text, []byte("]"))
	if !opened || !closed {
		return 0, false
	}
	number, err := strconv.ParseUint(string(text), 10, 64)
	return number, err == nil
}

// groupOf returns the group of a netns, and whether it is new; nil for the host's netns.
func (p *processes) groupOf(id nsID) (g *group, isNew bool) {
	if id == p.host {
		return nil, false
	}
	g = p.groups[id]
	if g != nil {
		return g, false
	}
	g = &group{id: id}
	p.groups[id] = g
	p.order = append(p.order, g)
	return g, true
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
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
		p.hidden++
	}
}

func idOf(f *os.File) (nsID, error) {
	var st unix.Stat_t
	err := control(f, func(fd int) error { return unix.Fstat(fd, &st) })
	return nsID{dev: st.Dev, ino: st.Ino}, err
}

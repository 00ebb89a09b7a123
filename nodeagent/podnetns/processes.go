// SPDX-License-Identifier: Apache-2.0

package podnetns

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

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

	// listedAtOnce is how much of the list of processes is read at once, in bytes.
	listedAtOnce = 32 << 10

	// lookedAtOnce is how many processes are looked at before what came of them is examined,
	// and before the context is looked at again.
	lookedAtOnce = 64

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

// share is some of the processes, in the order in which they are listed.
type share struct {
	sights []sight
	looked chan struct{} // closed when it is known which netns they are in
}

// pass looks once at the netns of every process outside of the host's. It calls first for
// the first one in each netns and keeps the others.
//
// Others look ahead. Most of what that takes is waiting for memory: of each process
// the kernel reads what was in no cache since the last pass.
func (p *processes) pass(ctx context.Context, first func(*group, string)) error {
	pids, err := p.list(ctx)
	if err != nil {
		return err
	}
	shares, stop := p.lookAhead(pids)
	defer stop()
	for _, some := range shares {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		<-some.looked
		for _, one := range some.sights {
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
	return nil
}

// list returns the PIDs of all processes.
func (p *processes) list(ctx context.Context) ([]string, error) {
	entries := make([]byte, listedAtOnce)
	var names, pids []string
	for {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		n, err := retrying(func() (int, error) { return unix.ReadDirent(p.dir, entries) })
		if err != nil {
			return nil, fmt.Errorf("listing %s: %w", p.root, err)
		}
		if n == 0 {
			return pids, nil
		}
		_, _, names = unix.ParseDirent(entries[:n], -1, names[:0])
		for _, name := range names {
			if '1' <= name[0] && name[0] <= '9' {
				pids = append(pids, name)
			}
		}
		if len(pids) > maxProcesses {
			return nil, fmt.Errorf("%s has more than %d processes", p.root, maxProcesses)
		}
	}
}

// lookAhead has as many goroutines as there are CPUs look at the processes, the first ones
// first. When stop returns none of them is at work any more.
func (p *processes) lookAhead(pids []string) (shares []share, stop func()) {
	shares = make([]share, 0, len(pids)/lookedAtOnce+1)
	for some := range slices.Chunk(pids, lookedAtOnce) {
		sights := make([]sight, len(some))
		for i, pid := range some {
			sights[i].pid = pid
		}
		shares = append(shares, share{sights: sights, looked: make(chan struct{})})
	}
	var next atomic.Int64
	var lookers sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), len(shares)) {
		lookers.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= len(shares) {
					return
				}
				for at := range shares[i].sights {
					p.lookAt(&shares[i].sights[at])
				}
				close(shares[i].looked)
			}
		})
	}
	return shares, func() {
		next.Store(int64(len(shares)))
		lookers.Wait()
	}
}

// lookAt finds out which netns a process is in. The text of its link tells for half of what
// it takes to follow it: for that the kernel makes a file of each netns that nobody has open.
func (p *processes) lookAt(one *sight) {
	link := one.pid + "/ns/net"
	var text [maxLink]byte
	n, err := retrying(func() (int, error) { return unix.Readlinkat(p.dir, link, text[:]) })
	if err != nil {
		one.err = err
		return
	}
	if ino, ok := netnsNumber(text[:n]); ok {
		one.id = nsID{dev: p.host.dev, ino: ino} // all are on one file system
		return
	}
	var st unix.Stat_t // not a process' own link, but one to such a link
	one.err = unix.Fstatat(p.dir, link, &st, 0)
	one.id = nsID{dev: st.Dev, ino: st.Ino}
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

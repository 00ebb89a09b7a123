// SPDX-License-Identifier: Apache-2.0

package podnetns

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// lead is what may lead to the netns of a wanted pod.
type lead interface {
	wanted() *pursuit
	// name says what it is, in the error of a pod that has no netns.
	name() string
	// open opens the netns, and gives up what the lead itself keeps open.
	open(host *Host) (*os.File, error)
	// confirm says why what it led to is not the pod's. The caller holds s.claiming.
	confirm(s *search, v surveyed) error
}

// pathLead is a path that is said to be the pod's netns.
type pathLead struct {
	pod    *pursuit
	source string // who says so
	path   string // where it is for the agent
	key    Key    // what is recorded of the netns; zero if nothing is
}

func (l pathLead) wanted() *pursuit { return l.pod }
func (l pathLead) name() string     { return l.source }

func (l pathLead) open(host *Host) (*os.File, error) {
	file, _, err := host.openNetns(unix.AT_FDCWD, l.path)
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", l.path, err)
	}
	return file, nil
}

func (l pathLead) confirm(_ *search, v surveyed) error {
	var err error
	switch recorded := l.key != (Key{}); {
	case !recorded:
		err = l.pod.livesIn(v)
	case v.err == nil && v.key != l.key:
		return fmt.Errorf("%s is netns %s now, the recorded one was %s", l.path, v.key, l.key)
	case v.err != nil || len(l.pod.IPs) > 0:
		err = v.has(l.pod.IPs)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", l.path, err)
	}
	return nil
}

// candidate is a process of a wanted pod, whose netns may be the pod's.
type candidate struct {
	pod   *pursuit
	pid   string
	dir   int    // descriptor of the process' directory
	group *group // the processes that were seen in the same netns
}

func (c candidate) wanted() *pursuit { return c.pod }
func (c candidate) name() string     { return "process " + c.pid }

// open opens the netns that the process is in now, and gives the process up.
func (c candidate) open(host *Host) (*os.File, error) {
	file, id, err := host.openNetns(c.dir, "ns/net")
	_ = unix.Close(c.dir) // nothing was written
	if err != nil {
		return nil, fmt.Errorf("opening its netns: %w", err)
	}
	if id != c.group.id {
		return nil, errors.Join(errors.New("it has entered another netns meanwhile"), file.Close())
	}
	return file, nil
}

func (c candidate) confirm(s *search, v surveyed) error {
	c.group.judged = append(c.group.judged, c.pod.UID)
	if err := c.pod.livesIn(v); err != nil {
		return err
	}
	c.group.claimed = true
	for _, ip := range v.held {
		c.group.contested = c.group.contested || slices.ContainsFunc(s.byIP[ip], func(rival *pursuit) bool {
			return rival != c.pod && !rival.settled
		})
	}
	return nil
}

// livesIn says why the netns in which somebody else than the record says that the pod lives
// is not the pod's. If it is the recorded one even so, the search ends: the pod has not left
// it for a new sandbox, but has taken its addresses off it, or keeps them from being read, and
// may have put them into a netns that it made itself: NET_ADMIN suffices for that. A shortage of
// the agent's own says none of this.
func (p *pursuit) livesIn(v surveyed) error {
	err := v.has(p.IPs)
	if err == nil || p.Key == (Key{}) || v.key != p.Key || isShortage(err) {
		return err
	}
	err = fmt.Errorf("the pod is still in the recorded netns %s, but: %w", v.key, err)
	return errors.Join(err, p.dispute(err))
}

// unsure says whether another process may tell more of the pod: it has no netns, or one that
// is not the recorded one.
func (p *pursuit) unsure() bool {
	return p.open() || p.netns != nil && p.Key != (Key{}) && p.netns.key != p.Key
}

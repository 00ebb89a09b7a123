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
	if v.err != nil {
		return fmt.Errorf("%s: %w", l.path, v.err)
	}
	recorded := l.key != Key{}
	if recorded && v.netns.key != l.key {
		return fmt.Errorf("%s is netns %s now, the recorded one was %s", l.path, v.netns.key, l.key)
	}
	if recorded && len(l.pod.IPs) == 0 {
		return nil
	}
	if err := holds(v.held, l.pod.IPs); err != nil {
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
	if v.err != nil {
		return v.err
	}
	if err := holds(v.held, c.pod.IPs); err != nil {
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

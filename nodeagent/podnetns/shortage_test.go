// SPDX-License-Identifier: Apache-2.0

package podnetns_test

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"ambientd/nodeagent/podnetns"
)

// allDescriptors is how many more one pod's search needs at most, with some to spare.
const allDescriptors = 20

// short searches with so many descriptors to spare, and returns the key of what was found.
func (n *node) short(spare int, w podnetns.Wanted) (found podnetns.Key, err error) {
	n.tb.Helper()
	f := n.finder()
	before := descriptors(n.tb)
	release := n.leave(spare)
	netns, missing := f.Find(n.tb.Context(), []podnetns.Wanted{w})
	release()
	for _, ns := range netns {
		found = ns.Key()
		n.must(ns.Close())
	}
	if after := descriptors(n.tb); after != before {
		n.tb.Errorf("%d descriptors before, %d after", before, after)
	}
	return found, missing[w.UID]
}

// leave lets the process open that many descriptors more, until release is called.
func (n *node) leave(spare int) (release func()) {
	n.tb.Helper()
	var taken []*os.File
	for highest := highestDescriptor(n.tb); ; {
		f, err := os.Open("/dev/null")
		n.must(err)
		taken = append(taken, f)
		if int(f.Fd()) > highest { // all that are lower are taken
			break
		}
	}
	var before unix.Rlimit
	n.must(unix.Getrlimit(unix.RLIMIT_NOFILE, &before))
	limit := before
	limit.Cur = uint64(int(taken[len(taken)-1].Fd()) + 1 + spare)
	n.must(unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	return func() {
		n.must(unix.Setrlimit(unix.RLIMIT_NOFILE, &before))
		for _, f := range taken {
			n.must(f.Close())
		}
	}
}

// Whichever step of the search has no descriptor left, what it did not look at is not said to be
// not there: the pod is found, or the error is of the shortage.
func TestFindShortOfDescriptors(t *testing.T) {
	for name, prepare := range map[string]func(n *node) (podnetns.Wanted, podnetns.Key){
		"record alone": func(n *node) (podnetns.Wanted, podnetns.Key) {
			own := n.netns("10.0.0.1")
			return n.recorded(uid1, n.file(own, "cni-1"), own), n.key(own)
		},
		"runtime": func(n *node) (podnetns.Wanted, podnetns.Key) {
			own := n.netns("10.0.0.1")
			n.runtime = runtimePaths{uid1: {n.file(own, "cni-1")}}
			return wantedPod(uid1, "10.0.0.1"), n.key(own)
		},
		"process": func(n *node) (podnetns.Wanted, podnetns.Key) {
			own := n.netns("10.0.0.1")
			n.resident(own, podCgroup(uid1))
			return wantedPod(uid1, "10.0.0.1"), n.key(own)
		},
		"thread": func(n *node) (podnetns.Wanted, podnetns.Key) {
			own := n.netns("10.0.0.1")
			n.leaderless(own, podCgroup(uid1))
			return wantedPod(uid1, "10.0.0.1"), n.key(own)
		},
		"file": func(n *node) (podnetns.Wanted, podnetns.Key) {
			own := n.netns("10.0.0.1")
			n.file(own, "cni-1")
			return wantedPod(uid1, "10.0.0.1"), n.key(own)
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			w, own := prepare(n)
			for spare := range allDescriptors {
				switch found, err := n.short(spare, w); {
				case spare == 0 && !errors.Is(err, unix.EMFILE), spare == allDescriptors-1 && err != nil:
					t.Errorf("%d descriptors: %v", spare, err)
				case err == nil && found != own:
					t.Errorf("%d descriptors: found %v, want %v", spare, found, own)
				case err != nil && (errors.Is(err, podnetns.ErrNotFound) || !errors.Is(err, unix.EMFILE)):
					t.Errorf("%d descriptors: %v; want an error that is of the shortage alone", spare, err)
				}
			}
		})
	}
}

// Nor is a netns taken for the pod's because there was no descriptor for what says otherwise.
func TestFindDecoyShortOfDescriptors(t *testing.T) {
	for name, prepare := range map[string]func(n *node) podnetns.Wanted{
		"in the recorded netns, met last": func(n *node) podnetns.Wanted {
			own, decoy := n.netns("10.0.0.9"), n.netns("10.0.0.1")
			n.resident(own, podCgroup(uid1))
			n.resident(decoy, podCgroup(uid1))
			return n.recorded(uid1, n.file(own, "cni-1"), own, "10.0.0.1")
		},
		"in the recorded netns, met first": func(n *node) podnetns.Wanted {
			own, decoy := n.netns("10.0.0.9"), n.netns("10.0.0.1")
			n.resident(decoy, podCgroup(uid1))
			n.resident(own, podCgroup(uid1))
			return n.recorded(uid1, n.file(own, "cni-1"), own, "10.0.0.1")
		},
		"two alike": func(n *node) podnetns.Wanted {
			for range 2 {
				n.resident(n.netns("10.0.0.1"), podCgroup(uid1))
			}
			return wantedPod(uid1, "10.0.0.1")
		},
		"two alike, by file": func(n *node) podnetns.Wanted {
			n.file(n.netns("10.0.0.1"), "cni-1")
			n.file(n.netns("10.0.0.1"), "cni-2")
			return wantedPod(uid1, "10.0.0.1")
		},
		"another pod's, by file": func(n *node) podnetns.Wanted {
			other := n.netns("10.0.0.1")
			n.resident(other, podCgroup(uid2))
			n.file(other, "cni-1")
			return wantedPod(uid1, "10.0.0.1")
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			w := prepare(n)
			for spare := range allDescriptors {
				found, err := n.short(spare, w)
				if err == nil || !errors.Is(err, podnetns.ErrNotFound) && !errors.Is(err, unix.EMFILE) {
					t.Errorf("%d descriptors: found %v, %v", spare, found, err)
				}
				if spare == allDescriptors-1 && !errors.Is(err, podnetns.ErrNotFound) {
					t.Errorf("%d descriptors: %v", spare, err)
				}
			}
		})
	}
}

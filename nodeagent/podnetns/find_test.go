// SPDX-License-Identifier: Apache-2.0

package podnetns_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/nodeagent/podnetns"
	"ambientd/tools/netnstest"
)

const (
	uid1 = "2d626580-270d-4ff0-9c8b-12b960e669c6"
	uid2 = "ff9b4b28-e8d0-4e63-b800-22b893e48bed"
	uid3 = "a65de77e-cb1f-443b-8d51-f14627f2c914"
)

// check looks for the wanted pods and compares: want has the netns of each, or the text
// that the error must have, which then must say that the search came to its end.
func (n *node) check(want map[string]any, wanted ...podnetns.Wanted) {
	n.tb.Helper()
	home, before := threadNetns(n.tb), descriptors(n.tb)
	found, missing := n.finder().Find(n.tb.Context(), wanted)
	for uid, w := range want {
		err := missing[uid]
		switch w := w.(type) {
		case *netnstest.NS:
			if found[uid] == nil {
				n.tb.Errorf("%s: not found: %v", uid, err)
			} else if got, want := found[uid].Key(), n.key(w); got != want {
				n.tb.Errorf("%s: found netns %v, want %v", uid, got, want)
			} else if err := found[uid].Do(func() error { return nil }); err != nil {
				n.tb.Errorf("%s: what was found cannot be used: %v", uid, err)
			}
		case string:
			if found[uid] != nil || !errors.Is(err, podnetns.ErrNotFound) || !strings.Contains(err.Error(), w) {
				n.tb.Errorf("%s: found %v, error %v; want one with %q", uid, found[uid], err, w)
			}
		}
	}
	if len(found)+len(missing) != len(want) {
		n.tb.Errorf("%d found and %d missing of %d", len(found), len(missing), len(want))
	}
	for uid, netns := range found {
		if missing[uid] != nil {
			n.tb.Errorf("%s: found, and yet the error %v", uid, missing[uid])
		}
		n.must(netns.Close())
	}
	if after := descriptors(n.tb); after != before {
		n.tb.Errorf("%d descriptors before, %d after", before, after)
	}
	everyThread(n.tb, home)
}

func (n *node) key(ns *netnstest.NS) podnetns.Key {
	n.tb.Helper()
	netns, err := n.host.Adopt(ns.File())
	n.must(err)
	n.must(netns.Close())
	return netns.Key()
}

// pin makes the pod hold the netns.
func (n *node) pin(uid string, ns *netnstest.NS) {
	n.tb.Helper()
	netns, err := n.host.Adopt(ns.File())
	n.must(err)
	n.must(n.pins.Pin(uid, netns))
	n.tb.Cleanup(func() { n.must(n.pins.Unpin(uid)) })
}

func TestFindByProcess(t *testing.T) {
	n := newNode(t)
	host, own1, own2, own3 := netnstest.Self(t), n.netns("10.0.0.1", "fd00::1"), n.netns("10.0.0.2"), n.netns("fd00::3")
	n.process(host, "/init.scope")
	n.process(own1, podCgroup(uid1))
	n.process(own2, "/kubepods/besteffort/pod"+uid2+"/771dc945d8ef")
	// What is in the netns first is not always the pod's.
	n.process(own3, "/system.slice/hypervisor.service")
	n.process(own3, podCgroup(uid2))
	n.process(own3, podCgroup(uid3))
	n.process(n.netns("10.0.0.9"), podCgroup("00000000-0000-4000-8000-000000000000"))
	n.check(map[string]any{uid1: own1, uid2: own2, uid3: own3},
		wantedPod(uid1, "10.0.0.1", "fd00::1"), wantedPod(uid2, "10.0.0.2"), wantedPod(uid3, "fd00::3"))
	n.check(map[string]any{uid3: own3}, wantedPod(uid3, "fd00::3"))
	n.check(map[string]any{})
}

// Case 6: a process with p1's cgroup that has entered the host's netns, another inside
// p2's. Real processes; only their cgroups are made up.
func TestFindProcessesThatEnteredOthers(t *testing.T) {
	for _, test := range []struct {
		name          string
		p1Alive       bool // p1 has processes in its own netns too
		p2First       bool // p2's processes are older than the one that came in
		wanted2, pin2 bool // p2 is wanted as well; p2 is enrolled
		host2         bool // p2 has a process in the host's netns too
	}{
		{name: "own netns found", p1Alive: true, p2First: true},
		{name: "nothing left of p1", p2First: true},
		{name: "came before p2"},
		{name: "came before p2, p1 alive", p1Alive: true},
		{name: "both wanted", p1Alive: true, p2First: true, wanted2: true},
		{name: "both wanted, came before p2", p1Alive: true, wanted2: true, host2: true},
		{name: "both wanted, nothing left of p1", wanted2: true},
		{name: "p2 enrolled", p2First: true, pin2: true},
		{name: "p2 enrolled, came before p2", p1Alive: true, pin2: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			n := newNode(t)
			own1, own2 := n.netns("10.0.0.1"), n.netns("10.0.0.2")
			n.resident(netnstest.Self(t), podCgroup(uid1))
			if test.host2 {
				n.resident(netnstest.Self(t), podCgroup(uid2))
			}
			if test.p2First {
				n.resident(own2, podCgroup(uid2))
			}
			n.resident(own2, podCgroup(uid1))
			n.resident(own2, podCgroup(uid2))
			want := map[string]any{uid1: "it holds 10.0.0.2, and not the pod's 10.0.0.1"}
			if test.wanted2 {
				want[uid1] = "" // p2's process may be met first, and then p1's is not looked at
			}
			if test.p1Alive {
				n.resident(own1, podCgroup(uid1))
				want[uid1] = own1
			}
			wanted := []podnetns.Wanted{wantedPod(uid1, "10.0.0.1")}
			if test.wanted2 {
				want[uid2] = own2
				wanted = append(wanted, wantedPod(uid2, "10.0.0.2"))
			}
			if test.pin2 {
				n.pin(uid2, own2)
			}
			n.check(want, wanted...)
			slices.Reverse(wanted)
			n.check(want, wanted...)
		})
	}
}

// Even with p1's address in it, which p1 can add with the right privileges, p2's netns
// is not p1's.
// How many processes are looked at more closely: of those in the host's netns none, and
// of others one in each netns, unless a pod is missing. Then it is every one, once.
func TestFindIsSparing(t *testing.T) {
	n := newNode(t)
	own1, own2, other := n.netns("10.0.0.1"), n.netns("10.0.0.2"), n.netns("10.0.0.9")
	for range 5 {
		n.process(netnstest.Self(t), podCgroup(uid1))
		n.process(own1, podCgroup(uid1))
		n.process(own2, podCgroup(uid2))
		n.process(other, podCgroup(uid3))
	}
	opened := n.watchCgroups()
	n.check(map[string]any{uid1: own1, uid2: own2}, wantedPod(uid1, "10.0.0.1"), wantedPod(uid2, "10.0.0.2"))
	if got := opened(); got != 3 {
		t.Errorf("%d cgroups were read, want one in each of 3 netns", got)
	}
	n.check(map[string]any{uid1: own1, uid3: "process"}, wantedPod(uid1, "10.0.0.1"), wantedPod(uid3, "10.0.0.3"))
	if got := opened(); got != 3+4+4 {
		t.Errorf("%d cgroups were read, want all but those in the netns that was found, and one there", got)
	}
	// However many processes lead to it, a netns is looked into once for a pod.
	_, missing := n.finder().Find(t.Context(), []podnetns.Wanted{wantedPod(uid3, "10.0.0.3")})
	if text := missing[uid3].Error(); strings.Count(text, "it holds 10.0.0.9") != 1 || strings.Contains(text, "host") {
		t.Error(text)
	}
}

// watchCgroups returns a function that tells how many cgroup files have been opened since
// it was last called.
func (n *node) watchCgroups() func() int {
	n.tb.Helper()
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	n.must(err)
	n.tb.Cleanup(func() { n.must(unix.Close(fd)) })
	paths, err := filepath.Glob(filepath.Join(n.proc, "*", "cgroup"))
	n.must(err)
	for _, path := range paths {
		_, err := unix.InotifyAddWatch(fd, path, unix.IN_OPEN)
		n.must(err)
	}
	return func() int {
		buf := make([]byte, 4096)
		size, err := unix.Read(fd, buf)
		if errors.Is(err, unix.EAGAIN) {
			return 0
		}
		n.must(err)
		return size / unix.SizeofInotifyEvent // of a file, an event has no name
	}
}

func TestFindAmbiguous(t *testing.T) {
	t.Run("processes and addresses of two wanted pods", func(t *testing.T) {
		for _, order := range [][]string{{uid1, uid2}, {uid2, uid1}, {uid2, uid2, uid1}} {
			n := newNode(t)
			both := n.netns("10.0.0.1", "10.0.0.2")
			for _, uid := range order {
				n.process(both, podCgroup(uid))
			}
			// Other addresses beside it are no reason: a pod may have several networks.
			n.check(map[string]any{uid1: "claimed equally", uid2: "claimed equally"},
				wantedPod(uid1, "10.0.0.1"), wantedPod(uid2, "10.0.0.2"))
			n.check(map[string]any{uid1: both}, wantedPod(uid1, "10.0.0.1"))
		}
	})
	t.Run("two wanted pods with the same address", func(t *testing.T) {
		n := newNode(t)
		own1, own2 := n.netns("10.0.0.1"), n.netns("10.0.0.1")
		n.process(own1, podCgroup(uid1))
		n.process(own2, podCgroup(uid2))
		n.check(map[string]any{uid1: own1, uid2: own2}, wantedPod(uid1, "10.0.0.1"), wantedPod(uid2, "10.0.0.1"))
	})
	t.Run("two netns", func(t *testing.T) {
		n := newNode(t)
		for range 3 {
			n.process(n.netns("10.0.0.1"), podCgroup(uid1))
		}
		own2 := n.netns("10.0.0.2")
		n.process(own2, podCgroup(uid2))
		n.check(map[string]any{uid1: "claimed equally for the pod", uid2: own2}, wantedPod(uid1, "10.0.0.1"), wantedPod(uid2, "10.0.0.2"))
	})
	t.Run("three pods", func(t *testing.T) {
		n := newNode(t)
		all := n.netns("10.0.0.1", "10.0.0.2", "10.0.0.3")
		want, wanted := map[string]any{}, []podnetns.Wanted{}
		for i, uid := range []string{uid1, uid2, uid3} {
			n.process(all, podCgroup(uid))
			want[uid] = "claimed equally"
			wanted = append(wanted, wantedPod(uid, fmt.Sprint("10.0.0.", i+1)))
		}
		n.check(want, wanted...)
	})
	t.Run("held by another pod", func(t *testing.T) {
		n := newNode(t)
		own := n.netns("10.0.0.1")
		n.process(own, podCgroup(uid1))
		n.pin(uid2, own)
		n.file(own, "cni-1")
		n.check(map[string]any{uid1: "belongs to the pod with UID " + uid2}, wantedPod(uid1, "10.0.0.1"))
	})
	t.Run("held by the pod itself", func(t *testing.T) {
		n := newNode(t)
		own := n.netns("10.0.0.1")
		n.process(own, podCgroup(uid1))
		n.pin(uid1, own)
		n.check(map[string]any{uid1: own}, wantedPod(uid1, "10.0.0.1"))
	})
}

func TestFindAddresses(t *testing.T) {
	n := newNode(t)
	for i, test := range []struct {
		held   []string
		wanted []string
		want   string // part of the reason; empty if it is the pod's
	}{
		{[]string{"10.0.0.1"}, []string{"10.0.0.1"}, ""},
		{[]string{"10.0.0.1", "fd00::1"}, []string{"10.0.0.1", "fd00::1"}, ""},
		{[]string{"10.0.0.1", "fd00::1"}, []string{"10.0.0.1"}, ""},
		{[]string{"10.0.0.1"}, []string{"::ffff:10.0.0.1"}, ""},
		{[]string{"10.0.0.1"}, []string{"10.0.0.1", "10.0.0.2"}, ""},
		// IPv6 was turned off in the pod.
		{[]string{"10.0.0.1"}, []string{"10.0.0.1", "fd00::1"}, ""},
		// Another network's address, and one for egress as in clusters of IPv6.
		{[]string{"10.0.0.1", "192.168.7.7"}, []string{"10.0.0.1"}, ""},
		{[]string{"fd00::1", "169.254.172.2"}, []string{"fd00::1", "10.0.0.1"}, ""},
		{[]string{"10.0.0.1", "fd00::2"}, []string{"10.0.0.1", "fd00::1"}, "it holds fd00::2, and not the pod's fd00::1"},
		{[]string{"10.0.0.2"}, []string{"10.0.0.1"}, "it holds 10.0.0.2, and not the pod's 10.0.0.1"},
		{[]string{"fd00::1"}, []string{"10.0.0.1"}, "none of the pod's addresses"},
		{nil, []string{"10.0.0.1"}, "none of the pod's addresses"},
		{[]string{"10.0.0.1"}, nil, "no usable record"},
		{[]string{"10.0.0.1"}, []string{"127.0.0.1"}, "no addresses of a pod"},
		{[]string{"10.0.0.1"}, []string{"fe80::1%eth0"}, "no addresses of a pod"},
		{[]string{"10.0.0.1"}, []string{"0.0.0.0"}, "no addresses of a pod"},
	} {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			n.tb = t
			uid := fmt.Sprintf("%08d-0000-4000-8000-000000000000", i)
			own := n.netns(test.held...)
			n.process(own, podCgroup(uid))
			if test.want == "" {
				n.check(map[string]any{uid: own}, wantedPod(uid, test.wanted...))
				return
			}
			_, missing := n.finder().Find(t.Context(), []podnetns.Wanted{wantedPod(uid, test.wanted...)})
			if err := missing[uid]; err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one with %q", err, test.want)
			}
		})
	}
}

// A pod's own address counts, not that of its peer, and whatever the number of them.
func TestFindAmongManyAddresses(t *testing.T) {
	n := newNode(t)
	own := n.netns()
	n.manyAddresses(own, 1000) // some 70 KiB of messages
	own.Do(t, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.AddrAdd(lo, &netlink.Addr{
			IPNet: netlink.NewIPNet(netip.MustParseAddr("10.2.0.1").AsSlice()),
			Peer:  netlink.NewIPNet(netip.MustParseAddr("10.2.0.2").AsSlice()),
		})
	})
	n.process(own, podCgroup(uid1))
	n.check(map[string]any{uid1: own}, wantedPod(uid1, "10.2.0.1"))
	n.check(map[string]any{uid1: own}, wantedPod(uid1, "10.1.3.250"))
	n.check(map[string]any{uid1: "not the pod's 10.2.0.2"}, wantedPod(uid1, "10.2.0.2"))
}

// recorded is a wanted pod with a record.
func (n *node) recorded(uid, path string, ns *netnstest.NS, addrs ...string) podnetns.Wanted {
	w := wantedPod(uid, addrs...)
	w.NetnsPath, w.Key = path, n.key(ns)
	return w
}

func TestFindByRecord(t *testing.T) {
	n := newNode(t)
	own, other := n.netns("10.0.0.1"), n.netns("10.0.0.1")
	path, otherPath := n.file(own, "cni-1"), n.file(other, "cni-2")
	n.must(unix.Mkfifo(filepath.Join(n.files, "pipe"), 0o600))
	// Neither processes nor files are looked at for a pod with a good record.
	procRoot := n.proc
	n.proc = filepath.Join(procRoot, "none")
	n.check(map[string]any{uid1: own}, n.recorded(uid1, path, own, "10.0.0.1"))
	n.check(map[string]any{uid1: own}, n.recorded(uid1, path, own))
	n.check(map[string]any{uid1: own, uid2: other}, n.recorded(uid1, path, own, "10.0.0.1"), n.recorded(uid2, otherPath, other, "10.0.0.1"))
	// A path of the host's /proc, as Docker has them.
	n.proc = procRoot
	pid := n.process(own, "/docker/1")
	n.check(map[string]any{uid1: own}, n.recorded(uid1, "/proc/"+pid+"/ns/net", own, "10.0.0.1"))

	older := n.recorded(uid1, path, own)
	older.Key.BootID = "6c1f2f0e-0000-4000-8000-000000000000"
	n.dirs = nil
	for want, w := range map[string]podnetns.Wanted{
		"before the last boot":           older,
		"the recorded one was":           n.recorded(uid1, otherPath, own, "10.0.0.1"), // the path was used again
		"no such file":                   n.recorded(uid1, path+"x", own, "10.0.0.1"),
		"not a network namespace":        n.recorded(uid1, filepath.Join(n.files, "pipe"), own, "10.0.0.1"),
		"the host's own":                 n.recorded(uid1, n.file(netnstest.Self(t), "host"), own, "10.0.0.1"),
		"not the pod's 10.0.0.3":         n.recorded(uid1, path, own, "10.0.0.3"),
		"there is no usable record, and": wantedPod(uid1),
	} {
		n.check(map[string]any{uid1: want}, w)
	}
	n.pin(uid3, own)
	n.check(map[string]any{uid1: "belongs to the pod with UID " + uid3}, n.recorded(uid1, path, own, "10.0.0.1"))
	n.must(n.pins.Unpin(uid3))
	// What a record does not lead to, a process may.
	n.process(own, podCgroup(uid1))
	n.check(map[string]any{uid1: own}, n.recorded(uid1, otherPath, own, "10.0.0.1"))
	// Two records of one netns: one is wrong, and nothing says which.
	n.check(map[string]any{uid1: "claimed equally", uid2: "claimed equally"},
		n.recorded(uid1, path, own, "10.0.0.1"), n.recorded(uid2, path, own, "10.0.0.1"))
	// A record counts more than a process in an older sandbox, which has the same address.
	n.process(other, podCgroup(uid1))
	own2 := n.netns("10.0.0.2")
	n.process(own2, podCgroup(uid2))
	n.check(map[string]any{uid1: own, uid2: own2}, n.recorded(uid1, path, own, "10.0.0.1"), wantedPod(uid2, "10.0.0.2"))
	// And more than processes that have come in.
	n.process(own, podCgroup(uid3))
	n.check(map[string]any{uid1: own, uid3: "belongs to the pod with UID " + uid1},
		n.recorded(uid1, path, own, "10.0.0.1"), wantedPod(uid3, "10.0.0.1"))
}

func TestFindByFile(t *testing.T) {
	n := newNode(t)
	own1, own2, strange := n.netns("10.0.0.1", "fd00::1"), n.netns("10.0.0.2"), n.netns("10.0.0.9")
	n.process(netnstest.Self(t), "/init.scope")
	n.process(netnstest.Self(t), podCgroup(uid1)) // CRI-O's conmon, say
	n.process(own2, podCgroup(uid2))
	n.file(own1, "cni-1")
	n.file(own2, "cni-2")
	n.file(strange, "cni-3")
	n.file(netnstest.Self(t), "host")
	n.must(os.WriteFile(filepath.Join(n.files, "cni-gone"), nil, 0o444))
	n.must(os.Symlink("nowhere", filepath.Join(n.files, "dangling")))
	n.must(unix.Mkfifo(filepath.Join(n.files, "pipe"), 0o600))
	n.must(os.Mkdir(filepath.Join(n.files, "directory"), 0o755))
	n.dirs = []string{"/run/none", n.files, n.files}
	n.check(map[string]any{uid1: own1, uid2: own2, uid3: "none of 3 processes leads to it, nor does a file in /run/none or " + n.files},
		wantedPod(uid1, "10.0.0.1", "fd00::1"), wantedPod(uid2, "10.0.0.2"), wantedPod(uid3, "10.0.0.3"))
	n.check(map[string]any{uid1: own1}, wantedPod(uid1, "10.0.0.1"))

	// The other pod's, though p1's address is in it, and whether that is wanted or not.
	n.process(strange, "/system.slice/tool.service")
	n.process(strange, podCgroup(uid2))
	want := "has processes of the pod with UID " + uid2
	n.check(map[string]any{uid3: want}, wantedPod(uid3, "10.0.0.9"))
	n.check(map[string]any{uid2: own2, uid3: want}, wantedPod(uid3, "10.0.0.9"), wantedPod(uid2, "10.0.0.2"))

	n.pin(uid2, own1)
	n.check(map[string]any{uid1: "belongs to the pod with UID " + uid2}, wantedPod(uid1, "10.0.0.1"))
}

func TestFindByFileAmbiguous(t *testing.T) {
	n := newNode(t)
	own := n.netns("10.0.0.1")
	n.file(own, "cni-1")
	// Addresses are all that there is to go by.
	n.check(map[string]any{uid1: "addresses of 2 wanted pods", uid2: "addresses of 2 wanted pods"},
		wantedPod(uid1, "10.0.0.1"), wantedPod(uid2, "10.0.0.1"))
	own2 := n.netns("10.0.0.1")
	n.process(own2, podCgroup(uid2))
	n.check(map[string]any{uid1: own, uid2: own2}, wantedPod(uid1, "10.0.0.1"), wantedPod(uid2, "10.0.0.1"))
	n.file(n.netns("10.0.0.1"), "cni-2")
	n.check(map[string]any{uid1: "claimed equally"}, wantedPod(uid1, "10.0.0.1"))
}

// A directory that cannot be looked through to its end is no reason to say "not there".
func TestFindTooManyFiles(t *testing.T) {
	n := newNode(t)
	for i := range 4097 {
		n.must(os.WriteFile(filepath.Join(n.files, strconv.Itoa(i)), nil, 0o444))
	}
	_, missing := n.finder().Find(t.Context(), []podnetns.Wanted{wantedPod(uid1, "10.0.0.1")})
	if err := missing[uid1]; err == nil || errors.Is(err, podnetns.ErrNotFound) || !strings.Contains(err.Error(), "more than 4096 files") {
		t.Errorf("error %v", err)
	}
}

func TestFindOddProcesses(t *testing.T) {
	n := newNode(t)
	own := n.netns("10.0.0.1")
	n.must(os.WriteFile(filepath.Join(n.proc, "uptime"), nil, 0o444))
	n.must(os.Mkdir(filepath.Join(n.proc, "0"), 0o755))
	n.must(os.Mkdir(filepath.Join(n.proc, "17"), 0o755)) // a process that has just ended
	n.must(os.WriteFile(filepath.Join(n.proc, "18"), nil, 0o444))
	for _, cgroup := range []string{"", "\x00", strings.Repeat("/x", 16<<10) + podCgroup(uid1), podCgroup(uid1) + strings.Repeat("/x", 16<<10)} {
		n.process(own, cgroup)
	}
	n.must(os.Remove(filepath.Join(n.proc, n.process(own, ""), "cgroup")))
	n.check(map[string]any{uid1: "none of 7 processes leads to it"}, wantedPod(uid1, "10.0.0.1"))
	n.process(own, podCgroup(uid1))
	n.check(map[string]any{uid1: own}, wantedPod(uid1, "10.0.0.1"))
}

// The search that cannot be made is another error than the search in vain.
func TestFindDoesNotComeToItsEnd(t *testing.T) {
	n := newNode(t)
	own1, own2 := n.netns("10.0.0.1"), n.netns("10.0.0.2")
	for range 600 {
		n.process(own1, podCgroup(uid1))
	}
	path := n.file(own2, "cni-2")
	wanted := []podnetns.Wanted{wantedPod(uid1, "10.0.0.1"), n.recorded(uid2, path, own2), {UID: uid3}}
	before := descriptors(t)
	why := errors.New("the agent ends")
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	found, missing := n.finder().Find(ended, wanted)
	if len(found) > 0 || len(missing) != 3 {
		t.Errorf("found %v, missing %v", found, missing)
	}
	for uid, err := range missing {
		if !errors.Is(err, why) || errors.Is(err, podnetns.ErrNotFound) {
			t.Errorf("%s: %v", uid, err)
		}
	}

	n.proc = filepath.Join(n.proc, "none")
	found, missing = n.finder().Find(t.Context(), wanted)
	if err := missing[uid1]; !errors.Is(err, os.ErrNotExist) || errors.Is(err, podnetns.ErrNotFound) {
		t.Errorf("no proc file system: %v", err)
	}
	// What the stages before have found stays.
	if found[uid2] == nil || !errors.Is(missing[uid3], podnetns.ErrNotFound) {
		t.Errorf("found %v, missing %v", found, missing)
	}
	n.must(found[uid2].Close())
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

// countdown is a context that ends after it was looked at so many times.
type countdown struct {
	context.Context

	left *int
}

func (c countdown) Err() error {
	if *c.left--; *c.left < 0 {
		return context.Canceled
	}
	return nil
}

func (c countdown) Value(key any) any { return c.Context.Value(key) }

// Wherever the search is stopped, no netns is returned of which it is not yet sure.
func TestFindStoppedAnywhere(t *testing.T) {
	n := newNode(t)
	own1, own2 := n.netns("10.0.0.1"), n.netns("10.0.0.2")
	for range 600 {
		n.process(own1, podCgroup(uid1))
	}
	n.file(own2, "cni-2")
	before := descriptors(t)
	for steps := 0; ; steps++ {
		left := steps
		found, missing := n.finder().Find(countdown{t.Context(), &left}, []podnetns.Wanted{wantedPod(uid1, "10.0.0.1"), wantedPod(uid2, "10.0.0.2")})
		for _, netns := range found {
			n.must(netns.Close())
		}
		if after := descriptors(t); after != before {
			t.Errorf("stopped after %d: %d descriptors before, %d after", steps, before, after)
		}
		if len(missing) == 0 {
			if steps < 5 {
				t.Errorf("the context was looked at %d times", steps)
			}
			return
		}
		if found[uid2] != nil || steps > 100 {
			t.Fatalf("stopped after %d: found %v, missing %v", steps, found, missing)
		}
	}
}

// hooked is a context that calls a function whenever it is looked at.
type hooked struct {
	context.Context

	hook func()
}

func (h hooked) Err() error {
	h.hook()
	return h.Context.Err()
}

// The process that was to lead to the pod's netns has ended before it could: another one does.
func TestFindProcessEndsMeanwhile(t *testing.T) {
	n := newNode(t)
	own := n.netns("10.0.0.1")
	var pids []string
	for i := range 1200 {
		n.process(netnstest.Self(t), "/init.scope")
		if i == 600 { // whichever way the directory is read
			pids = []string{n.process(own, podCgroup(uid1)), n.process(own, podCgroup(uid1))}
		}
	}
	// In the order that the finder will meet them.
	dir, err := os.Open(n.proc)
	n.must(err)
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	n.must(err)
	slices.SortFunc(pids, func(a, b string) int { return slices.Index(names, a) - slices.Index(names, b) })
	looks := 0
	ctx := hooked{t.Context(), func() {
		// Once for the records, then for every 256th process: by the fifth time the pass has
		// met the pod's, and has not come to its end.
		if looks++; looks == 5 {
			n.must(os.Remove(filepath.Join(n.proc, pids[0], "ns", "net")))
		}
	}}
	found, missing := n.finder().Find(ctx, []podnetns.Wanted{wantedPod(uid1, "10.0.0.1")})
	if found[uid1] == nil || looks < 6 {
		t.Fatalf("missing %v after %d looks", missing, looks)
	}
	n.must(found[uid1].Close())
}

func TestFindWithoutUID(t *testing.T) {
	n := newNode(t)
	n.process(n.netns("10.0.0.1"), "/init.scope")
	found, missing := n.finder().Find(t.Context(), []podnetns.Wanted{wantedPod("", "10.0.0.1"), wantedPod(uid1, "10.0.0.2")})
	if len(found) > 0 || len(missing) != 2 || !strings.Contains(missing[""].Error(), "without UID") {
		t.Errorf("found %v, missing %v", found, missing)
	}
}

func TestFindWantedTwice(t *testing.T) {
	n := newNode(t)
	own := n.netns("10.0.0.1")
	n.process(own, podCgroup(uid1))
	found, missing := n.finder().Find(t.Context(), []podnetns.Wanted{wantedPod(uid1, "10.0.0.1"), wantedPod(uid1, "10.0.0.1")})
	if len(found) > 0 || len(missing) != 1 || !strings.Contains(missing[uid1].Error(), "wanted twice") {
		t.Errorf("found %v, missing %v", found, missing)
	}
}

func TestNewFinderRefuses(t *testing.T) {
	host := openHost(t)
	for _, cfg := range []podnetns.FinderConfig{{}, {Host: host}, {Holders: podnetns.NewPins()}} {
		if f, err := podnetns.NewFinder(cfg); err == nil {
			t.Errorf("%+v: got %v", cfg, f)
		}
	}
	if _, err := podnetns.NewFinder(podnetns.FinderConfig{Host: host, Holders: podnetns.NewPins()}); err != nil {
		t.Error(err)
	}
}

// The machine's real processes, of which an ordinary user may look at few.
func TestFindAmongRealProcesses(t *testing.T) {
	n := newNode(t)
	n.proc, n.dirs = podnetns.DefaultProcRoot, podnetns.DefaultNetnsDirs()
	n.realProcess(n.netns("10.0.0.1"))
	n.check(map[string]any{uid1: "processes leads to it"}, wantedPod(uid1, "10.0.0.1"))
}

// No more descriptors than pods are open at once, give or take what waits or is being looked at:
// where there are few, no sockets are kept.
func TestFindIsBoundInDescriptors(t *testing.T) {
	n := newNode(t)
	const pods, others = 60, 40
	want := map[string]any{}
	var wanted []podnetns.Wanted
	for i := range pods + others {
		uid, addr := fmt.Sprintf("%08d-0000-4000-8000-000000000000", i), fmt.Sprint("10.0.0.", 1+i)
		own := n.netns(addr)
		for range 3 {
			n.process(own, podCgroup(uid))
		}
		if i < pods {
			want[uid] = own
		} else {
			// Claimed by processes, and another's by its addresses.
			want[uid] = "not the pod's 10.9.0"
			addr = fmt.Sprint("10.9.0.", 1+i)
		}
		wanted = append(wanted, wantedPod(uid, addr))
	}
	var old unix.Rlimit
	n.must(unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	limit := old
	limit.Cur = uint64(highestDescriptor(t) + 1 + pods + 70)
	n.must(unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	defer func() { n.must(unix.Setrlimit(unix.RLIMIT_NOFILE, &old)) }()
	n.check(want, wanted...)
}

func highestDescriptor(tb testing.TB) int {
	tb.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		tb.Fatal(err)
	}
	highest := 0
	for _, entry := range entries {
		if fd, err := strconv.Atoi(entry.Name()); err == nil {
			highest = max(highest, fd)
		}
	}
	return highest
}

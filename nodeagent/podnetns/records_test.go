// SPDX-License-Identifier: Apache-2.0

package podnetns_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"ambientd/nodeagent/podnetns"
	"ambientd/tools/netnstest"
)

// runtimePaths is a container runtime that names paths by pod UID.
type runtimePaths map[string][]string

func (r runtimePaths) NetnsPaths(context.Context, []string) (map[string][]string, error) {
	return r, nil
}

// A path of the host's leads to the pod, whoever names it: below /proc too, wherever that is
// for the agent.
func TestFindByPaths(t *testing.T) {
	n := newNode(t)
	own1, own2, own3 := n.netns("10.0.0.1"), n.netns("10.0.0.2"), n.netns("10.0.0.3")
	pid1, pid2, file3 := n.process(own1, podCgroup(uid1)), n.process(own2, "/docker/2"), n.file(own3, "cni-3")
	path1, path2 := "/proc/"+pid1+"/ns/net", "/proc/"+pid2+"/ns/net"
	mount := filepath.Join(n.files, "mount")
	n.must(os.Symlink("/proc/self/ns/mnt", mount))
	n.runtime = runtimePaths{uid2: {file3, "/proc/1/ns/none", mount, path2}}
	want := map[string]any{uid1: own1, uid2: own2, uid3: own3}
	n.check(want, wantedPod(uid1, "10.0.0.1"), wantedPod(uid2, "10.0.0.2"), wantedPod(uid3, "10.0.0.3"))

	// As records the same paths suffice: there is no other way.
	n.runtime, n.dirs = nil, nil
	n.must(os.Remove(filepath.Join(n.proc, pid1, "cgroup")))
	n.check(want, n.recorded(uid1, path1, own1, "10.0.0.1"), n.recorded(uid2, path2, own2), n.recorded(uid3, file3, own3, "10.0.0.3"))

	// Where the host's /proc is the agent's own.
	n.proc = podnetns.DefaultProcRoot
	n.check(map[string]any{uid1: own1}, n.recorded(uid1, "/proc/"+n.realProcess(own1)+"/ns/net", own1, "10.0.0.1"))
}

// A PID is given again: what is at its path then counts no more than any other netns, and
// the pod is looked for elsewhere.
func TestRecordOfProcessThatEnded(t *testing.T) {
	n := newNode(t)
	own, older, other := n.netns("10.0.0.1"), n.netns("10.0.0.1"), n.netns("10.0.0.2")
	again, gone := n.process(older, podCgroup(uid3)), n.process(other, podCgroup(uid3))
	n.must(os.RemoveAll(filepath.Join(n.proc, gone)))
	pathAgain, pathGone := "/proc/"+again+"/ns/net", "/proc/"+gone+"/ns/net"
	n.check(map[string]any{uid1: "the recorded one was"}, n.recorded(uid1, pathAgain, own, "10.0.0.1"))
	n.check(map[string]any{uid1: "no such file"}, n.recorded(uid1, pathGone, own, "10.0.0.1"))
	n.check(map[string]any{uid1: "the recorded one was"}, n.recorded(uid1, pathAgain, own)) // without addresses

	file := n.file(own, "cni-1")
	n.check(map[string]any{uid1: own}, n.recorded(uid1, pathAgain, own, "10.0.0.1"))
	n.process(own, podCgroup(uid1))
	n.check(map[string]any{uid1: own}, n.recorded(uid1, pathAgain, own, "10.0.0.1"))
	n.runtime = runtimePaths{uid1: {pathAgain + "x", file}}
	n.check(map[string]any{uid1: own}, n.recorded(uid1, pathGone, own, "10.0.0.1"))
}

// More records than fit in one batch, good and bad ones side by side: each pod gets what
// it would get alone.
func TestFindByManyRecords(t *testing.T) {
	n := newNode(t)
	want := map[string]any{}
	var wanted []podnetns.Wanted
	add := func(result any, w podnetns.Wanted) {
		w.UID = fmt.Sprintf("%08d-0000-4000-8000-000000000000", len(wanted))
		want[w.UID] = result
		wanted = append(wanted, w)
	}
	for i := range 12 {
		addr := fmt.Sprint("10.0.0.", 1+i)
		own, shared, byProcess := n.netns(addr), n.netns(addr), n.netns(addr)
		file := n.file(own, fmt.Sprint("cni-", i))
		add(own, n.recorded("", file, own, addr))
		add("the recorded one was", n.recorded("", file, shared))
		add("no such file", n.recorded("", file+"x", own))
		add("the host's own", n.recorded("", "/proc/"+n.process(netnstest.Self(t), "/")+"/ns/net", own))
		pid := n.process(shared, "/docker/1")
		for range 2 + i%2 {
			add("claimed equally", n.recorded("", "/proc/"+pid+"/ns/net", shared, addr))
		}
		add(byProcess, n.recorded("", file, byProcess, addr))
		n.process(byProcess, podCgroup(wanted[len(wanted)-1].UID))
		add("no usable record", podnetns.Wanted{})
	}
	n.dirs = nil
	n.check(want, wanted...)
	slices.Reverse(wanted)
	n.check(want, wanted...)
}

// BenchmarkFindByRecord looks for 100 pods whose records lead to real processes.
func BenchmarkFindByRecord(b *testing.B) {
	n := newNode(b)
	n.proc = podnetns.DefaultProcRoot
	var wanted []podnetns.Wanted
	for i := range 100 {
		own, addr := n.netns(), fmt.Sprint("10.0.0.", 1+i)
		n.address(own, addr)
		wanted = append(wanted, n.recorded("uid"+strconv.Itoa(i), "/proc/"+n.realProcess(own)+"/ns/net", own, addr))
	}
	f := n.finder()
	var one, all []time.Duration
	for b.Loop() {
		wall, _ := find(b, f, wanted[:1])
		one = append(one, wall)
		wall, _ = find(b, f, wanted)
		all = append(all, wall)
	}
	for name, times := range map[string][]time.Duration{"one": one, "100": all} {
		slices.Sort(times)
		b.ReportMetric(float64(times[len(times)/2].Microseconds()), name+"-µs")
		b.ReportMetric(float64(times[0].Microseconds()), name+"-min-µs")
	}
	b.ReportMetric(0, "ns/op")
}

// SPDX-License-Identifier: Apache-2.0

package podnetns_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ambientd/nodeagent/podnetns"
	"ambientd/tools/netnstest"
)

// crowd is how many there are of each in the benchmarks: 1,100 processes.
const (
	crowdPods   = 250
	crowdPerPod = 4
	crowdHost   = 100
)

// fill makes the pods and their processes with show, and returns what is wanted of them.
func (n *node) fill(show func(ns *netnstest.NS, cgroup string)) []podnetns.Wanted {
	host := netnstest.Self(n.tb)
	for range crowdHost {
		show(host, "/system.slice/sshd.service")
	}
	var wanted []podnetns.Wanted
	for i := range crowdPods {
		uid := fmt.Sprintf("2d626580-270d-4ff0-9c8b-%012d", i)
		addrs := []string{fmt.Sprintf("10.0.%d.%d", i/200, 1+i%200), fmt.Sprintf("fd00::%x", 1+i)}
		ns := n.netns()
		for _, a := range addrs {
			n.address(ns, a)
		}
		for range crowdPerPod {
			show(ns, podCgroup(uid))
		}
		wanted = append(wanted, wantedPod(uid, addrs...))
	}
	return wanted
}

// find is one search that must find all.
func find(b *testing.B, f *podnetns.Finder, wanted []podnetns.Wanted) (wall, cpu time.Duration) {
	b.Helper()
	cpuBefore, before := cpuTime(b), time.Now()
	found, missing := f.Find(b.Context(), wanted)
	wall, cpu = time.Since(before), cpuTime(b)-cpuBefore
	if len(found) != len(wanted) {
		b.Fatalf("found %d, missing: %v", len(found), missing)
	}
	for _, n := range found {
		if err := n.Close(); err != nil {
			b.Fatal(err)
		}
	}
	return wall, cpu
}

func cpuTime(tb testing.TB) time.Duration {
	tb.Helper()
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		tb.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// BenchmarkFind looks for one pod and for 250 in turn, among 1,100 processes, all in real
// netns of which each is opened, entered and asked for its addresses. "fake" are
// directories in a tmpfs; "real" are processes whose cgroup alone is a file there.
func BenchmarkFind(b *testing.B) {
	for _, kind := range []string{"fake", "real"} {
		b.Run(kind, func(b *testing.B) {
			n := newNode(b)
			show := func(ns *netnstest.NS, cgroup string) { n.process(ns, cgroup) }
			if kind == "real" {
				show = func(ns *netnstest.NS, cgroup string) { n.resident(ns, cgroup) }
			}
			wanted := n.fill(show)
			f := n.finder()
			var one, many, oneCPU, manyCPU []time.Duration
			for b.Loop() {
				wall, cpu := find(b, f, wanted[:1])
				one, oneCPU = append(one, wall), append(oneCPU, cpu)
				wall, cpu = find(b, f, wanted)
				many, manyCPU = append(many, wall), append(manyCPU, cpu)
			}
			for _, times := range [][]time.Duration{one, many, oneCPU, manyCPU} {
				slices.Sort(times)
			}
			report := func(name string, times []time.Duration) {
				b.ReportMetric(float64(times[len(times)/2].Microseconds()), name+"-µs")
				b.ReportMetric(float64(times[0].Microseconds()), name+"-min-µs")
			}
			report("one", one)
			report("250", many)
			report("one-cpu", oneCPU)
			report("250-cpu", manyCPU)
			b.ReportMetric(float64(many[len(many)/2])/float64(one[len(one)/2]), "ratio")
			b.ReportMetric(float64(many[0])/float64(one[0]), "min-ratio")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package growth_test

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"testing"
	"time"
)

const (
	// slabLimit is what the kernel's memory may grow by, in bytes a round.
	slabLimit = 1 << 10
	// heapLimit is what this process' own live memory may grow by in all, in bytes: caches
	// that are still filling, and what package testing keeps.
	heapLimit = 1 << 20
	// spareThreads may be there that were not before: the runtime starts one whenever all
	// others wait in the kernel. Had a thread been lost with each netns, it were 25 a window.
	spareThreads = 8

	patience = time.Minute
	look     = 5 * time.Millisecond // between two looks at what is awaited
)

// footprint is what this process holds.
type footprint struct {
	descriptors, goroutines, threads int
	heap                             int64 // live, in bytes
}

func (f footprint) String() string {
	return fmt.Sprintf("%d descriptors, %d goroutines, %d threads, %d KiB of memory", f.descriptors, f.goroutines, f.threads, f.heap>>10)
}

// takeProcess returns what this process holds, once sockets that are closed in the
// background are.
func takeProcess(t *testing.T) footprint {
	t.Helper()
	return steady(t, func() footprint { return process(t) }, func(a, b footprint) bool {
		return a.descriptors == b.descriptors && a.goroutines == b.goroutines
	})
}

// steady returns what several looks in a row agree on.
func steady[T any](t *testing.T, take func() T, same func(a, b T) bool) T {
	t.Helper()
	const wanted = 20
	last, agreed := take(), 0
	await(t, func() bool {
		now := take()
		agreed++
		if !same(now, last) {
			agreed = 0
		}
		last = now
		return agreed == wanted
	}, func() string { return fmt.Sprintf("no %d looks in a row show the same; the last: %v", wanted, last) })
	return last
}

func process(t *testing.T) footprint {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	return footprint{descriptors: len(entries), goroutines: runtime.NumGoroutine(), threads: len(threads), heap: liveHeap()}
}

func liveHeap() int64 {
	// Twice: what a pool holds goes with the second.
	runtime.GC()
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return int64(stats.HeapAlloc)
}

// awaitSame waits until this process holds no more than before.
func (f footprint) awaitSame(t *testing.T) {
	t.Helper()
	var now footprint
	await(t, func() bool {
		now = process(t)
		return now.descriptors <= f.descriptors && now.goroutines <= f.goroutines &&
			now.threads <= f.threads+spareThreads && now.heap <= f.heap+heapLimit
	}, func() string { return fmt.Sprintf("this process holds %v; it was %v before", now, f) })
	t.Logf("this process holds %v; it was %v before", now, f)
}

// await waits until done, and fails the test with what went wrong after patience.
func await(t *testing.T, done func() bool, wrong func() string) {
	t.Helper()
	deadline := time.Now().Add(patience)
	tick := time.NewTicker(look)
	defer tick.Stop()
	for !done() {
		if time.Now().After(deadline) {
			t.Fatal(wrong())
		}
		<-tick.C
	}
}

// takeSlab returns how much memory the kernel's objects take, in bytes, but for those
// that it drops when it needs room, which are of files. It is the whole machine's: the
// least of many looks, because processes come and go meanwhile. Where the system does not
// tell, the test is over.
func takeSlab(t *testing.T) int64 {
	t.Helper()
	// What is freed after a grace period may wait 5 s for company (KFREE_DRAIN_JIFFIES,
	// mm/slab_common.c of Linux 6.18).
	settled := time.After(6 * time.Second)
	least, err := unreclaimableSlab()
	if err != nil {
		t.Skipf("how much memory the kernel takes cannot be read, so its growth cannot be seen: %v", err)
	}
	tick := time.NewTicker(look)
	defer tick.Stop()
	for {
		select {
		case <-settled:
			return least
		case <-tick.C:
		}
		now, err := unreclaimableSlab()
		if err != nil {
			t.Fatal(err)
		}
		least = min(least, now)
	}
}

// unreclaimableSlab reads SUnreclaim of /proc/meminfo (proc_meminfo(5)), in bytes. Of a
// single cache /proc/slabinfo would tell, but root alone.
func unreclaimableSlab() (int64, error) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	for line := range bytes.Lines(text) {
		if value, ok := bytes.CutPrefix(line, []byte("SUnreclaim:")); ok {
			kib, err := strconv.ParseInt(string(bytes.TrimSpace(bytes.TrimSuffix(bytes.TrimSpace(value), []byte("kB")))), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("/proc/meminfo: %w", err)
			}
			return kib << 10, nil
		}
	}
	return 0, fmt.Errorf("/proc/meminfo has no SUnreclaim")
}

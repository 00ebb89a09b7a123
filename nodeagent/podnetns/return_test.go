// SPDX-License-Identifier: Apache-2.0

package podnetns

import (
	"errors"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"ambientd/tools/netnstest"
)

// A thread that cannot go home must never run anything else: it ends, and what
// the closure returned is reported together with the loss.
func TestThreadThatCannotReturnDies(t *testing.T) {
	host, pod, home := strand(t)
	failure := errors.New("closure's own")
	for range 20 {
		err := pod.Do(func() error { return failure })
		if !errors.Is(err, failure) || !errors.Is(err, unix.EINVAL) || !strings.Contains(err.Error(), "returning to the host's netns") {
			t.Fatalf("got %v, want the closure's error and why the way back failed", err)
		}
	}
	if err := pod.Do(func() error { return nil }); err == nil {
		t.Error("the lost thread was not reported")
	}

	var seen, finished sync.WaitGroup
	release := make(chan struct{})
	for range 64 {
		seen.Add(1)
		finished.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			if cookie, err := currentCookie(); err != nil || cookie != home {
				t.Errorf("a goroutine runs in netns %d (%v), want %d", cookie, err, home)
			}
			seen.Done()
			<-release
		})
	}
	seen.Wait()
	close(release)
	finished.Wait()

	// The main thread cannot end, so it must never have left.
	main, err := os.Open("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer main.Close()
	if _, err := host.Adopt(main); !errors.Is(err, ErrHostNetns) {
		t.Errorf("the main thread's netns: %v, want %v", err, ErrHostNetns)
	}
}

// strand returns a netns whose threads are sent to a descriptor that is no netns
// on their way back.
func strand(t *testing.T) (*Host, *Netns, uint64) {
	t.Helper()
	netnstest.Require(t)
	host, err := OpenHost()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { host.Close() })
	pod, err := host.Adopt(netnstest.New(t).File())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pod.Close() })
	nowhere, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nowhere.Close() })
	pod.home = nowhere
	return host, pod, host.Key().Cookie
}

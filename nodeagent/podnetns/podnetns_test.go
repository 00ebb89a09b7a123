// SPDX-License-Identifier: Apache-2.0

package podnetns_test

import (
	"errors"
	"flag"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"ambientd/nodeagent/podnetns"
	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) {
	if os.Getenv(leaderlessEnv) != "" {
		leaderless()
	}
	flag.Parse()
	if flag.Lookup("test.bench").Value.String() != "" {
		runtime.LockOSThread() // as ambientd does; the tests want to meet the main thread too
	}
	os.Exit(netnstest.Main(m))
}

func openHost(tb testing.TB) *podnetns.Host {
	tb.Helper()
	netnstest.Require(tb)
	host, err := podnetns.OpenHost()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := host.Close(); err != nil {
			tb.Errorf("closing the host's netns: %v", err)
		}
	})
	return host
}

func adopt(tb testing.TB, host *podnetns.Host, ns *netnstest.NS) *podnetns.Netns {
	tb.Helper()
	n, err := host.Adopt(ns.File())
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := n.Close(); err != nil {
			tb.Error(err)
		}
	})
	return n
}

// threadNetns names the calling thread's netns the way the kernel prints it,
// which is another way than the one under test.
func threadNetns(tb testing.TB) string {
	tb.Helper()
	link, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		tb.Fatal(err)
	}
	return link
}

func TestAdoptRefuses(t *testing.T) {
	host := openHost(t)
	open := func(path string) *os.File {
		t.Helper()
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	closed := open("/dev/null")
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	regular := filepath.Join(t.TempDir(), "netns")
	if err := os.WriteFile(regular, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name string
		file *os.File
		want error
	}{
		{"none", nil, podnetns.ErrNotNetns},
		{"closed", closed, os.ErrClosed},
		{"regular file", open(regular), podnetns.ErrNotNetns},
		{"device", open("/dev/null"), podnetns.ErrNotNetns},
		{"directory", open("/proc/self"), podnetns.ErrNotNetns},
		{"mount namespace", open("/proc/self/ns/mnt"), podnetns.ErrNotNetns},
		{"user namespace", open("/proc/self/ns/user"), podnetns.ErrNotNetns},
		{"the host's own", open("/proc/self/ns/net"), podnetns.ErrHostNetns},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := descriptors(t)
			n, err := host.Adopt(test.file)
			if !errors.Is(err, test.want) {
				t.Fatalf("got %v, %v; want an error that wraps %q", n, err, test.want)
			}
			if after := descriptors(t); after != before {
				t.Errorf("%d descriptors open before, %d after", before, after)
			}
		})
	}
}

func TestKeys(t *testing.T) {
	host := openHost(t)
	pod, other := netnstest.New(t), netnstest.New(t)
	a, b, again := adopt(t, host, pod), adopt(t, host, other), adopt(t, host, pod)
	switch {
	case a.Key() != again.Key():
		t.Errorf("one netns has the keys %v and %v", a.Key(), again.Key())
	case a.Key() == b.Key():
		t.Errorf("two netns have the key %v", a.Key())
	case a.Key() == host.Key():
		t.Errorf("a pod's netns has the host's key %v", a.Key())
	case a.Key().BootID != host.Key().BootID || len(a.Key().BootID) != 36:
		t.Errorf("boot IDs %q and %q, want one UUID", a.Key().BootID, host.Key().BootID)
	case a.Key().String() != strconv.FormatUint(a.Key().Cookie, 10):
		t.Errorf("key %#v is shown as %q", a.Key(), a.Key())
	}
}

// The caller's descriptor and the adopted one live apart.
func TestAdoptDuplicates(t *testing.T) {
	host := openHost(t)
	pod := netnstest.New(t)
	n := adopt(t, host, pod)
	if err := pod.File().Close(); err != nil {
		t.Fatal(err)
	}
	if err := n.Do(func() error { return nil }); err != nil {
		t.Fatalf("after the caller closed its descriptor: %v", err)
	}
}

func TestDo(t *testing.T) {
	host := openHost(t)
	pod := netnstest.New(t)
	n := adopt(t, host, pod)
	var want string
	pod.Do(t, func() error { want = threadNetns(t); return nil })
	home := threadNetns(t)

	var got string
	if err := n.Do(func() error { got = threadNetns(t); return nil }); err != nil {
		t.Fatal(err)
	}
	if got != want || got == home {
		t.Errorf("ran in %s, want %s (home is %s)", got, want, home)
	}
	failure := errors.New("no")
	if err := n.Do(func() error { return failure }); !errors.Is(err, failure) || err.Error() != failure.Error() {
		t.Errorf("got %v, want the closure's own error", err)
	}
	everyThread(t, home)
}

// A socket stays where it was opened, so what is slow can happen outside.
func TestDoSocketStays(t *testing.T) {
	host := openHost(t)
	n := adopt(t, host, netnstest.New(t))
	var l net.Listener
	err := n.Do(func() (err error) {
		l, err = net.Listen("tcp4", "127.0.0.1:0")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if c, err := net.Dial("tcp4", l.Addr().String()); err == nil {
		c.Close()
		t.Error("a listener of the pod was reached from outside of it")
	}
	if err := n.Do(func() error {
		c, err := net.Dial("tcp4", l.Addr().String())
		if err != nil {
			return err
		}
		return c.Close()
	}); err != nil {
		t.Errorf("the pod's listener from inside: %v", err)
	}
}

func TestDoPanics(t *testing.T) {
	host := openHost(t)
	n := adopt(t, host, netnstest.New(t))
	home := threadNetns(t)
	failure := errors.New("rules are broken")
	defer func() {
		p, ok := recover().(*podnetns.PanicError)
		if !ok {
			t.Fatalf("recovered something else than a *PanicError")
		}
		if !errors.Is(p, failure) {
			t.Errorf("panic value %v, want %v", p.Value, failure)
		}
		if text := p.Error(); !strings.Contains(text, "rules are broken") || !strings.Contains(text, "panicInside") {
			t.Errorf("text must have the value and the closure's stack, got:\n%s", text)
		}
		everyThread(t, home)
	}()
	err := n.Do(func() error { return panicInside(failure) })
	t.Errorf("Do returned (%v), want a panic", err)
}

//go:noinline
func panicInside(err error) error { panic(err) }

func TestDoGoexit(t *testing.T) {
	host := openHost(t)
	n := adopt(t, host, netnstest.New(t))
	home := threadNetns(t)
	ended := make(chan string, 1)
	go func() {
		how := "Goexit"
		defer func() { ended <- how }()
		err := n.Do(func() error { runtime.Goexit(); return nil })
		how = "returned " + errText(err)
	}()
	if how := <-ended; how != "Goexit" {
		t.Errorf("the caller: %s, want Goexit", how)
	}
	everyThread(t, home)
}

func errText(err error) string {
	if err == nil {
		return "nil"
	}
	return err.Error()
}

func TestClose(t *testing.T) {
	host := openHost(t)
	n := adopt(t, host, netnstest.New(t))
	for range 2 {
		if err := n.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.Do(func() error { t.Error("ran"); return nil }); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Do after Close: %v, want %v", err, os.ErrClosed)
	}
}

// A Do in progress outlives Close, which may come from a DEL.
func TestCloseDuringDo(t *testing.T) {
	host := openHost(t)
	pod := netnstest.New(t)
	n := adopt(t, host, pod)
	var want string
	pod.Do(t, func() error { want = threadNetns(t); return nil })
	err := n.Do(func() error {
		if err := n.Close(); err != nil {
			return err
		}
		if got := threadNetns(t); got != want {
			t.Errorf("after Close in %s, want %s", got, want)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func TestDoConcurrently(t *testing.T) {
	host := openHost(t)
	home := threadNetns(t)
	var pods sync.WaitGroup
	for range 8 {
		pod := netnstest.New(t)
		n := adopt(t, host, pod)
		var want string
		pod.Do(t, func() error { want = threadNetns(t); return nil })
		for range 4 {
			pods.Go(func() {
				for range 50 {
					var got string
					if err := n.Do(func() error { got = threadNetns(t); return nil }); err != nil || got != want {
						t.Errorf("ran in %q, %v; want %q", got, err, want)
						return
					}
				}
			})
		}
	}
	pods.Wait()
	everyThread(t, home)
}

// The main thread could not be ended if it did not come back. So many closures at
// once that every thread there is would be needed for one.
func TestDoKeepsOffTheMainThread(t *testing.T) {
	host := openHost(t)
	n := adopt(t, host, netnstest.New(t))
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	var inside, finished sync.WaitGroup
	release := make(chan struct{})
	for range len(tasks) + 8 {
		inside.Add(1)
		finished.Go(func() {
			err := n.Do(func() error {
				if unix.Gettid() == unix.Getpid() {
					t.Error("a closure runs on the main thread")
				}
				inside.Done()
				<-release
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	inside.Wait()
	close(release)
	finished.Wait()
}

func TestScratch(t *testing.T) {
	host := openHost(t)
	home := threadNetns(t)
	n, err := host.Scratch()
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if n.Key() == host.Key() || n.Key().Cookie == 0 {
		t.Errorf("scratch netns has key %v, the host %v", n.Key(), host.Key())
	}
	err = n.Do(func() error {
		links, err := net.Interfaces()
		if err != nil {
			return err
		}
		for _, link := range links {
			if link.Flags&net.FlagUp != 0 != (link.Name == "lo") {
				t.Errorf("interface %s has flags %v; lo must be up and nothing else", link.Name, link.Flags)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	everyThread(t, home)
}

func TestDescriptorsStayFlat(t *testing.T) {
	host := openHost(t)
	pod := netnstest.New(t)
	pins := podnetns.NewPins()
	round := func() {
		n, err := host.Adopt(pod.File())
		if err != nil {
			t.Fatal(err)
		}
		if err := pins.Pin("uid", n); err != nil {
			t.Fatal(err)
		}
		if err := n.Do(func() error { return nil }); err != nil {
			t.Fatal(err)
		}
		scratch, err := host.Scratch()
		if err != nil {
			t.Fatal(err)
		}
		if err := scratch.Close(); err != nil {
			t.Fatal(err)
		}
	}
	round()
	before := descriptors(t)
	for range 100 {
		round()
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors open before 100 rounds, %d after", before, after)
	}
	if err := pins.Unpin("uid"); err != nil {
		t.Fatal(err)
	}
	if after := descriptors(t); after != before-1 {
		t.Errorf("%d descriptors open after unpinning, want %d", after, before-1)
	}
}

func descriptors(tb testing.TB) int {
	tb.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		tb.Fatal(err)
	}
	return len(entries)
}

// everyThread fails the test unless code runs in home on whichever thread the
// runtime picks: more goroutines than there are threads, each on its own.
func everyThread(tb testing.TB, home string) {
	tb.Helper()
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		tb.Fatal(err)
	}
	var seen, finished sync.WaitGroup
	release := make(chan struct{})
	for range len(tasks) + 4 {
		seen.Add(1)
		finished.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			if link, err := os.Readlink("/proc/thread-self/ns/net"); err != nil || link != home {
				tb.Errorf("a thread is in %q (%v), want %q", link, err, home)
			}
			seen.Done()
			<-release
		})
	}
	seen.Wait()
	close(release)
	finished.Wait()
}

func BenchmarkDo(b *testing.B) {
	host := openHost(b)
	n := adopt(b, host, netnstest.New(b))
	b.ReportAllocs()
	for b.Loop() {
		if err := n.Do(func() error { return nil }); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkAdopt(b *testing.B) {
	host := openHost(b)
	pod := netnstest.New(b)
	b.ReportAllocs()
	for b.Loop() {
		n, err := host.Adopt(pod.File())
		if err != nil {
			b.Fatal(err)
		}
		if err := n.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

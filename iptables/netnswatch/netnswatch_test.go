// SPDX-License-Identifier: Apache-2.0

package netnswatch_test

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	google "github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/iptables/netnswatch"
	"ambientd/iptables/nftables"
	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }

// patience bounds the waiting for an event that should come at once.
const patience = 20 * time.Second

// watch is a running watcher.
type watch struct {
	*netnswatch.Watcher
	t *testing.T
}

func newWatcher(t *testing.T) *netnswatch.Watcher {
	t.Helper()
	netnstest.Require(t)
	watcher, err := netnswatch.New()
	if err != nil {
		t.Fatal(err)
	}
	return watcher
}

// run starts a watcher, which ends with the test.
func run(t *testing.T, watcher *netnswatch.Watcher) *watch {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- watcher.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the watcher ended with %v", err)
		}
	})
	return &watch{Watcher: watcher, t: t}
}

// netns is a network namespace to watch.
type netns struct {
	redirection.Runner
	file *os.File
}

func (n netns) File() *os.File { return n.file }

func toWatch(ns *netnstest.NS) netns { return netns{Runner: ns.Runner(), file: ns.File()} }

func (w *watch) watch(ns *netnstest.NS) netnswatch.ID {
	w.t.Helper()
	id, err := w.Watch(w.t.Context(), toWatch(ns))
	if err != nil {
		w.t.Fatal(err)
	}
	return id
}

// expect waits for the next event and fails the test unless it is for that namespace.
func (w *watch) expect(want netnswatch.ID) {
	w.t.Helper()
	select {
	case got := <-w.Events():
		if got != want {
			w.t.Errorf("event of %d, want %d", got, want)
		}
	case <-time.After(patience):
		w.t.Errorf("no event, want one of %d", want)
	}
}

// quiet fails the test if there is any event of earlier changes but those of the namespace marker.
func (w *watch) quiet(marker *netnstest.NS, id netnswatch.ID) {
	w.t.Helper()
	if seen := w.settle(marker, id); len(seen) > 0 {
		w.t.Errorf("events %v, want none", seen)
	}
}

// settle takes all events of earlier changes. It makes three changes in the namespace marker, each after the event of the one
// before: the first may be seen by a look that had passed another namespace already, and that namespace's event may come
// after the second.
func (w *watch) settle(marker *netnstest.NS, id netnswatch.ID) map[netnswatch.ID]int {
	w.t.Helper()
	seen := map[netnswatch.ID]int{}
	deadline := time.After(patience)
	for range 3 {
		commit(w.t, marker)
		for got := netnswatch.All; got != id; {
			select {
			case got = <-w.Events():
				seen[got]++
			case <-deadline:
				w.t.Fatal("no event of the marker")
			}
		}
	}
	delete(seen, id)
	return seen
}

// commit makes one transaction of packet rules.
func commit(t *testing.T, ns *netnstest.NS) {
	t.Helper()
	ns.Do(t, func() error {
		conn, err := google.New()
		if err != nil {
			return err
		}
		table := conn.AddTable(&google.Table{Name: "marker", Family: google.TableFamilyINet})
		conn.DelTable(table) // adding one that is there would change nothing
		return conn.Flush()
	})
}

func TestChangesMakeEvents(t *testing.T) {
	w := run(t, newWatcher(t))
	pod, marker := netnstest.New(t), netnstest.New(t)
	backend, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	opts := redirection.DefaultOptions()
	id, markerID := w.watch(pod), w.watch(marker)
	if again := w.watch(pod); again != id || id == markerID || id < 0 {
		t.Errorf("the pod's namespace is %d, then %d, the other one %d", id, again, markerID)
	}
	mask := redirection.MarkMask
	rule := netlink.NewRule()
	rule.Family, rule.Priority, rule.Table = netlink.FAMILY_V6, int(redirection.RulePriority), int(redirection.RouteTable)
	rule.Mark, rule.Mask = redirection.ConnMark, &mask
	deleteRoute := func(family int) func() error {
		return func() error {
			routes, err := netlink.RouteListFiltered(family, &netlink.Route{Table: int(redirection.RouteTable)}, netlink.RT_FILTER_TABLE)
			if err != nil {
				return err
			}
			return netlink.RouteDel(&routes[0])
		}
	}
	for _, change := range []struct {
		name string
		make func() error // inside the namespace
	}{
		{"table flushed", func() error { return exec.CommandContext(t.Context(), "nft", "flush", "ruleset").Run() }},
		{"iptables", func() error {
			return exec.CommandContext(t.Context(), "iptables-nft", "-A", "OUTPUT", "-j", "ACCEPT").Run()
		}},
		{"policy rule deleted", func() error { return netlink.RuleDel(rule) }},
		{"IPv4 route deleted", deleteRoute(netlink.FAMILY_V4)},
		{"IPv6 route deleted", deleteRoute(netlink.FAMILY_V6)},
		{"loopback down", func() error {
			return netlink.LinkSetDown(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: 1}})
		}},
	} {
		t.Run(change.name, func(t *testing.T) {
			w := &watch{Watcher: w.Watcher, t: t}
			if _, err := backend.Apply(t.Context(), pod.Runner(), opts); err != nil {
				t.Fatal(err)
			}
			w.settle(marker, markerID)
			pod.Do(t, change.make)
			w.expect(id)
			w.settle(marker, markerID)
		})
	}
}

// TestOthersMakeNone has what the filters are for: namespaces that nobody watches, and changes that matter to nobody.
func TestOthersMakeNone(t *testing.T) {
	w := run(t, newWatcher(t))
	pod, other, marker := netnstest.New(t), netnstest.New(t), netnstest.New(t)
	id, markerID := w.watch(pod), w.watch(marker)
	commit(t, other)
	w.quiet(marker, markerID)
	pod.Do(t, func() error {
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "a"}, PeerName: "b"}
		if err := netlink.LinkAdd(veth); err != nil {
			return err
		}
		_, elsewhere, err := net.ParseCIDR("192.0.2.0/24")
		return errors.Join(err, netlink.LinkSetUp(veth), netlink.RouteAdd(&netlink.Route{LinkIndex: veth.Index, Dst: elsewhere}))
	})
	w.quiet(marker, markerID)
	w.Unwatch(id)
	commit(t, pod)
	w.quiet(marker, markerID)
	if again := w.watch(pod); again != id {
		t.Errorf("watched again it is %d, not %d", again, id)
	}
	commit(t, pod)
	w.expect(id)
}

func TestOwnNamespace(t *testing.T) {
	w := run(t, newWatcher(t))
	own, pod := netnstest.Self(t), netnstest.New(t)
	id := w.watch(pod)
	commit(t, own)
	w.quiet(pod, id)
	if got := w.watch(own); got != netnswatch.Own {
		t.Errorf("the own namespace is %d", got)
	}
	commit(t, own)
	w.expect(netnswatch.Own)
}

// TestManyChangesAreOneEvent has nobody listen for a while.
func TestManyChangesAreOneEvent(t *testing.T) {
	watcher := newWatcher(t)
	w := &watch{Watcher: watcher, t: t}
	a, b := netnstest.New(t), netnstest.New(t)
	want := []netnswatch.ID{w.watch(a), w.watch(b)}
	for range 50 {
		commit(t, a)
		commit(t, b)
	}
	run(t, watcher)
	marker := netnstest.New(t)
	got := w.settle(marker, w.watch(marker))
	for _, id := range want {
		// One may be on its way to us while more are read.
		if count := got[id]; count < 1 || count > 2 {
			t.Errorf("%d events of %d, want one", count, id)
		}
	}
	if len(got) != len(want) {
		t.Errorf("events of %v, want %v", got, want)
	}
}

// TestOverrun makes more notifications than the kernel keeps.
func TestOverrun(t *testing.T) {
	watcher := newWatcher(t)
	w := &watch{Watcher: watcher, t: t}
	pod := netnstest.New(t)
	w.watch(pod)
	pod.Do(t, func() error {
		handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer handle.Close()
		rule := netlink.NewRule()
		rule.Priority, rule.Table = 12345, 12345
		for range 20_000 {
			if err := errors.Join(handle.RuleAdd(rule), handle.RuleDel(rule)); err != nil {
				return err
			}
		}
		return nil
	})
	run(t, watcher)
	w.expect(netnswatch.All)
}

func TestWhatCannotBeWatched(t *testing.T) {
	w := run(t, newWatcher(t))
	file, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if _, err := w.Watch(t.Context(), netns{Runner: netnstest.New(t).Runner(), file: file}); err == nil || !strings.Contains(err.Error(), "watching a network namespace: asking for its number") {
		t.Errorf("a file that is no namespace: %v", err)
	}
	pod := netnstest.New(t)
	id := w.watch(pod)
	commit(t, pod)
	w.expect(id)
	file.Close()
	if _, err := w.Watch(t.Context(), netns{Runner: netnstest.New(t).Runner(), file: file}); err == nil || !strings.Contains(err.Error(), "closed") {
		t.Errorf("a closed file: %v", err)
	}
}

// TestEnd has Run close everything, also with an event that nobody takes.
func TestEnd(t *testing.T) {
	netnstest.Require(t)
	pod := netnstest.New(t)
	before := descriptors(t)
	for range 20 {
		watcher := newWatcher(t)
		if _, err := watcher.Watch(t.Context(), toWatch(pod)); err != nil {
			t.Fatal(err)
		}
		commit(t, pod)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- watcher.Run(ctx) }()
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("ended with %v", err)
		}
		if _, err := watcher.Watch(t.Context(), toWatch(pod)); !errors.Is(err, os.ErrClosed) {
			t.Errorf("watching after the end: %v", err)
		}
	}
	for deadline := time.Now().Add(patience); descriptors(t) > before+2; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) { // closing ends in the background
			t.Fatalf("%d descriptors, %d before", descriptors(t), before)
		}
	}
}

// TestWatchingHoldsNothing lets a watched namespace go and sees its number go with it.
func TestWatchingHoldsNothing(t *testing.T) {
	w := run(t, newWatcher(t))
	seen := map[netnswatch.ID]bool{}
	for range 200 {
		pod := netnstest.New(t)
		seen[w.watch(pod)] = true
		pod.File().Close()
	}
	// Namespaces are taken down in the background, a batch at a time: their numbers are given again after that.
	if len(seen) == 200 {
		deadline := time.Now().Add(patience)
		for {
			pod := netnstest.New(t)
			id := w.watch(pod)
			pod.File().Close()
			if seen[id] {
				return
			}
			if time.Now().After(deadline) {
				t.Fatal("no number was ever given again: watching holds namespaces")
			}
		}
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

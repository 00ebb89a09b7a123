// SPDX-License-Identifier: Apache-2.0

package cri_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"ambientd/nodeagent/podnetns"
	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }

const uid = "2d626580-270d-4ff0-9c8b-12b960e669c6"

// node is a node with a runtime, and one pod with an address to find.
type node struct {
	*runtime
	tb   testing.TB
	host *podnetns.Host
	pins *podnetns.Pins
	proc string
}

func newNode(tb testing.TB) *node {
	tb.Helper()
	host, err := podnetns.OpenHost()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := host.Close(); err != nil {
			tb.Error(err)
		}
	})
	n := &node{runtime: newRuntime(tb), tb: tb, host: host, pins: podnetns.NewPins(), proc: tb.TempDir()}
	n.sandbox("sandbox", uid)
	return n
}

// pod makes a netns that holds the address.
func (n *node) pod(addr string) *netnstest.NS {
	n.tb.Helper()
	ns := netnstest.New(n.tb)
	a := netip.MustParseAddr(addr)
	netnstest.Connect(n.tb, netnstest.Port{NS: ns, Name: "eth0", Addrs: []netip.Prefix{netip.PrefixFrom(a, a.BitLen())}},
		netnstest.Port{NS: ns, Name: "peer"})
	return ns
}

func (n *node) adopt(ns *netnstest.NS) *podnetns.Netns {
	n.tb.Helper()
	netns, err := n.host.Adopt(ns.File())
	if err != nil {
		n.tb.Fatal(err)
	}
	return netns
}

func pathOf(ns *netnstest.NS) string {
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), ns.File().Fd())
}

// process shows a process of the pod in the netns.
func (n *node) process(pid int, ns *netnstest.NS) {
	n.tb.Helper()
	dir := filepath.Join(n.proc, fmt.Sprint(pid))
	if err := errors.Join(
		os.MkdirAll(filepath.Join(dir, "ns"), 0o755),
		os.Symlink(pathOf(ns), filepath.Join(dir, "ns", "net")),
		os.WriteFile(filepath.Join(dir, "cgroup"), []byte("0::/kubepods/besteffort/pod"+uid+"/771dc945d8ef\n"), 0o600),
	); err != nil {
		n.tb.Fatal(err)
	}
}

// find looks for the pod, which has the address 10.0.0.1, with the runtime's help and
// without that of netns files.
func (n *node) find(timeout time.Duration) (podnetns.Key, error) {
	n.tb.Helper()
	finder, err := podnetns.NewFinder(podnetns.FinderConfig{
		Host: n.host, Holders: n.pins, ProcRoot: n.proc, NetnsDirs: []string{}, Runtime: n.client(n.tb, timeout),
	})
	if err != nil {
		n.tb.Fatal(err)
	}
	found, missing := finder.Find(n.tb.Context(), []podnetns.Wanted{{UID: uid, IPs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}}})
	if found[uid] == nil {
		return podnetns.Key{}, missing[uid]
	}
	key := found[uid].Key()
	if err := found[uid].Close(); err != nil {
		n.tb.Error(err)
	}
	return key, nil
}

// answer makes the runtime name paths, and a process with the PID if that is not 0.
func (n *node) answer(pid int, path string) {
	n.status = func(context.Context, string) (map[string]string, error) {
		return map[string]string{"info": fmt.Sprintf(
			`{"pid":%d,"runtimeSpec":{"linux":{"namespaces":[{"type":"network","path":%q}]}}}`, pid, path)}, nil
	}
}

func (n *node) mustFind(want *netnstest.NS) {
	n.tb.Helper()
	netns := n.adopt(want)
	if got, err := n.find(time.Minute); err != nil || got != netns.Key() {
		n.tb.Errorf("found %v, %v; want %v", got, err, netns.Key())
	}
	if err := netns.Close(); err != nil {
		n.tb.Error(err)
	}
}

func (n *node) mustMiss(reason string) {
	n.tb.Helper()
	if got, err := n.find(time.Minute); !errors.Is(err, podnetns.ErrNotFound) || !strings.Contains(err.Error(), reason) {
		n.tb.Errorf("found %v, %v; want an error with %q", got, err, reason)
	}
}

// bind keeps the netns as a file, as the runtimes do.
func (n *node) bind(ns *netnstest.NS) string {
	n.tb.Helper()
	path := filepath.Join(n.tb.TempDir(), "cni-1")
	if err := os.Symlink(pathOf(ns), path); err != nil {
		n.tb.Fatal(err)
	}
	return path
}

func TestFindByFile(t *testing.T) {
	n := newNode(t)
	ns := n.pod("10.0.0.1")
	n.answer(0, n.bind(ns))
	n.mustFind(ns)
}

// The file may show elsewhere in the agent's mount namespace, or not at all; the host's
// processes show below --proc-root.
func TestFindByProcessOfSandbox(t *testing.T) {
	n := newNode(t)
	ns := n.pod("10.0.0.1")
	n.process(7, ns)
	if err := os.Remove(filepath.Join(n.proc, "7", "cgroup")); err != nil { // so that only the runtime leads there
		t.Fatal(err)
	}
	n.answer(7, "/no/such/file")
	n.mustFind(ns)
}

// The newest sandbox is not always the one that is the pod's: what counts are the addresses.
func TestFindOlderSandbox(t *testing.T) {
	n := newNode(t)
	n.sandbox("newer", uid)
	own := n.pod("10.0.0.1")
	paths := map[string]string{"sandbox": n.bind(own), "newer": n.bind(n.pod("10.0.0.2"))}
	n.status = func(_ context.Context, id string) (map[string]string, error) { return netnsAt(paths[id]), nil }
	n.mustFind(own)
}

// A runtime is not believed: what it names has to be the pod's.
func TestFindRefuses(t *testing.T) {
	n := newNode(t)
	n.answer(0, n.bind(n.pod("10.0.0.2")))
	n.mustMiss("it holds 10.0.0.2, and not the pod's 10.0.0.1")

	n.answer(0, "/proc/self/ns/net") // below --proc-root, where there is none
	n.mustMiss("no such file")

	n.answer(0, n.bind(netnstest.Self(t)))
	n.mustMiss("the host's own network namespace")

	other := n.pod("10.0.0.1")
	if err := n.pins.Pin("other", n.adopt(other)); err != nil {
		t.Fatal(err)
	}
	n.answer(0, n.bind(other))
	n.mustMiss("other")
	if err := n.pins.Unpin("other"); err != nil {
		t.Error(err)
	}

	regular := filepath.Join(t.TempDir(), "regular")
	if err := os.WriteFile(regular, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	n.answer(0, regular)
	n.mustMiss("not a network namespace")
}

// Without the runtime's help the search goes on at the processes.
func TestFindWithoutTheRuntime(t *testing.T) {
	n := newNode(t)
	ns := n.pod("10.0.0.1")
	n.process(7, ns)
	want := n.adopt(ns)
	n.status = func(ctx context.Context, _ string) (map[string]string, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if got, err := n.find(20 * time.Millisecond); err != nil || got != want.Key() {
		t.Errorf("with a runtime that hangs: found %v, %v", got, err)
	}
	n.all = nil
	n.mustFind(ns)
	if err := want.Close(); err != nil {
		t.Error(err)
	}
	if err := os.RemoveAll(filepath.Join(n.proc, "7")); err != nil {
		t.Fatal(err)
	}
	n.listed = errors.New("it is broken")
	n.mustMiss("it is broken")
}

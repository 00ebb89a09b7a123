// SPDX-License-Identifier: Apache-2.0

package podnetns_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/nodeagent/podnetns"
	"ambientd/tools/netnstest"
)

// node is a node as the finder sees it: a proc file system that the test writes, with
// real network namespaces behind it, and a directory of netns files.
type node struct {
	tb      testing.TB
	host    *podnetns.Host
	pins    *podnetns.Pins
	proc    string // the proc root
	files   string // the directory of netns files
	dirs    []string
	runtime podnetns.Runtime // nil for none
	life    *os.File         // what real processes read; they end when nobody can write to it
	nextID  int
}

func newNode(tb testing.TB) *node {
	tb.Helper()
	// Not below the test's own directory: a tmpfs costs more like procfs than a disk does.
	root, err := os.MkdirTemp("/run", "node")
	if err != nil {
		tb.Fatal(err)
	}
	n := &node{tb: tb, host: openHost(tb), pins: podnetns.NewPins(), proc: filepath.Join(root, "proc"), files: filepath.Join(root, "netns"), nextID: 100}
	n.must(os.Mkdir(n.proc, 0o755))
	n.must(os.Mkdir(n.files, 0o755))
	n.dirs = []string{n.files}
	read, write, err := os.Pipe()
	n.must(err)
	n.life = read
	// Even if the test is killed: the writing end is the test's alone.
	tb.Cleanup(func() { n.must(errors.Join(write.Close(), read.Close())) })
	return n
}

func (n *node) must(err error) {
	n.tb.Helper()
	if err != nil {
		n.tb.Fatal(err)
	}
}

func (n *node) finder() *podnetns.Finder {
	n.tb.Helper()
	f, err := podnetns.NewFinder(podnetns.FinderConfig{Host: n.host, Holders: n.pins, ProcRoot: n.proc, NetnsDirs: n.dirs, Runtime: n.runtime})
	n.must(err)
	return f
}

// netns makes a netns that holds the addresses, on an interface other than lo.
func (n *node) netns(addrs ...string) *netnstest.NS {
	n.tb.Helper()
	ns := netnstest.New(n.tb)
	if len(addrs) > 0 {
		port := netnstest.Port{NS: ns, Name: "eth0"}
		for _, a := range addrs {
			addr := netip.MustParseAddr(a)
			port.Addrs = append(port.Addrs, netip.PrefixFrom(addr, addr.BitLen()))
		}
		netnstest.Connect(n.tb, port, netnstest.Port{NS: ns, Name: "peer"})
	}
	return ns
}

// address adds an address to lo, which is the cheapest way to have one.
func (n *node) address(ns *netnstest.NS, addr string) {
	n.tb.Helper()
	ns.Do(n.tb, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.AddrAdd(lo, &netlink.Addr{IPNet: netlink.NewIPNet(netip.MustParseAddr(addr).AsSlice())})
	})
}

// manyAddresses adds that many addresses to lo, from 10.1.0.1 on.
func (n *node) manyAddresses(ns *netnstest.NS, count int) {
	n.tb.Helper()
	ns.Do(n.tb, func() error {
		inside, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer inside.Close()
		lo, err := inside.LinkByName("lo")
		for i := 0; i < count && err == nil; i++ {
			ip := netip.AddrFrom4([4]byte{10, byte(1 + i/62500), byte(i / 250 % 250), byte(1 + i%250)})
			err = inside.AddrAdd(lo, &netlink.Addr{IPNet: netlink.NewIPNet(ip.AsSlice())})
		}
		return err
	})
}

// descriptorPath names the netns for as long as it is open.
func descriptorPath(ns *netnstest.NS) string {
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), ns.File().Fd())
}

// process shows a process in the netns, and returns its PID.
func (n *node) process(ns *netnstest.NS, cgroup string) string {
	n.tb.Helper()
	n.nextID++
	pid := strconv.Itoa(n.nextID)
	n.must(os.MkdirAll(filepath.Join(n.proc, pid, "ns"), 0o755))
	n.must(os.Symlink(descriptorPath(ns), filepath.Join(n.proc, pid, "ns", "net")))
	n.cgroup(pid, cgroup)
	return pid
}

func (n *node) cgroup(pid, path string) {
	n.tb.Helper()
	n.must(os.WriteFile(filepath.Join(n.proc, pid, "cgroup"), []byte("0::"+path+"\n"), 0o644))
}

// resident starts a real process in the netns, and shows it with a cgroup that it does
// not really have.
func (n *node) resident(ns *netnstest.NS, cgroup string) {
	n.tb.Helper()
	pid := n.realProcess(ns)
	n.must(os.Mkdir(filepath.Join(n.proc, pid), 0o755))
	n.must(os.Symlink("/proc/"+pid+"/ns", filepath.Join(n.proc, pid, "ns")))
	n.cgroup(pid, cgroup)
}

// realProcess starts a real process in the netns and returns its PID.
func (n *node) realProcess(ns *netnstest.NS) string {
	n.tb.Helper()
	cmd := exec.Command("cat")
	cmd.Stdin = n.life
	ns.Do(n.tb, cmd.Start)
	n.tb.Cleanup(func() {
		n.must(cmd.Process.Kill())
		cmd.Wait()
	})
	return strconv.Itoa(cmd.Process.Pid)
}

// file keeps the netns as a file, as a runtime does.
func (n *node) file(ns *netnstest.NS, name string) string {
	n.tb.Helper()
	path := filepath.Join(n.files, name)
	n.must(os.WriteFile(path, nil, 0o444))
	n.must(syscall.Mount(descriptorPath(ns), path, "", syscall.MS_BIND, ""))
	n.tb.Cleanup(func() {
		if err := syscall.Unmount(path, syscall.MNT_DETACH); err != nil {
			n.tb.Error(err)
		}
	})
	return path
}

// podCgroup is what containerd and the systemd driver make for a container of the pod.
func podCgroup(uid string) string {
	return "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + strings.ReplaceAll(uid, "-", "_") +
		".slice/cri-containerd-771dc945d8ef33320eb739394c08f1c5818a4cd1741bc7a6d63e98e9d6ca1538.scope"
}

func wantedPod(uid string, addrs ...string) podnetns.Wanted {
	w := podnetns.Wanted{UID: uid}
	for _, a := range addrs {
		w.IPs = append(w.IPs, netip.MustParseAddr(a))
	}
	return w
}

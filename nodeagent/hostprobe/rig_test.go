// SPDX-License-Identifier: Apache-2.0

package hostprobe_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"ambientd/iptables/iptables"
	"ambientd/iptables/nftables"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/hostprobe"
	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }

// patience bounds the waiting for what should happen at once.
const patience = 10 * time.Second

// backend is what a backend of redirection does for host and pods.
type backend interface {
	hostprobe.Kernel
	Apply(ctx context.Context, ns redirection.Netns, opts redirection.Options) (redirection.Families, error)
}

// eachBackend runs test with every backend, and variant of one, that this system has.
func eachBackend(t *testing.T, test func(t *testing.T, b backend)) {
	t.Run("nftables", func(t *testing.T) {
		netnstest.Require(t)
		b, err := nftables.New()
		if err != nil {
			t.Fatal(err)
		}
		test(t, b)
	})
	for _, variant := range []iptables.Variant{iptables.NFTables, iptables.Legacy} {
		t.Run("iptables-"+string(variant), func(t *testing.T) {
			netnstest.Require(t)
			b, err := iptables.New(t.Context(), iptables.Config{Variant: variant})
			if err != nil {
				t.Skip(err)
			}
			test(t, b)
		})
	}
}

// rig is a Set that works on a netns which stands for the host's.
type rig struct {
	*hostprobe.Set
	t      *testing.T
	kernel *unreliable
	host   *netnstest.NS
	opts   redirection.HostOptions
}

func newRig(t *testing.T, b backend, changes ...func(*redirection.HostOptions)) *rig {
	t.Helper()
	defaults := redirection.DefaultOptions()
	r := &rig{t: t, kernel: &unreliable{backend: b}, host: netnstest.New(t), opts: redirection.HostOptions{
		ProbeSourceIPv4: defaults.ProbeSourceIPv4, ProbeSourceIPv6: defaults.ProbeSourceIPv6,
		IPv6: true, Scope: redirection.ProbeScopePod,
	}}
	for _, change := range changes {
		change(&r.opts)
	}
	r.restart()
	return r
}

func asUsual(*redirection.HostOptions)    {}
func declared(o *redirection.HostOptions) { o.Scope = redirection.ProbeScopeDeclared }
func ipv4Only(o *redirection.HostOptions) { o.IPv6 = false }

// restart replaces the Set by one that knows nothing, as a new agent's does.
func (r *rig) restart() {
	r.t.Helper()
	set, err := hostprobe.New(hostprobe.Config{Kernel: r.kernel, Run: r.host.Runner(), Options: r.opts})
	if err != nil {
		r.t.Fatal(err)
	}
	r.Set = set
}

// must fails the test on an error.
func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) add(uid string, targets ...string) {
	r.t.Helper()
	addrs, ports := parse(r.t, targets...)
	r.must(r.Add(r.t.Context(), uid, addrs, ports))
}

func (r *rig) remove(uid string) {
	r.t.Helper()
	r.must(r.Remove(r.t.Context(), uid))
}

func (r *rig) settle() {
	r.t.Helper()
	r.must(r.Settle(r.t.Context()))
}

// holds fails the test unless the kernel has the rule, and exactly these entries, and the
// Set says that it should.
func (r *rig) holds(entries ...string) {
	r.t.Helper()
	r.kernelHolds(entries...)
	r.differs()
}

// kernelHolds is holds without the Set's opinion.
func (r *rig) kernelHolds(texts ...string) {
	r.t.Helper()
	found, err := r.kernel.backend.VerifyHost(r.t.Context(), r.host.Runner(), r.opts, entries(r.t, texts...))
	r.must(err)
	for _, d := range found {
		r.t.Errorf("the kernel differs from %v: %s", texts, d)
	}
}

// differs fails the test unless the Set sees as many differences as there are wanted
// strings, each with that string in it.
func (r *rig) differs(want ...string) {
	r.t.Helper()
	found, err := r.Verify(r.t.Context())
	r.must(err)
	ok := len(found) == len(want)
	for i := range min(len(found), len(want)) {
		ok = ok && strings.Contains(found[i].String(), want[i])
	}
	if !ok {
		r.t.Errorf("the Set sees %v, want %q", found, want)
	}
}

// differsSomehow is for differences that each backend describes in its own way.
func (r *rig) differsSomehow() {
	r.t.Helper()
	found, err := r.Verify(r.t.Context())
	r.must(err)
	if len(found) == 0 {
		r.t.Error("the Set sees no difference")
	}
}

// gone fails the test unless the host's netns holds nothing of ours.
func (r *rig) gone() {
	r.t.Helper()
	found, err := r.kernel.backend.VerifyHost(r.t.Context(), r.host.Runner(), r.opts, nil)
	r.must(err)
	if len(found) == 0 {
		r.t.Error("the host's rule is there")
	}
	listing := r.command("nft", "list", "ruleset") + r.command("iptables-save")
	if strings.Contains(listing, "ambientd") {
		r.t.Errorf("something of ours is left:\n%s", listing)
	}
}

// command runs a program in the host's netns and returns what it prints.
func (r *rig) command(args ...string) string {
	r.t.Helper()
	var out []byte
	r.host.Do(r.t, func() (err error) {
		if out, err = exec.CommandContext(r.t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%v: %w: %s", args, err, out)
		}
		return nil
	})
	return string(out)
}

// parse reads addresses, and ports as ":80".
func parse(t *testing.T, targets ...string) (addrs []netip.Addr, ports []uint16) {
	t.Helper()
	for _, target := range targets {
		if strings.HasPrefix(target, ":") && !strings.HasPrefix(target, "::") {
			ports = append(ports, netip.MustParseAddrPort("0.0.0.0"+target).Port())
			continue
		}
		addrs = append(addrs, netip.MustParseAddr(target))
	}
	return addrs, ports
}

// entries reads entries as they print.
func entries(t *testing.T, texts ...string) []redirection.HostEntry {
	t.Helper()
	var all []redirection.HostEntry
	for _, text := range texts {
		if addr, err := netip.ParseAddr(text); err == nil {
			all = append(all, redirection.HostEntry{Addr: addr})
			continue
		}
		both := netip.MustParseAddrPort(text)
		all = append(all, redirection.HostEntry{Addr: both.Addr(), Port: both.Port()})
	}
	return all
}

// errKernel is what an unreliable kernel says.
var errKernel = errors.New("the kernel refuses")

// unreliable is a real backend on a real kernel, whose changes of entries fail on
// demand: before anything has happened, or after it has.
type unreliable struct {
	backend
	before, after func(op string, e redirection.HostEntry) error // nil: no failure
}

func (u *unreliable) around(op string, e redirection.HostEntry, fn func() error) error {
	if u.before != nil {
		if err := u.before(op, e); err != nil {
			return err
		}
	}
	if err := fn(); err != nil {
		return err
	}
	if u.after != nil {
		return u.after(op, e)
	}
	return nil
}

// aroundAll fails if any of the entries is to.
func (u *unreliable) aroundAll(op string, all []redirection.HostEntry, fn func() error) error {
	if len(all) == 0 {
		return fn()
	}
	return u.around(op, all[0], func() error { return u.aroundAll(op, all[1:], fn) })
}

func (u *unreliable) AddEntries(ctx context.Context, run redirection.Runner, opts redirection.HostOptions, all ...redirection.HostEntry) error {
	return u.aroundAll("add", all, func() error { return u.backend.AddEntries(ctx, run, opts, all...) })
}

func (u *unreliable) DelEntries(ctx context.Context, run redirection.Runner, opts redirection.HostOptions, all ...redirection.HostEntry) error {
	var errs []error
	for _, e := range all {
		errs = append(errs, u.around("del", e, func() error { return u.backend.DelEntries(ctx, run, opts, e) }))
	}
	return errors.Join(errs...)
}

func (u *unreliable) SetEntries(ctx context.Context, run redirection.Runner, opts redirection.HostOptions, all []redirection.HostEntry) error {
	return u.around("set", redirection.HostEntry{}, func() error { return u.backend.SetEntries(ctx, run, opts, all) })
}

func (u *unreliable) RemoveHost(ctx context.Context, run redirection.Runner) error {
	return u.around("remove", redirection.HostEntry{}, func() error { return u.backend.RemoveHost(ctx, run) })
}

// node is a rig with two neighbours of the host:
//
//	pod ── host ── elsewhere
//
// The pod is enrolled, and the host forwards, under its own address as kube-proxy may
// do it.
type node struct {
	*rig
	pod, elsewhere *netnstest.NS
}

// Addresses of the node's parts, IPv4 and IPv6.
var (
	podAddrs  = []netip.Addr{netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00:a::2")}
	nodeAddrs = []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00:a::1")}
	sources   = []netip.Addr{redirection.DefaultOptions().ProbeSourceIPv4, redirection.DefaultOptions().ProbeSourceIPv6}
)

func newNode(t *testing.T, b backend, changes ...func(*redirection.HostOptions)) *node {
	t.Helper()
	n := &node{rig: newRig(t, b, changes...), pod: netnstest.New(t), elsewhere: netnstest.New(t)}
	// Packets with a source that is not the host's own have their next hop asked for
	// from the link-local address, which must not be tentative then.
	n.command("sysctl", "-qw", "net.ipv6.conf.default.accept_dad=0")
	prefixes := func(texts ...string) (all []netip.Prefix) {
		for _, text := range texts {
			all = append(all, netip.MustParsePrefix(text))
		}
		return all
	}
	netnstest.Connect(t,
		netnstest.Port{NS: n.host, Name: "pod", Addrs: prefixes("10.0.0.1/24", "fd00:a::1/64")},
		netnstest.Port{NS: n.pod, Name: "eth0", Addrs: prefixes("10.0.0.2/24", "fd00:a::2/64"), Gateways: nodeAddrs})
	netnstest.Connect(t,
		netnstest.Port{NS: n.host, Name: "uplink", Addrs: prefixes("10.9.0.1/24", "fd00:9::1/64")},
		netnstest.Port{NS: n.elsewhere, Name: "eth0", Addrs: prefixes("10.9.0.2/24", "fd00:9::2/64"),
			Gateways: []netip.Addr{netip.MustParseAddr("10.9.0.1"), netip.MustParseAddr("fd00:9::1")}})
	n.command("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
	n.command("nft", "table inet kube { chain post { type nat hook postrouting priority srcnat; masquerade; }; }")
	families, err := b.Apply(t.Context(), n.pod.Runner(), redirection.DefaultOptions())
	n.must(err)
	if families != redirection.DualStack {
		t.Fatalf("the pod's redirection is for %s", families)
	}
	return n
}

// serve answers every connection to the port of the pod's addresses with name and the
// peer's address, until the test ends.
func (n *node) serve(port uint16, name string, opts ...netnstest.Option) {
	n.t.Helper()
	n.handle(port, func(c *net.TCPConn) {
		// The client may be one that was given up.
		_, _ = fmt.Fprintf(c, "%s %s", name, peerOf(c))
	}, opts...)
}

// handle runs fn for every connection to the port, one after the other, and closes it.
func (n *node) handle(port uint16, fn func(*net.TCPConn), opts ...netnstest.Option) {
	n.t.Helper()
	for _, any := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		listener := n.pod.ListenTCP(n.t, netip.AddrPortFrom(any, port), opts...)
		var served sync.WaitGroup
		served.Go(func() {
			for {
				c, err := listener.AcceptTCP()
				if err != nil {
					return
				}
				fn(c)
				_ = c.Close()
			}
		})
		n.t.Cleanup(func() {
			_ = listener.Close()
			served.Wait()
		})
	}
}

func peerOf(c net.Conn) netip.Addr { return netip.MustParseAddrPort(c.RemoteAddr().String()).Addr() }

// lands fails the test unless a connection to the port of the pod's addresses is
// answered by that listener, which sees one of these peers, IPv4 and IPv6.
func (n *node) lands(from *netnstest.NS, port uint16, at string, peers []netip.Addr) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), patience)
	defer cancel()
	for i, addr := range podAddrs {
		c, err := from.DialTCP(ctx, netip.AddrPort{}, netip.AddrPortFrom(addr, port))
		n.must(err)
		n.must(c.SetReadDeadline(time.Now().Add(patience)))
		answer, err := io.ReadAll(c)
		n.must(errors.Join(err, c.Close()))
		if got, want := string(answer), at+" "+peers[i].String(); got != want {
			n.t.Errorf("a connection to %s port %d lands at %q, want %q", addr, port, got, want)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package hostprobe_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
	"ambientd/nodeagent/hostprobe"
	"ambientd/tools/netnstest"
)

// checks fails the test unless a check of the pod sees these peers, IPv4 and IPv6.
func (n *node) checks(uid string, peers []netip.Addr) {
	n.t.Helper()
	var want []hostprobe.Arrival
	for i, family := range redirection.DualStack.Each() {
		want = append(want, hostprobe.Arrival{Family: family, Addr: podAddrs[i], Want: sources[i], Got: peers[i]})
	}
	got := n.CheckSource(n.t.Context(), uid, podAddrs, n.pod.Runner())
	if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
		n.t.Errorf("the check differs (-want +got):\n%s", diff)
	}
	for _, a := range got {
		if a.OK() != (a.Got == a.Want && a.Err == nil) || !strings.Contains(a.String(), a.Got.String()) {
			n.t.Errorf("%v: OK is %v", a, a.OK())
		}
	}
}

// TestCheckSource: with the pod's own entries, with the host's rule broken, and without
// entries the check tells what the pod sees.
func TestCheckSource(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		n := newNode(t, b)
		n.passOn()
		n.settle()
		n.add("p1", "10.0.0.2", "fd00:a::2")
		n.checks("p1", sources)
		other := n.opts
		other.ProbeSourceIPv4 = netip.MustParseAddr("169.254.7.1")
		n.must(b.EnsureHost(t.Context(), n.host.Runner(), other))
		n.checks("p1", []netip.Addr{other.ProbeSourceIPv4, sources[1]})
		n.must(n.Repair(t.Context()))
		n.remove("p1")
		n.checks("p1", nodeAddrs)
		n.holds()
	})
}

// TestCheckSourceDeclared: the check's own entry is there for the check alone, and only
// for a pod that has entries.
func TestCheckSourceDeclared(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		n := newNode(t, b, declared)
		n.passOn()
		n.settle()
		n.add("p1", "10.0.0.2", "fd00:a::2", ":8080")
		n.checks("p1", sources)
		n.holds("10.0.0.2:8080", "[fd00:a::2]:8080")
		n.remove("p1")
		n.must(n.Rest(t.Context()))
		for _, a := range n.CheckSource(t.Context(), "p1", podAddrs, n.pod.Runner()) {
			wantError(t, a.String(), a.Err, "the pod itself has none")
		}
		n.gone()
	})
}

// passOn starts a node proxy that passes plaintext on to where it was going, from the
// address that it came from, as ztunnel does.
func (n *node) passOn() {
	n.t.Helper()
	mark := netnstest.Mark(redirection.ProxyMark)
	n.handle(redirection.InboundPort, func(c *net.TCPConn) {
		to, err := netnstest.OriginalDst(c)
		if err != nil {
			n.t.Error(err)
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		onward, err := n.pod.DialTCP(ctx, netip.AddrPortFrom(peerOf(c), 0), to, mark, netnstest.Transparent())
		if err != nil {
			n.t.Error(err)
			return
		}
		defer onward.Close()
		// Its end is the client's; a check that is over may have reset it.
		if _, err := io.Copy(onward, c); err != nil && !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
			n.t.Error(err)
		}
	}, mark)
}

// TestCheckSourceFails: what stands between host and pod is told apart.
func TestCheckSourceFails(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		n := newNode(t, b)
		n.settle()
		all := func(ctx context.Context, want string, addrs ...netip.Addr) {
			t.Helper()
			arrivals := n.CheckSource(ctx, "p1", addrs, n.pod.Runner())
			if len(arrivals) != len(addrs) {
				t.Errorf("got %v for %v", arrivals, addrs)
			}
			for _, a := range arrivals {
				wantError(t, a.Addr.String(), a.Err, want)
				if a.OK() || a.Got.IsValid() || !strings.Contains(a.String(), want) {
					t.Errorf("%v is OK: %v", a, a.OK())
				}
			}
		}
		all(t.Context(), "connection refused", podAddrs...) // nobody listens for the proxy
		all(t.Context(), "listening in the pod", netip.MustParseAddr("10.0.0.3"), netip.MustParseAddr("fd00:a::3"))

		// A proxy that takes what it gets, and passes nothing on. No need to wait for more.
		ctx, cancel := context.WithCancel(t.Context())
		var taken atomic.Int32
		n.handle(redirection.InboundPort, func(c *net.TCPConn) {
			if _, err := c.Read(make([]byte, 1)); err != nil {
				t.Error(err)
			}
			if taken.Add(1) == int32(len(podAddrs)) {
				cancel()
			}
		}, netnstest.Mark(redirection.ProxyMark))
		all(ctx, "the node proxy as a rule", podAddrs...)
	})
}

// TestCheckSourceFamilies: the first address of each family, and no more families than
// there are rules for.
func TestCheckSourceFamilies(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		four, six := podAddrs[0], podAddrs[1]
		for _, test := range []struct {
			name   string
			change func(*redirection.HostOptions)
			addrs  []netip.Addr
			want   []netip.Addr
		}{
			{"one family", asUsual, []netip.Addr{six}, []netip.Addr{six}},
			{"several addresses", asUsual, []netip.Addr{six, four, netip.MustParseAddr("192.0.2.1")}, []netip.Addr{four, six}},
			{"no rule for IPv6", ipv4Only, []netip.Addr{six, four}, []netip.Addr{four}},
			{"unknown", asUsual, nil, nil},
			{"another notation", asUsual, []netip.Addr{netip.AddrFrom16(four.As16())}, []netip.Addr{four}},
		} {
			t.Run(test.name, func(t *testing.T) {
				n := newNode(t, b, test.change)
				n.settle()
				n.add("p1", "10.0.0.2", "fd00:a::2")
				var got []netip.Addr
				for _, a := range n.CheckSource(t.Context(), "p1", test.addrs, n.pod.Runner()) {
					if !a.OK() {
						t.Error(a)
					}
					got = append(got, a.Addr)
				}
				if diff := cmp.Diff(test.want, got, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
					t.Errorf("checked (-want +got):\n%s", diff)
				}
			})
		}
	})
}

// TestCheckSourceAmongStrangers: others connect to the check's listener first; one says
// something, one nothing. They are not taken for the host, and not waited for.
func TestCheckSourceAmongStrangers(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		n := newNode(t, b)
		n.settle()
		n.add("p1", "10.0.0.2", "fd00:a::2")
		var strangers []*net.TCPConn
		// The check opens its listener by way of this runner.
		inPod := func(fn func() error) error {
			if err := n.pod.Runner()(fn); err != nil {
				return err
			}
			listeners, err := n.listeners()
			if err != nil {
				return err
			}
			for _, listener := range listeners {
				for _, says := range []string{"", "GET / HTTP/1.1\r\nHost: stranger\r\n\r\n"} {
					c, err := n.pod.DialTCP(t.Context(), netip.AddrPort{}, listener)
					if err != nil {
						return err
					}
					strangers = append(strangers, c)
					if _, err := io.WriteString(c, says); err != nil {
						return err
					}
				}
			}
			return nil
		}
		for _, addr := range podAddrs {
			arrivals := n.CheckSource(t.Context(), "p1", []netip.Addr{addr}, inPod)
			if len(arrivals) != 1 || !arrivals[0].OK() {
				t.Errorf("checking %s: %v", addr, arrivals)
			}
		}
		if len(strangers) != 4 {
			t.Errorf("%d strangers came, want 4", len(strangers))
		}
		for _, c := range strangers {
			_ = c.Close()
		}
	})
}

// listeners returns at which of the pod's own addresses sockets listen (proc_net_tcp in
// the kernel's documentation: local address, remote address, state, all hexadecimal).
func (n *node) listeners() (all []netip.AddrPort, err error) {
	const stateListen = "0A"
	for i, file := range []string{"tcp", "tcp6"} {
		var table []byte
		err := n.pod.Runner()(func() (err error) {
			table, err = os.ReadFile("/proc/thread-self/net/" + file)
			return err
		})
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(table)) {
			fields := strings.Fields(line)
			_, port, ok := strings.Cut(fields[1], ":")
			if !ok || fields[3] != stateListen {
				continue // the heading, and connections
			}
			number, err := strconv.ParseUint(port, 16, 16)
			if err != nil {
				return nil, err
			}
			all = append(all, netip.AddrPortFrom(podAddrs[i], uint16(number)))
		}
	}
	return all, nil
}

// TestCheckSourceLeavesNothing: no descriptor and no entry is
// left by checks, however they end.
func TestCheckSourceLeavesNothing(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		n := newNode(t, b, declared)
		n.settle()
		n.add("p1", "10.0.0.2", "fd00:a::2")
		n.checks("p1", sources)
		before := descriptors(t)
		for range 50 {
			n.checks("p1", sources)
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			n.CheckSource(ctx, "p1", podAddrs, n.pod.Runner())
		}
		if after := descriptors(t); after > before {
			t.Errorf("%d descriptors before, %d after", before, after)
		}
		n.holds()
	})
}

func descriptors(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

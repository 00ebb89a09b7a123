// SPDX-License-Identifier: Apache-2.0

package enroll_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"

	"ambientd/iptables/conntrack"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/enroll"
	"ambientd/nodeagent/workload"
)

// counting counts how often is counted.
type counting struct {
	*conntrack.Reader
	times int
	err   error
}

func (c *counting) Kept(ctx context.Context, ns redirection.Netns) (int, error) {
	c.times++
	if c.err != nil {
		return 0, c.err
	}
	return c.Reader.Kept(ctx, ns)
}

// A pod that is enrolled while it runs shows how many of its connections are left; one
// that was enrolled at its start shows none. Asking again soon costs nothing.
func TestKeptConnections(t *testing.T) {
	connections := &counting{Reader: conntrack.New()}
	r := newRig(t, func(c *enroll.Config) { c.Connections = connections })
	r.proxy(t, nil)
	started, _ := r.enrolled(t, "started", "web", "c9")
	pod := r.pods.put(workload.Pod{UID: "uid-web", Namespace: "shop", Name: "web", ServiceAccount: "web"})
	ns := r.running(t, pod, 1)
	l := ns.ListenTCP(t, netip.MustParseAddrPort("10.1.0.1:0"))
	client, err := ns.DialTCP(t.Context(), netip.AddrPort{}, l.Addr().(*net.TCPAddr).AddrPort())
	must(t, err)
	defer client.Close()
	server, err := l.AcceptTCP()
	must(t, err)
	defer server.Close()

	r.meshed("web", "web")
	r.follow(t)
	r.await(t, func() bool { return slices.Contains(r.Enrolled(), pod.UID) })
	_, err = client.Write([]byte("ping"))
	must(t, err)
	_, err = io.ReadFull(server, make([]byte, 4))
	must(t, err)
	for range 2 {
		if kept := r.statusOf(t, pod).KeptConnections; kept == nil || *kept != 1 {
			t.Errorf("kept connections: %v, want 1", kept)
		}
	}
	if connections.times != 1 {
		t.Errorf("two looks at the status counted %d times", connections.times)
	}
	if kept := r.statusOf(t, started).KeptConnections; kept != nil {
		t.Errorf("a pod that was enrolled at its start keeps %d connections", *kept)
	}
}

// Where the kernel does not tell, nothing is shown.
func TestKeptConnectionsUnknown(t *testing.T) {
	connections := &counting{err: errors.New("no connection tracking")}
	r := newRig(t, func(c *enroll.Config) { c.Connections = connections })
	r.proxy(t, nil)
	pod := r.pods.put(workload.Pod{UID: "uid-web", Namespace: "shop", Name: "web", ServiceAccount: "web"})
	r.running(t, pod, 1)
	r.meshed("web", "web")
	r.follow(t)
	r.await(t, func() bool { return slices.Contains(r.Enrolled(), pod.UID) })
	if kept := r.statusOf(t, pod).KeptConnections; kept != nil || connections.times != 1 {
		t.Errorf("kept connections: %v, asked %d times", kept, connections.times)
	}
}

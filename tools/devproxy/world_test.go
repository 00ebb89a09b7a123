// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"ambientd/certfetch"
	"ambientd/certfetch/ca"
	"ambientd/certfetch/sds"
	"ambientd/certfetch/spiffeid"
	"ambientd/iptables/nftables"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/zds"
	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }

const trustDomain = "cluster.local"

// world is a node: an agent's sockets with the real servers behind them, a
// running devproxy, and network namespaces wired to each other.
//
//	client ── 10.0.1.0/24, fd00:1::/64 ── server ── 10.0.2.0/24, fd00:2::/64 ── outside
//	   └────────────── 10.0.3.0/24, fd00:3::/64 ─────────────────────────────────┘
type world struct {
	t       *testing.T
	ctx     context.Context // bounds every wait
	dir     string
	zds     *zds.Server
	fetcher *certfetch.Fetcher
	rules   *nftables.Backend
	log     *logLines

	client, server, outside *netnstest.NS

	mu   sync.Mutex
	pods map[string]admin.PodStatus // by UID: what the agent says is in the mesh
}

func (w *world) check(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// newWorld starts everything but pods. args are added to devproxy's.
func newWorld(t *testing.T, args ...string) *world {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
	t.Cleanup(cancel)
	w := &world{t: t, ctx: ctx, dir: t.TempDir(), log: newLogLines(), pods: make(map[string]admin.PodStatus)}
	w.wire()
	w.startAgent()
	var err error
	w.rules, err = nftables.New()
	w.check(err)
	w.background("devproxy", func(ctx context.Context) error {
		return run(ctx, append([]string{
			"--zds-socket", w.socket("zds"), "--sds-socket", w.socket("sds"), "--admin-socket", w.socket("admin"),
			"--trust-domain", trustDomain, "--log-format", "json",
		}, args...), w.log)
	})
	return w
}

func (w *world) socket(name string) string { return filepath.Join(w.dir, name+".sock") }

func prefixes(s ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range s {
		out = append(out, netip.MustParsePrefix(p))
	}
	return out
}

func (w *world) wire() {
	w.client, w.server, w.outside = netnstest.New(w.t), netnstest.New(w.t), netnstest.New(w.t)
	netnstest.Connect(w.t,
		netnstest.Port{NS: w.client, Name: "eth0", Addrs: prefixes("10.0.1.1/24", "fd00:1::1/64")},
		netnstest.Port{NS: w.server, Name: "eth0", Addrs: prefixes("10.0.1.2/24", "fd00:1::2/64")})
	netnstest.Connect(w.t,
		netnstest.Port{NS: w.server, Name: "eth1", Addrs: prefixes("10.0.2.2/24", "fd00:2::2/64")},
		netnstest.Port{NS: w.outside, Name: "eth0", Addrs: prefixes("10.0.2.3/24", "fd00:2::3/64")})
	netnstest.Connect(w.t,
		netnstest.Port{NS: w.client, Name: "eth1", Addrs: prefixes("10.0.3.1/24", "fd00:3::1/64")},
		netnstest.Port{NS: w.outside, Name: "eth1", Addrs: prefixes("10.0.3.3/24", "fd00:3::3/64")})
	w.settled(w.client, "fd00:1::1", "fd00:3::1")
	w.settled(w.server, "fd00:1::2", "fd00:2::2")
	w.settled(w.outside, "fd00:2::3", "fd00:3::3")
}

// settled waits for the local routes of a netns's own IPv6 addresses. The kernel
// adds them on a work queue after the link is up, when the addresses themselves
// can be used already; until then what is sent to them goes out to the link.
func (w *world) settled(ns *netnstest.NS, addrs ...string) {
	w.t.Helper()
	missing := make(map[string]struct{})
	for _, a := range addrs {
		missing[a] = struct{}{}
	}
	updates, done := make(chan netlink.RouteUpdate), make(chan struct{})
	defer func() {
		close(done)
		go func() { // the sender may be in the middle of one
			for range updates {
			}
		}()
	}()
	handle := netns.NsHandle(ns.File().Fd())
	w.check(netlink.RouteSubscribeWithOptions(updates, done, netlink.RouteSubscribeOptions{Namespace: &handle, ListExisting: true}))
	for len(missing) > 0 {
		select {
		case u := <-updates:
			if u.Route.Type == unix.RTN_LOCAL && u.Route.Dst != nil {
				delete(missing, u.Route.Dst.IP.String())
			}
		case <-w.ctx.Done():
			w.t.Fatalf("no local routes for %v", missing)
		}
	}
}

func (w *world) startAgent() {
	td, err := spiffeid.ParseTrustDomain(trustDomain)
	w.check(err)
	authority, err := ca.New(ca.Config{TrustDomain: td})
	w.check(err)
	w.fetcher, err = certfetch.New(certfetch.Config{Source: authority})
	w.check(err)
	w.background("fetcher", w.fetcher.Run)

	secrets, err := sds.NewServer(sds.Config{Fetcher: w.fetcher})
	w.check(err)
	rpc := grpc.NewServer()
	secrets.Register(rpc)
	go rpc.Serve(w.listen("unix", "sds"))
	w.t.Cleanup(rpc.Stop)

	w.zds, err = zds.New(zds.Config{Listener: w.listen("unixpacket", "zds")})
	w.check(err)
	w.background("zds", w.zds.Run)

	status := admin.NewStatusServer(w.listen("unix", "admin"), w.status, slog.New(slog.DiscardHandler))
	w.background("admin", status.Run)
}

func (w *world) listen(network, name string) net.Listener {
	w.t.Helper()
	l, err := net.Listen(network, w.socket(name))
	w.check(err)
	w.t.Cleanup(func() { l.Close() })
	return l
}

// background runs something until the test ends.
func (w *world) background(name string, run func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.ctx))
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	w.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Errorf("%s: %v", name, err)
		}
	})
}

func (w *world) status() admin.Status {
	w.mu.Lock()
	defer w.mu.Unlock()
	var s admin.Status
	for _, p := range w.pods {
		s.Pods = append(s.Pods, p)
	}
	return s
}

func (w *world) id(account string) spiffeid.ID {
	w.t.Helper()
	id, err := spiffeid.Parse("spiffe://" + trustDomain + "/ns/shop/sa/" + account)
	w.check(err)
	return id
}

func workload(name string) zds.Workload {
	return zds.Workload{UID: "uid-" + name, Name: name, Namespace: "shop", ServiceAccount: name}
}

// enroll puts a pod in the mesh, in the agent's order: certificate, rules, ZDS.
// Its service account has the pod's name.
func (w *world) enroll(name string, ns *netnstest.NS, ips ...string) error {
	w.t.Helper()
	pod := workload(name)
	w.check(w.fetcher.Register(pod.UID, w.id(name)))
	w.check(w.fetcher.Wait(w.ctx, w.id(name)))
	_, err := w.rules.Apply(w.ctx, ns.Runner(), redirection.DefaultOptions())
	w.check(err)
	status := admin.PodStatus{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, Identity: w.id(name).String()}
	for _, ip := range ips {
		status.IPs = append(status.IPs, netip.MustParseAddr(ip))
	}
	w.mu.Lock()
	w.pods[pod.UID] = status
	w.mu.Unlock()
	return w.zds.Add(w.ctx, pod, ns.File())
}

// enrollBoth puts client and server in the mesh, and waits until the first
// connection between them succeeds.
func (w *world) enrollBoth() {
	w.t.Helper()
	w.check(w.enroll("server", w.server, "10.0.1.2", "fd00:1::2", "10.0.2.2", "fd00:2::2"))
	w.check(w.enroll("client", w.client, "10.0.1.1", "fd00:1::1"))
	w.log.await(w.ctx, w.t, "certificate taken", "identity", w.id("client").String())
	w.log.await(w.ctx, w.t, "certificate taken", "identity", w.id("server").String())
}

// echo serves an echo on addr in the netns, which sends the peer's address
// first and half-closes when the peer does.
func (w *world) echo(ns *netnstest.NS, addr string) {
	w.t.Helper()
	l := ns.ListenTCP(w.t, netip.MustParseAddrPort(addr))
	go func() {
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				io.WriteString(c, c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap().String()+"\n")
				io.Copy(c, c)
				c.CloseWrite()
			}()
		}
	}()
}

func (w *world) dial(ns *netnstest.NS, to string) (*net.TCPConn, error) {
	c, err := ns.DialTCP(w.ctx, netip.AddrPort{}, netip.MustParseAddrPort(to))
	if err != nil {
		return nil, err
	}
	w.t.Cleanup(func() { c.Close() })
	return c, c.SetDeadline(time.Now().Add(20 * time.Second))
}

// listens says whether somebody listens on addr in the netns. The proxy resets
// what was not redirected to it, which may come before the connect is done.
func (w *world) listens(ns *netnstest.NS, addr string) bool {
	w.t.Helper()
	c, err := w.dial(ns, addr)
	switch {
	case err == nil:
		c.Close()
		return true
	case errors.Is(err, syscall.ECONNRESET):
		return true
	case errors.Is(err, syscall.ECONNREFUSED):
		return false
	}
	w.t.Fatal(err)
	return false
}

// talk sends a message, ends its side, and returns what the echo says: the
// address that it saw, and the message.
func (w *world) talk(ns *netnstest.NS, to string) (seen, reply string, err error) {
	c, err := w.dial(ns, to)
	if err != nil {
		return "", "", err
	}
	if _, err := io.WriteString(c, "a message"); err != nil {
		return "", "", err
	}
	// A reset that came meanwhile is what reading tells.
	if err := c.CloseWrite(); err != nil && !errors.Is(err, syscall.ENOTCONN) {
		return "", "", err
	}
	all, err := io.ReadAll(c)
	seen, reply, _ = strings.Cut(string(all), "\n")
	return seen, reply, err
}

// logLines is devproxy's log, line by line.
type logLines struct {
	pipe *io.PipeWriter

	mu      sync.Mutex
	lines   []map[string]any
	changed chan struct{}
}

func newLogLines() *logLines {
	r, w := io.Pipe()
	l := &logLines{pipe: w, changed: make(chan struct{})}
	go l.read(r)
	return l
}

func (l *logLines) Write(b []byte) (int, error) { return l.pipe.Write(b) }

func (l *logLines) read(r io.Reader) {
	for s := bufio.NewScanner(r); s.Scan(); {
		var line map[string]any
		if err := json.Unmarshal(s.Bytes(), &line); err != nil {
			line = map[string]any{"msg": "not JSON", "line": s.Text()}
		}
		l.mu.Lock()
		l.lines = append(l.lines, line)
		close(l.changed)
		l.changed = make(chan struct{})
		l.mu.Unlock()
	}
}

// await returns a line with that message, and values that contain those. It fails the test
// if there is none in time.
func (l *logLines) await(ctx context.Context, t *testing.T, msg string, keysAndValues ...string) map[string]any {
	t.Helper()
	for {
		l.mu.Lock()
		for _, line := range l.lines {
			if matches(line, msg, keysAndValues) {
				l.mu.Unlock()
				return line
			}
		}
		changed := l.changed
		l.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			l.mu.Lock()
			defer l.mu.Unlock()
			for _, line := range l.lines {
				t.Log(line)
			}
			t.Fatalf("no line %q with %q", msg, keysAndValues)
			return nil
		}
	}
}

func matches(line map[string]any, msg string, keysAndValues []string) bool {
	if line["msg"] != msg {
		return false
	}
	for i := 0; i < len(keysAndValues); i += 2 {
		if got, _ := line[keysAndValues[i]].(string); !strings.Contains(got, keysAndValues[i+1]) {
			return false
		}
	}
	return true
}

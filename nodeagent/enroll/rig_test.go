// SPDX-License-Identifier: Apache-2.0

package enroll_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	googlenft "github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/certfetch"
	"ambientd/certfetch/ca"
	"ambientd/certfetch/spiffeid"
	"ambientd/cni-plugin/podevent"
	"ambientd/iptables/nftables"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/enroll"
	"ambientd/nodeagent/hostprobe"
	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/records"
	"ambientd/nodeagent/workload"
	"ambientd/nodeagent/zds"
	"ambientd/nodeagent/zds/zdstest"
	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }

// rig is an Enroller with every part real: kernel, ZDS socket, fetcher, CA.
// Only the pod source is a map, and the CA can be told to misbehave.
type rig struct {
	*enroll.Enroller
	pods    *podMap
	source  *source
	fetcher *certfetch.Fetcher
	proxies *zds.Server
	rules   *nftables.Backend
	records *records.Store
	socket  string
	config  enroll.Config
	logged  chan struct{} // holds a token when a line was logged
}

type option func(*enroll.Config)

func newRig(t *testing.T, opts ...option) *rig {
	t.Helper()
	netnstest.Require(t)
	host, err := podnetns.OpenHost()
	must(t, err)
	t.Cleanup(func() { must(t, host.Close()) })
	td, err := spiffeid.ParseTrustDomain("cluster.local")
	must(t, err)
	authority, err := ca.New(ca.Config{TrustDomain: td})
	must(t, err)
	source := &source{Source: authority}
	fetcher, err := certfetch.New(certfetch.Config{Source: source, Linger: certfetch.DefaultLinger})
	must(t, err)
	socket := filepath.Join(t.TempDir(), "zds.sock")
	listener, err := net.Listen("unixpacket", socket)
	must(t, err)
	proxies, err := zds.New(zds.Config{Listener: listener})
	must(t, err)
	rules, err := nftables.New()
	must(t, err)
	run(t, fetcher.Run)
	run(t, proxies.Run)

	logged := make(signal, 1)
	pods := &podMap{pods: map[string]workload.Pod{}, changed: make(chan struct{}, 1)}
	store, err := records.Open(filepath.Join(t.TempDir(), "pods"))
	must(t, err)
	pins := podnetns.NewPins()
	finder, err := podnetns.NewFinder(podnetns.FinderConfig{Host: host, Holders: pins, ProcRoot: t.TempDir(), NetnsDirs: []string{t.TempDir()}})
	must(t, err)
	defaults := redirection.DefaultOptions()
	probes, err := hostprobe.New(hostprobe.Config{Kernel: rules, Run: netnstest.Self(t).Runner(), Options: hostOptions()})
	must(t, err)
	cfg := enroll.Config{
		Host: host, Pins: pins, Pods: pods, Inventory: pods, Finder: finder, Records: store, Policy: policy(t), Defaults: workload.Defaults{Redirection: defaults}, TrustDomain: td,
		Redirection: rules, BackendName: "nftables", Predecessors: predecessors{rules}, Probes: probes,
		Identities: fetcher, Fetched: fetcher.Identities, Registered: registered(fetcher), NodeProxy: proxies, ProxySet: proxies,
		ExistingConnections: enroll.KeepConnections,
		ProxyTimeout:        5 * time.Second, CertWait: 5 * time.Second, DelProxyWait: 500 * time.Millisecond,
		Logger: slog.New(slog.NewTextHandler(io.MultiWriter(t.Output(), logged), nil)),
	}
	for _, opt := range opts {
		opt(&cfg)
	}
	e, err := enroll.New(cfg)
	must(t, err)
	return &rig{Enroller: e, pods: pods, source: source, fetcher: fetcher, proxies: proxies, rules: rules, records: store, socket: socket, config: cfg, logged: logged}
}

func hostOptions() redirection.HostOptions {
	defaults := redirection.DefaultOptions()
	return redirection.HostOptions{
		ProbeSourceIPv4: defaults.ProbeSourceIPv4, ProbeSourceIPv6: defaults.ProbeSourceIPv6, IPv6: true, Scope: redirection.ProbeScopePod,
	}
}

// predecessors is the nftables backend's part of taking pods over.
type predecessors struct{ *nftables.Backend }

func (p predecessors) RemovePredecessors(ctx context.Context, ns redirection.Netns) (bool, error) {
	foreign, err := p.RemoveForeign(ctx, ns.Do)
	other, otherErr := p.RemoveOther(ctx, ns)
	return foreign || other, errors.Join(err, otherErr)
}

func (p predecessors) RemoveOther(ctx context.Context, ns redirection.Netns) (bool, error) {
	return p.Backend.RemoveOther(ctx, ns.Do)
}

func registered(f *certfetch.Fetcher) func(spiffeid.ID) bool {
	return func(id spiffeid.ID) bool {
		_, err := f.SVID(id)
		return !errors.Is(err, certfetch.ErrNotRegistered)
	}
}

func policy(t *testing.T) workload.Policy {
	selectors, err := workload.ParseSelectors(workload.DefaultSelectors())
	must(t, err)
	return workload.Policy{
		ExcludeNamespaces: []string{"kube-system"},
		AgentNamespace:    "mesh-system", OwnPods: []string{"ztunnel-*"},
		Selectors: selectors,
	}
}

// run starts a part and ends it with the test.
func run(t *testing.T, part func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- part(ctx) }()
	t.Cleanup(func() {
		cancel()
		must(t, <-ended)
	})
}

// proxy connects a node proxy and waits until it has its snapshot.
func (r *rig) proxy(t *testing.T, script zdstest.Script) *zdstest.Peer {
	t.Helper()
	peer, err := zdstest.Dial(t.Context(), r.socket, script)
	must(t, err)
	t.Cleanup(func() { must(t, peer.Close()) })
	must(t, peer.AwaitReady(t.Context()))
	for { // the peer's answers are under way yet
		changed := r.proxies.Changed()
		if peers := r.proxies.Peers(); len(peers) > 0 && peers[0].Ready {
			return peer
		}
		select {
		case <-changed:
		case <-t.Context().Done():
			t.Fatal("the proxy is not ready")
		}
	}
}

// hangUp ends a proxy's connection and waits until the agent knows.
func (r *rig) hangUp(t *testing.T, peer *zdstest.Peer) {
	t.Helper()
	before := len(r.proxies.Peers())
	must(t, peer.Close())
	for {
		changed := r.proxies.Changed()
		if len(r.proxies.Peers()) < before {
			return
		}
		<-changed
	}
}

// meshed puts a pod into the source that the policy selects.
func (r *rig) meshed(name, serviceAccount string) workload.Pod {
	return r.pods.put(workload.Pod{
		UID: "uid-" + name, Namespace: "shop", Name: name, ServiceAccount: serviceAccount,
		NamespaceLabels: map[string]string{"istio.io/dataplane-mode": "ambient"},
	})
}

func (r *rig) add(ctx context.Context, pod workload.Pod, container string, ns *netnstest.NS) podevent.Reply {
	return r.Handle(ctx, request(podevent.CommandAdd, pod, container), ns.File())
}

func (r *rig) del(ctx context.Context, pod workload.Pod, container string, netns *os.File) podevent.Reply {
	return r.Handle(ctx, request(podevent.CommandDel, pod, container), netns)
}

func request(command string, pod workload.Pod, container string) podevent.Request {
	req := podevent.Request{
		Command: command, Network: "net", ContainerID: container, IfName: "eth0",
		Pod: podevent.Pod{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
	}
	if command == podevent.CommandAdd {
		req.IPs = []netip.Addr{netip.MustParseAddr("10.0.0.9"), netip.MustParseAddr("fd00::9")}
	}
	return req
}

// running makes a pod that runs, with an address of its own, and tells the agent of
// it by an ADD, which enrols or skips it.
func (r *rig) running(t *testing.T, pod workload.Pod, number int) *netnstest.NS {
	t.Helper()
	ns := netnstest.New(t)
	req := request(podevent.CommandAdd, pod, "c-"+pod.Name)
	req.IPs = []netip.Addr{netip.AddrFrom4([4]byte{10, 1, byte(number >> 8), byte(number)})}
	req.NetnsPath = mounted(t, ns)
	holding(t, ns, req.IPs[0])
	if reply := r.Handle(t.Context(), req, ns.File()); reply.Error != nil {
		t.Fatal(reply.Error)
	}
	return ns
}

// holding gives the netns an address.
func holding(t *testing.T, ns *netnstest.NS, ip netip.Addr) {
	t.Helper()
	ns.Do(t, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.AddrAdd(lo, &netlink.Addr{IPNet: netlink.NewIPNet(ip.AsSlice())})
	})
}

// mounted is a file that is the netns, as container runtimes make one.
func mounted(t *testing.T, ns *netnstest.NS) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "netns")
	mountAt(t, ns, path)
	return path
}

func mountAt(t *testing.T, ns *netnstest.NS, path string) {
	t.Helper()
	must(t, os.WriteFile(path, nil, 0o600))
	must(t, unix.Mount(fmt.Sprintf("/proc/self/fd/%d", ns.File().Fd()), path, "", unix.MS_BIND, ""))
	t.Cleanup(func() { must(t, unix.Unmount(path, unix.MNT_DETACH)) })
}

// lookingIn has running pods looked for among the files of a directory: no process leads to one.
func lookingIn(t *testing.T, dir string) option {
	t.Helper()
	return func(c *enroll.Config) {
		finder, err := podnetns.NewFinder(podnetns.FinderConfig{Host: c.Host, Holders: c.Pins, ProcRoot: t.TempDir(), NetnsDirs: []string{dir}})
		must(t, err)
		c.Finder = finder
	}
}

// follow runs the part of the Enroller that follows the inventory.
func (r *rig) follow(t *testing.T) { run(t, r.Run) }

// await returns once cond holds of the log of the agent. Every change of a pod
// makes a line.
func (r *rig) await(t *testing.T, cond func() bool) {
	t.Helper()
	for !cond() {
		select {
		case <-r.logged:
		case <-t.Context().Done():
			t.Fatal("awaiting a state of the agent: the test has ended")
		case <-time.After(20 * time.Second):
			t.Fatalf("awaiting a state of the agent; status shows %+v", r.Pods())
		}
	}
}

// enrolled enrols a pod that must come through.
func (r *rig) enrolled(t *testing.T, name, serviceAccount, container string) (workload.Pod, *netnstest.NS) {
	t.Helper()
	pod, ns := r.meshed(name, serviceAccount), netnstest.New(t)
	want(t, r.add(t.Context(), pod, container, ns), podevent.ResultEnrolled)
	return pod, ns
}

// assertNothing fails unless no part of the pod is left: not in the kernel, not
// in the registry, not with the proxy, not in status.
func (r *rig) assertNothing(t *testing.T, peer *zdstest.Peer, pod workload.Pod, ns *netnstest.NS) {
	t.Helper()
	assertNoRules(t, ns)
	for _, s := range r.Pods() {
		if s.UID == pod.UID {
			t.Errorf("status still shows %+v", s)
		}
	}
	identity, err := spiffeid.Parse("spiffe://cluster.local/ns/" + pod.Namespace + "/sa/" + pod.ServiceAccount)
	must(t, err)
	if _, err := r.fetcher.SVID(identity); err == nil {
		t.Errorf("%s is still served", identity)
	}
	if peer != nil {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		must(t, peer.Await(ctx, func(s zdstest.State) bool { _, has := s.Pods[pod.UID]; return !has }))
	}
}

func assertNoRules(t *testing.T, ns *netnstest.NS) {
	t.Helper()
	ns.Do(t, func() error {
		conn, err := googlenft.New()
		if err != nil {
			return err
		}
		tables, err := conn.ListTables()
		if err != nil {
			return err
		}
		for _, table := range tables {
			if table.Name != redirection.HostTable { // the host's netns has that
				t.Errorf("table %s is still there", table.Name)
			}
		}
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			rules, err := netlink.RuleList(family)
			if err != nil {
				return err
			}
			for _, rule := range rules {
				if rule.Table == int(redirection.RouteTable) {
					t.Errorf("policy rule is still there: %v", rule)
				}
			}
			routes, err := netlink.RouteListFiltered(family, &netlink.Route{Table: int(redirection.RouteTable)}, netlink.RT_FILTER_TABLE)
			if err != nil {
				return err
			}
			for _, route := range routes {
				t.Errorf("route is still there: %v", route)
			}
		}
		return nil
	})
}

func (r *rig) assertRules(t *testing.T, ns *netnstest.NS) {
	t.Helper()
	_, differences, err := r.rules.Verify(t.Context(), ns.Runner(), redirection.DefaultOptions())
	must(t, err)
	for _, d := range differences {
		t.Errorf("rules differ: %s", d)
	}
}

func (r *rig) statusOf(t *testing.T, pod workload.Pod) admin.PodStatus {
	t.Helper()
	for _, s := range r.Pods() {
		if s.UID == pod.UID {
			return s
		}
	}
	t.Fatalf("status does not show pod %s", pod)
	return admin.PodStatus{}
}

func want(t *testing.T, reply podevent.Reply, result string) {
	t.Helper()
	if reply.Error != nil {
		t.Fatalf("the reply is error %d: %s", reply.Error.Code, reply.Error)
	}
	if reply.Result != result {
		t.Fatalf("the reply is %q (%s), want %q", reply.Result, reply.Reason, result)
	}
}

func wantCode(t *testing.T, reply podevent.Reply, code uint) {
	t.Helper()
	if reply.Error == nil {
		t.Fatalf("the reply is %q (%s), want error %d", reply.Result, reply.Reason, code)
	}
	if reply.Error.Code != code {
		t.Fatalf("the reply is error %d (%s), want %d", reply.Error.Code, reply.Error, code)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// signal is a writer that tells of each write.
type signal chan struct{}

func (s signal) Write(b []byte) (int, error) {
	select {
	case s <- struct{}{}:
	default:
	}
	return len(b), nil
}

// podMap is a pod source: what the API knows.
type podMap struct {
	changed chan struct{}
	mu      sync.Mutex
	pods    map[string]workload.Pod // by namespace/name

	incomplete bool
}

// setComplete adds the last pod.
func (m *podMap) setComplete(pod workload.Pod) {
	m.mu.Lock()
	m.incomplete = false
	m.mu.Unlock()
	m.put(pod)
}

func (m *podMap) put(pod workload.Pod) workload.Pod {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pods[pod.String()] = pod
	m.signal()
	return pod
}

func (m *podMap) remove(pod workload.Pod) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.pods, pod.String())
	m.signal()
}

func (m *podMap) signal() {
	select {
	case m.changed <- struct{}{}:
	default:
	}
}

func (m *podMap) Changed() <-chan struct{} { return m.changed }

func (m *podMap) List() ([]workload.Pod, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Values(m.pods)), !m.incomplete
}

func (m *podMap) Lookup(_ context.Context, namespace, name, _ string) (workload.Pod, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	pod, ok := m.pods[namespace+"/"+name]
	if !ok {
		return workload.Pod{}, fmt.Errorf("no pod %s/%s in the source", namespace, name)
	}
	return pod, nil
}

// source is the built-in CA, which a test can make refuse or wait, and which
// counts what it was asked for.
type source struct {
	certfetch.Source
	mu    sync.Mutex
	deny  map[string]bool
	gate  chan struct{} // when set, every issuance waits until it is closed
	asked map[string]int
}

func (s *source) Issue(ctx context.Context, id spiffeid.ID, csr []byte, ttl time.Duration) (certfetch.Issued, error) {
	s.mu.Lock()
	if s.asked == nil {
		s.asked = map[string]int{}
	}
	s.asked[id.ServiceAccount()]++
	deny, gate := s.deny[id.ServiceAccount()], s.gate
	s.mu.Unlock()
	if deny {
		return certfetch.Issued{}, fmt.Errorf("account %s: %w", id.ServiceAccount(), certfetch.ErrDenied)
	}
	if gate != nil {
		select {
		case <-gate:
		case <-ctx.Done():
			return certfetch.Issued{}, ctx.Err()
		}
	}
	return s.Source.Issue(ctx, id, csr, ttl)
}

func (s *source) timesAsked(serviceAccount string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked[serviceAccount]
}

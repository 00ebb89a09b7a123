// SPDX-License-Identifier: Apache-2.0

package audit_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/cni-plugin/podevent"
	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/agent"
	"ambientd/nodeagent/zds/zdstest"
	"ambientd/tools/netnstest"
)

// patience bounds what a test awaits; nothing takes this long.
const patience = 30 * time.Second

// node is a whole agent with its node proxy, on a real kernel.
type node struct {
	t    *testing.T
	cfg  agent.Config
	http string // host:port
	logs *logs
	pods *atomic.Int32 // that were added
}

// logs keeps the agent's log, which is JSON.
type logs struct {
	mu    sync.Mutex
	lines []map[string]any
	more  chan struct{} // closed when there is another line
}

func (l *logs) Write(line []byte) (int, error) {
	var fields map[string]any
	if err := json.Unmarshal(line, &fields); err != nil {
		return 0, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, fields)
	close(l.more)
	l.more = make(chan struct{})
	return len(line), nil
}

func (l *logs) next() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.more
}

// with returns the lines with that message, and the key at that value.
func (l *logs) with(msg, key, value string) (found []map[string]any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range l.lines {
		if line["msg"] == msg && (key == "" || line[key] == value) {
			found = append(found, line)
		}
	}
	return found
}

// await waits for a line of the log and returns it.
func (n *node) await(msg, key, value string) map[string]any {
	n.t.Helper()
	deadline := time.After(patience)
	for {
		next := n.logs.next()
		if found := n.logs.with(msg, key, value); len(found) > 0 {
			return found[0]
		}
		select {
		case <-next:
		case <-deadline:
			n.t.Fatalf("no line %q with %s %s in the log", msg, key, value)
		}
	}
}

// startNode runs an agent until the test ends.
func startNode(t *testing.T, change func(*agent.Config)) *node {
	t.Helper()
	netnstest.Require(t)
	dir, err := os.MkdirTemp("", "ambientd") // not t.TempDir: a socket's path has room for 107 bytes
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	n := &node{t: t, cfg: agent.Default(), logs: &logs{more: make(chan struct{})}, pods: new(atomic.Int32)}
	n.cfg.NodeName, n.cfg.RunDir, n.cfg.ZDSSocket = "node-1", filepath.Join(dir, "run"), filepath.Join(dir, "zds.sock")
	n.cfg.PodsFrom, n.cfg.HTTPAddr = "manifests="+filepath.Join(dir, "pods"), "127.0.0.1:0"
	n.cfg.Logger = slog.New(slog.NewJSONHandler(io.MultiWriter(t.Output(), n.logs), &slog.HandlerOptions{Level: slog.LevelDebug}))
	must(t, os.Mkdir(filepath.Join(dir, "pods"), 0o755))
	must(t, os.MkdirAll("/run/netns", 0o755))
	change(&n.cfg)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- agent.Run(ctx, n.cfg) }()
	t.Cleanup(func() {
		cancel()
		must(t, <-ended)
	})
	n.http = n.await("ready", "", "")["http_addr"].(string)
	peer, err := zdstest.Dial(t.Context(), n.cfg.ZDSSocket, zdstest.AckAll)
	must(t, err)
	t.Cleanup(func() { peer.Close() })
	must(t, peer.AwaitReady(t.Context()))
	n.manifest("shop", "apiVersion: v1\nkind: Namespace\nmetadata: {name: shop, labels: {istio.io/dataplane-mode: ambient}}\n")
	return n
}

func (n *node) manifest(name, text string) {
	n.t.Helper()
	_, dir, _ := strings.Cut(n.cfg.PodsFrom, "=")
	must(n.t, os.WriteFile(filepath.Join(dir, name+".yaml"), []byte(text), 0o600))
}

// pod is a pod that runs.
type pod struct {
	name, uid string
	ip        netip.Addr
	path      string // of its netns, where the runtime keeps it
	ns        *netnstest.NS
}

// add starts a pod, enrolled.
func (n *node) add() *pod {
	n.t.Helper()
	number := n.pods.Add(1)
	p := &pod{name: fmt.Sprint("web-", number), uid: fmt.Sprint("uid-", number), ip: netip.AddrFrom4([4]byte{10, 1, 0, byte(number)})}
	n.manifest(p.name, fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: %s, namespace: shop, uid: %s}\nspec: {serviceAccountName: web}\n", p.name, p.uid))
	p.ns, p.path = n.sandbox(p.ip), filepath.Join("/run/netns", fmt.Sprintf("cni-%d-%s", time.Now().UnixNano(), p.name))
	n.mount(p.ns, p.path)
	reply, err := podevent.Call(n.t.Context(), n.cfg.CNISocketPath(), podevent.Request{
		Command: podevent.CommandAdd, Network: "net", ContainerID: "sandbox-of-" + p.name, IfName: "eth0",
		Pod: podevent.Pod{Namespace: "shop", Name: p.name, UID: p.uid}, IPs: []netip.Addr{p.ip}, NetnsPath: p.path,
	}, p.ns.File())
	must(n.t, err)
	if reply.Result != podevent.ResultEnrolled {
		n.t.Fatalf("ADD: %+v", reply)
	}
	return p
}

// sandbox makes a netns that holds an address.
func (n *node) sandbox(ip netip.Addr) *netnstest.NS {
	n.t.Helper()
	ns := netnstest.New(n.t)
	ns.Do(n.t, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.AddrAdd(lo, &netlink.Addr{IPNet: netlink.NewIPNet(ip.AsSlice())})
	})
	return ns
}

// mount makes path be the netns, as container runtimes do, until the test ends.
func (n *node) mount(ns *netnstest.NS, path string) {
	n.t.Helper()
	must(n.t, os.WriteFile(path, nil, 0o600))
	must(n.t, unix.Mount(fmt.Sprintf("/proc/self/fd/%d", ns.File().Fd()), path, "", unix.MS_BIND, ""))
	n.t.Cleanup(func() {
		must(n.t, unix.Unmount(path, unix.MNT_DETACH))
		must(n.t, os.Remove(path))
	})
}

// arm returns once changes in the netns prompt audits: it makes some that mean nothing
// until one has.
func (n *node) arm(ns *netnstest.NS, audited func() time.Time) {
	n.t.Helper()
	began, deadline := time.Now(), time.Now().Add(patience)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		ns.Do(n.t, func() error {
			rule := netlink.NewRule()
			rule.Priority, rule.Table = 12345, 12345
			if err := netlink.RuleAdd(rule); err != nil {
				return err
			}
			return netlink.RuleDel(rule)
		})
		for range 15 {
			if audited().After(began) {
				return
			}
			<-tick.C
		}
		if time.Now().After(deadline) {
			n.t.Fatal("changes do not prompt audits")
		}
	}
}

func (n *node) status() admin.Status {
	n.t.Helper()
	status, err := admin.Fetch(n.t.Context(), n.cfg.AdminSocketPath())
	must(n.t, err)
	return status
}

func (n *node) podStatus(p *pod) admin.PodStatus {
	n.t.Helper()
	for _, s := range n.status().Pods {
		if s.UID == p.uid {
			return s
		}
	}
	n.t.Fatalf("status does not show pod %s", p.name)
	return admin.PodStatus{}
}

// repairs is a metric, of each part before its first repair too.
func (n *node) repairs(part string) int {
	n.t.Helper()
	resp, err := http.Get("http://" + n.http + "/metrics")
	must(n.t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	must(n.t, err)
	for line := range strings.Lines(string(body)) {
		if value, ok := strings.CutPrefix(line, fmt.Sprintf("ambientd_repairs_total{part=%q} ", part)); ok {
			count, err := strconv.Atoi(strings.TrimSpace(value))
			must(n.t, err)
			return count
		}
	}
	n.t.Fatalf("no counter of repairs of %q, which has to be there from the start", part)
	return 0
}

// run runs a program in the netns, nil for the host's.
func run(t *testing.T, ns *netnstest.NS, name string, args ...string) string {
	t.Helper()
	if ns == nil {
		ns = netnstest.Self(t)
	}
	path, err := exec.LookPath(name)
	if err != nil {
		path = filepath.Join("/usr/sbin", name)
		if _, err := os.Stat(path); err != nil {
			t.Fatalf("needs %s, which make test installs", name)
		}
	}
	var out []byte
	ns.Do(t, func() error {
		cmd := exec.CommandContext(context.WithoutCancel(t.Context()), path, args...) // cleanups run programs, too
		var err error
		if out, err = cmd.CombinedOutput(); err != nil {
			err = fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, bytes.TrimSpace(out))
		}
		return err
	})
	return string(out)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

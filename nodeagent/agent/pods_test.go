// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/cni-plugin/podevent"
	"ambientd/iptables/xtables"

	"ambientd/iptables/redirection"
	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/zds/zdstest"
	"ambientd/tools/netnstest"
)

// sandbox is what a runtime has made for a pod.
type sandbox struct {
	name, uid string
	ip        netip.Addr
	path      string // of its netns
	ns        *netnstest.NS
}

// newSandbox makes a sandbox whose netns is where runtimes keep them, and connected to
// the host.
func newSandbox(t *testing.T, number int) *sandbox {
	t.Helper()
	s := &sandbox{
		name: fmt.Sprint("web-", number), uid: fmt.Sprint("uid-", number), ip: netip.AddrFrom4([4]byte{10, 1, byte(number), 2}), ns: netnstest.New(t),
	}
	gateway := netip.AddrFrom4([4]byte{10, 1, byte(number), 1})
	netnstest.Connect(t,
		netnstest.Port{NS: netnstest.Self(t), Name: fmt.Sprint("veth", number), Addrs: []netip.Prefix{netip.PrefixFrom(gateway, 24)}},
		netnstest.Port{NS: s.ns, Name: "eth0", Addrs: []netip.Prefix{netip.PrefixFrom(s.ip, 24)}, Gateways: []netip.Addr{gateway}})
	t.Cleanup(func() {
		link, err := netlink.LinkByName(fmt.Sprint("veth", number))
		if err == nil {
			err = netlink.LinkDel(link)
		}
		must(t, err)
	})
	must(t, os.MkdirAll("/run/netns", 0o755))
	s.path = filepath.Join("/run/netns", "cni-"+s.name)
	must(t, os.WriteFile(s.path, nil, 0o600))
	must(t, unix.Mount(fmt.Sprintf("/proc/self/fd/%d", s.ns.File().Fd()), s.path, "", unix.MS_BIND, ""))
	t.Cleanup(func() { s.unmount(t) })
	return s
}

// unmount takes the netns from where the runtime keeps it, as it does after DEL.
func (s *sandbox) unmount(t *testing.T) {
	t.Helper()
	if _, err := os.Lstat(s.path); errors.Is(err, fs.ErrNotExist) {
		return
	}
	must(t, unix.Unmount(s.path, unix.MNT_DETACH))
	must(t, os.Remove(s.path))
}

// describe writes the pod's manifest, as of a pod that runs.
func (s *sandbox) describe(r *running, annotations string) {
	r.tb.Helper()
	r.manifest(s.name, fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: shop, uid: %s, annotations: {%s}}
spec: {serviceAccountName: web, containers: [{name: app, image: app, readinessProbe: {tcpSocket: {port: 8080}}}]}
status: {phase: Running, podIPs: [{ip: %s}]}
`, s.name, s.uid, annotations, s.ip))
}

// enrol starts the pod: its ADD enrols it.
func (s *sandbox) enrol(r *running, annotations string) {
	r.tb.Helper()
	s.describe(r, annotations)
	if reply := s.call(r, podevent.CommandAdd); reply.Result != podevent.ResultEnrolled {
		r.tb.Fatalf("ADD: %+v", reply)
	}
}

func (s *sandbox) call(r *running, command string) podevent.Reply {
	r.tb.Helper()
	req := podevent.Request{
		Command: command, Network: "net", ContainerID: "sandbox-of-" + s.name, IfName: "eth0", NetnsPath: s.path,
		Pod: podevent.Pod{Namespace: "shop", Name: s.name, UID: s.uid},
	}
	if command == podevent.CommandAdd {
		req.IPs = []netip.Addr{s.ip}
	}
	reply, err := podevent.Call(r.tb.Context(), r.cfg.CNISocketPath(), req, s.ns.File())
	if err != nil {
		r.tb.Fatal(err)
	}
	return reply
}

// proxy connects a node proxy that acks everything, and waits until it has its snapshot.
func (r *running) proxy(t *testing.T) *zdstest.Peer {
	t.Helper()
	peer, err := zdstest.Dial(t.Context(), r.cfg.ZDSSocket, zdstest.AckAll)
	must(t, err)
	t.Cleanup(func() { peer.Close() })
	must(t, peer.AwaitReady(t.Context()))
	return peer
}

// awaitStatus polls until the agent's status is as wanted.
func (r *running) awaitStatus(what string, wanted func(admin.Status) bool) admin.Status {
	r.tb.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); ; <-tick.C {
		status := r.status()
		if wanted(status) {
			return status
		}
		if time.Now().After(deadline) {
			r.tb.Fatalf("the status never shows %s: %+v", what, status)
		}
	}
}

// allEnrolled is the status of n pods that are wholly in the mesh.
func allEnrolled(n int) func(admin.Status) bool {
	return func(s admin.Status) bool {
		for _, pod := range s.Pods {
			if pod.State != admin.PodEnrolled {
				return false
			}
		}
		return len(s.Pods) == n
	}
}

func (r *running) verify(req admin.VerifyRequest) admin.VerifyResult {
	r.tb.Helper()
	result, err := admin.Verify(r.tb.Context(), r.cfg.AdminSocketPath(), req)
	if err != nil {
		r.tb.Fatal(err)
	}
	return result
}

// program runs a program in a netns and returns what it prints.
func program(t *testing.T, ns *netnstest.NS, stdin, name string, args ...string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		path = filepath.Join("/usr/sbin", name)
		if _, err := os.Stat(path); err != nil {
			t.Skip("needs ", name)
		}
	}
	var out []byte
	ns.Do(t, func() error {
		cmd := exec.CommandContext(context.WithoutCancel(t.Context()), path, args...) // cleanups run programs, too
		cmd.Stdin = strings.NewReader(stdin)
		var err error
		if out, err = cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, bytes.TrimSpace(out))
		}
		return nil
	})
	return string(out)
}

// everything is all that any means has in a netns: packet rules, policy rules, routes
// of the table.
func everything(t *testing.T, ns *netnstest.NS) string {
	t.Helper()
	text := program(t, ns, "", "nft", "list", "ruleset")
	for family, save := range map[redirection.Families]string{redirection.IPv4: "iptables-legacy-save", redirection.IPv6: "ip6tables-legacy-save"} {
		tables, err := xtables.LegacyTables(ns.Runner(), family)
		if !errors.Is(err, fs.ErrPermission) { // the first netns of a user namespace may not show them
			must(t, err)
		}
		if len(tables) > 0 {
			text += program(t, ns, "", save)
		}
	}
	for _, family := range []string{"-4", "-6"} {
		text += program(t, ns, "", "ip", family, "rule", "list", "priority", fmt.Sprint(redirection.RulePriority))
		text += program(t, ns, "", "ip", family, "route", "list", "table", "all")
	}
	return text
}

// traces are words that stand for redirection by anybody.
func traces() []string {
	return []string{"ambientd", "AMBIENTD", "ISTIO", "istio", "15001", "fwmark", fmt.Sprint("table ", redirection.RouteTable)}
}

func wantNoTraces(t *testing.T, ns *netnstest.NS) {
	t.Helper()
	text := everything(t, ns)
	for _, trace := range traces() {
		if strings.Contains(text, trace) {
			t.Errorf("%q is left:\n%s", trace, text)
		}
	}
}

// clearHost takes what agents have left in the host's netns, after a test that began
// with none.
func clearHost(t *testing.T) {
	t.Helper()
	t.Cleanup(func() {
		program(t, netnstest.Self(t), "", "nft", "flush", "ruleset")
		for _, set := range []string{redirection.ProbeSetIPv4, redirection.ProbeSetIPv6} {
			_ = netlink.IpsetDestroy(set) // it may not be there
		}
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

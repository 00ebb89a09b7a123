// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"ambientd/nodeagent/zds"
	"ambientd/tools/netnstest"
)

func TestBetweenPodsOfTheMesh(t *testing.T) {
	w := newWorld(t)
	w.enrollBoth()
	for _, tc := range []struct{ listen, to, from string }{
		{"0.0.0.0:8080", "10.0.1.2:8080", "10.0.1.1"},
		{"[::]:8081", "[fd00:1::2]:8081", "fd00:1::1"},
	} {
		w.echo(w.server, tc.listen)
		seen, reply, err := w.talk(w.client, tc.to)
		if err != nil || reply != "a message" {
			t.Fatalf("to %s: got %q, %v", tc.to, reply, err)
		}
		if seen != tc.from {
			t.Errorf("to %s: the application saw %s, want the client's own address %s", tc.to, seen, tc.from)
		}
		identities := []string{
			"dst", tc.to, "protocol", "hbone",
			"source_identity", w.id("client").String(), "destination_identity", w.id("server").String(),
		}
		w.log.await(w.ctx, t, "connection", append([]string{"direction", "outbound", "pod", "shop/client"}, identities...)...)
		w.log.await(w.ctx, t, "connection", append([]string{"direction", "inbound", "pod", "shop/server"}, identities...)...)
	}
}

func TestOriginalSourceCanBeOff(t *testing.T) {
	w := newWorld(t, "--original-source=false")
	w.enrollBoth()
	w.echo(w.server, "0.0.0.0:8080")
	seen, reply, err := w.talk(w.client, "10.0.1.2:8080")
	if err != nil || reply != "a message" || seen != "10.0.1.2" {
		t.Errorf("the application saw %s, got %q, %v", seen, reply, err)
	}
}

func TestPlaintextFromOutside(t *testing.T) {
	w := newWorld(t)
	w.enrollBoth()
	for _, tc := range []struct{ listen, to, from string }{
		{"0.0.0.0:8080", "10.0.2.2:8080", "10.0.2.3"},
		{"[::]:8081", "[fd00:2::2]:8081", "fd00:2::3"},
	} {
		w.echo(w.server, tc.listen)
		seen, reply, err := w.talk(w.outside, tc.to)
		if err != nil || reply != "a message" || seen != tc.from {
			t.Errorf("to %s: the application saw %s, got %q, %v", tc.to, seen, reply, err)
		}
		w.log.await(w.ctx, t, "connection", "direction", "inbound-plaintext", "pod", "shop/server", "src", "", "dst", tc.to,
			"protocol", "tcp", "destination_identity", w.id("server").String())
	}
}

func TestPassthrough(t *testing.T) {
	w := newWorld(t)
	w.enrollBoth()
	for _, tc := range []struct{ listen, to, from string }{
		{"0.0.0.0:8080", "10.0.3.3:8080", "10.0.3.1"},
		{"[::]:8081", "[fd00:3::3]:8081", "fd00:3::1"},
	} {
		w.echo(w.outside, tc.listen)
		seen, reply, err := w.talk(w.client, tc.to)
		if err != nil || reply != "a message" || seen != tc.from {
			t.Errorf("to %s: the application saw %s, got %q, %v", tc.to, seen, reply, err)
		}
		w.log.await(w.ctx, t, "connection", "direction", "passthrough", "pod", "shop/client", "dst", tc.to, "protocol", "tcp")
	}
	// What nobody listens on is refused.
	if _, _, err := w.talk(w.client, "10.0.3.3:9"); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("to a closed port: %v, want a reset", err)
	}
}

// Without a certificate for the source, or without knowing who the destination
// is, nothing arrives: not in plaintext either.
func TestFailsClosed(t *testing.T) {
	for _, tc := range []struct {
		name  string
		spoil func(w *world)
		want  string // in the log
	}{
		{"the source's identity is withdrawn", func(w *world) {
			w.fetcher.Unregister(workload("client").UID)
			w.log.await(w.ctx, t, "certificate gone", "identity", w.id("client").String())
		}, "no certificate"},
		{"the destination's identity is withdrawn", func(w *world) {
			w.fetcher.Unregister(workload("server").UID)
			w.log.await(w.ctx, t, "certificate gone", "identity", w.id("server").String())
		}, "connecting to"},
		{"the destination is somebody else", func(w *world) {
			w.mu.Lock()
			defer w.mu.Unlock()
			status := w.pods["uid-server"]
			status.Identity = w.id("other").String()
			w.pods["uid-server"] = status
		}, "connecting to"},
		{"the agent's answer makes no sense", func(w *world) {
			w.mu.Lock()
			defer w.mu.Unlock()
			status := w.pods["uid-server"]
			status.Identity = "nonsense"
			w.pods["uid-server"] = status
		}, "asking whether"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			w.enrollBoth()
			l := w.server.ListenTCP(t, netip.MustParseAddrPort("0.0.0.0:8080"))
			tc.spoil(w)
			if _, _, err := w.talk(w.client, "10.0.1.2:8080"); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("got %v, want a reset", err)
			}
			w.log.await(w.ctx, t, "connection", "direction", "outbound", "dst", "10.0.1.2:8080", "err", tc.want)
			l.SetDeadline(time.Now()) // whatever came would be in the backlog
			if c, err := l.Accept(); err == nil {
				t.Errorf("a connection from %s arrived", c.RemoteAddr())
			}
		})
	}
}

func TestThePodCannotBeUsedAsARelay(t *testing.T) {
	w := newWorld(t)
	w.enrollBoth()
	// The proxy's own listeners, from outside, are redirected like any port.
	for to, reason := range map[string]string{
		"10.0.2.2:15001": "the destination is the proxy itself",
		"10.0.2.2:15053": "the destination is the proxy itself",
		"10.0.2.2:15006": "not redirected", // to where it was going anyway
	} {
		if _, _, err := w.talk(w.outside, to); err == nil {
			t.Errorf("to %s: was served", to)
		}
		w.log.await(w.ctx, t, "connection", "direction", "inbound-plaintext", "err", reason)
	}
	// And from within the pod, where no rule redirects.
	if _, _, err := w.talk(w.client, "127.0.0.1:15001"); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("to the outbound listener itself: %v, want a reset", err)
	}
}

func TestDNS(t *testing.T) {
	w := newWorld(t)
	w.enrollBoth()
	const query = "\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01a\x02bc\x00\x00\x01\x00\x01"
	for _, resolver := range []string{"10.0.3.3:53", "[fd00:3::3]:53"} {
		c, err := w.client.DialUDP(w.ctx, netip.AddrPort{}, netip.MustParseAddrPort(resolver))
		w.check(err)
		defer c.Close()
		w.check(c.SetDeadline(time.Now().Add(20 * time.Second)))
		if _, err := c.Write([]byte(query)); err != nil {
			t.Fatal(err)
		}
		answer := make([]byte, 512)
		n, err := c.Read(answer)
		if err != nil || n != len(query) || string(answer[:4]) != "\x12\x34\x83\x80" {
			t.Errorf("%s: answer %q, %v; want a truncated one", resolver, answer[:n], err)
		}
		// As a stub resolver does then.
		w.echo(w.outside, resolver)
		if _, reply, err := w.talk(w.client, resolver); err != nil || reply != "a message" {
			t.Errorf("%s over TCP: got %q, %v", resolver, reply, err)
		}
		w.log.await(w.ctx, t, "connection", "direction", "passthrough", "dst", resolver)
	}
}

func TestRefusedPods(t *testing.T) {
	w := newWorld(t, "--nack", "shop/bad-*", "--nack", "other/*")
	var nack *zds.NackError
	if err := w.enroll("bad-one", w.client); !errors.As(err, &nack) || !strings.Contains(nack.Reason, "shop/bad-*") {
		t.Errorf("Add = %v, want a NACK that names the pattern", err)
	}
	w.log.await(w.ctx, t, "workload refused", "pod", "shop/bad-one", "uid", "uid-bad-one")
	if w.listens(w.client, "127.0.0.1:15001") {
		t.Error("somebody listens in the refused pod")
	}
	w.check(w.enroll("good", w.server))
}

// A denied pod is served, and nobody gets through to its application: neither from
// the mesh nor from outside.
func TestDeniedPods(t *testing.T) {
	w := newWorld(t, "--deny", "shop/server")
	w.enrollBoth()
	w.echo(w.server, "0.0.0.0:8080")
	for _, from := range []struct {
		ns *netnstest.NS
		to string
	}{{w.client, "10.0.1.2:8080"}, {w.outside, "10.0.2.2:8080"}} {
		if _, reply, err := w.talk(from.ns, from.to); reply != "" {
			t.Errorf("to %s: the application answered %q, %v", from.to, reply, err)
		}
	}
	w.log.await(w.ctx, t, "connection", "pod", "shop/server", "err", "pattern shop/server", "direction", "inbound-plaintext")
	w.log.await(w.ctx, t, "connection", "pod", "shop/server", "err", "pattern shop/server", "protocol", "hbone")
}

func TestDel(t *testing.T) {
	w := newWorld(t)
	w.enrollBoth()
	w.echo(w.server, "0.0.0.0:8080")
	c, err := w.dial(w.client, "10.0.1.2:8080")
	w.check(err)
	if _, err := io.ReadFull(c, make([]byte, len("10.0.1.1\n"))); err != nil {
		t.Fatal(err)
	}
	w.check(w.zds.Del(w.ctx, workload("server").UID))
	for _, port := range []string{"15001", "15006", "15008", "15053"} {
		for _, host := range []string{"127.0.0.1", "[::1]"} {
			if w.listens(w.server, host+":"+port) {
				t.Errorf("somebody listens on %s:%s", host, port)
			}
		}
	}
	w.log.await(w.ctx, t, "workload removed", "pod", "shop/server", "uid", "uid-server")
	// The open connection gets a moment, and then ends in an error.
	if n, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("read %d bytes, %v; want the connection to break", n, err)
	}
	w.log.await(w.ctx, t, "connection broken", "pod", "shop/client")
	w.check(w.zds.Del(w.ctx, workload("server").UID))
}

func TestAddAgain(t *testing.T) {
	w := newWorld(t)
	w.enrollBoth()
	w.echo(w.server, "0.0.0.0:8080")
	c, err := w.dial(w.client, "10.0.1.2:8080")
	w.check(err)
	if _, err := io.ReadFull(c, make([]byte, len("10.0.1.1\n"))); err != nil {
		t.Fatal(err)
	}
	w.check(w.zds.Add(w.ctx, workload("client"), w.client.File()))
	if _, err := io.WriteString(c, "still"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, len("still"))); err != nil {
		t.Errorf("after an add of the same netns: %v", err)
	}
	// Another sandbox of the same pod.
	other := netnstest.New(t)
	w.check(w.zds.Add(w.ctx, workload("client"), other.File()))
	if !w.listens(other, "127.0.0.1:15001") {
		t.Error("nobody listens in the new netns")
	}
	if w.listens(w.client, "127.0.0.1:15001") {
		t.Error("somebody listens in the old netns")
	}
}

func TestAPodWithoutIPv6(t *testing.T) {
	w := newWorld(t)
	ns := netnstest.New(t)
	ns.Do(t, func() error { return os.WriteFile("/proc/sys/net/ipv6/conf/all/disable_ipv6", []byte("1"), 0) })
	w.check(w.enroll("four", ns))
	if !w.listens(ns, "127.0.0.1:15001") {
		t.Error("nobody listens in the pod")
	}
}

func TestFlags(t *testing.T) {
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"--trust-domain", "NO"}, "--trust-domain"},
		{[]string{"--nack", "["}, "--nack"},
		{[]string{"--deny", "["}, "--deny"},
		{[]string{"--log-format", "xml"}, "--log-format"},
		{[]string{"stray"}, "stray"},
		{[]string{"--unknown"}, "unknown"},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // in case that it is accepted
		var stderr bytes.Buffer
		err := run(ctx, tc.args, &stderr)
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%q: %v, want an error about %s", tc.args, err, tc.want)
		}
		code := report(err, &stderr)
		if lines := strings.Split(strings.TrimSpace(stderr.String()), "\n"); code != 2 || !strings.HasSuffix(lines[len(lines)-1], "; see `devproxy --help`") ||
			strings.Count(stderr.String(), tc.want) != 1 || strings.Contains(stderr.String(), "Usage") {
			t.Errorf("%q: exit code %d and, on standard error, %q", tc.args, code, stderr.String())
		}
	}
	var help bytes.Buffer
	if code := report(run(t.Context(), []string{"--help"}, &help), &help); code != 0 || !strings.Contains(help.String(), "-zds-socket path") {
		t.Errorf("--help: exit code %d, %q", code, help.String())
	}
	if code := report(io.ErrUnexpectedEOF, io.Discard); code != 1 {
		t.Errorf("another error: exit code %d", code)
	}
}

// Without an agent the log says what runs, and what it waits for.
func TestStartWithoutAnAgent(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	dir := t.TempDir()
	log := newLogLines()
	running, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() {
		done <- run(running, []string{
			"--zds-socket", dir + "/zds.sock", "--sds-socket", dir + "/sds.sock", "--admin-socket", dir + "/admin.sock", "--log-format", "json",
		}, log)
	}()
	start := log.await(ctx, t, "starting", "zds_socket", dir+"/zds.sock", "sds_socket", dir+"/sds.sock", "admin_socket", dir+"/admin.sock", "trust_domain", "cluster.local")
	if start["version"] == "" {
		t.Errorf("the version is missing in %v", start)
	}
	log.await(ctx, t, "waiting for the agent", "socket", dir+"/zds.sock", "err", "no such file")
	log.await(ctx, t, "waiting for secrets", "resource", "ROOTCA", "err", dir+"/sds.sock")
	stop()
	if err := <-done; err != nil {
		t.Errorf("run = %v", err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"ambientd/nodeagent/admin"
)

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// serve runs s until the test ends, and returns a function that ends it earlier.
func serve(t *testing.T, s *admin.Server) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := s.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	stop = func() { cancel(); running.Wait() }
	t.Cleanup(stop)
	return stop
}

func listen(t *testing.T) (net.Listener, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "admin.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	return l, path
}

func example() admin.Status {
	start := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	const id = "spiffe://cluster.local/ns/shop/sa/web"
	return admin.Status{
		Node: "node-1", Version: "v0.1.0", Started: start, TrustDomain: "cluster.local", Ready: true,
		Redirection: admin.RedirectionStatus{Backend: "nftables", Reason: "its probe succeeded"},
		Proxies:     []admin.ProxyStatus{{Since: start.Add(time.Minute), Ready: true}},
		Pods: []admin.PodStatus{
			{
				Namespace: "shop", Name: "web-0", UID: "uid-0", Netns: "4026", State: admin.PodEnrolled, Backend: "nftables",
				Families: []string{"ipv4", "ipv6"}, IPs: []netip.Addr{netip.MustParseAddr("10.0.0.2")}, Proxy: admin.ProxyAcked, Identity: id,
				Certificate: admin.CertificateStatus{State: admin.CertificateReady, NotAfter: start.Add(24 * time.Hour)}, KeptConnections: new(3),
			},
			{
				Namespace: "shop", Name: "web-1", UID: "uid-1", State: admin.PodEnrolling, Backend: "nftables", Proxy: admin.ProxyPending,
				Identity: id, Certificate: admin.CertificateStatus{State: admin.CertificatePending},
			},
		},
		Identities: []admin.IdentityStatus{{
			ID: id, Pods: 2, State: admin.CertificateReady, NotAfter: start.Add(24 * time.Hour), LastError: "the CA\x1b[31m said\nno",
		}},
		Skipped: []admin.SkippedStatus{{Namespace: "shop", Name: "batch", Reason: "its label opts out"}},
	}
}

func TestFetch(t *testing.T) {
	listener, path := listen(t)
	want := example()
	serve(t, admin.NewStatusServer(listener, func() admin.Status { return want }, quiet()))
	got, err := admin.Fetch(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	want.Pods[1].Families, want.Pods[1].IPs = []string{}, []netip.Addr{}
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

// What scripts rely on: names, [] rather than null, no zero times.
func TestStatusJSON(t *testing.T) {
	for _, test := range []struct {
		name   string
		status admin.Status
		want   string
	}{
		{
			"empty", admin.Status{Node: "n"},
			`{"node":"n","version":"","started":"0001-01-01T00:00:00Z","trustDomain":"","redirection":{"backend":"","reason":""},"ready":false,` +
				`"proxies":[],"pods":[],"identities":[],"skipped":[]}`,
		},
		{
			"full", example(),
			`{"node":"node-1","version":"v0.1.0","started":"2026-03-01T12:00:00Z","trustDomain":"cluster.local",` +
				`"redirection":{"backend":"nftables","reason":"its probe succeeded"},"ready":true,"proxies":[{"since":"2026-03-01T12:01:00Z","ready":true}],` +
				`"pods":[{"namespace":"shop","name":"web-0","uid":"uid-0","netns":"4026","state":"enrolled","backend":"nftables","families":["ipv4","ipv6"],` +
				`"ips":["10.0.0.2"],"proxy":"acked","identity":"spiffe://cluster.local/ns/shop/sa/web",` +
				`"certificate":{"state":"ready","notAfter":"2026-03-02T12:00:00Z"},"keptConnections":3},` +
				`{"namespace":"shop","name":"web-1","uid":"uid-1","netns":"","state":"enrolling","backend":"nftables","families":[],"ips":[],"proxy":"pending",` +
				`"identity":"spiffe://cluster.local/ns/shop/sa/web","certificate":{"state":"pending"}}],` +
				`"identities":[{"id":"spiffe://cluster.local/ns/shop/sa/web","pods":2,"state":"ready","notAfter":"2026-03-02T12:00:00Z","lastError":"the CA\u001b[31m said\nno"}],` +
				`"skipped":[{"namespace":"shop","name":"batch","reason":"its label opts out"}]}`,
		},
		{
			"what audits have shown", audited(),
			`{"node":"n","version":"","started":"2026-03-01T12:00:00Z","trustDomain":"",` +
				`"redirection":{"backend":"iptables","variant":"nft","reason":"r","probed":"2026-03-01T12:00:00Z","ipv6Uncaptured":"drop"},"ready":false,"proxies":[],` +
				`"pods":[{"namespace":"shop","name":"web","uid":"","netns":"","state":"","backend":"","families":[],"ips":[],"proxy":"","identity":"","certificate":{"state":""},` +
				`"malformedOptions":[{"annotation":"a","value":"v","problem":"p"}],` +
				`"audit":{"lastAudit":"2026-03-01T12:00:00Z","repairs":1,"lastRepair":"2026-03-01T12:00:00Z","repaired":["route: missing"]},` +
				`"probes":[{"address":"10.0.0.2","want":"169.254.7.127","error":"timeout","checked":"2026-03-01T12:00:00Z"}]}],` +
				`"identities":[],"skipped":[],"host":{"audit":{"lastAudit":"2026-03-01T12:00:00Z","error":"locked"}}}`,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			listener, path := listen(t)
			serve(t, admin.NewStatusServer(listener, func() admin.Status { return test.status }, quiet()))
			client := http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
				return net.Dial("unix", path)
			}}}
			defer client.CloseIdleConnections()
			code, body := get(t, &client, "http://agent/v1/status")
			if code != http.StatusOK || body != test.want {
				t.Errorf("got %d %s\nwant %s", code, body, test.want)
			}
			if !json.Valid([]byte(body)) {
				t.Error("no JSON")
			}
		})
	}
}

func audited() admin.Status {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	return admin.Status{
		Node: "n", Started: now,
		Redirection: admin.RedirectionStatus{Backend: "iptables", Variant: "nft", Reason: "r", Probed: now, IPv6Uncaptured: "drop"},
		Pods: []admin.PodStatus{{
			Namespace: "shop", Name: "web",
			MalformedOptions: []admin.MalformedOption{{Annotation: "a", Value: "v", Problem: "p"}},
			Audit:            admin.AuditStatus{LastAudit: now, Repairs: 1, LastRepair: now, Repaired: []string{"route: missing"}},
			Probes: []admin.ProbeFinding{{
				Address: netip.MustParseAddr("10.0.0.2"), Want: netip.MustParseAddr("169.254.7.127"), Error: "timeout", Checked: now,
			}},
		}},
		Host: admin.HostStatus{Audit: admin.AuditStatus{LastAudit: now, Error: "locked"}},
	}
}

func get(t *testing.T, client *http.Client, url string) (code int, body string) {
	t.Helper()
	resp, err := client.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	content, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(content)
}

func TestFetchErrors(t *testing.T) {
	t.Run("nobody there", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "no.sock")
		_, err := admin.Fetch(t.Context(), path)
		wantError(t, err, syscall.ENOENT, path, "is ambientd running")
	})
	t.Run("agent ended", func(t *testing.T) {
		listener, path := listen(t)
		listener.(*net.UnixListener).SetUnlinkOnClose(false)
		if err := listener.Close(); err != nil {
			t.Fatal(err)
		}
		_, err := admin.Fetch(t.Context(), path)
		wantError(t, err, syscall.ECONNREFUSED, path, "is ambientd running")
	})
	t.Run("turned away", func(t *testing.T) {
		listener, path := answering(t, "")
		defer listener.Close()
		_, err := admin.Fetch(t.Context(), path)
		wantError(t, err, nil, path, "only root may ask")
	})
	t.Run("another service", func(t *testing.T) {
		listener, path := answering(t, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
		defer listener.Close()
		_, err := admin.Fetch(t.Context(), path)
		wantError(t, err, nil, path, "404 Not Found")
	})
	t.Run("no JSON", func(t *testing.T) {
		listener, path := answering(t, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
		defer listener.Close()
		_, err := admin.Fetch(t.Context(), path)
		wantError(t, err, nil, path, "about its status")
	})
	t.Run("silence", func(t *testing.T) {
		listener, path := listen(t) // never accepts
		defer listener.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		_, err := admin.Fetch(ctx, path)
		wantError(t, err, context.DeadlineExceeded, path)
	})
}

// answering accepts one connection, reads a request, answers text and hangs up.
func answering(t *testing.T, text string) (net.Listener, string) {
	t.Helper()
	listener, path := listen(t)
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		if _, err := http.ReadRequest(bufio.NewReader(conn)); err != nil {
			t.Errorf("reading the request: %v", err)
		}
		if _, err := io.WriteString(conn, text); err != nil {
			t.Errorf("answering: %v", err)
		}
	}()
	return listener, path
}

func wantError(t *testing.T, err, want error, parts ...string) {
	t.Helper()
	if err == nil || want != nil && !errors.Is(err, want) {
		t.Fatalf("got %v, want an error that wraps %v", err, want)
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("error %q does not say %q", err, part)
		}
	}
}

func TestOnlyStatusIsServed(t *testing.T) {
	listener, path := listen(t)
	serve(t, admin.NewStatusServer(listener, func() admin.Status { return admin.Status{} }, quiet()))
	for request, want := range map[string]string{
		"GET / HTTP/1.1\r\nHost: a\r\n\r\n":                                                    "404 Not Found",
		"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n":                                             "404 Not Found",
		"POST /v1/status HTTP/1.1\r\nHost: a\r\n\r\n":                                          "405 Method Not Allowed",
		"GET /v1/status HTTP/1.1\r\nHost: a\r\nX: " + strings.Repeat("x", 16<<10) + "\r\n\r\n": "431 Request Header Fields Too Large",
		"nonsense\r\n\r\n": "400 Bad Request",
	} {
		conn, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(conn, request); err != nil {
			t.Fatal(err)
		}
		line, err := bufio.NewReader(conn).ReadString('\n')
		if err != nil || !strings.Contains(line, want) {
			t.Errorf("%.40q: answered %q (%v), want %s", request, line, err, want)
		}
		conn.Close()
	}
}

func TestHealth(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	notReady := errors.New("manifests are being read")
	ready := func() error {
		mu.Lock()
		defer mu.Unlock()
		return notReady
	}
	server := admin.NewHealthServer(listener, ready, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, "ambientd_ready 1")
	}), quiet())
	serve(t, server)
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	url := "http://" + server.Addr().String()
	check := func(path string, code int, text string) {
		t.Helper()
		if gotCode, gotText := get(t, client, url+path); gotCode != code || !strings.Contains(gotText, text) {
			t.Errorf("GET %s: %d %q, want %d %q", path, gotCode, gotText, code, text)
		}
	}
	check("/healthz", http.StatusOK, "ok")
	check("/readyz", http.StatusServiceUnavailable, "manifests are being read")
	mu.Lock()
	notReady = nil
	mu.Unlock()
	check("/readyz", http.StatusOK, "ok")
	check("/metrics", http.StatusOK, "ambientd_ready 1")
	check("/v1/status", http.StatusNotFound, "")
}

// Anybody may open connections to the health endpoints. They cost the agent a
// bounded number of descriptors, and whoever asks is still answered.
func TestHealthInACrowd(t *testing.T) {
	const visitors, enough = 200, 100 // more than are kept, and as many of the latest as cannot all be
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := admin.NewHealthServer(listener, func() error { return nil }, http.NotFoundHandler(), quiet())
	serve(t, server)
	ask := func(conn net.Conn) error {
		if _, err := io.WriteString(conn, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			return err
		}
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, resp.Body)
		return errors.Join(err, resp.Body.Close())
	}
	var conns []net.Conn
	for range visitors {
		conn, err := net.Dial("tcp", server.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := errors.Join(conn.SetDeadline(time.Now().Add(10*time.Second)), ask(conn)); err != nil {
			t.Fatal(err)
		}
		conns = append(conns, conn)
	}
	for i, conn := range conns[:visitors-enough] {
		if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("connection %d of %d is still open: %v", i, visitors, err)
		}
	}
	if err := ask(conns[visitors-1]); err != nil {
		t.Errorf("the latest connection: %v", err)
	}
}

// A client that never ends its request cannot keep the agent from ending.
func TestStopWithOpenConnections(t *testing.T) {
	listener, path := listen(t)
	stop := serve(t, admin.NewStatusServer(listener, func() admin.Status { return admin.Status{} }, quiet()))
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "GET /v1/sta"); err != nil {
		t.Fatal(err)
	}
	if _, err := admin.Fetch(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	stop()
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
}

func TestRunSaysWhyItCannotServe(t *testing.T) {
	listener, _ := listen(t)
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	err := admin.NewStatusServer(listener, func() admin.Status { return admin.Status{} }, quiet()).Run(t.Context())
	wantError(t, err, net.ErrClosed, "serving HTTP")
}

func TestWriteTable(t *testing.T) {
	status := example()
	var got strings.Builder
	if err := admin.WriteTable(&got, status, status.Started.Add(3*time.Hour+4*time.Second)); err != nil {
		t.Fatal(err)
	}
	want := `node          node-1
version       v0.1.0
uptime        3h0m
trust domain  cluster.local
redirection   nftables (its probe succeeded)
ready         yes
proxies       connected for 2h59m, ready
pods          1 enrolled, 1 enrolling, 0 degraded, 1 not in the mesh

POD         UID    NETNS  STATE      BACKEND   FAMILIES   PROXY    IDENTITY                               CERTIFICATE                KEPT  REPAIRS
shop/web-0  uid-0  4026   enrolled   nftables  ipv4,ipv6  acked    spiffe://cluster.local/ns/shop/sa/web  ready (expires in 20h59m)  3     0
shop/web-1  uid-1  -      enrolling  nftables  -          pending  spiffe://cluster.local/ns/shop/sa/web  pending                    -     0

CERTIFICATE TROUBLE
spiffe://cluster.local/ns/shop/sa/web: the CA [31m said no

NOT IN THE MESH  BECAUSE
shop/batch       its label opts out
`
	if diff := cmp.Diff(want, got.String()); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

func TestWriteTableOfAnIdleAgent(t *testing.T) {
	start := time.Unix(0, 0)
	status := admin.Status{Node: "n", Started: start}
	for uptime, want := range map[time.Duration]string{
		-time.Second: "0s", 12 * time.Second: "12s", 65 * time.Second: "1m5s", 24 * time.Hour: "1d0h", 77 * time.Hour: "3d5h",
	} {
		var got strings.Builder
		if err := admin.WriteTable(&got, status, start.Add(uptime)); err != nil {
			t.Fatal(err)
		}
		for _, line := range []string{"uptime        " + want + "\n", "ready         no\n", "none connected; pods of the mesh cannot start"} {
			if !strings.Contains(got.String(), line) {
				t.Errorf("after %v: no %q in\n%s", uptime, line, got.String())
			}
		}
		if strings.Contains(got.String(), "POD ") || strings.Contains(got.String(), "TROUBLE") {
			t.Errorf("empty tables are shown:\n%s", got.String())
		}
	}
}

func TestWriteTableTellsExpiryAndUpgrade(t *testing.T) {
	status := example()
	status.Proxies = append(status.Proxies, admin.ProxyStatus{Since: status.Started})
	var got strings.Builder
	if err := admin.WriteTable(&got, status, status.Started.Add(25*time.Hour)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"ready (expired 1h0m ago)", "connected for 1d0h, ready; connected for 1d1h, waiting for its snapshot's ack"} {
		if !strings.Contains(got.String(), want) {
			t.Errorf("no %q in\n%s", want, got.String())
		}
	}
}

func TestWriteTableTellsWhatWasRepaired(t *testing.T) {
	status := example()
	now := status.Started.Add(time.Hour)
	status.Redirection.Probed, status.Redirection.IPv6Uncaptured = status.Started, "drop"
	status.Pods[0].Families = []string{"ipv4"}
	status.Pods[0].MalformedOptions = []admin.MalformedOption{{Annotation: "ambient.istio.io/dns-capture", Value: "may\tbe", Problem: "it must be true or false"}}
	status.Pods[0].Audit = admin.AuditStatus{Repairs: 2, LastRepair: now.Add(-time.Minute), Repaired: []string{"route: missing", "rule: missing\x1b[31m"}}
	status.Pods[0].Probes = []admin.ProbeFinding{{
		Address: netip.MustParseAddr("10.0.0.2"), Want: netip.MustParseAddr("169.254.7.127"), Got: netip.MustParseAddr("10.0.0.1"), Checked: now.Add(-time.Second),
	}}
	status.Pods[1].Audit.Error = "no memory"
	status.Host.Audit = admin.AuditStatus{Repairs: 1, LastRepair: now, Repaired: []string{"set: missing"}}
	status.ManifestProblems = []string{"/etc/ambientd/manifests/web.yaml: document 2: unknown\tfield"}
	var got strings.Builder
	if err := admin.WriteTable(&got, status, now); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"\nredirection   nftables (its probe succeeded; probed 1h0m ago)\n",
		"  ipv4 (ipv6: drop)  ", "(expires in 23h0m)  3     2\n",
		`
OPTIONS THAT COUNT AS ABSENT
shop/web-0: ambient.istio.io/dns-capture="may\tbe": it must be true or false

AUDITS
shop/web-0: repaired 2 times, last 1m0s ago
  route: missing
  rule: missing [31m
shop/web-0: a connection from the host to 10.0.0.2 arrives from 10.0.0.1, want 169.254.7.127 (1s ago)
shop/web-1: cannot be compared or repaired: no memory
the host's rule for probes: repaired once, last 0s ago
  set: missing

MANIFESTS THAT ARE NOT IN USE, OR NOT WHOLLY
/etc/ambientd/manifests/web.yaml: document 2: unknown field
`,
	} {
		if !strings.Contains(got.String(), want) {
			t.Errorf("no %q in\n%s", want, got.String())
		}
	}
}

func TestWriteTableReportsAFullDisk(t *testing.T) {
	err := admin.WriteTable(failing{}, admin.Status{}, time.Now())
	wantError(t, err, io.ErrShortWrite, "writing the status")
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, fmt.Errorf("disk: %w", io.ErrShortWrite) }

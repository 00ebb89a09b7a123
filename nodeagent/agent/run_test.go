// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"ambientd/cni-plugin/podevent"
	"ambientd/iptables/backend"
	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/agent"
	"ambientd/nodeagent/podsource/manifests"
	"ambientd/nodeagent/zds/zdstest"
	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }

// patience bounds what a test awaits; nothing takes this long.
const patience = 30 * time.Second

// running is an agent with its log.
type running struct {
	tb    testing.TB
	cfg   agent.Config
	lines chan map[string]any
	stop  context.CancelFunc
	ended chan error
}

// Write is the io.Writer of the agent's log, which is JSON.
func (r *running) Write(line []byte) (int, error) {
	var fields map[string]any
	if err := json.Unmarshal(line, &fields); err != nil {
		return 0, err
	}
	r.lines <- fields
	return len(line), nil
}

// config returns the configuration of an agent in a directory of the test's.
func config(tb testing.TB) agent.Config {
	tb.Helper()
	// Not tb.TempDir: a socket's path has room for 107 bytes.
	dir, err := os.MkdirTemp("", "ambientd")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { os.RemoveAll(dir) })
	cfg := valid()
	cfg.RunDir = filepath.Join(dir, "run")
	cfg.ZDSSocket = filepath.Join(dir, "proxy", "zds.sock")
	cfg.PodsFrom = "manifests=" + filepath.Join(dir, "manifests")
	cfg.Version = "v0.0.0-test"
	if err := os.Mkdir(filepath.Join(dir, "manifests"), 0o755); err != nil {
		tb.Fatal(err)
	}
	return cfg
}

// start runs an agent until the test ends, and returns once it is ready.
func start(t *testing.T, cfg agent.Config) *running {
	t.Helper()
	r, _ := startReady(t, cfg)
	return r
}

// startReady returns the log line that says ready, too.
func startReady(t *testing.T, cfg agent.Config) (r *running, ready map[string]any) {
	t.Helper()
	netnstest.Require(t)
	r = &running{tb: t, cfg: cfg, lines: make(chan map[string]any, 1000), ended: make(chan error, 1)}
	r.cfg.Logger = slog.New(slog.NewJSONHandler(r, &slog.HandlerOptions{Level: slog.LevelDebug}))
	ctx, cancel := context.WithCancel(t.Context())
	r.stop = cancel
	go func() { r.ended <- agent.Run(ctx, r.cfg) }()
	t.Cleanup(cancel)
	return r, r.await("ready")
}

// await returns the first line of the log with that message.
func (r *running) await(msg string) map[string]any {
	r.tb.Helper()
	for {
		select {
		case line := <-r.lines:
			if line["msg"] == msg {
				return line
			}
		case err := <-r.ended:
			r.tb.Fatalf("the agent ended before it logged %q: %v", msg, err)
		case <-time.After(patience):
			r.tb.Fatalf("the agent did not log %q", msg)
		}
	}
}

// end stops the agent and waits for it.
func (r *running) end() {
	r.tb.Helper()
	r.stop()
	select {
	case err := <-r.ended:
		if err != nil {
			r.tb.Fatalf("the agent ended with %v", err)
		}
	case <-time.After(patience):
		r.tb.Fatal("the agent did not end")
	}
}

func (r *running) status() admin.Status {
	r.tb.Helper()
	status, err := admin.Fetch(r.tb.Context(), r.cfg.AdminSocketPath())
	if err != nil {
		r.tb.Fatal(err)
	}
	return status
}

func (r *running) manifest(name, text string) {
	r.tb.Helper()
	_, dir, _ := strings.Cut(r.cfg.PodsFrom, "=")
	if err := os.WriteFile(filepath.Join(dir, name+".yaml"), []byte(text), 0o600); err != nil {
		r.tb.Fatal(err)
	}
}

// call sends what the plugin would.
func (r *running) call(command, pod string, netns *netnstest.NS) podevent.Reply {
	r.tb.Helper()
	reply, err := podevent.Call(r.tb.Context(), r.cfg.CNISocketPath(), podevent.Request{
		Command: command, Network: "net", ContainerID: "sandbox-of-" + pod, IfName: "eth0",
		Pod: podevent.Pod{Namespace: "shop", Name: pod}, IPs: []netip.Addr{netip.MustParseAddr("10.0.0.2")},
	}, netns.File())
	if err != nil {
		r.tb.Fatal(err)
	}
	return reply
}

const shop = "apiVersion: v1\nkind: Namespace\nmetadata: {name: shop, labels: {istio.io/dataplane-mode: ambient}}\n"

func pod(name, spec string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: %s, namespace: shop}\nspec: {%s}\n", name, spec)
}

// What is wrong with a manifest is in the status for as long as it is.
func TestStatusTellsOfManifests(t *testing.T) {
	cfg := config(t)
	_, dir, _ := strings.Cut(cfg.PodsFrom, "=")
	path := filepath.Join(dir, "web.yaml")
	if err := os.WriteFile(path, []byte(pod("web", "serviceAcountName: web")), 0o600); err != nil {
		t.Fatal(err)
	}
	r := start(t, cfg)
	if got := r.status().ManifestProblems; len(got) != 1 || !strings.HasPrefix(got[0], path+": ") || !strings.Contains(got[0], "serviceAcountName") {
		t.Errorf("the status tells of %q, want the misspelt field in %s", got, path)
	}
	r.end()
}

// One pod through all parts, in and out again.
func TestPodThroughTheAgent(t *testing.T) {
	for _, mode := range []string{backend.NFTables, backend.IPTables} {
		t.Run(mode, func(t *testing.T) {
			cfg := config(t)
			cfg.Redirection = mode
			r := start(t, cfg)
			peer, err := zdstest.Dial(t.Context(), cfg.ZDSSocket, zdstest.AckAll)
			if err != nil {
				t.Fatal(err)
			}
			defer peer.Close()
			if err := peer.AwaitReady(t.Context()); err != nil {
				t.Fatal(err)
			}
			r.manifest("shop", shop)
			r.manifest("web", pod("web", "serviceAccountName: web-account"))
			r.manifest("node", pod("node", "hostNetwork: true"))
			web := netnstest.New(t)

			if reply := r.call(podevent.CommandAdd, "web", web); reply.Result != podevent.ResultEnrolled {
				t.Fatalf("ADD of a pod in the mesh: %+v", reply)
			}
			if reply := r.call(podevent.CommandAdd, "node", netnstest.New(t)); reply.Result != podevent.ResultSkipped || !strings.Contains(reply.Reason, "hostNetwork") {
				t.Errorf("ADD of a pod in the host's network: %+v", reply)
			}
			checkEnrolled(t, r.status(), mode)

			if reply := r.call(podevent.CommandDel, "web", web); reply.Error != nil {
				t.Fatalf("DEL: %+v", reply)
			}
			if status := r.status(); len(status.Pods) > 0 || len(status.Identities) > 0 {
				t.Errorf("after DEL: %+v", status)
			}
			r.end()
		})
	}
}

func checkEnrolled(t *testing.T, status admin.Status, mode string) {
	t.Helper()
	if status.Node != "node-1" || status.Version != "v0.0.0-test" || status.TrustDomain != "cluster.local" || !status.Ready ||
		status.Redirection.Backend != mode || status.Redirection.Reason == "" || time.Since(status.Started) > time.Hour {
		t.Errorf("the agent's status: %+v", status)
	}
	if len(status.Proxies) != 1 || !status.Proxies[0].Ready {
		t.Errorf("proxies: %+v, want one that is ready", status.Proxies)
	}
	const identity = "spiffe://cluster.local/ns/shop/sa/web-account"
	if len(status.Identities) != 1 || status.Identities[0].ID != identity || status.Identities[0].State != admin.CertificateReady {
		t.Errorf("identities: %+v, want exactly %s", status.Identities, identity)
	}
	if len(status.Skipped) != 1 || status.Skipped[0].Name != "node" {
		t.Errorf("skipped: %+v, want the pod in the host's network", status.Skipped)
	}
	if len(status.Pods) != 1 {
		t.Fatalf("pods: %+v, want one", status.Pods)
	}
	p := status.Pods[0]
	if p.Namespace != "shop" || p.Name != "web" || p.UID != manifests.DerivedUID("shop", "web") || p.State != admin.PodEnrolled || p.Backend != mode ||
		p.Proxy != admin.ProxyAcked || p.Identity != identity || p.Certificate.State != admin.CertificateReady || len(p.Families) != 2 || p.Netns == "" {
		t.Errorf("pod: %+v", p)
	}
}

// The end of the agent leaves pods redirected, so that they fail closed.
func TestEndLeavesRules(t *testing.T) {
	nft, err := exec.LookPath("nft")
	if err != nil {
		t.Skip("needs nft, of the Debian package nftables: ", err)
	}
	r := start(t, config(t))
	peer, err := zdstest.Dial(t.Context(), r.cfg.ZDSSocket, zdstest.AckAll)
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	r.manifest("shop", shop)
	r.manifest("web", pod("web", ""))
	web := netnstest.New(t)
	if reply := r.call(podevent.CommandAdd, "web", web); reply.Result != podevent.ResultEnrolled {
		t.Fatalf("ADD: %+v", reply)
	}
	r.end()
	web.Do(t, func() error {
		out, err := exec.Command(nft, "list", "ruleset").CombinedOutput()
		if !strings.Contains(string(out), "15001") {
			t.Errorf("no redirection is left:\n%s", out)
		}
		return err
	})
}

// A request that has been begun is finished, with the help of all other parts.
func TestEndFinishesWhatWasBegun(t *testing.T) {
	r := start(t, config(t))
	asked, release := make(chan struct{}), make(chan struct{})
	peer, err := zdstest.Dial(t.Context(), r.cfg.ZDSSocket, func(_ context.Context, e zdstest.Event) zdstest.Answer {
		if e.Kind == zdstest.Add {
			close(asked)
			<-release
		}
		return zdstest.Ack()
	})
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	r.manifest("shop", shop)
	r.manifest("web", pod("web", ""))
	web := netnstest.New(t)
	replies := make(chan podevent.Reply, 1)
	go func() { replies <- r.call(podevent.CommandAdd, "web", web) }()
	<-asked
	r.stop()
	awaitGone(t, r.cfg.CNISocketPath()) // the first thing that ends
	close(release)
	if reply := <-replies; reply.Result != podevent.ResultEnrolled {
		t.Errorf("ADD during the end: %+v", reply)
	}
	r.end()
}

// awaitGone waits until the file is removed.
func awaitGone(t *testing.T, path string) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); ; <-tick.C {
		if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s is still there", path)
		}
	}
}

func TestFilesAndTheirModes(t *testing.T) {
	old := syscall.Umask(0o077) // whatever starts the agent may have any
	defer syscall.Umask(old)
	cfg := config(t)
	// A directory from another time, and too open.
	if err := errors.Join(os.Mkdir(cfg.RunDir, 0o777), os.Mkdir(filepath.Join(cfg.RunDir, "private"), 0o755)); err != nil {
		t.Fatal(err)
	}
	r := start(t, cfg)
	want := map[string]fs.FileMode{
		cfg.RunDir:                                    fs.ModeDir | 0o711,
		filepath.Join(cfg.RunDir, "private"):          fs.ModeDir | 0o700,
		filepath.Join(cfg.RunDir, "private", "spool"): fs.ModeDir | 0o700,
		filepath.Join(cfg.RunDir, "sds"):              fs.ModeDir | 0o700,
		cfg.CNISocketPath():                           fs.ModeSocket | 0o600,
		cfg.AdminSocketPath():                         fs.ModeSocket | 0o600,
		cfg.SDSSocketPath():                           fs.ModeSocket | 0o600,
		cfg.ZDSSocket:                                 fs.ModeSocket | 0o600,
	}
	for path, mode := range want {
		info, err := os.Lstat(path)
		if err != nil {
			t.Error(err)
			continue
		}
		if info.Mode() != mode {
			t.Errorf("%s has mode %v, want %v", path, info.Mode(), mode)
		}
	}
	r.end()
	for _, path := range []string{cfg.CNISocketPath(), cfg.AdminSocketPath(), cfg.SDSSocketPath(), cfg.ZDSSocket} {
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s after the end: %v, want %v", path, err, fs.ErrNotExist)
		}
	}
	start(t, cfg).end() // and everything can be had again
}

func TestHealthEndpoints(t *testing.T) {
	cfg := config(t)
	cfg.HTTPAddr = "127.0.0.1:0"
	r, ready := startReady(t, cfg)
	addr := ready["http_addr"]
	for _, path := range []string{"/healthz", "/readyz"} {
		resp, err := http.Get(fmt.Sprintf("http://%s%s", addr, path))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusOK || string(body) != "ok\n" {
			t.Errorf("%s: %s %q %v", path, resp.Status, body, err)
		}
	}
	http.DefaultClient.CloseIdleConnections()
	r.end()
}

// What cannot work ends the agent before it listens anywhere, or closes again
// what it has opened.
func TestRunRefuses(t *testing.T) {
	netnstest.Require(t)
	taken := config(t)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	taken.HTTPAddr = listener.Addr().String()
	missing := config(t)
	missing.PodsFrom += "/missing"
	inTheWay := config(t)
	if err := os.WriteFile(inTheWay.RunDir, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	invalid := config(t)
	invalid.CA = "vault"
	for _, test := range []struct {
		name string
		cfg  agent.Config
		want []string
	}{
		{"invalid configuration", invalid, []string{"--ca", "vault"}},
		{"address in use", taken, []string{"--http-addr", "address already in use"}},
		{"no manifests", missing, []string{"manifest directory", "/missing", "create it"}},
		{"a file in the way", inTheWay, []string{inTheWay.RunDir, "no directory"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.cfg.Logger = slog.New(slog.DiscardHandler)
			err := agent.Run(t.Context(), test.cfg)
			if err == nil {
				t.Fatal("no error")
			}
			for _, part := range test.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("error %q does not say %q", err, part)
				}
			}
			for _, path := range []string{test.cfg.CNISocketPath(), test.cfg.ZDSSocket} {
				if _, err := os.Lstat(path); err == nil {
					t.Errorf("%s is left behind", path)
				}
			}
		})
	}
	if err := agent.Run(t.Context(), config(t)); err == nil || !strings.Contains(err.Error(), "logger") {
		t.Errorf("without a logger: %v", err)
	}
}

// Whoever owns the run directory could put sockets of his own there, and answer for
// the agent.
func TestRunRefusesAnothersDirectory(t *testing.T) {
	netnstest.Require(t)
	const nobody = 65534
	for _, dir := range []string{"", "private", "sds"} {
		cfg := config(t)
		cfg.Logger = slog.New(slog.DiscardHandler)
		path := filepath.Join(cfg.RunDir, dir)
		if err := os.MkdirAll(path, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(path, nobody, nobody); err != nil {
			t.Skipf("needs a second user: %v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if err := agent.Run(ctx, cfg); err == nil || !strings.Contains(err.Error(), path+" exists and belongs to another user") {
			t.Errorf("%s of another user: %v", path, err)
		}
	}
}

// A second agent on the same sockets does not take them from the first.
func TestSecondAgent(t *testing.T) {
	r := start(t, config(t))
	second := r.cfg
	second.Logger = slog.New(slog.DiscardHandler)
	if err := agent.Run(t.Context(), second); err == nil || !strings.Contains(err.Error(), r.cfg.CNISocketPath()) {
		t.Errorf("a second agent: %v, want an error that names the socket", err)
	}
	if status := r.status(); status.Node != "node-1" {
		t.Errorf("the first agent's status: %+v", status)
	}
	r.end()
}

// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"ambientd/nodeagent/agent"
	"ambientd/nodeagent/workload"
)

// valid returns the defaults with what has none.
func valid() agent.Config {
	cfg := agent.Default()
	cfg.NodeName = "node-1"
	cfg.PodsFrom = "manifests=/etc/ambientd/manifests"
	return cfg
}

func TestDefaultsAreValid(t *testing.T) {
	if err := valid().Validate(); err != nil {
		t.Error(err)
	}
	err := agent.Default().Validate()
	if err == nil || !strings.Contains(err.Error(), "--node-name") || !strings.Contains(err.Error(), "--pods-from is required") {
		t.Errorf("without what is required: %v", err)
	}
}

func TestValidate(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*agent.Config)
		want   []string // parts of the error; nil: valid
	}{
		{"node name", func(c *agent.Config) { c.NodeName = "Node_1" }, []string{"--node-name", "Node_1"}},
		{"relative run directory", func(c *agent.Config) { c.RunDir = "run" }, []string{"--run-dir run", "absolute"}},
		{"relative socket", func(c *agent.Config) { c.CNISocket = "cni.sock" }, []string{"--cni-socket cni.sock", "absolute"}},
		{"no ZDS socket", func(c *agent.Config) { c.ZDSSocket = "" }, []string{"--zds-socket", "absolute"}},
		{"longest socket", func(c *agent.Config) { c.SDSSocket = "/" + strings.Repeat("s", 106) }, nil},
		{"socket too long", func(c *agent.Config) { c.SDSSocket = "/" + strings.Repeat("s", 107) }, []string{"--sds-socket", "107", "108"}},
		{"run directory too long", func(c *agent.Config) { c.RunDir = "/" + strings.Repeat("r", 90) }, []string{"--cni-socket", "--admin-socket"}},
		{
			"one socket twice", func(c *agent.Config) { c.SDSSocket = "/run/ambientd/private/../private/cni.sock" },
			[]string{"--sds-socket", "--cni-socket is the same"},
		},
		{"no pods", func(c *agent.Config) { c.PodsFrom = "" }, []string{"--pods-from is required", "kubernetes or manifests=DIR"}},
		{"other pods", func(c *agent.Config) { c.PodsFrom = "kubelet" }, []string{"--pods-from kubelet", "kubernetes or manifests=DIR"}},
		{"cluster of a directory", func(c *agent.Config) { c.PodsFrom = "kubernetes=/etc" }, []string{"--pods-from kubernetes=/etc", "kubernetes or"}},
		{"cluster", func(c *agent.Config) { c.PodsFrom = "kubernetes" }, nil},
		{"cluster by a file", func(c *agent.Config) { c.PodsFrom, c.Kubeconfig = "kubernetes", "/etc/kubeconfig" }, nil},
		{"relative kubeconfig", func(c *agent.Config) { c.PodsFrom, c.Kubeconfig = "kubernetes", "config" }, []string{"--kubeconfig config", "absolute"}},
		{"kubeconfig for manifests", func(c *agent.Config) { c.Kubeconfig = "/etc/kubeconfig" }, []string{"--kubeconfig", "--pods-from kubernetes"}},
		{"relative manifests", func(c *agent.Config) { c.PodsFrom = "manifests=pods" }, []string{"--pods-from", "absolute"}},
		{"HTTP without port", func(c *agent.Config) { c.HTTPAddr = "localhost" }, []string{"--http-addr localhost", "port"}},
		{"HTTP port by name", func(c *agent.Config) { c.HTTPAddr = ":http" }, []string{"--http-addr :http", "number"}},
		{"HTTP", func(c *agent.Config) { c.HTTPAddr = "[::1]:8080" }, nil},

		{"trust domain", func(c *agent.Config) { c.TrustDomain = "Cluster Local" }, []string{"--trust-domain", "Cluster Local"}},
		{"CA", func(c *agent.Config) { c.CA = "istiod" }, []string{"--ca", "istiod", "supported: builtin"}},
		{"holder", func(c *agent.Config) { c.CertHolder = "proxy" }, []string{"--cert-holder", "proxy", "supported: agent"}},
		{"redirection", func(c *agent.Config) { c.Redirection = "ebpf" }, []string{"--redirection", "ebpf", "auto, nftables, iptables"}},
		{"log level", func(c *agent.Config) { c.LogLevel = "loud" }, []string{"--log-level", "loud"}},
		{"log format", func(c *agent.Config) { c.LogFormat = "xml" }, []string{"--log-format", "xml"}},

		{"excluded namespace", func(c *agent.Config) { c.ExcludeNamespaces = []string{"a b"} }, []string{"--exclude-namespaces: ", "a b"}},
		{"agent's namespace", func(c *agent.Config) { c.AgentNamespace = "A" }, []string{"--agent-namespace: ", `"A"`}},
		{"no namespace for own pods", func(c *agent.Config) { c.AgentNamespace = "" }, []string{"--own-pods needs --agent-namespace"}},
		{"neither", func(c *agent.Config) { c.AgentNamespace, c.OwnPods = "", nil }, nil},
		{"pattern", func(c *agent.Config) { c.OwnPods = []string{"["} }, []string{"--own-pods: ", `"["`}},
		{"no selectors", func(c *agent.Config) { c.Selectors = nil }, []string{"key selectors: none"}},
		{"selector for all", func(c *agent.Config) { c.Selectors = make([]workload.SelectorSpec, 1) }, []string{"key selectors: selector 1: ", "every pod"}},
		{
			"probe source", func(c *agent.Config) { c.ProbeSourceIPv4 = netip.MustParseAddr("::1") },
			[]string{"--probe-source-ipv4: ", "::1 is of another family"},
		},
		{
			"IPv6 probe source", func(c *agent.Config) { c.ProbeSourceIPv6 = netip.MustParseAddr("10.0.0.1") },
			[]string{"--probe-source-ipv6: ", "10.0.0.1 is of another family"},
		},
		{"no probe source", func(c *agent.Config) { c.ProbeSourceIPv4 = netip.Addr{} }, []string{"--probe-source-ipv4: ", "no address"}},
		{"IPv6 off", func(c *agent.Config) { c.IPv6, c.ProbeSourceIPv6 = false, netip.Addr{} }, nil},

		{"uncaptured IPv6", func(c *agent.Config) { c.IPv6Uncaptured = "reject" }, []string{"--ipv6-uncaptured", "reject", "drop, allow"}},
		{"probe scope", func(c *agent.Config) { c.ProbeScope = "node" }, []string{"--probe-scope", "node", "pod, declared"}},
		{"probe source that others have", func(c *agent.Config) { c.ProbeSourceIPv4 = netip.MustParseAddr("10.0.0.1") }, []string{"probe source", "10.0.0.1"}},
		{"repair", func(c *agent.Config) { c.OnRepair = "" }, []string{"--on-repair", "drop, allow"}},
		{"existing connections", func(c *agent.Config) { c.ExistingConnections = "drop" }, []string{"--existing-connections", "keep, reset"}},
		{"pod options", func(c *agent.Config) { c.AllowedPodOptions = []string{"exclude-interfaces", "all"} }, []string{"--allowed-pod-options", `"all"`, "exclude-outbound-cidrs"}},
		{"audits too often", func(c *agent.Config) { c.AuditInterval = 0 }, []string{"--audit-interval 0s", "1s to 1h"}},
		{"audits too seldom", func(c *agent.Config) { c.AuditInterval = 2 * time.Hour }, []string{"--audit-interval 2h"}},
		{"proc", func(c *agent.Config) { c.ProcRoot = "proc" }, []string{"--proc-root proc", "absolute"}},
		{"cri", func(c *agent.Config) { c.CRISocket = "cri.sock" }, []string{"--cri-socket cri.sock", "absolute"}},

		{"TTL", func(c *agent.Config) { c.CertTTL = time.Second }, []string{"--cert-ttl 1s", "at least 10s"}},
		{"TTL too long", func(c *agent.Config) { c.CertTTL = 100 * 24 * time.Hour }, []string{"--cert-ttl 2400h0m0s", "at most 2160h0m0s"}},
		{"no workers", func(c *agent.Config) { c.CertWorkers = 0 }, []string{"--cert-workers 0", "1 to"}},
		{"linger", func(c *agent.Config) { c.CertLinger = -1 }, []string{"--cert-linger"}},

		{"plugin gives up first", func(c *agent.Config) { c.AddTimeout = 20 * time.Second }, []string{"--add-timeout 20s", "--plugin-timeout 20s"}},
		{"proxy and certificate", func(c *agent.Config) { c.CertWait = 7 * time.Second }, []string{"--proxy-timeout 8s", "--cert-wait 7s", "--add-timeout 15s"}},
		{"lookup too", func(c *agent.Config) { c.LookupTimeout = 4 * time.Second }, []string{"--lookup-timeout 4s", "--add-timeout 15s"}},
		{"no lookup", func(c *agent.Config) { c.LookupTimeout = 0 }, []string{"--lookup-timeout 0s", "at least 1ms"}},
		{"slow DEL", func(c *agent.Config) { c.DelProxyWait = time.Second }, []string{"--del-proxy-wait 1s", "900ms"}},
		{"no wait for the certificate", func(c *agent.Config) { c.CertWait = 0 }, nil},
		{"negative waits", func(c *agent.Config) { c.CertWait, c.ProxyTimeout = -1, 0 }, []string{"--cert-wait -1ns", "--proxy-timeout 0s"}},
		{
			"all longer", func(c *agent.Config) {
				c.PluginTimeout, c.AddTimeout, c.ProxyTimeout = time.Minute, 45*time.Second, 30*time.Second
			}, nil,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			cfg := valid()
			test.change(&cfg)
			err := cfg.Validate()
			if test.want == nil {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if err == nil {
				t.Fatal("no error")
			}
			for _, part := range test.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("error %q does not say %q", err, part)
				}
			}
			if lines := strings.Count(err.Error(), "\n"); lines >= 2 {
				t.Errorf("one mistake makes %d lines:\n%v", lines+1, err)
			}
		})
	}
}

// Whoever has made several mistakes learns of all at once.
func TestValidateReportsAll(t *testing.T) {
	cfg := valid()
	cfg.CA, cfg.LogLevel, cfg.TrustDomain, cfg.CertTTL = "vault", "loud", "", 0
	err := cfg.Validate()
	for _, want := range []string{"--ca", "--log-level", "--trust-domain", "--cert-ttl"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %q does not say %s", err, want)
		}
	}
}

func TestPaths(t *testing.T) {
	cfg := valid()
	cfg.RunDir = "/tmp/r"
	for got, want := range map[string]string{
		cfg.CNISocketPath(): "/tmp/r/private/cni.sock", cfg.AdminSocketPath(): "/tmp/r/private/admin.sock", cfg.SDSSocketPath(): "/tmp/r/sds/sds.sock",
	} {
		if got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	cfg.CNISocket, cfg.AdminSocket, cfg.SDSSocket = "/a", "/b", "/c"
	if got := cfg.CNISocketPath() + cfg.AdminSocketPath() + cfg.SDSSocketPath(); got != "/a/b/c" {
		t.Errorf("given paths become %s", got)
	}
}

func TestLevel(t *testing.T) {
	for name, want := range map[string]slog.Level{"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError} {
		if got := (agent.Config{LogLevel: name}).Level(); got != want {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
}

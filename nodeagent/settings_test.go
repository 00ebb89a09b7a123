// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"flag"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"ambientd/nodeagent/agent"
	"ambientd/nodeagent/workload"
)

// everyKey sets each key of the file to something else than its default.
const everyKey = `
nodeName: node-1
runDir: /r
cniSocket: /s/cni
adminSocket: /s/admin
sdsSocket: /s/sds
zdsSocket: /s/zds
httpAddr: "[::1]:8080"
procRoot: /host/proc
podsFrom: kubernetes
kubeconfig: /k
criSocket: /s/cri
allowedPodOptions: [exclude-interfaces]
agentNamespace: mesh
ownPods: agent-*, proxy-* # as a flag has it; the other lists are lists
excludeNamespaces: []
selectors:
- podSelector: {matchLabels: {mesh: "yes"}}
redirection: iptables
dnsCapture: false
ipv6: false
probeSourceIPv4: 169.254.1.1
probeSourceIPv6: fd00::1
ipv6Uncaptured: allow
probeScope: declared
onRepair: allow
existingConnections: reset
auditInterval: 5s
trustDomain: example.org
ca: builtin
certHolder: agent
certTTL: 1h
certWorkers: 8
certLinger: 0s
pluginTimeout: 50s
addTimeout: 40s
lookupTimeout: 1s
proxyTimeout: 20s
certWait: 10s
delProxyWait: 100ms
logLevel: debug
logFormat: json
`

func fromEveryKey() agent.Config {
	return agent.Config{
		NodeName: "node-1", RunDir: "/r", CNISocket: "/s/cni", AdminSocket: "/s/admin", SDSSocket: "/s/sds", ZDSSocket: "/s/zds",
		HTTPAddr: "[::1]:8080", PodsFrom: "kubernetes", Kubeconfig: "/k", CRISocket: "/s/cri", AgentNamespace: "mesh", OwnPods: []string{"agent-*", "proxy-*"},
		ExcludeNamespaces: []string{},
		Selectors:         []workload.SelectorSpec{{PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"mesh": "yes"}}}},
		Redirection:       "iptables", ProbeSourceIPv4: netip.MustParseAddr("169.254.1.1"), ProbeSourceIPv6: netip.MustParseAddr("fd00::1"),
		IPv6Uncaptured: "allow", ProbeScope: "declared", OnRepair: "allow", ExistingConnections: "reset", AuditInterval: 5 * time.Second,
		ProcRoot: "/host/proc", AllowedPodOptions: []string{"exclude-interfaces"},
		TrustDomain: "example.org", CA: "builtin", CertHolder: "agent", CertTTL: time.Hour, CertWorkers: 8, CertLinger: 0,
		PluginTimeout: 50 * time.Second, AddTimeout: 40 * time.Second, LookupTimeout: time.Second, ProxyTimeout: 20 * time.Second, CertWait: 10 * time.Second,
		DelProxyWait: 100 * time.Millisecond, LogLevel: "debug", LogFormat: "json",
	}
}

// diff compares configurations.
func diff(want, got agent.Config) string {
	return cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }))
}

func writeFile(t *testing.T, content string) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func configured(t *testing.T, args ...string) agent.Config {
	t.Helper()
	cfg, err := configure(args, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func TestEveryKeyOfTheFile(t *testing.T) {
	if d := diff(fromEveryKey(), configured(t, "--config", writeFile(t, everyKey))); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
	s, err := newSettings()
	if err != nil {
		t.Fatal(err)
	}
	for key := range s.keys {
		if !strings.Contains(everyKey, "\n"+key+":") {
			t.Errorf("the test's file has no key %s", key)
		}
	}
}

func TestFlagsWin(t *testing.T) {
	file := writeFile(t, everyKey)
	want := fromEveryKey()
	want.NodeName, want.AddTimeout, want.IPv6, want.DNSCapture = "node-2", 35*time.Second, true, true
	want.ExcludeNamespaces, want.OwnPods = []string{"a", "b"}, nil
	want.HTTPAddr, want.ProbeSourceIPv4, want.CertWorkers = "", netip.MustParseAddr("169.254.2.2"), 1
	// Before and after --config alike.
	got := configured(t, "--node-name=node-2", "--add-timeout", "35s", "--ipv6", "--config", file, "--dns-capture=true",
		"--exclude-namespaces", "a, b,", "--own-pods=", "--http-addr=", "--probe-source-ipv4=169.254.2.2", "--cert-workers=1")
	if d := diff(want, got); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}

// What the DaemonSet tells the agent's pod wins over the machine's name, which may be
// another one.
func TestNodeNameOfTheEnvironment(t *testing.T) {
	t.Setenv("NODE_NAME", "node-of-the-pod")
	if got := configured(t, "--pods-from=kubernetes").NodeName; got != "node-of-the-pod" {
		t.Errorf("the node is %s", got)
	}
}

func TestDefaultsOfTheCommandLine(t *testing.T) {
	want := agent.Default()
	want.NodeName, want.PodsFrom = "node-1", "manifests=/m"
	if d := diff(want, configured(t, "--node-name=node-1", "--pods-from=manifests=/m")); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}

// A flag's help is the same whatever the machine, and its key is its name in
// camelCase.
func TestKeysFollowFlags(t *testing.T) {
	s, err := newSettings()
	if err != nil {
		t.Fatal(err)
	}
	var bound []string
	for key, name := range s.keys {
		bound = append(bound, name)
		if !strings.EqualFold(key, strings.ReplaceAll(name, "-", "")) || strings.ToLower(key[:1]) != key[:1] {
			t.Errorf("flag --%s has the key %s", name, key)
		}
	}
	s.flags.set.VisitAll(func(f *flag.Flag) {
		if f.Name != "config" && !slices.Contains(bound, f.Name) {
			t.Errorf("flag --%s has no key", f.Name)
		}
	})
	if host := s.cfg.NodeName; strings.Contains(s.flags.help(), " "+host+")") {
		t.Errorf("the help shows this machine's name, %s", host)
	}
}

func TestConfigFileIsBounded(t *testing.T) {
	_, err := configure([]string{"--config", writeFile(t, "# "+strings.Repeat("x", maxConfigBytes))}, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "larger than") {
		t.Errorf("got %v", err)
	}
}

// A comment before the first document's mark is no document.
func TestConfigFileWithMark(t *testing.T) {
	cfg := configured(t, "--config", writeFile(t, "# ours\n---\nnodeName: node-1\npodsFrom: manifests=/m\n"))
	if cfg.NodeName != "node-1" {
		t.Errorf("node name %q", cfg.NodeName)
	}
}

func TestDurations(t *testing.T) {
	for value, want := range map[time.Duration]string{
		0: "0s", 700 * time.Millisecond: "700ms", 15 * time.Second: "15s", 90 * time.Second: "1m30s", 10 * time.Minute: "10m",
		24 * time.Hour: "24h", time.Hour + 5*time.Minute: "1h5m", time.Hour + 10*time.Second: "1h0m10s",
	} {
		d := duration(value)
		if got := d.String(); got != want {
			t.Errorf("%v is shown as %q, want %q", value, got, want)
		}
		var back duration
		if err := back.Set(want); err != nil || time.Duration(back) != value {
			t.Errorf("%q is read as %v, %v", want, time.Duration(back), err)
		}
	}
}

// A duration in the log has its unit, whatever the format.
func TestDurationsInTheLog(t *testing.T) {
	for format, want := range map[string]string{agent.LogText: " took=5.4ms ", agent.LogJSON: `,"took":"5.4ms",`} {
		var log strings.Builder
		cfg := agent.Default()
		cfg.LogFormat = format
		newLogger(cfg, &log).Info("done", "took", 5400*time.Microsecond, "pods", 3)
		if !strings.Contains(log.String(), want) {
			t.Errorf("%s: %s has no %q", format, log.String(), want)
		}
	}
}

func TestBuildVersion(t *testing.T) {
	if buildVersion() == "" {
		t.Error("no version")
	}
}

// go test's own package flags must not leak into ours.
func TestFlagsAreOfTheirCommand(t *testing.T) {
	err := parse(newFlags("status").set, []string{"-test.v"}, io.Discard, func() string { return "" })
	usage, ok := errors.AsType[*usageError](err)
	if !ok || !strings.Contains(usage.Error(), "--test.v") || usage.Unwrap() == nil {
		t.Errorf("got %v, want a usage error", err)
	}
}

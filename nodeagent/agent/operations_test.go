// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"strings"
	"testing"

	"ambientd/cni-plugin/podevent"
	"ambientd/iptables/backend"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/admin"
	"ambientd/tools/netnstest"
)

// What operators ask for, over all parts: compare, take out, let back in.
func TestOperations(t *testing.T) {
	for _, mode := range []string{backend.NFTables, backend.IPTables} {
		t.Run(mode, func(t *testing.T) {
			clearHost(t)
			cfg := config(t)
			cfg.Redirection = mode
			r := begin(t, cfg)
			r.proxy(t)
			one, two := newSandbox(t, 1), newSandbox(t, 2)
			one.enrol(r, "")
			two.enrol(r, "")
			r.manifest("node", pod("node", "hostNetwork: true"))
			checkVerify(t, r, one, two)
			checkWithdraw(t, r, one, two)
			// An agent that has pods leaves the host's rule for the next, one without takes it along.
			if _, err := admin.Withdraw(t.Context(), r.cfg.AdminSocketPath(), admin.Selection{Pods: []string{"shop/web-1", "shop/web-2"}}); err != nil {
				t.Fatal(err)
			}
			r.end()
			wantNoTraces(t, netnstest.Self(t))
		})
	}
}

func checkVerify(t *testing.T, r *running, one, two *sandbox) {
	t.Helper()
	if result := r.verify(admin.VerifyRequest{}); !result.OK() || len(result.Pods) != 2 || result.Pods[0].Pod != "shop/web-1" || result.Pods[0].Probes != nil {
		t.Errorf("all: %+v", result)
	}
	for _, name := range []string{"shop/web-2", two.uid} {
		if result := r.verify(admin.VerifyRequest{Pods: []string{name}}); !result.OK() || len(result.Pods) != 1 || result.Pods[0].UID != two.uid {
			t.Errorf("one by %s: %+v", name, result)
		}
	}
	// What differs is put right, by this or on the kernel's word before; a connection from
	// the host shows that it was.
	program(t, one.ns, "", "ip", "rule", "del", "priority", fmt.Sprint(redirection.RulePriority))
	result := r.verify(admin.VerifyRequest{Pods: []string{one.uid}, Probes: true})
	if result.Pods[0].Error != "" || result.OK() != (len(result.Pods[0].Differences) == 0) {
		t.Errorf("without the policy rule: %+v", result)
	}
	for _, pod := range r.status().Pods {
		if (pod.UID == one.uid) != (pod.Audit.Repairs == 1) {
			t.Errorf("status shows %d repairs of %s", pod.Audit.Repairs, pod.Name)
		}
	}
	if probes := result.Pods[0].Probes; len(probes) != 1 || !probes[0].OK() || probes[0].Address != one.ip {
		t.Errorf("probes: %+v", probes)
	}
	if result := r.verify(admin.VerifyRequest{Probes: true}); !result.OK() {
		t.Errorf("after the repair: %+v", result)
	}
	for _, pod := range r.status().Pods {
		if len(pod.Probes) != 1 || !pod.Probes[0].OK() || pod.Probes[0].Checked.IsZero() {
			t.Errorf("status shows probes %+v", pod.Probes)
		}
	}
	if result := r.verify(admin.VerifyRequest{Pods: []string{"shop/node"}}); len(result.Pods) != 1 || !strings.Contains(result.Pods[0].Error, "not enrolled") {
		t.Errorf("a pod outside the mesh: %+v", result)
	}
	if _, err := admin.Verify(t.Context(), r.cfg.AdminSocketPath(), admin.VerifyRequest{Pods: []string{"shop/nobody"}}); err == nil || !strings.Contains(err.Error(), "shop/nobody: no such pod on this node") {
		t.Errorf("a pod that is not there: %v", err)
	}
}

func checkWithdraw(t *testing.T, r *running, one, two *sandbox) {
	t.Helper()
	socket := r.cfg.AdminSocketPath()
	outcome, err := admin.Withdraw(t.Context(), socket, admin.Selection{Pods: []string{"shop/web-1"}})
	if err != nil || len(outcome.Pods) != 1 {
		t.Fatalf("withdrawing one: %+v, %v", outcome, err)
	}
	wantNoTraces(t, one.ns)
	status := r.status()
	if len(status.Pods) != 1 || status.Pods[0].UID != two.uid || len(status.Skipped) != 1 || !strings.Contains(status.Skipped[0].Reason, "operator") {
		t.Errorf("with one withdrawn: %+v", status)
	}
	for _, nobody := range []func() error{
		func() error {
			_, err := admin.Withdraw(t.Context(), socket, admin.Selection{Pods: []string{"shop/nobody"}})
			return err
		},
		func() error {
			_, err := admin.Enrol(t.Context(), socket, admin.Selection{Pods: []string{"shop/nobody"}})
			return err
		},
	} {
		if err := nobody(); err == nil || !strings.HasPrefix(err.Error(), "shop/nobody: no such pod on this node; ") {
			t.Errorf("a pod that is not there: %v", err)
		}
	}
	if _, err := admin.Withdraw(t.Context(), socket, admin.Selection{All: true}); err != nil {
		t.Fatal(err)
	}
	wantNoTraces(t, two.ns)
	wantNoTraces(t, netnstest.Self(t))
	if outcome, err = admin.Enrol(t.Context(), socket, admin.Selection{All: true}); err != nil || len(outcome.Pods) != 2 {
		t.Fatalf("letting all back in: %+v, %v", outcome, err)
	}
	r.awaitStatus("both pods again", allEnrolled(2))
	for _, pod := range r.status().Pods {
		if len(pod.Probes) > 0 {
			t.Errorf("%s: what was found before it was withdrawn is shown again: %+v", pod.Name, pod.Probes)
		}
	}
	if result := r.verify(admin.VerifyRequest{Probes: true}); !result.OK() {
		t.Errorf("back in: %+v", result)
	}
}

// Options of pods are as the operator and the pod's author say, and the status tells
// what of them is not in force.
func TestPodOptions(t *testing.T) {
	clearHost(t)
	cfg := config(t)
	cfg.Redirection = backend.NFTables
	cfg.AllowedPodOptions = []string{"exclude-outbound-ports"}
	r := begin(t, cfg)
	r.proxy(t)
	s := newSandbox(t, 1)
	s.enrol(r, "ambientd.io/exclude-outbound-ports: '9000-9010', ambientd.io/exclude-inbound-ports: '80', ambient.istio.io/dns-capture: maybe")
	rules := func() string { return program(t, s.ns, "", "nft", "list", "ruleset") }
	if text := rules(); !strings.Contains(text, "9000-9010") || strings.Contains(text, "dport 80 ") || !strings.Contains(text, "15053") {
		t.Errorf("rules:\n%s", text)
	}
	options := map[string]string{}
	for _, m := range r.status().Pods[0].MalformedOptions {
		options[m.Annotation] = m.Problem
	}
	if len(options) != 2 || !strings.Contains(options["ambientd.io/exclude-inbound-ports"], "--allowed-pod-options") ||
		!strings.Contains(options["ambient.istio.io/dns-capture"], "true or false") {
		t.Errorf("status shows %v", options)
	}
	s.describe(r, "ambientd.io/exclude-outbound-ports: '9000,x', ambient.istio.io/dns-capture: 'false'")
	r.awaitStatus("the changed options", func(status admin.Status) bool {
		malformed := status.Pods[0].MalformedOptions
		return len(malformed) == 1 && strings.Contains(malformed[0].Problem, `"x"`)
	})
	if text := rules(); strings.Contains(text, "9000") || strings.Contains(text, "15053") {
		t.Errorf("rules after the change:\n%s", text)
	}
	if result := r.verify(admin.VerifyRequest{}); !result.OK() {
		t.Errorf("after the change: %+v", result)
	}
	r.end()
}

// Entries of the host's set are as narrow as the operator says.
func TestProbeScope(t *testing.T) {
	clearHost(t)
	cfg := config(t)
	cfg.Redirection, cfg.ProbeScope = backend.NFTables, "declared"
	r := begin(t, cfg)
	r.proxy(t)
	s := newSandbox(t, 1)
	s.enrol(r, "")
	if text := program(t, netnstest.Self(t), "", "nft", "list", "table", "inet", redirection.HostTable); !strings.Contains(text, fmt.Sprintf("%s . 8080", s.ip)) {
		t.Errorf("the host's table:\n%s", text)
	}
	if result := r.verify(admin.VerifyRequest{Probes: true}); !result.OK() {
		t.Errorf("probes: %+v", result)
	}
	r.end()
}

// Without capture of IPv6 the pod's is shut, unless the operator says otherwise, and the
// status tells.
func TestIPv6Uncaptured(t *testing.T) {
	for _, what := range []string{"drop", "allow"} {
		t.Run(what, func(t *testing.T) {
			clearHost(t)
			cfg := config(t)
			cfg.Redirection, cfg.IPv6, cfg.IPv6Uncaptured = backend.NFTables, false, what
			r := begin(t, cfg)
			r.proxy(t)
			s := newSandbox(t, 1)
			s.enrol(r, "")
			status := r.status()
			if status.Redirection.IPv6Uncaptured != what || strings.Join(status.Pods[0].Families, ",") != "ipv4" {
				t.Errorf("status: %+v", status)
			}
			if text := program(t, s.ns, "", "nft", "list", "ruleset"); strings.Contains(text, "drop") != (what == "drop") {
				t.Errorf("rules:\n%s", text)
			}
			r.end()
		})
	}
}

// Pods enrolled while they run keep their connections, or not.
func TestExistingConnections(t *testing.T) {
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip("needs nft, of the Debian package nftables: ", err)
	}
	for _, what := range []string{"keep", "reset"} {
		t.Run(what, func(t *testing.T) {
			clearHost(t)
			cfg := config(t)
			cfg.Redirection, cfg.ExistingConnections = backend.NFTables, what
			s := newSandbox(t, 1)
			r := begin(t, cfg)
			r.proxy(t)
			s.describe(r, "")
			r.awaitStatus("the pod", allEnrolled(1))
			if text := program(t, s.ns, "", "nft", "list", "ruleset"); strings.Contains(text, "tcp flags") != (what == "keep") {
				t.Errorf("rules:\n%s", text)
			}
			r.end()
		})
	}
}

// What the agent counts shows on the node's address, and nothing that changes anything.
func TestMetricsEndpoint(t *testing.T) {
	clearHost(t)
	cfg := config(t)
	cfg.HTTPAddr = "127.0.0.1:0"
	r, ready := startReady(t, cfg)
	r.manifest("shop", shop)
	r.proxy(t)
	s := newSandbox(t, 1)
	s.enrol(r, "")
	r.verify(admin.VerifyRequest{})
	if reply := s.call(r, podevent.CommandDel); reply.Error != nil {
		t.Errorf("DEL: %+v", reply)
	}
	// This one starts past the plugin, and its label finds it running.
	late := newSandbox(t, 2)
	late.describe(r, "")
	r.awaitStatus("the pod that started past the plugin", allEnrolled(1))
	get := func(path string) (int, string) {
		t.Helper()
		resp, err := http.Get(fmt.Sprintf("http://%s%s", ready["http_addr"], path))
		must(t, err)
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		must(t, err)
		return resp.StatusCode, string(body)
	}
	code, body := get("/metrics")
	for _, want := range []string{
		`ambientd_cni_requests_total{code="",command="ADD",result="enrolled"} 1`,
		`ambientd_cni_requests_total{code="",command="DEL",result="withdrawn"} 1`,
		`ambientd_audit_duration_seconds_count{subject="pod"}`,
		`ambientd_audit_duration_seconds_count{subject="host"}`,
		`ambientd_pods{state="enrolled"} 1`, `ambientd_ready 1`, `ambientd_node_proxies{ready="true"} 1`,
	} {
		if code != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("%d, no %s in\n%s", code, want, body)
		}
	}
	// The first one may have been found before its ADD came.
	if !strings.Contains(body, "ambientd_running_pods_enrolled_total 1\n") && !strings.Contains(body, "ambientd_running_pods_enrolled_total 2\n") {
		t.Errorf("of pods enrolled while they ran it tells\n%s", body)
	}
	for _, path := range []string{"/v1/verify", "/v1/withdraw", "/v1/enrol", "/v1/status"} {
		if code, _ := get(path); code != http.StatusNotFound {
			t.Errorf("GET %s: %d", path, code)
		}
	}
	http.DefaultClient.CloseIdleConnections()
	r.end()
}

// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"ambientd/nodeagent/admin"
)

// scrape returns the lines that are no comments.
func scrape(t *testing.T, m *admin.Metrics) []string {
	t.Helper()
	server := httptest.NewServer(m.Handler(quiet()))
	defer server.Close()
	code, body := get(t, server.Client(), server.URL)
	if code != http.StatusOK {
		t.Fatalf("%d %s", code, body)
	}
	var lines []string
	for line := range strings.Lines(body) {
		if !strings.HasPrefix(line, "#") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}

func TestMetrics(t *testing.T) {
	status := example()
	status.Pods[0].MalformedOptions = []admin.MalformedOption{{Annotation: "a"}}
	later := status.Identities[0]
	later.NotAfter = later.NotAfter.Add(time.Hour)
	status.Identities = append(status.Identities, later, admin.IdentityStatus{State: admin.CertificateDenied})
	m, err := admin.NewMetrics(func() admin.Status { return status })
	if err != nil {
		t.Fatal(err)
	}
	m.CNIRequest("ADD", "enrolled", 0, 20*time.Millisecond)
	m.CNIRequest("ADD", "enrolled", 0, 20*time.Millisecond)
	m.CNIRequest("ADD", "error", 11, time.Second)
	m.CNIRequest("DEL", "withdrawn", 0, time.Millisecond)
	m.Audited("pod", 300*time.Microsecond)
	m.Audited("host", time.Millisecond)
	m.Repaired("redirection")
	m.RepairFailed("pod")
	m.EnrolledRunning()
	lines := scrape(t, m)
	for _, want := range []string{
		`ambientd_cni_requests_total{code="",command="ADD",result="enrolled"} 2`,
		`ambientd_cni_requests_total{code="11",command="ADD",result="error"} 1`,
		`ambientd_cni_requests_total{code="",command="DEL",result="withdrawn"} 1`,
		`ambientd_cni_request_duration_seconds_bucket{command="ADD",le="0.025"} 2`,
		`ambientd_audit_duration_seconds_bucket{subject="pod",le="0.0005"} 1`,
		`ambientd_audit_duration_seconds_count{subject="host"} 1`,
		`ambientd_repairs_total{part="redirection"} 1`,
		`ambientd_repair_failures_total{subject="pod"} 1`,
		`ambientd_running_pods_enrolled_total 1`,
		`ambientd_info{backend="nftables",version="v0.1.0"} 1`,
		`ambientd_ready 1`,
		`ambientd_pods{state="enrolled"} 1`,
		`ambientd_pods{state="enrolling"} 1`,
		`ambientd_pods{state="degraded"} 0`,
		`ambientd_pods_malformed_options 1`,
		`ambientd_node_proxies{ready="true"} 1`,
		`ambientd_node_proxies{ready="false"} 0`,
		`ambientd_identities{state="ready"} 2`,
		`ambientd_identities{state="pending"} 0`,
		`ambientd_identities{state="denied"} 1`,
		`ambientd_certificate_expiry_min_timestamp_seconds 1.7724528e+09`,
	} {
		found := false
		for _, line := range lines {
			found = found || line == want
		}
		if !found {
			t.Errorf("no line %s in\n%s", want, strings.Join(lines, "\n"))
		}
	}
	for _, line := range lines {
		if !strings.HasPrefix(line, "ambientd_") {
			t.Errorf("a metric of another name: %s", line)
		}
	}
}

// Nothing is registered globally: two agents in one process do not meet.
func TestMetricsOfAnIdleAgent(t *testing.T) {
	for range 2 {
		m, err := admin.NewMetrics(func() admin.Status { return admin.Status{} })
		if err != nil {
			t.Fatal(err)
		}
		lines := strings.Join(scrape(t, m), "\n")
		if strings.Contains(lines, "certificate_expiry") || !strings.Contains(lines, "ambientd_ready 0") {
			t.Errorf("got\n%s", lines)
		}
		for _, want := range []string{
			`repairs_total{part="netns"} 0`, `repairs_total{part="redirection"} 0`, `repairs_total{part="identity"} 0`,
			`repairs_total{part="node proxy"} 0`, `repairs_total{part="host probes"} 0`,
			`repair_failures_total{subject="pod"} 0`, `repair_failures_total{subject="host"} 0`,
		} {
			if !strings.Contains(lines, "ambientd_"+want) {
				t.Errorf("before the first repair there is no %s", want)
			}
		}
	}
}

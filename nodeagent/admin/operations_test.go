// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"ambientd/nodeagent/admin"
)

// operator is what the agent does for operators, and what it was asked.
type operator struct {
	verify  func(ctx context.Context, req admin.VerifyRequest) (admin.VerifyResult, error)
	outcome func(operation string, pods admin.Selection) (admin.Outcome, error)
}

func (o operator) Verify(ctx context.Context, req admin.VerifyRequest) (admin.VerifyResult, error) {
	return o.verify(ctx, req)
}

func (o operator) Withdraw(_ context.Context, pods admin.Selection) (admin.Outcome, error) {
	return o.outcome("withdraw", pods)
}

func (o operator) Enrol(_ context.Context, pods admin.Selection) (admin.Outcome, error) {
	return o.outcome("enrol", pods)
}

// serveOperations returns the socket, and a function that ends the server.
func serveOperations(t *testing.T, o operator) (path string, stop func()) {
	t.Helper()
	listener, path := listen(t)
	return path, serve(t, admin.NewOperationsServer(listener, func() admin.Status { return admin.Status{Node: "n"} }, o, quiet()))
}

func findings() admin.VerifyResult {
	probe := admin.ProbeFinding{
		Address: netip.MustParseAddr("10.0.0.2"), Want: netip.MustParseAddr("169.254.7.127"), Got: netip.MustParseAddr("169.254.7.127"),
		Checked: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC),
	}
	lost, masqueraded := probe, probe
	lost.Got, lost.Error = netip.Addr{}, "timeout"
	masqueraded.Got = netip.MustParseAddr("10.0.0.1")
	return admin.VerifyResult{
		Pods: []admin.PodFinding{
			{Pod: "shop/api", UID: "uid-1", Differences: []string{}, Probes: []admin.ProbeFinding{probe, lost, masqueraded}},
			{Pod: "shop/gone", Differences: []string{}, Error: "it is not enrolled"},
			{Pod: "shop/web", UID: "uid-0", Differences: []string{"route (ipv6): missing", "rule\x1b[31m: missing"}},
		},
		Host: admin.HostFinding{Differences: []string{}},
	}
}

func TestVerify(t *testing.T) {
	want := findings()
	var asked admin.VerifyRequest
	path, _ := serveOperations(t, operator{verify: func(ctx context.Context, req admin.VerifyRequest) (admin.VerifyResult, error) {
		asked = req
		if _, bounded := ctx.Deadline(); !bounded {
			t.Error("an operation without a deadline")
		}
		r := want
		r.Host.Differences = nil
		return r, nil
	}})
	req := admin.VerifyRequest{Pods: []string{"shop/web", "uid-1"}, Probes: true}
	got, err := admin.Verify(t.Context(), path, req)
	if err != nil {
		t.Fatal(err)
	}
	same := cmp.Comparer(func(a, b netip.Addr) bool { return a == b })
	if diff := cmp.Diff(want, got, same); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	if diff := cmp.Diff(req, asked); diff != "" {
		t.Errorf("asked (-want +got)\n%s", diff)
	}
	if status, err := admin.Fetch(t.Context(), path); err != nil || status.Node != "n" {
		t.Errorf("the status on the same socket: %+v, %v", status, err)
	}
}

func TestFindingsAreOK(t *testing.T) {
	all := findings()
	ok := admin.PodFinding{Probes: all.Pods[0].Probes[:1]}
	for _, test := range []struct {
		name   string
		result admin.VerifyResult
		want   bool
	}{
		{"nothing", admin.VerifyResult{}, true},
		{"a healthy pod", admin.VerifyResult{Pods: []admin.PodFinding{ok}}, true},
		{"a probe that was lost", admin.VerifyResult{Pods: []admin.PodFinding{ok, {Probes: all.Pods[0].Probes[1:2]}}}, false},
		{"a probe from elsewhere", admin.VerifyResult{Pods: []admin.PodFinding{{Probes: all.Pods[0].Probes[2:]}}}, false},
		{"a pod that is not enrolled", admin.VerifyResult{Pods: all.Pods[1:2]}, false},
		{"a pod that differed", admin.VerifyResult{Pods: []admin.PodFinding{ok, all.Pods[2]}}, false},
		{"a host that differed", admin.VerifyResult{Host: admin.HostFinding{Differences: []string{"set: missing"}}}, false},
		{"a host that failed", admin.VerifyResult{Host: admin.HostFinding{Error: "locked"}}, false},
	} {
		if got := test.result.OK(); got != test.want {
			t.Errorf("%s: %t, want %t", test.name, got, test.want)
		}
	}
}

func TestWriteFindings(t *testing.T) {
	r := findings()
	r.Host = admin.HostFinding{Differences: []string{"set: missing"}}
	var got strings.Builder
	if err := admin.WriteFindings(&got, r); err != nil {
		t.Fatal(err)
	}
	want := `shop/api: as it should be
  a connection from the host to 10.0.0.2 arrives from 169.254.7.127
  a connection from the host to 10.0.0.2 does not arrive: timeout
  a connection from the host to 10.0.0.2 arrives from 10.0.0.1, want 169.254.7.127
shop/gone: cannot be compared or repaired: it is not enrolled
shop/web: differed, and was repaired
  route (ipv6): missing
  rule [31m: missing
the host's rule for probes: differed, and was repaired
  set: missing
`
	if diff := cmp.Diff(want, got.String()); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	wantError(t, admin.WriteFindings(failing{}, r), io.ErrShortWrite, "writing what was found")

	got.Reset()
	if err := admin.WriteFindings(&got, admin.VerifyResult{}); err != nil {
		t.Fatal(err)
	}
	if want := "no pod is enrolled\nthe host's rule for probes: as it should be\n"; got.String() != want {
		t.Errorf("without a pod: %q, want %q", got.String(), want)
	}
}

func TestWithdrawAndEnrol(t *testing.T) {
	var asked []string
	path, _ := serveOperations(t, operator{outcome: func(operation string, pods admin.Selection) (admin.Outcome, error) {
		asked = append(asked, fmt.Sprint(operation, pods))
		switch {
		case pods.All:
			return admin.Outcome{Pods: []string{"shop/web"}, Error: "pod shop/api: no memory"}, nil
		case pods.Pods[0] == "shop/nobody":
			return admin.Outcome{}, fmt.Errorf("shop/nobody: %w", admin.ErrNoSuchPod)
		case pods.Pods[0] == "shop/none":
			return admin.Outcome{}, nil
		}
		return admin.Outcome{Pods: pods.Pods}, nil
	}})
	one := admin.Selection{Pods: []string{"shop/web"}}
	for _, do := range []func(context.Context, string, admin.Selection) (admin.Outcome, error){admin.Withdraw, admin.Enrol} {
		if outcome, err := do(t.Context(), path, one); err != nil || len(outcome.Pods) != 1 {
			t.Errorf("one: %+v, %v", outcome, err)
		}
		if outcome, err := do(t.Context(), path, admin.Selection{Pods: []string{"shop/none"}}); err != nil || outcome.Pods == nil {
			t.Errorf("none: %+v, %v", outcome, err)
		}
		_, err := do(t.Context(), path, admin.Selection{Pods: []string{"shop/nobody"}})
		// The agent's own words, as they are.
		if want := "shop/nobody: no such pod on this node; name it as NAMESPACE/NAME, or by its UID"; err == nil || err.Error() != want {
			t.Errorf("nobody: %v, want %s", err, want)
		}
		outcome, err := do(t.Context(), path, admin.Selection{All: true})
		if wantError(t, err, nil, "pod shop/api: no memory"); len(outcome.Pods) != 1 {
			t.Errorf("all: %+v", outcome)
		}
		for _, neither := range []admin.Selection{{}, {All: true, Pods: []string{"shop/web"}}} {
			_, err = do(t.Context(), path, neither)
			wantError(t, err, nil, "either pods are named, or all are meant")
		}
	}
	if len(asked) != 8 || !strings.HasPrefix(asked[0], "withdraw") || !strings.HasPrefix(asked[4], "enrol") {
		t.Errorf("asked %v", asked)
	}
}

// Requests are read strictly, and only so much of them.
func TestOperationsRequests(t *testing.T) {
	path, _ := serveOperations(t, operator{verify: func(context.Context, admin.VerifyRequest) (admin.VerifyResult, error) {
		return admin.VerifyResult{}, errors.New("the kernel does not answer")
	}})
	client := http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", path) }}}
	defer client.CloseIdleConnections()
	for _, test := range []struct {
		method, path, body string
		code               int
		text               string
	}{
		{http.MethodPost, "/v1/verify", `{}`, http.StatusInternalServerError, `{"error":"the kernel does not answer"}`},
		{http.MethodPost, "/v1/verify", ``, http.StatusBadRequest, "reading the request: EOF"},
		{http.MethodPost, "/v1/verify", `{"pods":"shop/web"}`, http.StatusBadRequest, "reading the request"},
		{http.MethodPost, "/v1/verify", `{"pod":["shop/web"]}`, http.StatusBadRequest, `unknown field`},
		{http.MethodPost, "/v1/verify", `{} {}`, http.StatusBadRequest, "something follows"},
		{http.MethodPost, "/v1/verify", `{"pods":["` + strings.Repeat("x", 1<<20) + `"]}`, http.StatusRequestEntityTooLarge, "too large"},
		{http.MethodPost, "/v1/withdraw", `{}`, http.StatusBadRequest, "either pods are named"},
		{http.MethodPost, "/v1/enrol", `{"all":true,"pods":["a"]}`, http.StatusBadRequest, "either pods are named"},
		{http.MethodPost, "/v1/withdraw", `{"pods":["shop/web",""]}`, http.StatusBadRequest, `a pod is named \"\": name it as NAMESPACE/NAME`},
		{http.MethodPost, "/v1/verify", `{"pods":[""]}`, http.StatusBadRequest, `a pod is named \"\": name it as NAMESPACE/NAME`},
		{http.MethodGet, "/v1/verify", ``, http.StatusMethodNotAllowed, ""},
		{http.MethodPost, "/v1/status", ``, http.StatusMethodNotAllowed, ""},
	} {
		req, err := http.NewRequestWithContext(t.Context(), test.method, "http://agent"+test.path, bytes.NewReader([]byte(test.body)))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != test.code || !strings.Contains(string(body), test.text) {
			t.Errorf("%s %s %.40s: %d %s (%v), want %d %s", test.method, test.path, test.body, resp.StatusCode, body, err, test.code, test.text)
		}
	}
}

// The end of the agent ends operations, and waits until they have.
func TestEndWaitsForOperations(t *testing.T) {
	begun, ended := make(chan struct{}), make(chan struct{})
	path, stop := serveOperations(t, operator{verify: func(ctx context.Context, _ admin.VerifyRequest) (admin.VerifyResult, error) {
		close(begun)
		<-ctx.Done()
		close(ended)
		return admin.VerifyResult{}, ctx.Err()
	}})
	answered := make(chan error, 1)
	go func() {
		_, err := admin.Verify(t.Context(), path, admin.VerifyRequest{})
		answered <- err
	}()
	<-begun
	stop()
	select {
	case <-ended:
	default:
		t.Error("Run has returned before the operation")
	}
	if err := <-answered; err == nil {
		t.Error("whoever asked was told success")
	}
}

// SPDX-License-Identifier: Apache-2.0

//go:build apitest

package apitest

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"
)

// kubeconfig is as much of one as devcluster writes, in JSON.
type kubeconfig struct {
	Clusters []struct {
		Cluster struct {
			Server string
			CA     []byte `json:"certificate-authority-data"`
		}
	}
	Users []struct {
		User struct {
			Cert []byte `json:"client-certificate-data"`
			Key  []byte `json:"client-key-data"`
		}
	}
}

// administrator returns a client of the cluster's administrator, and the API server's URL.
func administrator(t *testing.T) (*http.Client, string) {
	t.Helper()
	content, err := os.ReadFile(Kubeconfig(t))
	if err != nil {
		t.Fatal(err)
	}
	var config kubeconfig
	if err := json.Unmarshal(content, &config); err != nil || len(config.Clusters) != 1 || len(config.Users) != 1 {
		t.Fatalf("the kubeconfig does not have one cluster and one user: %v", err)
	}
	cert, err := tls.X509KeyPair(config.Users[0].User.Cert, config.Users[0].User.Key)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(config.Clusters[0].Cluster.CA) {
		t.Fatal("the kubeconfig has no CA")
	}
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{cert}}}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: 30 * time.Second}, config.Clusters[0].Cluster.Server
}

func do(t *testing.T, client *http.Client, method, url, body string) (int, []byte) {
	t.Helper()
	return doAs(t, client, method, url, body, http.Header{})
}

// doAs is do with headers by which the API server takes the client for somebody else.
func doAs(t *testing.T, client *http.Client, method, url, body string, who http.Header) (int, []byte) {
	t.Helper()
	req, err := http.NewRequestWithContext(context.Background(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header = who
	if req.Header.Get("Content-Type") == "" {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, answer
}

// What the other tests of this tag take for granted: the kubeconfig is an administrator's,
// writes are kept, and the audit log has one entry for each request, with its user.
func TestServer(t *testing.T) {
	client, server := administrator(t)
	started := time.Now()
	const name = "apitest-smoke"
	namespaces := server + "/api/v1/namespaces"
	if code, answer := do(t, client, http.MethodPost, namespaces, `{"metadata":{"name":"`+name+`"}}`); code != http.StatusCreated {
		t.Fatalf("creating a namespace: %d: %s", code, answer)
	}
	t.Cleanup(func() { do(t, client, http.MethodDelete, namespaces+"/"+name, "") })
	code, answer := do(t, client, http.MethodGet, namespaces+"/"+name, "")
	if code != http.StatusOK || !bytes.Contains(answer, []byte(`"uid":`)) {
		t.Fatalf("reading the namespace: %d: %s", code, answer)
	}
	ours := func(r Request) bool {
		return r.ObjectRef.Name == name && r.User.Username == "admin" && !r.RequestReceivedTimestamp.Before(started)
	}
	const want = "create get"
	var got string
	for deadline := time.Now().Add(10 * time.Second); got != want && time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		var verbs []string
		for _, r := range Requests(t, ours) {
			verbs = append(verbs, r.Verb)
		}
		got = strings.Join(verbs, " ")
	}
	if got != want {
		t.Errorf("the audit log has %q for the namespace, want %q", got, want)
	}
}

// The audit log has enough of an error to tell what was refused for want of rights from what
// cannot be made because its namespace is being deleted.
func TestRefused(t *testing.T) {
	client, server := administrator(t)
	nobody := &http.Client{Transport: withoutCertificate(t, client), Timeout: client.Timeout}
	name := fmt.Sprintf("apitest-refused-%x", time.Now().UnixNano())
	namespaces := server + "/api/v1/namespaces"
	own, events := namespaces+"/"+name, namespaces+"/"+name+"/events"
	// Its finalizer keeps the namespace there for as long as the test goes on.
	body := `{"metadata":{"name":"` + name + `","finalizers":["example.org/apitest"]}}`
	if code, answer := do(t, client, http.MethodPost, namespaces, body); code != http.StatusCreated {
		t.Fatalf("creating a namespace: %d: %s", code, answer)
	}
	t.Cleanup(func() {
		doAs(t, client, http.MethodPatch, own, `{"metadata":{"finalizers":null}}`, http.Header{"Content-Type": {"application/merge-patch+json"}})
	})
	if code, answer := do(t, client, http.MethodDelete, own, ""); code != http.StatusOK {
		t.Fatalf("deleting the namespace: %d: %s", code, answer)
	}

	event := `{"metadata":{"name":"a"},"involvedObject":{"kind":"Pod","namespace":"` + name + `","name":"a"}}`
	for _, step := range []struct {
		agent, method, url string
		client             *http.Client
		who                http.Header
		code               int
		refused            bool
	}{
		{"reads", http.MethodGet, own, client, http.Header{}, 200, false},
		{"makes", http.MethodPost, events, client, http.Header{}, 403, false},
		{"no-right", http.MethodPost, events, client, http.Header{"Impersonate-User": {"somebody"}}, 403, true},
		{"not-known", http.MethodPost, events, nobody, http.Header{"Authorization": {"Bearer none"}}, 401, true},
	} {
		step.who.Set("User-Agent", name+"-"+step.agent)
		code, answer := doAs(t, step.client, step.method, step.url, event, step.who)
		if code != step.code {
			t.Errorf("%s: %d: %s; want %d", step.agent, code, answer, step.code)
		}
		r := awaitRequest(t, name+"-"+step.agent)
		if r.ResponseStatus.Code != step.code || r.Refused() != step.refused {
			t.Errorf("%s: the audit log has %s; it counts as refused: %v, want %v", step.agent, r, r.Refused(), step.refused)
		}
	}
}

// awaitRequest waits for the audit log to have the request of a user agent's.
func awaitRequest(t *testing.T, agent string) Request {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if got := Requests(t, func(r Request) bool { return r.UserAgent == agent }); len(got) > 0 {
			return got[0]
		}
	}
	t.Fatalf("the audit log has no request of %s", agent)
	return Request{}
}

// Pods cannot be told who they are without these: the ones devcluster turns on.
func TestServesCertificatesForPods(t *testing.T) {
	client, server := administrator(t)
	_, answer := do(t, client, http.MethodGet, server+"/apis/certificates.k8s.io/v1beta1", "")
	for _, resource := range []string{"clustertrustbundles", "podcertificaterequests"} {
		if !bytes.Contains(answer, []byte(`"name":"`+resource+`"`)) {
			t.Errorf("the API server does not serve %s: %s", resource, answer)
		}
	}
}

// The API server knows who asks: nobody without a certificate gets anything.
func TestRefusesAnonymous(t *testing.T) {
	client, server := administrator(t)
	code, answer := do(t, &http.Client{Transport: withoutCertificate(t, client)}, http.MethodGet, server+"/api/v1/pods", "")
	if code != http.StatusForbidden && code != http.StatusUnauthorized {
		t.Errorf("anonymous reads pods: %d: %s", code, answer)
	}
}

// withoutCertificate is how the client reaches the API server, as nobody.
func withoutCertificate(t *testing.T, client *http.Client) *http.Transport {
	t.Helper()
	transport := client.Transport.(*http.Transport).Clone()
	transport.TLSClientConfig.Certificates = nil
	t.Cleanup(transport.CloseIdleConnections)
	return transport
}

// SPDX-License-Identifier: Apache-2.0

package apitest

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const auditLines = `{"stage":"ResponseStarted","auditID":"1","verb":"watch"}
{"stage":"ResponseComplete","auditID":"2","verb":"get","user":{"username":"admin"},"objectRef":{"resource":"pods","name":"a"},"responseStatus":{"code":200}}
{"stage":"ResponseComplete","auditID":"3","verb":"patch","user":{"username":"agent"},"objectRef":{"resource":"pods","subresource":"status","name":"a"},"responseStatus":{"code":200}}
{"stage":"ResponseComplete","auditID":"4","verb":"get","user":{"user`

// A request counts once, when it was answered; a line that is still being written does not.
func TestReadRequests(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.log")
	if err := os.WriteFile(path, []byte(auditLines), 0o600); err != nil {
		t.Fatal(err)
	}
	all, err := ReadRequests(path, func(Request) bool { return true })
	if err != nil || len(all) != 2 || all[0].AuditID != "2" || all[1].AuditID != "3" {
		t.Fatalf("got %+v, %v, want requests 2 and 3", all, err)
	}
	agent, err := ReadRequests(path, func(r Request) bool { return r.User.Username == "agent" })
	if err != nil || len(agent) != 1 || agent[0].Verb != "patch" || agent[0].ObjectRef.Subresource != "status" || agent[0].ResponseStatus.Code != 200 {
		t.Errorf("got %+v, %v, want the agent's patch of a status", agent, err)
	}
}

// refusalLines are as an API server of Kubernetes 1.36 has written them, but for names.
const refusalLines = `{"kind":"Event","apiVersion":"audit.k8s.io/v1","level":"Metadata","auditID":"terminating","stage":"ResponseComplete","requestURI":"/api/v1/namespaces/a/events","verb":"create","user":{"username":"admin","groups":["system:masters","system:authenticated"]},"sourceIPs":["10.99.0.1"],"userAgent":"test","objectRef":{"resource":"events","namespace":"a","name":"a","apiVersion":"v1"},"responseStatus":{"metadata":{},"status":"Failure","message":"events \"a\" is forbidden: unable to create new content in namespace a because it is being terminated","reason":"Forbidden","details":{"name":"a","kind":"events","causes":[{"reason":"NamespaceTerminating","message":"namespace a is being terminated","field":"metadata.namespace"}]},"code":403},"requestReceivedTimestamp":"2026-11-30T01:49:25.947695Z","stageTimestamp":"2026-11-30T01:49:25.949543Z","annotations":{"authorization.k8s.io/decision":"allow","authorization.k8s.io/reason":""}}
{"kind":"Event","apiVersion":"audit.k8s.io/v1","level":"Metadata","auditID":"no right","stage":"ResponseComplete","requestURI":"/api/v1/namespaces/a/events","verb":"create","user":{"username":"agent","groups":["system:authenticated"]},"sourceIPs":["10.99.0.1"],"userAgent":"test","objectRef":{"resource":"events","namespace":"a","apiVersion":"v1"},"responseStatus":{"metadata":{},"status":"Failure","message":"events is forbidden: User \"agent\" cannot create resource \"events\" in API group \"\" in the namespace \"a\"","reason":"Forbidden","details":{"kind":"events"},"code":403},"requestReceivedTimestamp":"2026-11-30T01:49:26.003382Z","stageTimestamp":"2026-11-30T01:49:26.004291Z","annotations":{"authorization.k8s.io/decision":"forbid","authorization.k8s.io/reason":""}}
{"kind":"Event","apiVersion":"audit.k8s.io/v1","level":"Metadata","auditID":"not known","stage":"ResponseStarted","requestURI":"/api/v1/namespaces/a/events","verb":"create","user":{},"sourceIPs":["10.99.0.1"],"userAgent":"test","objectRef":{"resource":"events","namespace":"a","apiVersion":"v1"},"responseStatus":{"metadata":{},"status":"Failure","message":"Unauthorized","reason":"Unauthorized","code":401},"requestReceivedTimestamp":"2026-11-30T01:49:26.062551Z","stageTimestamp":"2026-11-30T01:49:26.063450Z"}
{"kind":"Event","apiVersion":"audit.k8s.io/v1","level":"Metadata","auditID":"watch","stage":"ResponseStarted","requestURI":"/api/v1/pods?watch=true","verb":"watch","user":{"username":"agent"},"userAgent":"test","objectRef":{"resource":"pods","apiVersion":"v1"},"responseStatus":{"metadata":{},"code":200},"requestReceivedTimestamp":"2026-11-30T01:49:26.062551Z","stageTimestamp":"2026-11-30T01:49:26.063450Z"}
{"kind":"Event","apiVersion":"audit.k8s.io/v1","level":"Metadata","auditID":"gone","stage":"ResponseComplete","requestURI":"/api/v1/namespaces/a/pods/x/status","verb":"patch","user":{"username":"agent"},"userAgent":"test","objectRef":{"resource":"pods","namespace":"a","name":"x","apiVersion":"v1","subresource":"status"},"responseStatus":{"metadata":{},"status":"Failure","message":"pods \"x\" not found","reason":"NotFound","details":{"name":"x","kind":"pods"},"code":404},"requestReceivedTimestamp":"2026-11-30T01:49:26.062551Z","stageTimestamp":"2026-11-30T01:49:26.063450Z"}
`

// Refused is what somebody had no right to, or was not known for: neither what is not there, nor
// what cannot be made in a namespace that is being deleted.
func TestRefusedByAuditLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.log")
	if err := os.WriteFile(path, []byte(refusalLines), 0o600); err != nil {
		t.Fatal(err)
	}
	all, err := ReadRequests(path, func(Request) bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]bool{}
	for _, r := range all {
		got[r.AuditID] = r.Refused()
	}
	if want := map[string]bool{"terminating": false, "no right": true, "not known": true, "gone": false}; !maps.Equal(got, want) {
		t.Errorf("refused are %v, want %v", got, want)
	}
	if text := all[1].String(); !strings.Contains(text, `by "agent"`) || !strings.Contains(text, "403 events is forbidden") {
		t.Errorf("a refusal reads %q", text)
	}
}

func TestReadRequestsOfBrokenLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.log")
	if err := os.WriteFile(path, []byte("no JSON\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := ReadRequests(path, func(Request) bool { return true }); err == nil {
		t.Errorf("got %+v from a log that is none, want an error", got)
	}
	if got, err := ReadRequests(path+".not", func(Request) bool { return true }); err == nil {
		t.Errorf("got %+v from a log that is not there, want an error", got)
	}
}

// SPDX-License-Identifier: Apache-2.0

package apitest

import (
	"os"
	"path/filepath"
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

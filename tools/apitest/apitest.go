// SPDX-License-Identifier: Apache-2.0

// Package apitest is for tests that need a Kubernetes API server, those with the build
// tag apitest, which `make test-api` runs inside of a cluster of tools/devcluster. It owns
// what they read of their surroundings: the administrator's kubeconfig, and which requests the
// API server has answered. It refuses to stand in for a client.
package apitest

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"testing"
	"time"
)

// Request is one that the API server has answered, as its audit log has it.
type Request struct {
	AuditID    string
	Verb       string
	RequestURI string
	User       struct{ Username string }
	UserAgent  string
	ObjectRef  struct {
		Resource, Subresource, Namespace, Name string
	}
	ResponseStatus           Status
	RequestReceivedTimestamp time.Time
}

// Status is what the API server answered, of an error in more words than its code; but not to
// whoever has asked for an object's metadata alone: then the audit log has the code only.
type Status struct {
	Code            int
	Reason, Message string
	Details         struct{ Causes []Cause }
}

// Cause is one thing that kept the API server from doing as it was asked.
type Cause struct{ Reason, Message string }

// Refused tells whether whoever asked had no right to, or was not known. To make something
// in a namespace that is being deleted is forbidden too, whatever the rights.
func (r Request) Refused() bool {
	switch r.ResponseStatus.Code {
	case http.StatusUnauthorized:
		return true
	case http.StatusForbidden:
		return !slices.ContainsFunc(r.ResponseStatus.Details.Causes, func(c Cause) bool { return c.Reason == namespaceTerminating })
	}
	return false
}

// namespaceTerminating is corev1.NamespaceTerminatingCause.
const namespaceTerminating = "NamespaceTerminating"

// String says what was asked for and what came of it, for whoever reads why a test has failed.
func (r Request) String() string {
	return fmt.Sprintf("%s %s by %q (%s): %d %s", r.Verb, r.RequestURI, r.User.Username, r.UserAgent, r.ResponseStatus.Code, r.ResponseStatus.Message)
}

// Kubeconfig returns the path of the administrator's kubeconfig.
func Kubeconfig(t *testing.T) string {
	t.Helper()
	return fromEnvironment(t, "KUBECONFIG")
}

// Requests returns what the API server has answered until now and keep keeps, oldest first.
// An entry may come a moment after the answer; that of a watch comes when the watch ends.
func Requests(t *testing.T, keep func(Request) bool) []Request {
	t.Helper()
	requests, err := ReadRequests(fromEnvironment(t, "DEVCLUSTER_AUDIT_LOG"), keep)
	if err != nil {
		t.Fatal(err)
	}
	return requests
}

// ReadRequests is Requests for programs that measure: path is that of the audit log.
func ReadRequests(path string, keep func(Request) bool) ([]Request, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("opening the audit log: %w", err)
	}
	defer file.Close()
	var requests []Request
	reader := bufio.NewReader(file)
	for {
		line, err := reader.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			// A line without its end is still being written: it belongs to a later request.
			return requests, nil
		}
		if err != nil {
			return nil, fmt.Errorf("reading the audit log: %w", err)
		}
		var entry entry
		if err := json.Unmarshal(line, &entry); err != nil {
			return nil, fmt.Errorf("reading the audit log %s: %w", path, err)
		}
		if entry.isLast() && keep(entry.Request) {
			requests = append(requests, entry.Request)
		}
	}
}

// entry is one of the audit log.
type entry struct {
	Stage string
	Request
}

// isLast tells whether no other entry of the same request follows. Of one whose user is not
// known there is none with the stage that ends all others.
func (e entry) isLast() bool {
	return e.Stage == "ResponseComplete" || e.Stage == "ResponseStarted" && e.ResponseStatus.Code == http.StatusUnauthorized
}

func fromEnvironment(t *testing.T, name string) string {
	t.Helper()
	value := os.Getenv(name)
	if value == "" {
		t.Fatalf("%s is not set: run this test with `make test-api`", name)
	}
	return value
}

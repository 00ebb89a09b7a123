// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"ambientd/nodeagent/apiserver"
)

const kubeconfig = `{"apiVersion": "v1", "kind": "Config", "current-context": "c",
"clusters": [{"name": "c", "cluster": {"server": %q, "insecure-skip-tls-verify": true}}],
"contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
"users": [{"name": "u", "user": {"token": "t"}}]}`

// lines is a writer for a logger that tests read meanwhile.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *lines) count(part string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.buf.String(), part)
}

// serve returns a source of what h answers in place of an API server.
func serve(t *testing.T, h http.HandlerFunc) (*Source, *lines) {
	t.Helper()
	server := httptest.NewUnstartedServer(h)
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(server.Close)
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(path, fmt.Appendf(nil, kubeconfig, server.URL), 0o600); err != nil {
		t.Fatal(err)
	}
	client, err := apiserver.New(apiserver.Config{Kubeconfig: path, UserAgent: "test"})
	if err != nil {
		t.Fatal(err)
	}
	logged := &lines{}
	s, err := New(Config{Client: client, Node: "n1", LiveTimeout: time.Second, Logger: slog.New(slog.NewTextHandler(logged, nil))})
	if err != nil {
		t.Fatal(err)
	}
	return s, logged
}

// silence is a handler that does not answer the first requests of each kind of each resource.
type silence struct {
	first int

	mu       sync.Mutex
	seen     map[string]int
	watching int // of both resources
	ended    int // of those watches
}

// watches returns how many have begun and ended.
func (h *silence) watches() (begun, ended int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.watching, h.ended
}

func (h *silence) count(n *int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	*n++
}

func (h *silence) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	kind := fmt.Sprint(r.URL.Path, query.Has("watch"))
	h.mu.Lock()
	h.seen[kind]++
	silent := h.seen[kind] <= h.first
	h.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	switch {
	case silent:
		<-r.Context().Done()
	case query.Has("sendInitialEvents"):
		w.WriteHeader(http.StatusUnprocessableEntity)
		_, _ = io.WriteString(w, `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Invalid", "code": 422}`)
	case query.Has("watch"):
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		h.count(&h.watching)
		<-r.Context().Done()
		h.count(&h.ended)
	case strings.HasSuffix(r.URL.Path, "/namespaces"):
		_, _ = io.WriteString(w, `{"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": {"resourceVersion": "7"},
"items": [{"metadata": {"name": "shop", "resourceVersion": "3"}}]}`)
	default:
		_, _ = io.WriteString(w, `{"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "7"},
"items": [{"metadata": {"name": "web", "namespace": "shop", "uid": "u", "resourceVersion": "4"}, "spec": {"nodeName": "n1"}}]}`)
	}
}

// TestSilence: an API server that takes requests and does not answer them is asked again, by list and by watch, and a watch
// that has begun is left alone though nothing comes.
func TestSilence(t *testing.T) {
	handler := &silence{first: 2, seen: map[string]int{}}
	s, logged := serve(t, handler.ServeHTTP)
	s.answerTimeout = 100 * time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	if err := s.AwaitSync(ctx); err != nil {
		t.Fatal(err)
	}
	for {
		pods, complete := s.List()
		if begun, _ := handler.watches(); complete && len(pods) == 1 && begun == 2 {
			break
		}
		select {
		case <-ctx.Done():
			t.Fatalf("%d pods, complete: %v", len(pods), complete)
		case <-s.Changed():
		case <-time.After(10 * time.Millisecond):
		}
	}
	if n := logged.count(errNoAnswer.Error()); n != 2 {
		t.Errorf("told %d times, want once of each resource", n)
	}
	<-time.After(3 * s.answerTimeout) // for nothing to happen in
	if begun, ended := handler.watches(); begun != 2 || ended != 0 {
		t.Errorf("%d watches begun, %d ended; want 2 that go on", begun, ended)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestReasons: while there is no watch, another reason for that is told, and the same one is not.
func TestReasons(t *testing.T) {
	var mu sync.Mutex
	answers := map[string]int{}
	s, logged := serve(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		answers[r.URL.Path]++
		status, reason := http.StatusInternalServerError, "InternalError"
		if answers[r.URL.Path] > 4 {
			status, reason = http.StatusForbidden, "Forbidden"
		}
		mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = fmt.Fprintf(w, `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": %q, "code": %d}`, reason, status)
	})
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	enough := func() bool {
		mu.Lock()
		defer mu.Unlock()
		return answers["/api/v1/pods"] > 7 && answers["/api/v1/namespaces"] > 7
	}
	for !enough() {
		select {
		case <-ctx.Done():
			t.Fatal("the API server was not asked again")
		case <-time.After(10 * time.Millisecond):
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if all, refused := logged.count("cannot be watched;"), logged.count("ClusterRole"); all != 4 || refused != 2 {
		t.Errorf("told %d times, %d of that it is forbidden; want 4 and 2, half for each resource", all, refused)
	}
}

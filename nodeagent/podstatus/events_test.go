// SPDX-License-Identifier: Apache-2.0

package podstatus

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"ambientd/nodeagent/apiserver"
	"ambientd/nodeagent/enroll"
	"ambientd/nodeagent/workload"
)

// A namespace that goes away, or has gone, takes its events with it: nobody is told that
// one could not be made there. Whatever else the API server answers is a failure.
func TestEventOfNamespaceThatIsGone(t *testing.T) {
	for _, c := range []struct {
		name, answer string
		code         int
		fails        bool
	}{
		{"gone", `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404}`, http.StatusNotFound, false},
		{"terminating", `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403,"details":{"causes":[{"reason":"NamespaceTerminating"}]}}`, http.StatusForbidden, false},
		{"forbidden", `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403}`, http.StatusForbidden, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				w.WriteHeader(c.code)
				_, _ = fmt.Fprint(w, c.answer)
			}))
			defer server.Close()
			kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
			content := fmt.Sprintf(`{"clusters":[{"name":"c","cluster":{"server":%q}}],"contexts":[{"name":"c","context":{"cluster":"c"}}],"current-context":"c"}`, server.URL)
			if err := os.WriteFile(kubeconfig, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			client, err := apiserver.New(apiserver.Config{Kubeconfig: kubeconfig})
			if err != nil {
				t.Fatal(err)
			}
			e := newEvents(Config{Client: client, Node: "node", Logger: slog.New(slog.DiscardHandler)})
			_, err = e.write(t.Context(), event{pod: workload.Pod{UID: "u", Namespace: "gone", Name: "web"}, reason: enroll.ReasonEnrolled, first: time.Now(), count: 1})
			if (err != nil) != c.fails {
				t.Errorf("got the error %v", err)
			}
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

//go:build apitest

package kubernetes_test

import (
	"context"
	"fmt"
	"io"
	"log"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"ambientd/nodeagent/workload"
	"ambientd/tools/apitest"
)

// What an API server says of a version for which it has no history any more: as the status of
// its answer, or, where it has a watch cache, as the only event of a watch.
const (
	expiredStatus = `{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"too old resource version: 1 (209)","reason":"Expired","code":410}`
	expiredEvent  = `{"type":"ERROR","object":` + expiredStatus + `}` + "\n"
)

// outage is the administrator's way to the API server, on which watches can be ended, and
// find then that the version from which they go on has expired. The API server itself
// keeps history for longer than a test goes on.
type outage struct {
	code   int // how that is said
	answer string

	mu      sync.Mutex
	end     context.CancelFunc // ends the watches that are under way
	round   context.Context
	over    chan struct{}   // closed while watches may begin
	expires map[string]bool // resources whose next watch has expired
	expired []string        // resources whose watch had
}

// newOutage returns one that has not begun, and a kubeconfig by it.
func newOutage(t *testing.T, code int, answer string) (*outage, string) {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", apitest.Kubeconfig(t))
	must(t, err)
	transport, err := rest.TransportFor(config)
	must(t, err)
	target, err := url.Parse(config.Host)
	must(t, err)
	o := &outage{code: code, answer: answer, over: make(chan struct{}), expires: map[string]bool{}}
	o.round, o.end = context.WithCancel(context.Background())
	close(o.over)
	server := httptest.NewServer(o.handler(&httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }, Transport: transport, FlushInterval: -1,
		ErrorLog: log.New(t.Output(), "", 0),
	}))
	t.Cleanup(server.Close)
	t.Cleanup(func() { o.end() })
	file := filepath.Join(t.TempDir(), "kubeconfig")
	must(t, os.WriteFile(file, fmt.Appendf(nil, `{"apiVersion": "v1", "kind": "Config", "current-context": "c",
"clusters": [{"name": "c", "cluster": {"server": %q}}], "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
"users": [{"name": "u", "user": {}}]}`, server.URL), 0o600))
	return o, file
}

func (o *outage) handler(api http.Handler) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("watch") == "" {
			api.ServeHTTP(w, r)
			return
		}
		ctx, cancel := context.WithCancel(r.Context())
		defer cancel()
		round, ok := o.await(ctx)
		if !ok {
			return
		}
		if o.hasExpired(r) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(o.code)
			_, _ = io.WriteString(w, o.answer) // whoever reads it sees what is missing
			return
		}
		defer context.AfterFunc(round, cancel)()
		api.ServeHTTP(w, r.WithContext(ctx))
	}
}

// begin ends all watches; none begins until the outage is finished.
func (o *outage) begin() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.over = make(chan struct{})
	o.end()
	o.round, o.end = context.WithCancel(context.Background())
}

// finish lets watches begin; the next of each of the resources has expired.
func (o *outage) finish(resources ...string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, resource := range resources {
		o.expires[resource] = true
	}
	close(o.over)
}

// await waits for watches to be allowed, and returns what ends with them.
func (o *outage) await(ctx context.Context) (round context.Context, ok bool) {
	o.mu.Lock()
	over, round := o.over, o.round
	o.mu.Unlock()
	select {
	case <-over:
		return round, true
	case <-ctx.Done():
		return nil, false
	}
}

// hasExpired tells whether it is that watch. One that begins with what there is goes on from no
// version that could have.
func (o *outage) hasExpired(r *http.Request) bool {
	query := r.URL.Query()
	if query.Get("sendInitialEvents") != "" {
		return false
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	resource := path.Base(r.URL.Path)
	if !o.expires[resource] {
		return false
	}
	delete(o.expires, resource)
	o.expired = append(o.expired, resource)
	return true
}

func (o *outage) whichExpired() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Sorted(slices.Values(o.expired))
}

// The watches were away for so long that the API server has no history from where they
// ended: the source lists again, knows what went and came meanwhile, and follows. Nobody who is
// there is taken for gone at any time, not even one that came meanwhile and was read at its ADD.
func TestExpired(t *testing.T) {
	for name, answer := range map[string]struct {
		code int
		text string
	}{"by event": {http.StatusOK, expiredEvent}, "by status": {http.StatusGone, expiredStatus}} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t)
			o, kubeconfig := newOutage(t, answer.code, answer.text)
			c.sourceBy(kubeconfig)
			c.run()
			c.pod("web")
			gone := c.pod("gone")
			c.await("the pods", has("gone", "web"))
			c.expire(o, gone)
		})
	}
}

// expire has the watches expire while the pods web and gone are known.
func (c *cluster) expire(o *outage, gone *corev1.Pod) {
	c.t.Helper()
	labelled := func(mode string, names ...string) func(map[string]workload.Pod, bool) bool {
		return func(pods map[string]workload.Pod, complete bool) bool {
			return has(names...)(pods, complete) && pods["web"].NamespaceLabels["istio.io/dataplane-mode"] == mode
		}
	}
	// Of a watch that ends within a second, without an event, the source takes no version.
	c.label("other")
	c.await("the namespace's label", labelled("other", "gone", "web"))
	o.begin()
	c.remove(gone)
	late, added := c.pod("late"), c.pod("added")
	c.label("none")
	_, err := c.source.Lookup(c.t.Context(), c.namespace, "added", string(added.UID))
	must(c.t, err)
	if pods, _ := c.source.List(); len(pods) != 3 {
		c.t.Errorf("without a watch it lists %v, want the two that it knew and the one that was read", pods)
	}
	missed := c.watchFor("web", "added")
	o.finish("namespaces", "pods")
	c.await("the list", labelled("none", "added", "late", "web"))
	if got := o.whichExpired(); !slices.Equal(got, []string{"namespaces", "pods"}) {
		c.t.Errorf("expired were the watches of %q, want both", got)
	}
	c.pod("later")
	c.remove(late)
	c.label("ambient")
	c.await("what followed", labelled("ambient", "added", "later", "web"))
	if names := missed(); len(names) > 0 {
		c.t.Errorf("%q were not listed for a moment", names)
	}
}

// watchFor looks all the time whether the source lists the pods. The returned function ends that,
// and says which were missing at any time.
func (c *cluster) watchFor(names ...string) (missed func() []string) {
	ctx, cancel := context.WithCancel(c.t.Context())
	found := make(chan []string, 1)
	go func() {
		missing := map[string]bool{}
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for ctx.Err() == nil {
			list, _ := c.source.List()
			for _, name := range names {
				if !slices.ContainsFunc(list, func(p workload.Pod) bool { return p.Name == name }) {
					missing[name] = true
				}
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
		}
		found <- slices.Sorted(maps.Keys(missing))
	}()
	return func() []string {
		cancel()
		return <-found
	}
}

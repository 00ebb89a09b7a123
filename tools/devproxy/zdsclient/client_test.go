// SPDX-License-Identifier: Apache-2.0

package zdsclient_test

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"ambientd/nodeagent/zds"
	"ambientd/nodeagent/zds/packet"
	"ambientd/nodeagent/zds/zdspb"
	"ambientd/tools/devproxy/zdsclient"
)

// recorder is a Handler that remembers, and refuses the pods in refuse.
type recorder struct {
	refuse map[string]string // reason by name

	mu      sync.Mutex
	pods    map[string]zdsclient.Workload
	retains int
	changed chan struct{}
}

func newRecorder() *recorder {
	return &recorder{refuse: make(map[string]string), pods: make(map[string]zdsclient.Workload), changed: make(chan struct{})}
}

func (r *recorder) Add(_ context.Context, w zdsclient.Workload, netns *os.File) error {
	if err := netns.Close(); err != nil {
		return err
	}
	if reason := r.refuse[w.Name]; reason != "" {
		return errors.New(reason)
	}
	r.update(func() { r.pods[w.UID] = w })
	return nil
}

func (r *recorder) Del(uid string) { r.update(func() { delete(r.pods, uid) }) }

func (r *recorder) Retain(uids map[string]struct{}) {
	r.update(func() {
		r.retains++
		maps.DeleteFunc(r.pods, func(uid string, _ zdsclient.Workload) bool { _, ok := uids[uid]; return !ok })
	})
}

func (r *recorder) update(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *recorder) pod(uid string) zdsclient.Workload {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pods[uid]
}

// await returns once the recorder has exactly those pods after so many
// snapshots.
func (r *recorder) await(t *testing.T, ctx context.Context, snapshots int, want ...string) {
	t.Helper()
	for {
		r.mu.Lock()
		got, retains, changed := slices.Sorted(maps.Keys(r.pods)), r.retains, r.changed
		r.mu.Unlock()
		if retains >= snapshots && slices.Equal(got, want) {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			t.Fatalf("after %d snapshots the proxy has %q, want %q after %d", retains, got, want, snapshots)
		}
	}
}

func socket(t *testing.T) string { return filepath.Join(t.TempDir(), "zds.sock") }

func listen(t *testing.T, path string) *net.UnixListener {
	t.Helper()
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Net: "unixpacket", Name: path})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// run runs the client until the test ends.
func run(t *testing.T, path string, h zdsclient.Handler) {
	t.Helper()
	runLogged(t, path, h, slog.New(slog.DiscardHandler))
}

// runLogged is run with a log.
func runLogged(t *testing.T, path string, h zdsclient.Handler, log *slog.Logger) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	c := zdsclient.New(zdsclient.Config{Socket: path, Handler: h, Logger: log})
	go func() { done <- c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run = %v", err)
		}
	})
}

// agent runs a real ZDS server until stop is called.
func agent(t *testing.T, path string) (s *zds.Server, stop func()) {
	t.Helper()
	s, err := zds.New(zds.Config{Listener: listen(t, path)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("agent: %v", err)
		}
	})
	t.Cleanup(stop)
	return s, stop
}

func deadline(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func workload(name string) zds.Workload {
	return zds.Workload{UID: "uid-" + name, Name: name, Namespace: "shop", ServiceAccount: "web"}
}

func TestAgainstARealAgent(t *testing.T) {
	ctx := deadline(t)
	path := socket(t)
	netns, err := os.Open("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Close()
	r := newRecorder()
	r.refuse["bad"] = "no\xff" + strings.Repeat("ö", packet.MaxSize)
	run(t, path, r) // before there is an agent

	s, stop := agent(t, path)
	for _, name := range []string{"a", "b"} {
		if err := s.Add(ctx, workload(name), netns); err != nil {
			t.Fatal(err)
		}
	}
	r.await(t, ctx, 1, "uid-a", "uid-b")
	if got := r.pod("uid-a"); got != (zdsclient.Workload{UID: "uid-a", Name: "a", Namespace: "shop", ServiceAccount: "web"}) {
		t.Errorf("the proxy was told %+v", got)
	}
	var nack *zds.NackError
	if err := s.Add(ctx, workload("bad"), netns); !errors.As(err, &nack) || !strings.HasPrefix(nack.Reason, "noö") {
		t.Errorf("Add of a pod to refuse = %v", err)
	}
	if err := s.Del(ctx, "uid-a"); err != nil {
		t.Fatal(err)
	}
	r.await(t, ctx, 1, "uid-b")

	// Without the agent the pods stay; the next one's snapshot decides.
	stop()
	r.await(t, ctx, 1, "uid-b")
	s, _ = agent(t, path)
	if err := s.Add(ctx, workload("c"), netns); err != nil {
		t.Fatal(err)
	}
	r.await(t, ctx, 2, "uid-c")
}

// fakeAgent is the agent's side of one connection, after the hello.
type fakeAgent struct {
	t    *testing.T
	conn *net.UnixConn
}

func accept(t *testing.T, l *net.UnixListener) fakeAgent {
	t.Helper()
	l.SetDeadline(time.Now().Add(20 * time.Second))
	conn, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(20 * time.Second))
	b, _, err := packet.Read(conn)
	if err == nil {
		err = packet.DecodeHello(b)
	}
	if err != nil {
		t.Fatal(err)
	}
	return fakeAgent{t, conn}
}

func (f fakeAgent) send(r *zdspb.WorkloadRequest) {
	f.t.Helper()
	b, err := packet.Encode(r)
	if err == nil {
		err = packet.Write(f.conn, b, nil)
	}
	if err != nil {
		f.t.Fatal(err)
	}
}

// acked reports whether the proxy accepts, instead of ending the stream.
func (f fakeAgent) acked() bool {
	b, _, err := packet.Read(f.conn)
	if err != nil {
		return false
	}
	nack, err := packet.DecodeResponse(b)
	return err == nil && nack == ""
}

func keep(uid string) *zdspb.WorkloadRequest {
	return &zdspb.WorkloadRequest{Payload: &zdspb.WorkloadRequest_Keep{Keep: &zdspb.KeepWorkload{Uid: uid}}}
}

func del(uid string) *zdspb.WorkloadRequest {
	return &zdspb.WorkloadRequest{Payload: &zdspb.WorkloadRequest_Del{Del: &zdspb.DelWorkload{Uid: uid}}}
}

func snapshotSent() *zdspb.WorkloadRequest {
	return &zdspb.WorkloadRequest{Payload: &zdspb.WorkloadRequest_SnapshotSent{SnapshotSent: &zdspb.SnapshotSent{}}}
}

func TestKeep(t *testing.T) {
	path := socket(t)
	l := listen(t, path)
	r := newRecorder()
	r.pods["uid-kept"], r.pods["uid-lost"] = zdsclient.Workload{}, zdsclient.Workload{}
	run(t, path, r)
	a := accept(t, l)
	a.send(keep("uid-kept"))
	if !a.acked() {
		t.Fatal("keep was not accepted")
	}
	a.send(snapshotSent())
	if !a.acked() {
		t.Fatal("the snapshot's end was not accepted")
	}
	r.await(t, deadline(t), 1, "uid-kept")
}

func TestWhatZtunnelEndsOnEndsTheStream(t *testing.T) {
	add := &zdspb.WorkloadRequest{Payload: &zdspb.WorkloadRequest_Add{Add: &zdspb.AddWorkload{Uid: "u", WorkloadInfo: &zdspb.WorkloadInfo{}}}}
	for _, tc := range []struct {
		name string
		send []*zdspb.WorkloadRequest // all but the last are accepted
	}{
		{"keep after the snapshot", []*zdspb.WorkloadRequest{snapshotSent(), keep("u")}},
		{"a second snapshot", []*zdspb.WorkloadRequest{snapshotSent(), snapshotSent()}},
		{"del within the snapshot", []*zdspb.WorkloadRequest{del("u")}},
		{"add without a descriptor", []*zdspb.WorkloadRequest{add}},
		{"nothing that is known", []*zdspb.WorkloadRequest{{}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := socket(t)
			l := listen(t, path)
			run(t, path, newRecorder())
			a := accept(t, l)
			for i, m := range tc.send {
				a.send(m)
				if last := i == len(tc.send)-1; a.acked() == last {
					t.Fatalf("message %d: accepted %t", i, !last)
				}
			}
			accept(t, l) // it comes back
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package cri_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimev1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"ambientd/nodeagent/podnetns/cri"
)

// runtime is a container runtime on a real socket.
type runtime struct {
	runtimev1.UnimplementedRuntimeServiceServer
	socket string

	listed error // what a list ends with
	all    []*runtimev1.PodSandbox
	status func(ctx context.Context, id string) (map[string]string, error)

	mu      sync.Mutex
	filters []*runtimev1.PodSandboxFilter
	asked   []string // IDs
	now     int      // questions about sandboxes under way
	most    int
}

func newRuntime(tb testing.TB) *runtime {
	tb.Helper()
	r := &runtime{socket: filepath.Join(tb.TempDir(), "cri.sock")}
	listener, err := net.Listen("unix", r.socket)
	if err != nil {
		tb.Fatal(err)
	}
	server := grpc.NewServer(grpc.MaxSendMsgSize(64 << 20))
	runtimev1.RegisterRuntimeServiceServer(server, r)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	tb.Cleanup(func() {
		server.Stop()
		if err := <-ended; err != nil {
			tb.Error(err)
		}
	})
	return r
}

func (r *runtime) ListPodSandbox(_ context.Context, request *runtimev1.ListPodSandboxRequest) (*runtimev1.ListPodSandboxResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.filters = append(r.filters, request.GetFilter())
	return &runtimev1.ListPodSandboxResponse{Items: r.all}, r.listed
}

func (r *runtime) PodSandboxStatus(ctx context.Context, request *runtimev1.PodSandboxStatusRequest) (*runtimev1.PodSandboxStatusResponse, error) {
	r.mu.Lock()
	r.asked = append(r.asked, request.GetPodSandboxId())
	r.now++
	r.most = max(r.most, r.now)
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		r.now--
		r.mu.Unlock()
	}()
	info, err := r.status(ctx, request.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	if !request.GetVerbose() {
		info = nil
	}
	return &runtimev1.PodSandboxStatusResponse{Info: info}, nil
}

// sandbox adds a ready sandbox of the pod, younger than those before it.
func (r *runtime) sandbox(id, uid string) *runtimev1.PodSandbox {
	s := &runtimev1.PodSandbox{
		Id: id, Metadata: &runtimev1.PodSandboxMetadata{Uid: uid, Name: "web", Namespace: "shop"},
		State: runtimev1.PodSandboxState_SANDBOX_READY, CreatedAt: int64(len(r.all)),
	}
	r.all = append(r.all, s)
	return s
}

// netnsAt is an answer with the path of a netns.
func netnsAt(path string) map[string]string {
	return map[string]string{"info": fmt.Sprintf(`{"runtimeSpec":{"linux":{"namespaces":[{"type":"network","path":%q}]}}}`, path)}
}

func (r *runtime) client(tb testing.TB, timeout time.Duration) *cri.Runtime {
	tb.Helper()
	client, err := cri.New(cri.Config{Socket: r.socket, Timeout: timeout})
	if err != nil {
		tb.Fatal(err)
	}
	return client
}

func TestNetnsPaths(t *testing.T) {
	r := newRuntime(t)
	r.status = func(_ context.Context, id string) (map[string]string, error) { return netnsAt("/netns/" + id), nil }
	r.sandbox("old", "uid1")
	r.sandbox("new", "uid1")
	r.sandbox("other", "uid2")
	r.sandbox("unwanted", "uid3")
	// The runtime does not heed the filter.
	r.sandbox("ended", "uid1").State = runtimev1.PodSandboxState_SANDBOX_NOTREADY
	r.sandbox("nameless", "").Metadata = nil
	got, err := r.client(t, time.Minute).NetnsPaths(t.Context(), []string{"uid1", "uid2", "uid4"})
	want := map[string][]string{"uid1": {"/netns/new", "/netns/old"}, "uid2": {"/netns/other"}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%q, %v; want %q", got, err, want)
	}
	slices.Sort(r.asked)
	if want := []string{"new", "old", "other"}; !slices.Equal(r.asked, want) {
		t.Errorf("asked about %q, want %q", r.asked, want)
	}
	if len(r.filters) != 1 || r.filters[0].GetState().GetState() != runtimev1.PodSandboxState_SANDBOX_READY {
		t.Errorf("filters %v", r.filters)
	}
}

// The runtime has to serve kubelet too.
func TestFewQuestionsAtOnce(t *testing.T) {
	r := newRuntime(t)
	r.status = func(_ context.Context, id string) (map[string]string, error) { return netnsAt("/" + id), nil }
	var uids []string
	for i := range 250 {
		uids = append(uids, fmt.Sprint("uid", i))
		r.sandbox(fmt.Sprint(i), uids[i])
	}
	for i := range 100 {
		r.sandbox(fmt.Sprint("again", i), "uid0")
	}
	got, err := r.client(t, time.Minute).NetnsPaths(t.Context(), uids)
	if err != nil || len(got) != 250 || len(got["uid0"]) != 4 {
		t.Errorf("paths of %d pods, %d of the first, %v", len(got), len(got["uid0"]), err)
	}
	if r.most > 4 || len(r.asked) != 253 {
		t.Errorf("%d questions at once, %d in all", r.most, len(r.asked))
	}
}

// What one sandbox answers does not keep the others' from being used.
func TestPartlyUseless(t *testing.T) {
	r := newRuntime(t)
	r.status = func(_ context.Context, id string) (map[string]string, error) {
		switch id {
		case "gone":
			return nil, status.Error(codes.NotFound, "an error occurred when try to find sandbox")
		case "huge":
			return map[string]string{"info": strings.Repeat("x", 2<<20)}, nil
		case "silent":
			return nil, nil
		case "broken", "another":
			return map[string]string{"info": "{"}, nil
		}
		return netnsAt("/" + id), nil
	}
	var uids []string
	for _, id := range []string{"gone", "huge", "silent", "broken", "another", "good"} {
		r.sandbox(id, "uid of "+id)
		uids = append(uids, "uid of "+id)
	}
	got, err := r.client(t, time.Minute).NetnsPaths(t.Context(), uids)
	if want := map[string][]string{"uid of good": {"/good"}}; !reflect.DeepEqual(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if err == nil || !strings.Contains(err.Error(), r.socket) || !strings.Contains(err.Error(), "and 2 more") || len(err.Error()) > 2000 {
		t.Errorf("error %v", err)
	}
}

func TestHugeIsRefused(t *testing.T) {
	r := newRuntime(t)
	r.status = func(context.Context, string) (map[string]string, error) {
		return map[string]string{"info": strings.Repeat(" ", 2<<20) + "{}"}, nil
	}
	r.sandbox("huge", "uid1")
	if _, err := r.client(t, time.Minute).NetnsPaths(t.Context(), []string{"uid1"}); status.Code(lastOf(err)) != codes.ResourceExhausted {
		t.Errorf("error %v", err)
	}
}

// A runtime that hangs costs the time that was set, no more; and nothing if the search ends.
func TestHanging(t *testing.T) {
	r := newRuntime(t)
	r.status = func(ctx context.Context, _ string) (map[string]string, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	r.sandbox("hanging", "uid1")
	if _, err := r.client(t, 20*time.Millisecond).NetnsPaths(t.Context(), []string{"uid1"}); status.Code(lastOf(err)) != codes.DeadlineExceeded {
		t.Errorf("error %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.client(t, time.Hour).NetnsPaths(ctx, []string{"uid1"}); status.Code(lastOf(err)) != codes.Canceled {
		t.Errorf("error %v", err)
	}
}

// lastOf is the error that has a status in its chain.
func lastOf(err error) error {
	var with interface{ GRPCStatus() *status.Status }
	if errors.As(err, &with) {
		return with.GRPCStatus().Err()
	}
	return err
}

// A socket at which somebody accepts and never speaks.
func TestNobodySpeaks(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cri.sock")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	client, err := cri.New(cri.Config{Socket: path, Timeout: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := client.NetnsPaths(t.Context(), []string{"uid1"}); err == nil || len(got) > 0 {
		t.Errorf("%v, %v", got, err)
	}
}

func TestNoRuntime(t *testing.T) {
	client, err := cri.New(cri.Config{Socket: filepath.Join(t.TempDir(), "none.sock"), Timeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	got, err := client.NetnsPaths(t.Context(), []string{"uid1"})
	if status.Code(lastOf(err)) != codes.Unavailable || !strings.Contains(err.Error(), "none.sock") || len(got) > 0 {
		t.Errorf("%v, %v", got, err)
	}
}

func TestListFails(t *testing.T) {
	r := newRuntime(t)
	r.listed = status.Error(codes.Unimplemented, "unknown service runtime.v1.RuntimeService")
	if _, err := r.client(t, time.Minute).NetnsPaths(t.Context(), nil); status.Code(lastOf(err)) != codes.Unimplemented {
		t.Errorf("error %v", err)
	}
}

func TestNewRefuses(t *testing.T) {
	for _, cfg := range []cri.Config{{}, {Socket: "containerd.sock"}, {Socket: "/run/c.sock", Timeout: -1}} {
		if _, err := cri.New(cfg); err == nil {
			t.Errorf("%+v was accepted", cfg)
		}
	}
}

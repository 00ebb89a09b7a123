// SPDX-License-Identifier: Apache-2.0

// Package cri asks a container runtime where the host has the network namespaces of
// pods, by the Container Runtime Interface that kubelet speaks too.
//
// It owns the questions, their bounds, and the reading of what runtimes answer in a form
// of their own: containerd and CRI-O put the sandbox's OCI specification into the
// verbose answer. It refuses to be believed: a path is where to look, and whoever asked
// has to prove that the netns there is the pod's. It changes nothing in the runtime.
package cri

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimev1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// DefaultTimeout is how long all questions of one search may take. A runtime that is busy
// must not keep the search from going on at the processes.
const DefaultTimeout = 2 * time.Second

const (
	// maxList bounds the list of sandboxes, in bytes: kubelet's own limit.
	maxList = 16 << 20
	// maxStatus bounds one sandbox's answer, in bytes. Usual ones have 20 KiB.
	maxStatus = 1 << 20
	// maxSandboxes bounds how many sandboxes of one pod are asked about. One is ready as
	// a rule, two while a new one takes over.
	maxSandboxes = 4
	// askedAtOnce is how many questions are under way: the runtime serves kubelet too.
	askedAtOnce = 4
	// maxReasons bounds how many of the failures are told.
	maxReasons = 3
)

// Config is what a Runtime works with.
type Config struct {
	Socket  string        // absolute path, such as /run/containerd/containerd.sock
	Timeout time.Duration // [DefaultTimeout] if zero
}

// Runtime is a container runtime. It keeps no connection between two searches.
type Runtime struct {
	cfg Config
}

// New returns the runtime that serves at the socket. Nothing is asked yet: the socket may
// come later.
func New(cfg Config) (*Runtime, error) {
	if !filepath.IsAbs(cfg.Socket) {
		return nil, fmt.Errorf("cri: the socket's path %q is not absolute", cfg.Socket)
	}
	if cfg.Timeout < 0 {
		return nil, fmt.Errorf("cri: the timeout %s is negative", cfg.Timeout)
	}
	cfg.Timeout = cmp.Or(cfg.Timeout, DefaultTimeout)
	return &Runtime{cfg: cfg}, nil
}

// NetnsPaths returns where the host has the netns of those of the pods that have a ready
// sandbox with a netns of its own, by UID: the newest sandbox's first, and the netns'
// file before the process that lives in it. With an error it returns what it has learnt
// nevertheless.
func (r *Runtime) NetnsPaths(ctx context.Context, uids []string) (_ map[string][]string, err error) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
	defer cancel()
	conn, err := grpc.NewClient("unix:"+r.cfg.Socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()), // the socket's mode protects it
		grpc.WithNoProxy())
	if err != nil {
		return nil, fmt.Errorf("connecting to the container runtime at %s: %w", r.cfg.Socket, err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	client := runtimev1.NewRuntimeServiceClient(conn)

	ready := &runtimev1.PodSandboxFilter{State: &runtimev1.PodSandboxStateValue{State: runtimev1.PodSandboxState_SANDBOX_READY}}
	list, err := client.ListPodSandbox(ctx, &runtimev1.ListPodSandboxRequest{Filter: ready}, grpc.MaxCallRecvMsgSize(maxList))
	if err != nil {
		return nil, fmt.Errorf("asking the container runtime at %s for its sandboxes: %w", r.cfg.Socket, err)
	}
	paths, err := inspect(ctx, client, sandboxes(list.GetItems(), uids))
	if err != nil {
		return paths, fmt.Errorf("asking the container runtime at %s about sandboxes: %w", r.cfg.Socket, err)
	}
	return paths, nil
}

// sandboxes returns the ready ones of the wanted pods, newest first of each. The runtime
// may not have heeded the filter.
func sandboxes(items []*runtimev1.PodSandbox, uids []string) []*runtimev1.PodSandbox {
	wanted := make(map[string]int, len(uids)) // how many more are taken of each
	for _, uid := range uids {
		wanted[uid] = maxSandboxes
	}
	slices.SortStableFunc(items, func(a, b *runtimev1.PodSandbox) int { return cmp.Compare(b.GetCreatedAt(), a.GetCreatedAt()) })
	var kept []*runtimev1.PodSandbox
	for _, item := range items {
		uid := item.GetMetadata().GetUid()
		if item.GetState() != runtimev1.PodSandboxState_SANDBOX_READY || wanted[uid] == 0 {
			continue
		}
		wanted[uid]--
		kept = append(kept, item)
	}
	return kept
}

// inspect asks about each sandbox, several at once.
func inspect(ctx context.Context, client runtimev1.RuntimeServiceClient, all []*runtimev1.PodSandbox) (map[string][]string, error) {
	answers := make([][]string, len(all))
	var failed failures
	var group errgroup.Group
	group.SetLimit(askedAtOnce)
	for i, sandbox := range all {
		group.Go(func() error {
			request := &runtimev1.PodSandboxStatusRequest{PodSandboxId: sandbox.GetId(), Verbose: true}
			status, err := client.PodSandboxStatus(ctx, request, grpc.MaxCallRecvMsgSize(maxStatus))
			if err == nil {
				answers[i], err = netnsPaths(status.GetInfo())
			}
			if err != nil {
				failed.add(fmt.Errorf("sandbox %.64q: %w", sandbox.GetId(), err))
			}
			return nil
		})
	}
	_ = group.Wait() // none returns an error: the others are asked nevertheless
	paths := make(map[string][]string, len(all))
	for i, sandbox := range all {
		uid := sandbox.GetMetadata().GetUid()
		if len(answers[i]) > 0 {
			paths[uid] = append(paths[uid], answers[i]...)
		}
	}
	return paths, failed.err()
}

// failures are those of questions that were asked at the same time.
type failures struct {
	mu   sync.Mutex
	kept []error
	more int
}

func (f *failures) add(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.kept) == maxReasons {
		f.more++
		return
	}
	f.kept = append(f.kept, err)
}

func (f *failures) err() error {
	if f.more > 0 {
		f.kept = append(f.kept, fmt.Errorf("and %d more", f.more))
	}
	return errors.Join(f.kept...)
}

// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"golang.org/x/sync/singleflight"

	"ambientd/nodeagent/apiserver"
	"ambientd/nodeagent/workload"
)

// Config is what a Source needs; every field is required.
type Config struct {
	Client      *apiserver.Client
	Node        string        // whose pods there are
	LiveTimeout time.Duration // for one read at the API server of a pod that is not known
	Logger      *slog.Logger
}

// Source answers for the pods of one node of a cluster. It is safe for concurrent use.
type Source struct {
	cfg        Config
	pods       *known
	namespaces *known
	reads      singleflight.Group // at the API server, by pod

	answerTimeout time.Duration // [answerTimeout], but in tests

	changed chan struct{} // holds a token when a pod or a namespace has changed
}

// New returns a Source that knows nothing before Run is called.
func New(cfg Config) (*Source, error) {
	if cfg.Client == nil || cfg.Node == "" || cfg.LiveTimeout <= 0 || cfg.Logger == nil {
		return nil, errors.New("kubernetes: client, node, timeout and logger are required")
	}
	s := &Source{cfg: cfg, changed: make(chan struct{}, 1), answerTimeout: answerTimeout}
	s.pods = newKnown(s.signal, func(a, b *item) bool { return !same(a.pod, b.pod) })
	s.namespaces = newKnown(s.signal, func(a, b *item) bool { return !maps.Equal(a.Labels, b.Labels) })
	return s, nil
}

func (s *Source) signal() {
	select {
	case s.changed <- struct{}{}:
	default: // one is waiting already
	}
}

// Run watches until ctx ends, and then returns nil.
func (s *Source) Run(ctx context.Context) error {
	ctx = apiserver.WithLog(ctx, s.cfg.Logger)
	var watches sync.WaitGroup
	watches.Go(func() {
		s.watch(ctx, resource{
			name: "pods", kind: &corev1.Pod{}, list: &corev1.PodList{}, fields: "spec.nodeName=" + s.cfg.Node, into: s.pods,
		})
	})
	watches.Go(func() {
		s.watch(ctx, resource{
			name: "namespaces", kind: &metav1.PartialObjectMetadata{}, list: &metav1.PartialObjectMetadataList{},
			accept: apiserver.PartialMetadata, acceptList: apiserver.PartialMetadataList, into: s.namespaces,
		})
	})
	watches.Wait()
	return nil
}

// AwaitSync returns nil once all pods of the node and all namespaces are known, or at
// the end of ctx why they are not.
func (s *Source) AwaitSync(ctx context.Context) error {
	for _, kind := range []struct {
		name string
		*known
	}{{"pods", s.pods}, {"namespaces", s.namespaces}} {
		select {
		case <-kind.synced:
		case <-ctx.Done():
			if failure := kind.lastFailure(); failure != nil {
				return fmt.Errorf("%s have not been read yet: %w", kind.name, failure)
			}
			return fmt.Errorf("%s have not been read yet: %w", kind.name, context.Cause(ctx))
		}
	}
	return nil
}

// List returns all pods of the node, in no order. It is not complete before everything
// was read, nor while the API server cannot be watched: a pod that is missing may then
// be there.
//
// A pod whose namespace is not known is left out: nobody could tell whether it belongs
// in the mesh.
func (s *Source) List() (pods []workload.Pod, complete bool) {
	items, complete := s.pods.all()
	pods = make([]workload.Pod, 0, len(items))
	for _, i := range items {
		pod, ok := s.withLabels(i)
		if !ok {
			complete = false
			continue
		}
		pods = append(pods, pod)
	}
	return pods, complete
}

// withLabels is the pod with its namespace's labels, false if these are not known.
func (s *Source) withLabels(i *item) (workload.Pod, bool) {
	namespace, ok := s.namespaces.get(objectName{name: i.Namespace})
	if !ok {
		return workload.Pod{}, false
	}
	pod := i.pod
	pod.NamespaceLabels = namespace.Labels
	return pod, true
}

// Changed receives after a pod of the node or a namespace has changed, once for any
// number of changes. It is meant for one receiver.
func (s *Source) Changed() <-chan struct{} { return s.changed }

// Namespaces returns the labels of all namespaces by name, as they were seen last.
// It is not complete before all were read.
func (s *Source) Namespaces() (labels map[string]map[string]string, complete bool) {
	complete = s.namespaces.isSynced() // before the list is taken, which would else be an earlier one's
	items, _ := s.namespaces.all()
	labels = make(map[string]map[string]string, len(items))
	for _, i := range items {
		labels[i.Name] = i.Labels
	}
	return labels, complete
}

// Known returns the pod as it was seen last, without its namespace's labels.
func (s *Source) Known(namespace, name, uid string) (workload.Pod, bool) {
	i, ok := s.pods.get(objectName{namespace, name})
	if !ok || i.pod.UID != uid {
		return workload.Pod{}, false
	}
	return i.pod, true
}

// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"ambientd/nodeagent/apiserver"
	"ambientd/nodeagent/podsource"
	"ambientd/nodeagent/workload"
)

// Lookup returns the pod of that name. The UID may be empty; if it is not, it must be
// the pod's, or the error wraps [podsource.ErrUIDMismatch]. An unknown pod is
// [podsource.ErrNotFound].
//
// It costs no request while the pod is known. Before everything was read it waits for
// that, as long as ctx lets it; a pod that is not known then is read once from the API
// server.
func (s *Source) Lookup(ctx context.Context, namespace, name, uid string) (workload.Pod, error) {
	if pod, ok := s.lookup(namespace, name, uid); ok {
		return pod, nil
	}
	if isStaticUID(uid) {
		// No object may ever show it, and no account makes it an identity.
		return workload.Pod{UID: uid, Namespace: namespace, Name: name, Static: true}, nil
	}
	if err := s.AwaitSync(ctx); err != nil {
		return workload.Pod{}, fmt.Errorf("looking for pod %s/%s: %w", namespace, name, err)
	}
	if pod, ok := s.lookup(namespace, name, uid); ok {
		return pod, nil
	}
	pod, err := s.readShared(ctx, namespace, name)
	if err != nil {
		return workload.Pod{}, fmt.Errorf("pod %s/%s: %w", namespace, name, err)
	}
	if uid != "" && pod.UID != uid {
		return workload.Pod{}, fmt.Errorf("pod %s/%s: %w: %s at the API server, %s from the runtime, which may have an older one of that name",
			namespace, name, podsource.ErrUIDMismatch, pod.UID, uid)
	}
	return pod, nil
}

// lookup returns the pod if it is known, with its namespace. Without a UID one that is
// on its way out is not meant by what starts now.
func (s *Source) lookup(namespace, name, uid string) (workload.Pod, bool) {
	i, ok := s.pods.get(objectName{namespace, name})
	if !ok || uid != "" && i.pod.UID != uid || uid == "" && (i.pod.Deleting || i.pod.Ended()) {
		return workload.Pod{}, false
	}
	return s.withLabels(i)
}

// staticUIDLength is that of a hash in hexadecimal, which kubelet gives to a pod from a
// file, where the API server gives a UUID with its hyphens.
const staticUIDLength = 32

func isStaticUID(uid string) bool {
	return len(uid) == staticUIDLength && strings.Trim(uid, "0123456789abcdef") == ""
}

// readShared reads the pod from the API server, once for all who ask at the same time.
func (s *Source) readShared(ctx context.Context, namespace, name string) (workload.Pod, error) {
	read := s.reads.DoChan(namespace+"/"+name, func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.LiveTimeout)
		defer cancel()
		return s.read(apiserver.WithLog(ctx, s.cfg.Logger), namespace, name)
	})
	select {
	case r := <-read:
		if r.Err != nil {
			return workload.Pod{}, r.Err
		}
		return r.Val.(workload.Pod), nil // read returns nothing else
	case <-ctx.Done():
		return workload.Pod{}, fmt.Errorf("reading it at the API server: %w", context.Cause(ctx))
	}
}

// read reads the pod, and its namespace unless that is known.
func (s *Source) read(ctx context.Context, namespace, name string) (workload.Pod, error) {
	var pod corev1.Pod
	err := s.cfg.Client.Interface.Get().Namespace(namespace).Resource("pods").Name(name).Do(ctx).Into(&pod)
	switch {
	case apierrors.IsNotFound(err):
		return workload.Pod{}, fmt.Errorf("%w to the API server", podsource.ErrNotFound)
	case err != nil:
		return workload.Pod{}, fmt.Errorf("reading it at the API server: %w", apiserver.Explain(err))
	}
	i := trimPod(&pod)
	if i.node != s.cfg.Node {
		return workload.Pod{}, fmt.Errorf("%w on this node: the API server has it on node %q, and this is %q; see --node-name",
			podsource.ErrNotFound, i.node, s.cfg.Node)
	}
	if _, known := s.namespaces.get(objectName{name: namespace}); !known {
		var ns metav1.PartialObjectMetadata
		err := s.cfg.Client.Interface.Get().Resource("namespaces").Name(namespace).SetHeader("Accept", apiserver.PartialMetadata).Do(ctx).Into(&ns)
		if err != nil {
			return workload.Pod{}, fmt.Errorf("reading its namespace at the API server: %w", apiserver.Explain(err))
		}
		trimmed, err := asItem(&ns)
		if err != nil {
			return workload.Pod{}, err
		}
		s.namespaces.readAhead(trimmed)
	}
	s.pods.readAhead(i)
	found, ok := s.withLabels(i)
	if !ok {
		return workload.Pod{}, fmt.Errorf("its namespace has gone: %w", podsource.ErrNotFound)
	}
	return found, nil
}

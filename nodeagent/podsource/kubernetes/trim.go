// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"ambientd/nodeagent/workload"
)

// item is what is kept of an object. It is an object itself, since the reflector gathers
// items before it hands them over.
type item struct {
	metav1.ObjectMeta // name, namespace, UID and version; of a namespace its labels

	pod  workload.Pod // without its namespace's labels
	node string
}

// trim cuts an object down to an item.
func trim(object any) (any, error) {
	switch o := object.(type) {
	case *item:
		return o, nil
	case *corev1.Pod:
		return trimPod(o), nil
	case *metav1.PartialObjectMetadata:
		return &item{ObjectMeta: metav1.ObjectMeta{
			Name: o.Name, UID: o.UID, ResourceVersion: o.ResourceVersion, Labels: o.Labels,
		}}, nil
	}
	return nil, fmt.Errorf("%T is neither a pod nor the metadata of a namespace", object)
}

// trimPod takes over the pod's maps.
func trimPod(pod *corev1.Pod) *item {
	var annotations map[string]string
	for annotation, text := range pod.Annotations {
		key, value := workload.IsNeeded(annotation)
		if !key {
			continue
		}
		if annotations == nil {
			annotations = map[string]string{}
		}
		if !value {
			text = ""
		}
		annotations[annotation] = text
	}
	pod.Annotations = annotations
	return &item{
		ObjectMeta: metav1.ObjectMeta{
			Name: pod.Name, Namespace: pod.Namespace, UID: pod.UID, ResourceVersion: pod.ResourceVersion,
		},
		pod:  workload.FromPod(pod, nil),
		node: pod.Spec.NodeName,
	}
}

// same tells whether nobody who decides about the pod could tell a from b. What the
// agent itself writes on the pod is no difference.
func same(a, b workload.Pod) bool {
	return a.UID == b.UID && a.ServiceAccount == b.ServiceAccount && a.HostNetwork == b.HostNetwork && a.Phase == b.Phase &&
		a.Deleting == b.Deleting && a.Static == b.Static &&
		maps.Equal(a.Labels, b.Labels) && sameAnnotations(a.Annotations, b.Annotations) &&
		slices.Equal(a.IPs, b.IPs) && slices.Equal(a.Probes, b.Probes)
}

func sameAnnotations(a, b map[string]string) bool {
	covers := func(a, b map[string]string) bool {
		for annotation, text := range a {
			if other, ok := b[annotation]; annotation != workload.AnnotationRedirection && (!ok || other != text) {
				return false
			}
		}
		return true
	}
	return covers(a, b) && covers(b, a)
}

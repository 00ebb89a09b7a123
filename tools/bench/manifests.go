// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"ambientd/cni-plugin/podevent"
)

const (
	namespace = "bench"
	// switched and others are the namespaces of a crowd's pods: those that are switched on
	// and off at once, and the rest.
	switched, others = "switched", "others"
	// sharedAccounts is how many service accounts pods have whose identity the agent is to
	// hold already, as when a deployment grows.
	sharedAccounts = 10
)

// kind is what a pod is for.
type kind int

const (
	stayer    kind = iota // enrolled and left there; the first of them bring in all shared accounts
	passing               // enrolled and withdrawn, with a shared account
	newcomer              // enrolled and withdrawn, with an account of its own
	member                // of a crowd, in the namespace switched, with a shared account
	bystander             // of a crowd, in the namespace others, with a shared account
)

func (k kind) String() string {
	return [...]string{"stayer", "passing", "newcomer", "member", "bystander"}[k]
}

func (k kind) namespace() string {
	switch k {
	case member:
		return switched
	case bystander:
		return others
	default:
		return namespace
	}
}

// pod returns the pod of that kind and number, as the runtime knows it.
func (k kind) pod(number int) podevent.Pod {
	return podevent.Pod{
		Namespace: k.namespace(), Name: fmt.Sprintf("%s-%d", k, number),
		UID: fmt.Sprintf("00000000-0000-4000-8000-%06x%06x", int(k), number),
	}
}

func (k kind) account(number int) string {
	if k == newcomer {
		return fmt.Sprintf("own-%d", number)
	}
	return fmt.Sprintf("shared-%d", number%sharedAccounts)
}

// manifest is the pod's object, with the addresses that its status shows.
func (k kind) manifest(number int, ips []netip.Addr) *corev1.Pod {
	pod := k.pod(number)
	object := &corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: types.UID(pod.UID)},
		Spec: corev1.PodSpec{
			ServiceAccountName: k.account(number),
			Containers:         []corev1.Container{{Name: "app", Image: "bench"}},
		},
	}
	for _, ip := range ips {
		object.Status.PodIPs = append(object.Status.PodIPs, corev1.PodIP{IP: ip.String()})
	}
	return object
}

// membership says whether a namespace is in the mesh.
type membership int

const (
	outside membership = iota
	inMesh
)

func namespaceManifest(name string, m membership) *corev1.Namespace {
	object := &corev1.Namespace{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"}, ObjectMeta: metav1.ObjectMeta{Name: name}}
	if m == inMesh {
		object.Labels = map[string]string{"istio.io/dataplane-mode": "ambient"}
	}
	return object
}

// writeManifests writes the namespace and all pods that are ever enrolled by the plugin,
// stayers of them staying, to one file in dir: the agent reads it once.
func writeManifests(dir string, stayers int) error {
	objects := []any{namespaceManifest(namespace, inMesh)}
	for _, pods := range []struct {
		kind  kind
		count int
	}{{stayer, stayers}, {passing, batch}, {newcomer, batch}} {
		for i := range pods.count {
			objects = append(objects, pods.kind.manifest(i, nil))
		}
	}
	return writeObjects(dir, "all.yaml", objects...)
}

// writeCrowd writes the pods of a crowd, and their namespaces outside of the mesh.
func writeCrowd(dir string, c *crowd) error {
	var objects []any
	for _, pod := range c.pods {
		objects = append(objects, pod.kind.manifest(pod.number, pod.ips))
	}
	return errors.Join(writeObjects(dir, "pods.yaml", objects...), switchNamespace(dir, switched, outside), switchNamespace(dir, others, outside))
}

// switchNamespace replaces a namespace's manifest.
func switchNamespace(dir, name string, m membership) error {
	return writeObjects(dir, "namespace-"+name+".yaml", namespaceManifest(name, m))
}

// writeObjects writes objects to a file in dir, by rename: the agent follows the directory.
func writeObjects(dir, name string, objects ...any) error {
	var text bytes.Buffer
	for _, object := range objects {
		one, err := yaml.Marshal(object)
		if err != nil {
			return fmt.Errorf("encoding a manifest: %w", err)
		}
		text.WriteString("---\n")
		text.Write(one)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("making the manifests' directory: %w", err)
	}
	next := filepath.Join(dir, "."+name)
	if err := os.WriteFile(next, text.Bytes(), 0o644); err != nil {
		return fmt.Errorf("writing manifests: %w", err)
	}
	if err := os.Rename(next, filepath.Join(dir, name)); err != nil {
		return fmt.Errorf("writing manifests: %w", err)
	}
	return nil
}

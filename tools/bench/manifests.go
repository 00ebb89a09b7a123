// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
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
	// sharedAccounts is how many service accounts pods have whose identity the agent is to
	// hold already, as when a deployment grows.
	sharedAccounts = 10
)

// kind is what a pod is for.
type kind int

const (
	stayer   kind = iota // enrolled and left there; the first of them bring in all shared accounts
	passing              // enrolled and withdrawn, with a shared account
	newcomer             // enrolled and withdrawn, with an account of its own
)

func (k kind) String() string { return [...]string{"stayer", "passing", "newcomer"}[k] }

// pod returns the pod of that kind and number, as the runtime knows it.
func (k kind) pod(number int) podevent.Pod {
	return podevent.Pod{
		Namespace: namespace, Name: fmt.Sprintf("%s-%d", k, number),
		UID: fmt.Sprintf("00000000-0000-4000-8000-%06x%06x", int(k), number),
	}
}

func (k kind) account(number int) string {
	if k == newcomer {
		return fmt.Sprintf("own-%d", number)
	}
	return fmt.Sprintf("shared-%d", number%sharedAccounts)
}

// writeManifests writes the namespace and all pods that are ever enrolled, stayers of
// them staying, to one file in dir: the agent reads it once.
func writeManifests(dir string, stayers int) error {
	var text bytes.Buffer
	if err := appendManifest(&text, &corev1.Namespace{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
		ObjectMeta: metav1.ObjectMeta{Name: namespace, Labels: map[string]string{"istio.io/dataplane-mode": "ambient"}},
	}); err != nil {
		return err
	}
	for _, pods := range []struct {
		kind  kind
		count int
	}{{stayer, stayers}, {passing, batch}, {newcomer, batch}} {
		for i := range pods.count {
			pod := pods.kind.pod(i)
			if err := appendManifest(&text, &corev1.Pod{
				TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
				ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: types.UID(pod.UID)},
				Spec: corev1.PodSpec{
					ServiceAccountName: pods.kind.account(i),
					Containers:         []corev1.Container{{Name: "app", Image: "bench"}},
				},
			}); err != nil {
				return err
			}
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("making the manifests' directory: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "all.yaml"), text.Bytes(), 0o644); err != nil {
		return fmt.Errorf("writing the manifests: %w", err)
	}
	return nil
}

func appendManifest(text *bytes.Buffer, object any) error {
	one, err := yaml.Marshal(object)
	if err != nil {
		return fmt.Errorf("encoding a manifest: %w", err)
	}
	text.WriteString("---\n")
	text.Write(one)
	return nil
}

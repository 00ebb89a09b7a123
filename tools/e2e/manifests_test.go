// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"maps"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// The patches fit the manifests as they are; nothing else of them changes. What runs are
// images that `make e2e` makes, and fields that the API knows.
func TestPatchesFitManifests(t *testing.T) {
	for proxy, image := range map[string]string{Devproxy: "localhost/devproxy:dev", Ztunnel: "localhost/ambientd-dev:dev"} {
		t.Run(proxy, func(t *testing.T) {
			patterns, err := Manifests(proxy)
			if err != nil {
				t.Fatal(err)
			}
			objects, err := ReadManifests(patterns...)
			if err != nil {
				t.Fatal(err)
			}
			if err := Apply(Patches(proxy, "denied"), objects); err != nil {
				t.Fatal(err)
			}
			got := map[string]string{}
			for _, object := range objects {
				if object.GetKind() != "DaemonSet" {
					continue
				}
				var set appsv1.DaemonSet
				if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(object.Object, &set, true); err != nil {
					t.Errorf("%s: %v", object.GetName(), err)
				}
				pod := set.Spec.Template.Spec
				got[set.Name] = pod.Containers[0].Image
				if pod.NodeSelector["kubernetes.io/os"] != "linux" || (pod.NodeSelector[AgentLabel] == "on") != (set.Name == "ambientd") {
					t.Errorf("%s has the node selector %v", set.Name, pod.NodeSelector)
				}
				if slices.Contains(pod.Containers[0].Args, "--deny=denied/*") != (set.Name == Devproxy) {
					t.Errorf("%s has the arguments %q", set.Name, pod.Containers[0].Args)
				}
			}
			if want := map[string]string{"ambientd": "localhost/ambientd:dev", proxy: image}; !maps.Equal(got, want) {
				t.Errorf("the images are %v, want %v", got, want)
			}
		})
	}
}

func TestManifestsRefused(t *testing.T) {
	if got, err := Manifests("envoy"); err == nil {
		t.Errorf("an unknown proxy has the manifests %q", got)
	}
	if _, err := ReadManifests("testdata/none/*.yaml"); err == nil {
		t.Error("no manifest is no error")
	}
	if got, err := parseManifests([]byte("# only a comment\n---\nkind: A\n---\n")); err != nil || len(got) != 1 || got[0].GetKind() != "A" {
		t.Errorf("got %v, %v", got, err)
	}
	if _, err := parseManifests([]byte("kind: [\n")); err == nil {
		t.Error("broken YAML is no error")
	}
	err := Apply(Patches(Devproxy, "denied"), nil)
	if err == nil || !strings.Contains(err.Error(), AgentLabel) {
		t.Errorf("patching what is not there: %v", err)
	}
	if err := addArgs(map[string]any{}, "--x"); err == nil {
		t.Error("arguments for no container are no error")
	}
}

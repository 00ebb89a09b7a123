// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// The patches fit the manifests as they are; nothing else of them changes.
func TestPatchesFitManifests(t *testing.T) {
	objects, err := ReadManifests("../../deploy/manifests/*.yaml", "../../deploy/dev/devproxy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := Apply(Patches("denied"), objects); err != nil {
		t.Fatal(err)
	}
	for _, object := range objects {
		if object.GetKind() != "DaemonSet" {
			continue
		}
		selector, _, err := unstructured.NestedStringMap(object.Object, "spec", "template", "spec", "nodeSelector")
		if err != nil || selector["kubernetes.io/os"] != "linux" || (selector[AgentLabel] == "on") != (object.GetName() == "ambientd") {
			t.Errorf("%s has the node selector %v (%v)", object.GetName(), selector, err)
		}
		containers, _, err := unstructured.NestedSlice(object.Object, "spec", "template", "spec", "containers")
		if err != nil || len(containers) != 1 {
			t.Fatalf("%s has %d containers (%v)", object.GetName(), len(containers), err)
		}
		args, _, err := unstructured.NestedStringSlice(containers[0].(map[string]any), "args")
		if err != nil || slices.Contains(args, "--deny=denied/*") != (object.GetName() == "devproxy") {
			t.Errorf("%s has the arguments %q (%v)", object.GetName(), args, err)
		}
	}
}

func TestManifestsRefused(t *testing.T) {
	if _, err := ReadManifests("testdata/none/*.yaml"); err == nil {
		t.Error("no manifest is no error")
	}
	if got, err := parseManifests([]byte("# only a comment\n---\nkind: A\n---\n")); err != nil || len(got) != 1 || got[0].GetKind() != "A" {
		t.Errorf("got %v, %v", got, err)
	}
	if _, err := parseManifests([]byte("kind: [\n")); err == nil {
		t.Error("broken YAML is no error")
	}
	err := Apply(Patches("denied"), nil)
	if err == nil || !strings.Contains(err.Error(), AgentLabel) {
		t.Errorf("patching what is not there: %v", err)
	}
	if err := addArgs(map[string]any{}, "--x"); err == nil {
		t.Error("arguments for no container are no error")
	}
}

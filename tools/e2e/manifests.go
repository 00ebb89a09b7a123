// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	yamldocs "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// AgentLabel is the node label by which tests have the agent on a node or not.
const AgentLabel = "e2e.ambientd.io/agent"

// Patch is what the tests have otherwise than the manifests in deploy.
type Patch struct {
	Kind, Name string
	Why        string
	Change     func(object map[string]any) error
}

// String says what is patched and why.
func (p Patch) String() string { return p.Kind + " " + p.Name + ": " + p.Why }

// Node proxies that the tests can be run with.
const (
	Devproxy = "devproxy"
	// Ztunnel takes pods and forwards nothing, without a control plane: what is seen of pods in
	// the proxy's log or in their traffic is left out.
	Ztunnel = "ztunnel"
)

// Manifests are the files that are applied with the node proxy, as patterns relative to this
// directory.
func Manifests(proxy string) ([]string, error) {
	switch proxy {
	case Devproxy:
		return []string{"../../deploy/manifests/*.yaml", "../../deploy/dev/devproxy.yaml"}, nil
	case Ztunnel:
		return []string{"../../deploy/manifests/*.yaml", "ztunnel.yaml"}, nil
	}
	return nil, fmt.Errorf("no manifest for the node proxy %q: %s or %s", proxy, Devproxy, Ztunnel)
}

// Patches are all of them with the node proxy, for a namespace to whose pods it lets nobody
// through if it can.
func Patches(proxy, denied string) []Patch {
	patches := []Patch{
		{"DaemonSet", "ambientd", "on nodes with the label " + AgentLabel + "=on only, so that a test can have the agent away from one node",
			func(object map[string]any) error {
				return unstructured.SetNestedField(object, "on", "spec", "template", "spec", "nodeSelector", AgentLabel)
			}},
	}
	if proxy == Devproxy {
		patches = append(patches, Patch{"DaemonSet", Devproxy, "denies all traffic to the pods of " + denied,
			func(object map[string]any) error { return addArgs(object, "--deny="+denied+"/*") }})
	}
	return patches
}

// addArgs gives the only container of a DaemonSet further arguments.
func addArgs(object map[string]any, args ...string) error {
	containers, _, err := unstructured.NestedSlice(object, "spec", "template", "spec", "containers")
	if err != nil {
		return err
	}
	if len(containers) != 1 {
		return fmt.Errorf("it has %d containers, and one is expected", len(containers))
	}
	container, ok := containers[0].(map[string]any)
	if !ok {
		return errors.New("its container is no object")
	}
	all, _, err := unstructured.NestedStringSlice(container, "args")
	if err != nil {
		return err
	}
	if err := unstructured.SetNestedStringSlice(container, append(all, args...), "args"); err != nil {
		return err
	}
	return unstructured.SetNestedSlice(object, containers, "spec", "template", "spec", "containers")
}

// ReadManifests returns the objects of the files that match any of the patterns, in the
// order of patterns, names and documents.
func ReadManifests(patterns ...string) ([]*unstructured.Unstructured, error) {
	var objects []*unstructured.Unstructured
	for _, pattern := range patterns {
		files, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		if len(files) == 0 {
			return nil, fmt.Errorf("there is no manifest at %s", pattern)
		}
		for _, file := range files {
			content, err := os.ReadFile(file)
			if err != nil {
				return nil, err
			}
			some, err := parseManifests(content)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
			objects = append(objects, some...)
		}
	}
	return objects, nil
}

func parseManifests(content []byte) ([]*unstructured.Unstructured, error) {
	var objects []*unstructured.Unstructured
	documents := yamldocs.NewYAMLReader(bufio.NewReader(bytes.NewReader(content)))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return objects, nil
		}
		if err != nil {
			return nil, err
		}
		object := &unstructured.Unstructured{}
		if err := yaml.Unmarshal(document, &object.Object); err != nil {
			return nil, err
		}
		if len(object.Object) > 0 { // or else nothing but comments
			objects = append(objects, object)
		}
	}
}

// Apply changes the objects. A patch of something that is not there is an error.
func Apply(patches []Patch, objects []*unstructured.Unstructured) error {
	for _, patch := range patches {
		found := false
		for _, object := range objects {
			if object.GetKind() == patch.Kind && object.GetName() == patch.Name {
				found = true
				if err := patch.Change(object.Object); err != nil {
					return fmt.Errorf("patch of %s: %w", patch, err)
				}
			}
		}
		if !found {
			return fmt.Errorf("patch of %s: there is none", patch)
		}
	}
	return nil
}

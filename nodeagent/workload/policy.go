// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"errors"
	"fmt"
	"path"
	"slices"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
)

// annotationSidecarStatus is on every pod whose traffic a sidecar takes. Two
// redirections in one netns would send traffic in circles.
const annotationSidecarStatus = "sidecar.istio.io/status"

// Policy says which pods belong in the mesh. It is data: set it up once, check
// it with Validate, and use it from any goroutine.
type Policy struct {
	// ExcludeNamespaces are out of the mesh whatever their labels say.
	ExcludeNamespaces []string

	// OwnPods are name patterns (as of path.Match) of the agent, the node proxy
	// and the CA. Within AgentNamespace, and nowhere else, they are out of the
	// mesh: it cannot start before they do.
	OwnPods        []string
	AgentNamespace string

	// Selectors select pods; any match will do. Without any, no pod is in.
	Selectors []Selector
}

// Decision says whether a pod belongs in the mesh, and why, in words that follow
// "because" in front of an operator.
type Decision struct {
	InMesh bool
	Reason string
}

// Validate returns an error that names the first namespace or pattern that is
// wrong.
func (p Policy) Validate() error {
	for _, ns := range p.ExcludeNamespaces {
		if err := checkNamespace(ns); err != nil {
			return fmt.Errorf("excluded namespace: %w", err)
		}
	}
	if len(p.OwnPods) > 0 && p.AgentNamespace == "" {
		return errors.New("patterns of own pods are given, but no namespace of the agent in which they would hold")
	}
	if p.AgentNamespace != "" {
		if err := checkNamespace(p.AgentNamespace); err != nil {
			return fmt.Errorf("namespace of the agent: %w", err)
		}
	}
	for _, pattern := range p.OwnPods {
		if _, err := path.Match(pattern, ""); err != nil || pattern == "" {
			return fmt.Errorf("pattern of own pods %q: must be a shell pattern such as ztunnel-*", pattern)
		}
	}
	return nil
}

func checkNamespace(name string) error {
	if problems := validation.IsDNS1123Label(name); len(problems) > 0 {
		return fmt.Errorf("%q: %s", name, problems[0])
	}
	return nil
}

// Decide says whether pod belongs in the mesh. What keeps a pod out wins over
// every selector.
func (p Policy) Decide(pod Pod) Decision {
	if reason := p.exclusion(pod); reason != "" {
		return Decision{Reason: reason}
	}
	for _, s := range p.Selectors {
		if s.matches(pod) {
			return Decision{InMesh: true, Reason: "it is selected by " + s.String()}
		}
	}
	return Decision{Reason: "no selector matches the labels of the pod and its namespace"}
}

// exclusion returns why pod is out of the mesh whatever selects it, or "". The
// order matters to the reader only: the reason that he can change least is first.
func (p Policy) exclusion(pod Pod) string {
	if reason := p.exclusionByName(pod.Namespace, pod.Name); reason != "" {
		return reason
	}
	switch _, sidecar := pod.Annotations[annotationSidecarStatus]; {
	case pod.HostNetwork:
		return "it uses the host's network (hostNetwork: true)"
	case pod.Ended():
		return fmt.Sprintf("it has ended (phase %s)", pod.Phase)
	case pod.Labels[LabelDataplaneMode] == ModeNone:
		return fmt.Sprintf("its label %s=%s opts out", LabelDataplaneMode, ModeNone)
	case sidecar:
		return fmt.Sprintf("a sidecar takes its traffic (annotation %s)", annotationSidecarStatus)
	case pod.ServiceAccount == "" && pod.Static:
		return "it is a static pod without a service account, so it has no identity"
	case pod.ServiceAccount == "":
		return "it has no service account, so it has no identity"
	}
	return ""
}

// ExcludesName tells whether the pod of that name is out of the mesh whatever else it is:
// one of the mesh's own, or in an excluded namespace.
func (p Policy) ExcludesName(namespace, name string) bool {
	return p.exclusionByName(namespace, name) != ""
}

func (p Policy) exclusionByName(namespace, name string) string {
	if namespace == p.AgentNamespace {
		for _, pattern := range p.OwnPods {
			// Validate has refused patterns that Match cannot read.
			if own, err := path.Match(pattern, name); err == nil && own {
				return fmt.Sprintf("it is one of the mesh's own pods (%s in namespace %s)", pattern, p.AgentNamespace)
			}
		}
	}
	if slices.Contains(p.ExcludeNamespaces, namespace) {
		return fmt.Sprintf("namespace %s is excluded by the agent's configuration", namespace)
	}
	return ""
}

// NamespaceOut tells whether pods of a namespace with those labels are out of the mesh as
// far as the namespace goes: it is excluded, or no selector that asks for a namespace's
// labels matches it. Selectors that ask for nothing but a pod's labels do not count, as
// they would put every namespace in: such a pod is in the mesh by itself.
func (p Policy) NamespaceOut(name string, namespaceLabels map[string]string) bool {
	if slices.Contains(p.ExcludeNamespaces, name) {
		return true
	}
	for _, s := range p.Selectors {
		if s.namespace != nil && !s.namespace.Empty() && s.namespace.Matches(labels.Set(namespaceLabels)) {
			return false
		}
	}
	return true
}

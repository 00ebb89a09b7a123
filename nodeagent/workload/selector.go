// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"errors"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// The label that puts pods in the mesh, on the pod or its namespace, and its
// values.
const (
	LabelDataplaneMode = "istio.io/dataplane-mode"
	ModeAmbient        = "ambient"
	ModeNone           = "none"
)

// SelectorSpec is a pair of label selectors as configuration writes it. A pod
// is selected if its own labels match the first and its namespace's the second.
// An empty selector matches everything, but not both at once.
type SelectorSpec struct {
	PodSelector       metav1.LabelSelector `json:"podSelector"`
	NamespaceSelector metav1.LabelSelector `json:"namespaceSelector"`
}

// Selector is a SelectorSpec that is known to be valid. The zero Selector
// selects nothing.
type Selector struct {
	pod, namespace labels.Selector
	text           string // see String
}

// DefaultSelectors are the ecosystem's: the pod's own label, or its namespace's
// unless the pod opts out.
func DefaultSelectors() []SelectorSpec {
	ambient := metav1.LabelSelector{MatchLabels: map[string]string{LabelDataplaneMode: ModeAmbient}}
	notNone := metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{
		Key:      LabelDataplaneMode,
		Operator: metav1.LabelSelectorOpNotIn,
		Values:   []string{ModeNone},
	}}}
	return []SelectorSpec{
		{PodSelector: ambient},
		{PodSelector: notNone, NamespaceSelector: ambient},
	}
}

// ParseSelectors checks specs and returns them ready for use. An error counts
// from 1 and names the half that is wrong.
func ParseSelectors(specs []SelectorSpec) ([]Selector, error) {
	selectors := make([]Selector, 0, len(specs))
	for i, spec := range specs {
		s, err := spec.parse()
		if err != nil {
			return nil, fmt.Errorf("selector %d: %w", i+1, err)
		}
		selectors = append(selectors, s)
	}
	return selectors, nil
}

func (s SelectorSpec) parse() (Selector, error) {
	pod, err := metav1.LabelSelectorAsSelector(&s.PodSelector)
	if err != nil {
		return Selector{}, fmt.Errorf("podSelector: %w", err)
	}
	namespace, err := metav1.LabelSelectorAsSelector(&s.NamespaceSelector)
	if err != nil {
		return Selector{}, fmt.Errorf("namespaceSelector: %w", err)
	}
	if pod.Empty() && namespace.Empty() {
		return Selector{}, errors.New("podSelector and namespaceSelector are both empty, which would select every pod; " +
			"if that is meant, select namespaces in which kubernetes.io/metadata.name exists")
	}
	selector := Selector{pod: pod, namespace: namespace}
	selector.text = selector.describe() // once: it is part of the decision on each pod
	return selector, nil
}

func (s Selector) matches(p Pod) bool {
	return s.pod != nil && s.pod.Matches(labels.Set(p.Labels)) && s.namespace.Matches(labels.Set(p.NamespaceLabels))
}

// String names the labels asked for, as in "pods istio.io/dataplane-mode=ambient".
func (s Selector) String() string {
	if s.pod == nil {
		return "nothing"
	}
	return s.text
}

func (s Selector) describe() string {
	switch {
	case s.namespace.Empty():
		return fmt.Sprintf("pods %s", s.pod)
	case s.pod.Empty():
		return fmt.Sprintf("namespaces %s", s.namespace)
	}
	return fmt.Sprintf("pods %s in namespaces %s", s.pod, s.namespace)
}

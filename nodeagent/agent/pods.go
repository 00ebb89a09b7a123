// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"

	"ambientd/nodeagent/apiserver"
	"ambientd/nodeagent/enroll"
	"ambientd/nodeagent/podsource/kubernetes"
	"ambientd/nodeagent/podsource/manifests"
	"ambientd/nodeagent/podstatus"
	"ambientd/nodeagent/policyfile"
	"ambientd/nodeagent/workload"
)

// podSource is where pods are from, whichever it is.
type podSource struct {
	enroll.Pods
	enroll.Inventory

	namespaces policyfile.Namespaces

	run       func(context.Context) error
	awaitSync func(context.Context) error // returns nil once it was read wholly
	report    *podstatus.Writer           // nil where nobody looks at pods' objects
	problems  func() []string             // with what it reads
}

// openSource makes the source that the configuration names.
func openSource(cfg Config) (podSource, error) {
	if dir, ok := cfg.manifestDir(); ok {
		source, err := manifests.New(manifests.Config{Dir: dir, Logger: cfg.Logger})
		if err != nil {
			return podSource{}, err
		}
		read := func(context.Context) error { return nil } // New has read it
		return podSource{Pods: source, Inventory: source, namespaces: source, run: source.Run, awaitSync: read, problems: source.Problems}, nil
	}
	client, err := apiserver.New(apiserver.Config{Kubeconfig: cfg.Kubeconfig, UserAgent: "ambientd/" + cfg.Version})
	if err != nil {
		return podSource{}, err
	}
	source, err := kubernetes.New(kubernetes.Config{Client: client, Node: cfg.NodeName, LiveTimeout: cfg.LookupTimeout, Logger: cfg.Logger})
	if err != nil {
		return podSource{}, err
	}
	writer, err := podstatus.New(podstatus.Config{Client: client, Node: cfg.NodeName, Known: source.Known, Logger: cfg.Logger})
	if err != nil {
		return podSource{}, err
	}
	return podSource{
		Pods: source, Inventory: source, namespaces: source, run: source.Run, awaitSync: source.AwaitSync, report: writer,
		problems: func() []string { return nil }, // the API server takes no objects that cannot be read
	}, nil
}

// countedReports passes on what becomes of pods, where somebody is told, and counts the
// pods that were enrolled while they ran.
type countedReports struct{ *parts }

// State is part of enroll.Reporter, as the next.
func (c countedReports) State(pod workload.Pod, state enroll.State) {
	if c.pods.report != nil {
		c.pods.report.State(pod, state)
	}
}

// Event counts and passes on.
func (c countedReports) Event(pod workload.Pod, reason enroll.Reason, message string) {
	if reason == enroll.ReasonEnrolled {
		c.metrics.EnrolledRunning()
	}
	if c.pods.report != nil {
		c.pods.report.Event(pod, reason, message)
	}
}

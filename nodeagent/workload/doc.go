// SPDX-License-Identifier: Apache-2.0

// Package workload owns the agent's view of a pod and the decision whether that
// pod belongs in the mesh: which labels select it, what keeps it out, and which
// options its annotations set. Labels and annotations are the ambient
// ecosystem's, so that manifests work unchanged.
//
// It decides from data alone: it refuses to read pods (a pod source does), to
// look at the kernel, and to remember what it decided.
package workload

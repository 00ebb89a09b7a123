// SPDX-License-Identifier: Apache-2.0

// Command devcluster runs a real Kubernetes on one machine, for tests: etcd and
// kube-apiserver, and up to two nodes with kubelet and containerd, each in network,
// mount and process namespaces of its own. Nothing of it is seen in the machine's own
// network namespace, no file outside of its directory is written but the cache of built
// programs, and no sysctl of the machine changes.
//
// It owns the cluster's life: building the programs once, keys, starting, and leaving
// nothing behind. It refuses to know ambientd: what runs in the cluster is the
// caller's.
//
// # Another version of Kubernetes
//
// kubernetes/go.mod is the go.mod of k8s.io/kubernetes with another module line, the
// tool lines, and for each staging module (k8s.io/api and so on, v0.0.0 there) the
// release v0.MINOR.PATCH as requirement and as replacement; then `go mod tidy`.
package main

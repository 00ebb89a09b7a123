// SPDX-License-Identifier: Apache-2.0

// Package e2e tests ambientd on a real cluster: kubelet and containerd on two nodes, the
// agent and devproxy as DaemonSets from the manifests in deploy, images built here. Its
// tests have the build tag e2e; `make e2e` brings a cluster of tools/devcluster up, runs
// them inside, and takes it down.
//
// It owns what is checked and what differs from the manifests for that. It refuses to look
// into any part: what it states is seen in the API, in packets, in the kernel's tables, in
// the agents' status and in the logs that `kubectl logs` shows. What can be asked without a
// cluster, reading logs and manifests, has tests of its own here.
package e2e

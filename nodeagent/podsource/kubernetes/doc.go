// SPDX-License-Identifier: Apache-2.0

// Package kubernetes owns the pod source for nodes of a cluster: what the API server
// says of this node's pods, and of all namespaces' labels. Both are watched, and cut
// down to what the agent needs before they are kept.
//
// It refuses to write, to read other nodes' pods, and to guess: while the API server is
// away it answers from what it knows, says that its list is not complete, and takes
// nobody for gone.
//
// A pod whose ADD comes before its watch event is read once from the API server. That
// answer counts until the watch has passed it, so that the pod is not taken for gone
// meanwhile.
package kubernetes

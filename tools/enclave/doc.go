// SPDX-License-Identifier: Apache-2.0

// Package enclave runs a program of ours in user, mount and network namespaces
// of its own, so that a demonstration or a measurement has a whole "host" to
// itself: its own links, rules, /run and sysctls. The machine's own network is
// out of reach, nobody needs to be root, and nothing is left behind, because
// namespaces end with their last process and every process started here ends
// with the one that started it.
//
// It owns the way in (Run), the processes started inside (Starter, Process), what
// they write (Log), and network namespaces made as a container runtime makes
// them (Netns). It knows nothing of meshes, and the product does not import it.
package enclave

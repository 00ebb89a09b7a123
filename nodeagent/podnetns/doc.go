// SPDX-License-Identifier: Apache-2.0

// Package podnetns owns the agent's dealings with network namespaces: it says
// whether a descriptor is one that the agent may touch, names it by a key that
// the kernel never gives twice, keeps it open, and runs code inside it.
//
// It is the only package of the agent that changes a thread's namespace
// (setns, unshare). Everybody else hands a closure to [Netns.Do].
//
// It refuses descriptors that are no network namespace and the one that the
// agent itself runs in, and it refuses a netns that another pod already holds
// ([Pins.Pin]). It knows nothing of pods beyond their UID and addresses. During an
// ADD it opens no netns by path: a descriptor is handed in. Only for pods that run
// already does it look for one ([Finder]), and it believes neither a path nor a
// process' cgroup by itself.
package podnetns

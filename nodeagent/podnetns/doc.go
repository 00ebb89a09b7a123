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
// ([Pins.Pin]). It knows nothing of pods beyond their UID, and opens no netns
// by path except the calling thread's own under /proc: a descriptor is always
// handed in.
package podnetns

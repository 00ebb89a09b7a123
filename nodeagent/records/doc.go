// SPDX-License-Identifier: Apache-2.0

// Package records owns what the agent notes of a pod on disk, so that an agent that
// starts anew knows which netns is whose without asking the runtime: one file for
// each pod UID, in a directory that only root may enter.
//
// A file is there whole or not at all: it is written under another name, flushed,
// renamed, and the directory flushed. What the directory holds besides, or a file
// that is torn or of a newer agent, is reported by [Store.All] and left alone.
//
// It refuses to be believed: a record says what was so when it was written. Whether
// its netns is still there is for package podnetns to find out, and whether the pod is
// still in the mesh for the kernel to say. It holds no secret.
package records

// SPDX-License-Identifier: Apache-2.0

// Package audit owns the schedule by which enrolled pods, and the host's rule for
// probes, are compared with the kernel and put right: each once an interval, spread
// over it, and within a second when the kernel tells of a change.
//
// It refuses to know what a pod should be like and how it is repaired (package enroll
// does), and what the host's rule is (package hostprobe does).
//
// # Why a repair does not prompt itself for ever
//
// The kernel's notifications do not say who made a change. A repair thus prompts one
// more audit, which finds nothing, writes nothing, and so ends it. Somebody who undoes
// every repair at once, or a pod that changes rules of its own all the time, is held to
// a number of prompted audits an interval; after that the pod waits for its regular one.
package audit

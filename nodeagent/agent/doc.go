// SPDX-License-Identifier: Apache-2.0

// Package agent owns the configuration of ambientd, the checks on it, and the
// wiring of its parts: [Run] reads as the architecture.
//
// It refuses to decide anything about a pod, and to read flags, files or the
// environment, which the main package does.
package agent

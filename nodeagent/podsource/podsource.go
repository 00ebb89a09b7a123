// SPDX-License-Identifier: Apache-2.0

// Package podsource owns what its subpackages, the sources of pods, have in common:
// the errors by which a caller tells why a pod cannot be had.
//
// It refuses to know where pods are from.
package podsource

import "errors"

var (
	// ErrNotFound says that the source has no such pod.
	ErrNotFound = errors.New("no such pod is known")

	// ErrUIDMismatch says that the pod of that name is another one: its UID is not the
	// runtime's.
	ErrUIDMismatch = errors.New("the pod has another UID")
)

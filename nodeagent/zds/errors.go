// SPDX-License-Identifier: Apache-2.0

package zds

import (
	"errors"
	"fmt"
)

var (
	// ErrNoProxy is returned by Add when no proxy was connected at the time
	// its context ended. It comes with the context's error.
	ErrNoProxy = errors.New("no node proxy is connected")
	// ErrNoAck is returned when the context ended while a connected proxy had
	// not answered. It comes with the context's error.
	ErrNoAck = errors.New("the node proxy has not answered")
	// ErrSuperseded is returned by an Add that a later Add or Del of the same
	// pod has overtaken.
	ErrSuperseded = errors.New("overtaken by a later request for the same pod")
	// ErrStopped is returned by Add once Run has returned.
	ErrStopped = errors.New("the ZDS server has stopped")
)

// NackError says that the node proxy refused a pod, or the removal of one.
type NackError struct {
	UID string
	// Reason is the proxy's own text, of at most 1 KiB.
	Reason string
}

// Error quotes the reason, which comes from another process.
func (e *NackError) Error() string {
	return fmt.Sprintf("the node proxy refused pod %s: %q", e.UID, e.Reason)
}

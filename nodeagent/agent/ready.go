// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"sync/atomic"
)

// readiness is what /readyz says. It is set once: a proxy, a CA or an API server that goes
// away later does not make the agent unready, since nothing but the agent's own restart
// would follow from that.
type readiness struct {
	yes      atomic.Bool
	awaiting atomic.Pointer[string]
}

func (r *readiness) set() { r.yes.Store(true) }

// await notes what keeps the agent from being ready.
func (r *readiness) await(what string) { r.awaiting.Store(&what) }

// check returns why the agent is not ready.
func (r *readiness) check() error {
	if r.yes.Load() {
		return nil
	}
	if what := r.awaiting.Load(); what != nil {
		return errors.New(*what)
	}
	return errors.New("pods of an earlier agent are being taken up")
}

// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"sync/atomic"
)

// readiness is what /readyz says. It is set once: a proxy or CA that goes away
// later does not make the agent unready, since nothing but the agent's own restart
// would follow from that.
type readiness struct{ yes atomic.Bool }

func (r *readiness) set() { r.yes.Store(true) }

// check returns why the agent is not ready.
func (r *readiness) check() error {
	if r.yes.Load() {
		return nil
	}
	return errors.New("the CA's roots are not known yet")
}

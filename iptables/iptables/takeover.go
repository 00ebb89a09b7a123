// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"

	"ambientd/iptables/redirection"
)

// HasForeign reports whether the pod's netns holds rules of another ambient agent,
// or our own by another means than this backend's: nftables, or the other variant
// of iptables. It reads only, and makes no table by that.
func (b *Backend) HasForeign(ctx context.Context, run redirection.Runner) (bool, error) {
	return b.foreign.Has(ctx, run, b.means)
}

// RemoveForeign takes such rules out of the pod's netns and leaves everybody
// else's, and this backend's. It reports whether there were any. Call it after
// Apply: connections are redirected throughout then, and keep their translation.
func (b *Backend) RemoveForeign(ctx context.Context, run redirection.Runner) (bool, error) {
	return b.foreign.Remove(ctx, run, b.means)
}

// RemoveForeignFromHost does so in the host's netns, for the rule that other agents
// have there for probes. It waits for x_tables' lock as long as the configuration
// allows.
func (b *Backend) RemoveForeignFromHost(ctx context.Context, run redirection.Runner) (bool, error) {
	return b.foreign.RemoveFromHost(ctx, run, b.means, b.config.HostLockWait)
}

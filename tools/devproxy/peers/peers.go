// SPDX-License-Identifier: Apache-2.0

// Package peers learns from the agent which address belongs to which identity.
// A real node proxy is told by a control plane, also about other nodes; here
// the mesh ends at the node, and nothing is remembered between two questions.
package peers

import (
	"context"
	"fmt"
	"net/netip"

	"ambientd/certfetch/spiffeid"
	"ambientd/nodeagent/admin"
)

// Agent is the node's agent.
type Agent struct {
	Socket string // path of its admin socket
}

// Identity returns the identity of the pod that has the address, or false if no
// pod in the mesh has it. A pod that is on its way in, or that has lost a part,
// counts as in the mesh: its traffic fails closed.
func (a Agent) Identity(ctx context.Context, addr netip.Addr) (spiffeid.ID, bool, error) {
	status, err := admin.Fetch(ctx, a.Socket)
	if err != nil {
		return spiffeid.ID{}, false, err
	}
	for _, pod := range status.Pods {
		for _, ip := range pod.IPs {
			if ip.Unmap() != addr.Unmap() {
				continue
			}
			id, err := spiffeid.Parse(pod.Identity)
			if err != nil {
				return spiffeid.ID{}, false, fmt.Errorf("identity of pod %s/%s: %w", pod.Namespace, pod.Name, err)
			}
			return id, true, nil
		}
	}
	return spiffeid.ID{}, false, nil
}

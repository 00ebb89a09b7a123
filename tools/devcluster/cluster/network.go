// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
)

// Addresses. All of them are in the cluster's own network namespaces only.
const (
	// apiAddress is the first node's, where the control plane is.
	apiAddress = "10.99.0.1"
	// serviceAddress is the one that pods know the API server by: the first of the service
	// range. The first node has it on its loopback, so no kube-proxy is needed for it.
	serviceAddress = "10.96.0.1"
	serviceRange   = "10.96.0.0/16"
	// The API server listens on the port of its service, so that nothing must be translated.
	apiPort = "443"
	apiURL  = "https://" + apiAddress + ":" + apiPort
	// nodeLink is the name of the link between the nodes.
	nodeLink = "node0"
)

func nodeAddress(i int) string { return fmt.Sprintf("10.99.0.%d", i+1) }

// podRange is what pods of node i get their addresses from.
func podRange(i int) string { return fmt.Sprintf("10.244.%d.0/24", i) }

// connect gives the nodes their addresses, a link between them, and routes to each other's
// pods and to the API server.
func connect(ctx context.Context, state *State) error {
	peer := "peer name " + nodeLink + "-peer"
	if len(state.Nodes) > 1 {
		peer = fmt.Sprintf("peer name %s netns %d", nodeLink, state.Nodes[1].Process.PID)
	}
	if err := state.ip(ctx, 0, "link add "+nodeLink+" type veth "+peer); err != nil {
		return err
	}
	for i, n := range state.Nodes {
		commands := []string{
			"link set lo up",
			"addr add " + n.Address + "/24 dev " + nodeLink,
			"link set " + nodeLink + " up",
		}
		if i == 0 {
			commands = append(commands, "addr add "+serviceAddress+"/32 dev lo")
		} else {
			commands = append(commands, "route add "+serviceAddress+" via "+apiAddress)
		}
		if len(state.Nodes) == 1 {
			// The other end only gives the link a carrier.
			commands = append(commands, "link set "+nodeLink+"-peer up", "route add default dev "+nodeLink)
		} else {
			other := 1 - i
			commands = append(commands,
				"route add "+podRange(other)+" via "+state.Nodes[other].Address,
				"route add default via "+state.Nodes[other].Address)
		}
		if err := state.ip(ctx, i, commands...); err != nil {
			return err
		}
	}
	return nil
}

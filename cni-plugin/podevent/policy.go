// SPDX-License-Identifier: Apache-2.0

package podevent

// DefaultAgentNamespace is where the agent's, the node proxy's and the CA's pods are expected.
const DefaultAgentNamespace = "ambientd-system"

// DefaultOwnPods are the name patterns of those pods, as of [path.Match]. They hold within the
// agent's namespace only.
func DefaultOwnPods() []string { return []string{"ambientd-*", "ztunnel-*", "ambient-ca-*"} }

// DefaultExcludeNamespaces are the namespaces whose pods never are in the mesh. Plugin and agent must
// agree: the agent decides while it runs, the plugin while it does not.
func DefaultExcludeNamespaces() []string { return []string{"kube-system"} }

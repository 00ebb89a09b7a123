// SPDX-License-Identifier: Apache-2.0

package podevent

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"syscall"
)

// DefaultAgentNamespace is where the agent's, the node proxy's and the CA's pods are expected.
const DefaultAgentNamespace = "ambientd-system"

// DefaultOwnPods are the name patterns of those pods, as of [path.Match]. They hold within the
// agent's namespace only.
func DefaultOwnPods() []string { return []string{"ambientd-*", "ztunnel-*", "ambient-ca-*"} }

// DefaultExcludeNamespaces are the namespaces whose pods never are in the mesh. Plugin and agent must
// agree: the agent decides while it runs, the plugin while it does not.
func DefaultExcludeNamespaces() []string { return []string{"kube-system"} }

// PolicyInRunDir is where in the run directory the agent keeps its policy for the time when it is away.
const PolicyInRunDir = "/private/policy.json"

// PolicyVersion is the version of [Policy] that this package reads and writes, MaxPolicy the most
// bytes that it has: 50,000 namespaces with names of the greatest length.
const (
	PolicyVersion = 1
	MaxPolicy     = 4 << 20
)

// Exclusions are pods that never are in the mesh, whatever their labels say.
type Exclusions struct {
	// AgentNamespace and OwnPods (patterns as of [path.Match]) name the agent's, the proxy's and the
	// CA's pods. A pattern holds only within the namespace: pods elsewhere may be called anything.
	AgentNamespace string   `json:"agentNamespace,omitempty"`
	OwnPods        []string `json:"ownPods,omitempty"`
	// ExcludeNamespaces never are in the mesh.
	ExcludeNamespaces []string `json:"excludeNamespaces,omitempty"`
}

// Policy is what an agent that is away would say of whole namespaces. The plugin reads it only then.
type Policy struct {
	// Version is [PolicyVersion].
	Version int `json:"version"`
	// BootID is of the boot in which it was written: another's says nothing.
	BootID string `json:"bootID"`
	// Exclusions are the agent's own.
	Exclusions
	// OutOfMesh are the namespaces by whose labels no pod is in the mesh, in order. What is not in here
	// is in the mesh, or not known.
	OutOfMesh []string `json:"outOfMesh"`
}

// Match tells whether the pod is one of them, and why.
func (e Exclusions) Match(pod Pod) (reason string, ok bool) {
	if pod.Namespace == e.AgentNamespace {
		for _, p := range e.OwnPods {
			if matched, err := path.Match(p, pod.Name); err == nil && matched {
				return fmt.Sprintf("own pod (%s in namespace %s)", p, e.AgentNamespace), true
			}
		}
	}
	if slices.Contains(e.ExcludeNamespaces, pod.Namespace) {
		return "excluded namespace " + pod.Namespace, true
	}
	return "", false
}

// Encode returns the policy's file, stamped with [PolicyVersion] and in order.
func (p Policy) Encode() ([]byte, error) {
	p.Version = PolicyVersion
	p.OutOfMesh = slices.Sorted(slices.Values(p.OutOfMesh))
	if p.OutOfMesh == nil {
		p.OutOfMesh = []string{}
	}
	content, err := json.Marshal(p)
	if err != nil {
		return nil, fmt.Errorf("encoding the policy: %w", err)
	}
	if len(content) >= MaxPolicy {
		return nil, fmt.Errorf("the policy has %d bytes, fewer than %d are allowed", len(content), MaxPolicy)
	}
	return append(content, '\n'), nil
}

// DecodePolicy reads a policy's file. The errors are a [*VersionError] or one that wraps
// [ErrMalformed].
func DecodePolicy(content []byte) (Policy, error) {
	var p Policy
	if len(content) > MaxPolicy {
		return Policy{}, fmt.Errorf("%w: more than %d bytes", ErrMalformed, MaxPolicy)
	}
	if err := decodeVersion(content, PolicyVersion, &p); err != nil {
		return Policy{}, err
	}
	if p.BootID == "" {
		return Policy{}, fmt.Errorf("%w: no boot ID", ErrMalformed)
	}
	return p, nil
}

// ReadPolicy reads the policy at a path, if it was written in this boot by an agent of the same user.
func ReadPolicy(path string) (Policy, error) {
	content, err := readOwn(path)
	if err != nil {
		return Policy{}, fmt.Errorf("reading the agent's policy: %w", err)
	}
	p, err := DecodePolicy(content)
	if err != nil {
		return Policy{}, fmt.Errorf("reading the agent's policy %s: %w", path, err)
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return Policy{}, fmt.Errorf("asking for the boot ID: %w", err)
	}
	if string(bytes.TrimSpace(boot)) != p.BootID {
		return Policy{}, fmt.Errorf("the agent's policy %s is of another boot", path)
	}
	return p, nil
}

func readOwn(path string) ([]byte, error) {
	// Without O_NONBLOCK, opening a named pipe waits for a writer.
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errors.New(path + " is not a regular file")
	}
	if err := checkOwner(info, path); err != nil {
		return nil, err
	}
	return io.ReadAll(io.LimitReader(file, MaxPolicy+1))
}

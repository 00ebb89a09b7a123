// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"ambientd/nodeagent/admin"
	"ambientd/tools/enclave"
)

// proxyPatience is how long the proxy may take to leave a pod that was withdrawn.
const proxyPatience = time.Second

// isSigning matches the one line that the CA logs for each CSR that it has seen.
func isSigning(l enclave.Line) bool {
	return l.Field("msg") == "certificate signed" || l.Field("msg") == "signing refused"
}

// signingLog returns the CA's lines about an identity.
func (st *stage) signingLog(identity string) []enclave.Line {
	return st.agent.Log().Find(0, func(l enclave.Line) bool { return isSigning(l) && l.Field("identity") == identity })
}

// identities returns the identities that the agent says it holds, sorted.
func identities(status admin.Status) []string {
	var ids []string
	for _, identity := range status.Identities {
		ids = append(ids, identity.ID)
	}
	slices.Sort(ids)
	return ids
}

// entryOf returns what the status says of a pod.
func entryOf(status admin.Status, p *pod) (admin.PodStatus, bool) {
	i := slices.IndexFunc(status.Pods, func(s admin.PodStatus) bool { return s.UID == p.uid })
	if i < 0 {
		return admin.PodStatus{}, false
	}
	return status.Pods[i], true
}

// expectNoEntry returns an error if the status shows the pod or its identity.
func expectNoEntry(status admin.Status, p *pod) error {
	if entry, ok := entryOf(status, p); ok {
		return fmt.Errorf("the agent has pod %s: %+v", p, entry)
	}
	if slices.Contains(identities(status), p.identity()) {
		return fmt.Errorf("the agent holds %s", p.identity())
	}
	return nil
}

// expectNoRedirection returns an error if the kernel has anything of a redirection in
// the pod's network namespace.
func (st *stage) expectNoRedirection(ctx context.Context, p *pod) error {
	found, err := inspect(ctx, p.netns, st.starter)
	if err != nil {
		return err
	}
	if got := found.redirected(); got != "" {
		return fmt.Errorf("in the netns of pod %s there is still %s", p, got)
	}
	return nil
}

// expectUnregistered returns an error if the agent still has the pod: its entry, its
// identity, or a descriptor of its network namespace.
func (st *stage) expectUnregistered(ctx context.Context, p *pod) error {
	status, err := st.status(ctx)
	if err != nil {
		return err
	}
	if err := expectNoEntry(status, p); err != nil {
		return err
	}
	held, err := p.netns.HeldBy(st.agent.Pid())
	if err != nil {
		return err
	}
	if held > 0 {
		return fmt.Errorf("the agent holds %d descriptors of the netns of pod %s", held, p)
	}
	return expectRefusal(ctx, sdsSocket, p.identity())
}

// awaitProxyGone waits, for as long as the proxy may take, until it has neither a
// listener in the pod's network namespace nor a descriptor of it.
func (st *stage) awaitProxyGone(ctx context.Context, p *pod) error {
	ctx, cancel := context.WithTimeout(ctx, proxyPatience)
	defer cancel()
	var seen string
	err := poll(ctx, func() (bool, error) {
		found, err := inspect(ctx, p.netns, st.starter)
		if err != nil {
			return false, err
		}
		held, err := p.netns.HeldBy(st.proxy.Pid())
		if err != nil {
			return false, err
		}
		seen = fmt.Sprintf("listeners %v and %d descriptors of the netns", found.proxied(), held)
		return len(found.proxied()) == 0 && held == 0, nil
	})
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("in pod %s the proxy still has %s after %v", p, seen, proxyPatience)
	}
	return err
}

// remove takes a pod away as a runtime does: DEL, the network namespace, DEL once more
// without one, as after a reboot; then its manifest.
func (st *stage) remove(ctx context.Context, p *pod) error {
	if p.netns == nil {
		return nil
	}
	st.say("deleting pod %s", p)
	if err := st.runtime.del(ctx, p, p.netns.Path()); err != nil {
		return fmt.Errorf("DEL of pod %s: %w", p, err)
	}
	if err := st.runtime.remove(ctx, p); err != nil {
		return fmt.Errorf("removing the sandbox of pod %s: %w", p, err)
	}
	p.netns = nil
	if err := st.runtime.del(ctx, p, ""); err != nil {
		return fmt.Errorf("DEL of pod %s without a netns: %w", p, err)
	}
	return p.removeManifest(st.path("manifests"))
}

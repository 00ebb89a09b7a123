// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"ambientd/nodeagent/admin"
	"ambientd/tools/enclave"
)

// checks are all promises, in the order in which they are looked at: the first five
// only look, the last three add and delete pods.
//
//nolint:gochecknoglobals // a table that nothing writes to
var checks = []check{
	{"client-to-server", clientToServer},
	{"outside-to-server", outsideToServer},
	{"untouched", untouched},
	{"only-enrolled", onlyEnrolled},
	{"ready-before-start", readyBeforeStart},
	{"two-pods-one-identity", twoPodsOneIdentity},
	{"whole-or-nothing", wholeOrNothing},
	{"delete", deletion},
}

// untouched: pods outside of the mesh have no rule, no policy rule, no identity.
func untouched(ctx context.Context, st *stage) (string, error) {
	status, err := st.status(ctx)
	if err != nil {
		return "", err
	}
	for _, p := range []*pod{st.outside, st.optedOut} {
		found, err := inspect(ctx, p.netns, st.starter)
		if err != nil {
			return "", err
		}
		// Not even an empty table: nothing has ever been written here.
		if got := found.redirected(); got != "" || len(found.Tables)+len(found.Legacy) > 0 {
			return "", fmt.Errorf("pod %s has %s, tables %v%v", p, got, found.Tables, found.Legacy)
		}
		if ports := found.proxied(); len(ports) > 0 {
			return "", fmt.Errorf("pod %s has the proxy's listeners %v", p, ports)
		}
		if err := expectNoEntry(status, p); err != nil {
			return "", err
		}
		if lines := st.signingLog(p.identity()); len(lines) > 0 {
			return "", fmt.Errorf("the CA has seen a CSR for pod %s: %s", p, lines[0].Text)
		}
	}
	// The control: what was not found there is found here.
	found, err := inspect(ctx, st.client.netns, st.starter)
	if err != nil {
		return "", err
	}
	if found.PacketRules == 0 || len(found.PolicyRules) == 0 || len(found.Routes) == 0 || len(found.proxied()) != 3 {
		return "", fmt.Errorf("the control fails: in the enrolled pod %s there is only %q, listeners %v", st.client, found.redirected(), found.Listeners)
	}
	// Their traffic goes where they send it.
	passed := st.proxy.Log().Len()
	if _, err := st.exchange(ctx, st.outside, st.optedOut, st.optedOut.ips[0], newWord("question")); err != nil {
		return "", err
	}
	if lines := st.proxy.Log().Find(passed, withMessage("connection")); len(lines) > 0 {
		return "", fmt.Errorf("their traffic went through the proxy: %s", lines[0].Text)
	}
	return fmt.Sprintf("%s and %s have no table, policy rule, listener or identity (%s has %d packet rules); they reach each other directly",
		st.outside, st.optedOut, st.client, found.PacketRules), nil
}

// onlyEnrolled: the identities held are those of the enrolled pods; any other is
// refused, and the CA was never asked for one.
func onlyEnrolled(ctx context.Context, st *stage) (string, error) {
	want := []string{st.client.identity(), st.server.identity()}
	status, err := st.status(ctx)
	if err != nil {
		return "", err
	}
	if got := identities(status); !slices.Equal(got, want) {
		return "", fmt.Errorf("identities held are %v, want %v", got, want)
	}
	for _, identity := range want {
		if _, err := fetchSVID(ctx, sdsSocket, identity); err != nil {
			return "", err
		}
	}
	others := []string{
		st.outside.identity(), st.optedOut.identity(),
		"spiffe://" + trustDomain + "/ns/" + meshed + "/sa/nobody",
		"spiffe://elsewhere.example/ns/" + meshed + "/sa/client",
	}
	for _, identity := range others {
		if err := expectRefusal(ctx, sdsSocket, identity); err != nil {
			return "", err
		}
	}
	// The refused requests above are over: had they led to a CSR, its line would be here.
	var asked []string
	for _, line := range st.agent.Log().Find(0, isSigning) {
		asked = append(asked, line.Field("identity"))
	}
	slices.Sort(asked)
	if asked = slices.Compact(asked); !slices.Equal(asked, want) {
		return "", fmt.Errorf("the CA has seen CSRs for %v, want %v", asked, want)
	}
	return fmt.Sprintf("held, and seen by the CA: %s; SDS refuses %d others", strings.Join(want, ", "), len(others)), nil
}

// readyBeforeStart: at the moment ADD returned, the certificate was ready.
func readyBeforeStart(_ context.Context, st *stage) (string, error) {
	var details []string
	for _, p := range []*pod{st.client, st.server} {
		entry, ok := entryOf(p.statusWhenAdded, p)
		if !ok {
			return "", fmt.Errorf("when ADD had returned, pod %s was not in the status", p)
		}
		if entry.State != admin.PodEnrolled || entry.Certificate.State != admin.CertificateReady || entry.Proxy != admin.ProxyAcked {
			return "", fmt.Errorf("when ADD had returned, pod %s was %s, its certificate %s, the proxy's part %s",
				p, entry.State, entry.Certificate.State, entry.Proxy)
		}
		// The status was asked for after ADD: the CA's log says when the certificate was there.
		signed := st.signingLog(p.identity())
		if len(signed) == 0 || signed[0].Time().IsZero() {
			return "", fmt.Errorf("the CA's log has no line, or none with a time, for pod %s", p)
		}
		lead := p.added.Sub(signed[0].Time())
		if lead < 0 {
			return "", fmt.Errorf("the certificate of pod %s was signed %v after ADD had returned", p, -lead)
		}
		details = append(details, fmt.Sprintf("%s: signed %.1f ms before ADD returned", p, lead.Seconds()*1000))
	}
	return strings.Join(details, ", "), nil
}

// twoPodsOneIdentity: a second pod of a service account causes no second CSR.
func twoPodsOneIdentity(ctx context.Context, st *stage) (string, error) {
	identity := st.client.identity()
	before, err := fetchSVID(ctx, sdsSocket, identity)
	if err != nil {
		return "", err
	}
	if err := st.add(ctx, st.client2); err != nil {
		return "", err
	}
	after, err := fetchSVID(ctx, sdsSocket, identity)
	if err != nil {
		return "", err
	}
	if before.SerialNumber.Cmp(after.SerialNumber) != 0 {
		return "", fmt.Errorf("the certificate has changed from serial %032x to %032x", before.SerialNumber, after.SerialNumber)
	}
	i := slices.IndexFunc(st.client2.statusWhenAdded.Identities, func(s admin.IdentityStatus) bool { return s.ID == identity })
	if i < 0 || st.client2.statusWhenAdded.Identities[i].Pods != 2 {
		return "", fmt.Errorf("the identities are %+v, want %s with 2 pods", st.client2.statusWhenAdded.Identities, identity)
	}
	if err := st.meshExchange(ctx, st.client2, st.server, st.server.ips[0]); err != nil {
		return "", err
	}
	if lines := st.signingLog(identity); len(lines) != 1 {
		return "", fmt.Errorf("the CA has seen %d CSRs for %s, want 1", len(lines), identity)
	}
	return fmt.Sprintf("%s and %s share %s, serial %032x: 1 CSR", st.client, st.client2, identity, after.SerialNumber), nil
}

// wholeOrNothing: a pod that the proxy refuses fails to start, and nothing of it stays.
func wholeOrNothing(ctx context.Context, st *stage) (string, error) {
	p := st.refused
	addErr := st.add(ctx, p)
	if addErr == nil {
		return "", fmt.Errorf("ADD of pod %s succeeded although the proxy refuses it", p)
	}
	if p.netns == nil {
		return "", addErr
	}
	if lines := st.proxy.Log().Find(0, func(l enclave.Line) bool {
		return l.Field("msg") == "workload refused" && l.Field("pod") == p.String()
	}); len(lines) == 0 {
		return "", fmt.Errorf("ADD failed for another reason: %w", addErr)
	}
	if err := st.expectNoRedirection(ctx, p); err != nil {
		return "", err
	}
	if err := st.expectUnregistered(ctx, p); err != nil {
		return "", err
	}
	if err := st.awaitProxyGone(ctx, p); err != nil {
		return "", err
	}
	if err := st.remove(ctx, p); err != nil {
		return "", err
	}
	return fmt.Sprintf("ADD failed with %q; no rule, descriptor, identity or listener is left", addErr), nil
}

// deletion: when DEL has returned, nothing of the pod is left.
func deletion(ctx context.Context, st *stage) (string, error) {
	p := st.server
	if err := p.stopServer(); err != nil {
		return "", err
	}
	if err := st.runtime.del(ctx, p, p.netns.Path()); err != nil {
		return "", fmt.Errorf("DEL: %w", err)
	}
	if err := st.expectNoRedirection(ctx, p); err != nil {
		return "", err
	}
	if err := st.expectUnregistered(ctx, p); err != nil {
		return "", err
	}
	if err := st.awaitProxyGone(ctx, p); err != nil {
		return "", err
	}
	if err := st.runtime.del(ctx, p, p.netns.Path()); err != nil {
		return "", fmt.Errorf("DEL again: %w", err)
	}
	if err := st.remove(ctx, p); err != nil {
		return "", err
	}

	// The last pod of an identity takes it along, not the first.
	if err := st.remove(ctx, st.client2); err != nil {
		return "", err
	}
	if _, err := fetchSVID(ctx, sdsSocket, st.client.identity()); err != nil {
		return "", fmt.Errorf("with %s deleted, %s still there: %w", st.client2, st.client, err)
	}
	for _, p := range []*pod{st.client, st.outside, st.optedOut} {
		if err := errors.Join(p.stopServer(), st.remove(ctx, p)); err != nil {
			return "", err
		}
	}
	status, err := st.status(ctx)
	if err != nil {
		return "", err
	}
	if len(status.Pods)+len(status.Identities)+len(status.Skipped) > 0 {
		return "", fmt.Errorf("with all pods deleted the agent still has pods %+v, identities %+v, skipped %+v",
			status.Pods, status.Identities, status.Skipped)
	}
	return fmt.Sprintf("%s: no rule, pin, identity or listener is left; DEL again and without a netns succeed; with all pods deleted the agent is empty", p), nil
}

// SPDX-License-Identifier: Apache-2.0

package iptables

import "ambientd/iptables/redirection"

// # The guardrail
//
// A restore changes each table at once, but one table after the other: while a pod
// is repaired that lost the rules of NAT and of another table, its connections go
// uncaptured until the last table is written. So the first transaction of a replacement puts up a
// guardrail in the filter table, and the last one takes it down: the new rules of
// NAT over again, seen after NAT, with "drop" where they say "redirect". What has
// been captured is let by, and so is what is not to be captured; what should have
// been captured and was not is dropped. While nothing is amiss, it drops nothing.
//
// A restore that ends in the middle leaves it standing. The pod then fails closed,
// Verify tells of chains that should not be there, and the next Apply or Remove
// takes them down.

// filterTable holds the guardrail, and nothing else of ours: at its hooks, NAT has
// decided.
const filterTable = "filter"

// renderGuard returns the guardrail for the rules of one family, nothing where
// they capture nothing.
func renderGuard(rules []redirection.Rule) []chain {
	in := chain{name: redirection.IPTablesGuardInput, builtins: []string{"INPUT", "FORWARD"}, rules: spared("-i " + redirection.Loopback)}
	out := chain{name: redirection.IPTablesGuardOutput, builtins: []string{"OUTPUT"}, rules: spared("-o " + redirection.Loopback)}
	captures := false
	for _, rule := range rules {
		if rule.Chain.Table != redirection.NAT {
			continue
		}
		c := &in
		if rule.Chain.Hook == redirection.Output {
			c = &out
		}
		verdict := "-j RETURN"
		if rule.Verdict.Action == redirection.Redirect {
			verdict = "-j DROP"
			captures = true
		}
		for _, match := range renderMatch(rule.Match) {
			c.rules = append(c.rules, sentence(match, verdict))
		}
	}
	if !captures {
		return nil
	}
	return []chain{in, out}
}

// spared returns the rules for what the guardrail leaves alone, as NAT does: what
// stays in the pod, what belongs to a connection that NAT has seen, and what NAT
// has redirected.
func spared(onLoopback string) []string {
	return []string{
		sentence(onLoopback, "-j RETURN"),
		"-m conntrack ! --ctstate NEW,RELATED -j RETURN",
		"-m conntrack --ctstate DNAT -j RETURN",
	}
}

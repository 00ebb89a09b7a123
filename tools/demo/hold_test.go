// SPDX-License-Identifier: Apache-2.0

package main

import "testing"

func TestAdviceKeepsItsColumns(t *testing.T) {
	got := advice([]hint{{"logs", "tail -f a b"}, {"rules of shop/a-pod-with-a-long-name", "nft list ruleset"}})
	want := `  logs                                  tail -f a b
  rules of shop/a-pod-with-a-long-name  nft list ruleset
`
	if got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	if got := advice(nil); got != "" {
		t.Errorf("no hints give %q", got)
	}
}

func TestRulesAreListedAsTheBackendWritesThem(t *testing.T) {
	for backendName, want := range map[string]string{
		"nftables": "nft list ruleset",
		"iptables": "sh -c 'iptables-save; ip6tables-save'",
	} {
		if got := listRules(backendName); got != want {
			t.Errorf("%s: %q, want %q", backendName, got, want)
		}
	}
}

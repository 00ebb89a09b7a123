// SPDX-License-Identifier: Apache-2.0

package xtables

import (
	"strings"
	"testing"
)

func TestParseRefuses(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"incompatible table", "# Table `nat' is incompatible, use 'nft' tool.\n", "Table `nat' is incompatible, use 'nft' tool."},
		{"rule before a table", "-A INPUT -j ACCEPT\n", "stands before any table"},
		{"counters", "*nat\n[0:0] -A INPUT -j ACCEPT\n", "no line of iptables-save"},
		{"text", "<html>\n", "stands before any table"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, err := Parse(c.text); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got the error %v, want %q in it", err, c.want)
			}
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

// Package docs_test keeps what the pages say in step with what they say it of.
package docs_test

import (
	"os"
	"strings"
	"testing"
)

// TestEachLineIsExplained: what the programs print of an enrolled pod is in the tables of
// redirection.md, line by line.
func TestEachLineIsExplained(t *testing.T) {
	page := read(t, "redirection.md")
	for _, golden := range []string{
		"../iptables/nftables/testdata/default.nft",
		"../iptables/nftables/testdata/host-pod.nft",
		"../iptables/iptables/testdata/enrolled.ipv4.iptables-save",
	} {
		for line := range strings.Lines(read(t, golden)) {
			line = strings.TrimSpace(line)
			if line == "" || line == "}" {
				continue
			}
			// Within a table a bar has to be escaped.
			quoted := "`" + strings.ReplaceAll(line, "|", `\|`) + "`"
			if !strings.Contains(page, quoted) {
				t.Errorf("%s: redirection.md does not explain %s", golden, quoted)
			}
		}
	}
}

// TestIPv6HasTheSameLines: so that the page explains both families by one.
func TestIPv6HasTheSameLines(t *testing.T) {
	inIPv4 := strings.NewReplacer("::1/128", "127.0.0.0/8", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff/128", "169.254.7.127/32")
	four, six := read(t, "../iptables/iptables/testdata/enrolled.ipv4.iptables-save"), read(t, "../iptables/iptables/testdata/enrolled.ipv6.iptables-save")
	if got := inIPv4.Replace(six); got != four {
		t.Errorf("IPv6 differs by more than addresses:\n%s", got)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// SPDX-License-Identifier: Apache-2.0

// Package docs_test keeps what the pages say in step with what they say it of.
package docs_test

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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

// TestMessagesAreThere: what troubleshooting.md says one may see is what the programs say.
// An ellipsis stands for what differs from case to case.
func TestMessagesAreThere(t *testing.T) {
	sources := sources(t)
	quoted := regexp.MustCompile("`([^`]+)`")
	seen := 0
	for line := range strings.Lines(read(t, "troubleshooting.md")) {
		cells := strings.Split(line, " | ")
		if !strings.HasPrefix(line, "| ") || len(cells) < 3 {
			continue
		}
		for _, message := range quoted.FindAllStringSubmatch(cells[0], -1) {
			for part := range strings.SplitSeq(message[1], "…") {
				part = strings.Trim(part, " ,:;\"")
				if strings.Count(part, " ") < 2 || strings.HasPrefix(part, "-") {
					continue // a flag, a field, a word
				}
				seen++
				if !strings.Contains(sources, part) {
					t.Errorf("no program says %q: %s", part, cells[0])
				}
			}
		}
	}
	if seen < 20 {
		t.Errorf("only %d messages were found in the page", seen)
	}
}

// sources returns the text of all programs, without their tests.
func sources(t *testing.T) string {
	t.Helper()
	var all strings.Builder
	for _, dir := range []string{"../nodeagent", "../iptables", "../certfetch", "../cni-plugin"} {
		err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
			if err == nil && !entry.IsDir() && strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") {
				all.WriteString(read(t, path))
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return all.String()
}

// TestTargetsAreThere: what the pages have one make is what `make help` shows.
func TestTargetsAreThere(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "make", "-s", "--no-print-directory", "-C", "..", "help").CombinedOutput()
	if err != nil {
		t.Fatalf("make help: %v: %s", err, out)
	}
	named := regexp.MustCompile("(?m)(?:`|^\\$? ?)make ([a-z0-9-]+)")
	seen := 0
	for _, page := range []string{"../README.md", "../CHANGELOG.md", "../deploy/README.md", "development.md", "one-machine.md", "troubleshooting.md"} {
		for _, target := range named.FindAllStringSubmatch(read(t, page), -1) {
			seen++
			if target[1] != "help" && !strings.Contains(string(out), "\n  make "+target[1]+" ") {
				t.Errorf("%s names `make %s`, which make help does not show", page, target[1])
			}
		}
	}
	if seen < 20 {
		t.Errorf("only %d targets are named: the pattern fits no more", seen)
	}
}

// TestTablesAreWhole: a row behind an empty line is shown as text with bars.
func TestTablesAreWhole(t *testing.T) {
	pages, err := filepath.Glob("*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range append(pages, "../README.md", "../ARCHITECTURE.md", "../deploy/README.md") {
		inTable := false
		lines := strings.Split(read(t, page), "\n")
		for i, line := range lines {
			row := strings.HasPrefix(strings.TrimSpace(line), "|")
			if row && !inTable && (i+1 == len(lines) || !strings.HasPrefix(strings.TrimSpace(lines[i+1]), "|--")) {
				t.Errorf("%s:%d: a row without a table's head: %s", page, i+1, line)
			}
			inTable = row
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package fences

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// placeholder is what a page has where something is to be filled in.
var placeholder = regexp.MustCompile(`@[A-Z][A-Z0-9_]*@`)

const whyNoPlaceholder = "what was to be filled in there is missing: a reader finds a page that is not finished; fill it in, or take the line out"

// TestPagesAreFilledIn looks at the pages that git tracks, as they are in the work tree.
func TestPagesAreFilledIn(t *testing.T) {
	git := exec.CommandContext(t.Context(), "git", "-C", "../..", "ls-files", "-z", "--", "*.md")
	out, err := git.Output()
	if err != nil {
		t.Skipf("git does not list this checkout's files: %v", err)
	}
	pages := strings.FieldsFunc(string(out), func(r rune) bool { return r == 0 })
	if !slices.Contains(pages, "README.md") {
		t.Errorf("git lists %q, without README.md: this test looks in the wrong place", pages)
	}
	for _, page := range pages {
		text, err := os.ReadFile(filepath.Join("../..", page))
		if os.IsNotExist(err) {
			continue // deleted, and not committed yet
		}
		if err != nil {
			t.Error(err)
		}
		for _, found := range placeholders(string(text)) {
			t.Errorf("%s:%s: %s", page, found, whyNoPlaceholder)
		}
	}
}

// placeholders returns the places, "line: what", of a text.
func placeholders(text string) []string {
	var found []string
	number := 0
	for line := range strings.Lines(text) {
		number++
		for _, what := range placeholder.FindAllString(line, -1) {
			found = append(found, fmt.Sprintf("%d: %s", number, what))
		}
	}
	return found
}

func TestPlaceholdersAreFound(t *testing.T) {
	for _, c := range []struct {
		text string
		want []string
	}{
		{"", nil},
		{"# Title\n\nsomebody@example.org, @ONE, A@B and @lower@\n", nil},
		{"# Title\n\n@BENCH@\n", []string{"3: @BENCH@"}},
		{"| median | @MEDIAN_MS@ | @P90@ |\r\n\r\n  @NAME@", []string{"1: @MEDIAN_MS@", "1: @P90@", "3: @NAME@"}},
	} {
		if got := placeholders(c.text); !slices.Equal(got, c.want) {
			t.Errorf("in %q: found %q, want %q", c.text, got, c.want)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package spelling_test

import (
	"testing"

	"ambientd/cni-plugin/spelling"
)

func TestNear(t *testing.T) {
	for _, c := range []struct {
		given, known string
		want         bool
	}{
		{"status", "status", true},
		{"stauts", "status", true},
		{"statu", "status", true},
		{"enroll", "enrol", true},
		{"xstatus", "status", true},
		{"statuz", "status", true},
		{"statzz", "status", false},
		{"tsatsu", "status", false},
		{"stat0us", "status", true},
		{"state", "status", false},
		{"", "status", false},
		{"statuss", "status", true}, // the same letter before and behind
		{"exclude_namespaces", "excludeNamespaces", true},
		{"exclude-namespace", "excludeNamespaces", true},
		{"--run_dir", "--run-dir", true},
		{"runDir", "run-dir", true},
		{"NAME", "name", true},
		{"names", "name", false}, // too short for a slip
		{"", "", true},
		{"ä", "status", false},
	} {
		if got := spelling.Near(c.given, c.known); got != c.want {
			t.Errorf("%q for %q: %t, want %t", c.given, c.known, got, c.want)
		}
	}
}

// In a short word too a slip is one, if only to ask back.
func TestSlip(t *testing.T) {
	for _, c := range []struct {
		given, known string
		want         bool
	}{
		{"--jsn", "--json", true}, {"--jsno", "--json", true}, {"jsonn", "json", true}, {"rum", "run", true}, {"json", "json", true},
		{"node", "json", false}, {"stauts", "status", true}, {"tsatsu", "status", false},
	} {
		if got := spelling.Slip(c.given, c.known); got != c.want {
			t.Errorf("%q for %q: %t, want %t", c.given, c.known, got, c.want)
		}
	}
}

func TestSame(t *testing.T) {
	for _, c := range []struct {
		given, known string
		want         bool
	}{{"Run_dir", "run-dir", true}, {"runDir", "run-dir", true}, {"cni-socket", "criSocket", false}, {"name", "names", false}} {
		if got := spelling.Same(c.given, c.known); got != c.want {
			t.Errorf("%q for %q: %t, want %t", c.given, c.known, got, c.want)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

// Package spelling tells a slip of the pen from another word. It owns that one question, which
// plugin and agent both have of names that they do not know; what becomes of one is theirs. The
// plugin runs for each pod: strings of the standard library are all that it may cost.
package spelling

import "strings"

// minLength is how many letters a word has that one slip does not make another: of shorter ones too
// many are a letter apart.
const minLength = 5

// Same tells whether two names are the same but for capitals, hyphens and underscores.
func Same(given, known string) bool { return bare(given) == bare(known) }

// Near tells whether given is the same as known, or was meant to be: in a word of some length, but
// for one letter that is missing, is too much, is another or has changed places with its neighbour.
func Near(given, known string) bool {
	a, b := bare(given), bare(known)
	return a == b || len(b) >= minLength && slip(a, b)
}

// Slip is Near for words of any length: reason enough to ask back, and too little to refuse a word.
func Slip(given, known string) bool { return slip(bare(given), bare(known)) }

// slip tells whether the words are the same but for one slip at most.
func slip(a, b string) bool {
	for a != "" && b != "" && a[0] == b[0] {
		a, b = a[1:], b[1:]
	}
	for a != "" && b != "" && a[len(a)-1] == b[len(b)-1] {
		a, b = a[:len(a)-1], b[:len(b)-1]
	}
	swapped := len(a) == 2 && len(b) == 2 && a[0] == b[1] && a[1] == b[0]
	return swapped || len(a) <= 1 && len(b) <= 1
}

// bare is what distinguishes a name, in whatever style it is written.
func bare(name string) string {
	return strings.Map(func(r rune) rune {
		if r == '-' || r == '_' {
			return -1
		}
		return r
	}, strings.ToLower(name))
}

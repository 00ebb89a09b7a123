// SPDX-License-Identifier: Apache-2.0

package main

import (
	"flag"
	"fmt"
	"slices"
	"strings"

	"ambientd/cni-plugin/spelling"
)

// minLetters is how many letters of a word are enough to guess the rest, or to see a slip in it.
const minLetters = 3

// didYouMean is the end of an error about a name that there is not: the known ones as which it
// may have been meant, or nothing.
func didYouMean(name string, known []string) string {
	var near []string
	for _, k := range slices.Sorted(slices.Values(known)) {
		if spelling.Same(name, k) {
			near = []string{k}
			break
		}
		if letters(k) >= minLetters && spelling.Slip(name, k) || begins(name, k) || begins(k, name) {
			near = append(near, k)
		}
	}
	if len(near) == 0 {
		return ""
	}
	return fmt.Sprintf(" (did you mean %s?)", strings.Join(near, " or "))
}

// begins tells whether word begins with enough letters that are all of beginning.
func begins(beginning, word string) bool {
	return letters(beginning) >= minLetters && strings.HasPrefix(word, beginning)
}

// letters is the length of a word, or of a flag's without its dashes.
func letters(word string) int { return len(strings.TrimLeft(word, "-")) }

// flagError says in our style what is wrong with a flag.
func flagError(set *flag.FlagSet, err error) error {
	err = gnuStyle(err)
	name, ok := strings.CutPrefix(err.Error(), "flag provided but not defined: ")
	if !ok {
		return err
	}
	var known []string
	set.VisitAll(func(f *flag.Flag) { known = append(known, "--"+f.Name) })
	return fmt.Errorf("%w%s", err, didYouMean(name, known))
}

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Line is one of a log that log/slog wrote as text: its attributes by key.
type Line map[string]string

// ParseLine reads a line. What a person cannot read as key=value is an error.
func ParseLine(raw string) (Line, error) {
	line := Line{}
	for rest := raw; rest != ""; rest = strings.TrimPrefix(rest, " ") {
		key, after, ok := strings.Cut(rest, "=")
		if !ok || key == "" || strings.ContainsAny(key, " \"") {
			return nil, fmt.Errorf("no key=value at %q", rest)
		}
		value, tail, _ := strings.Cut(after, " ")
		if strings.HasPrefix(after, `"`) {
			quoted, err := strconv.QuotedPrefix(after)
			if err != nil {
				return nil, fmt.Errorf("the value of %s: %w", key, err)
			}
			if value, err = strconv.Unquote(quoted); err != nil {
				return nil, fmt.Errorf("the value of %s: %w", key, err)
			}
			tail = after[len(quoted):]
		}
		line[key], rest = value, tail
	}
	for _, key := range []string{"time", "level", "msg"} {
		if line[key] == "" {
			return nil, errors.New("no " + key)
		}
	}
	return line, nil
}

// LinesPerPod returns how many of the lines name each pod, as "namespace/name uid".
func LinesPerPod(lines []Line) map[string]int {
	count := map[string]int{}
	for _, line := range lines {
		if pod := line["pod"]; pod != "" {
			count[pod+" "+line["uid"]]++
		}
	}
	return count
}

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

// Mentions is how often a log names a pod, and for how many sandboxes the runtime had asked: it
// makes another one of a pod whose network it could not set up, so each begins anew.
type Mentions struct{ Lines, Sandboxes int }

// MentionsOfPods counts them for each pod, as "namespace/name uid".
func MentionsOfPods(lines []Line) map[string]Mentions {
	count := map[string]Mentions{}
	seen := map[string]bool{}
	for _, line := range lines {
		if line["pod"] == "" {
			continue
		}
		pod := line["pod"] + " " + line["uid"]
		now := count[pod]
		now.Lines++
		if container := line["container"]; container != "" && !seen[pod+" "+container] {
			seen[pod+" "+container] = true
			now.Sandboxes++
		}
		count[pod] = now
	}
	return count
}

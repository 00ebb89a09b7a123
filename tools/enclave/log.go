// SPDX-License-Identifier: Apache-2.0

package enclave

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// maxLine bounds a line of a log, in bytes.
const maxLine = 1 << 20

// ErrEnded is wrapped by Await's error when the process ended without a matching line.
var ErrEnded = errors.New("the process ended")

// Line is one line that a process wrote.
type Line struct {
	Text string
	// fields are read when somebody asks for one: until then a line costs a measured
	// process little of the CPU that it shares with us.
	fields func() map[string]any
}

// ParseLine makes a Line of a text.
func ParseLine(text string) Line {
	return Line{Text: text, fields: sync.OnceValue(func() map[string]any {
		var fields map[string]any
		// What is no JSON object has no fields; it still has its text.
		if err := json.Unmarshal([]byte(text), &fields); err != nil {
			return nil
		}
		return fields
	})}
}

// Field returns a field of a line that is a JSON object, as text; "" if there is none.
func (l Line) Field(name string) string {
	if l.fields == nil {
		return ""
	}
	switch v := l.fields()[name].(type) {
	case nil:
		return ""
	case string:
		return v
	default:
		return fmt.Sprint(v)
	}
}

// Time returns the field "time" that log/slog writes; the zero time if there is none.
func (l Line) Time() time.Time {
	t, err := time.Parse(time.RFC3339Nano, l.Field("time"))
	if err != nil {
		return time.Time{}
	}
	return t
}

// Log is what a process wrote to standard output and error, line by line. Its
// methods are safe for concurrent use.
type Log struct {
	file *os.File // nil: only in memory

	mu      sync.Mutex
	lines   []Line
	ended   bool
	changed chan struct{} // closed and made anew with each line, closed for good at the end
}

func newLog(path string) (*Log, error) {
	l := &Log{changed: make(chan struct{})}
	if path == "" {
		return l, nil
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("opening a log: %w", err)
	}
	l.file = file
	return l, nil
}

// follow takes lines from r until its end. It reads on after an error of the file,
// so that the process does not block.
func (l *Log) follow(r io.Reader) error {
	var fileErr error
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		l.append(lines.Text())
		if l.file != nil && fileErr == nil {
			_, fileErr = l.file.Write(append(lines.Bytes(), '\n'))
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended = true
	close(l.changed)
	return errors.Join(lines.Err(), fileErr)
}

func (l *Log) append(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, ParseLine(text))
	close(l.changed)
	l.changed = make(chan struct{})
}

func (l *Log) close() error {
	if l.file == nil {
		return nil
	}
	return l.file.Close()
}

// Len returns how many lines there are: the position of the next one.
func (l *Log) Len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.lines)
}

// Find returns the lines from position from on that match.
func (l *Log) Find(from int, match func(Line) bool) []Line {
	l.mu.Lock()
	defer l.mu.Unlock()
	var found []Line
	for _, line := range l.lines[min(from, len(l.lines)):] {
		if match(line) {
			found = append(found, line)
		}
	}
	return found
}

// Await returns the first line from position from on that matches, and waits for
// it until ctx ends or the process does.
func (l *Log) Await(ctx context.Context, from int, match func(Line) bool) (Line, error) {
	for {
		l.mu.Lock()
		changed, ended := l.changed, l.ended
		lines := l.lines[min(from, len(l.lines)):]
		from += len(lines)
		l.mu.Unlock()

		for _, line := range lines {
			if match(line) {
				return line, nil
			}
		}
		if ended {
			return Line{}, ErrEnded
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return Line{}, ctx.Err()
		}
	}
}

// Tail returns the last n lines as one text.
func (l *Log) Tail(n int) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var text string
	for _, line := range l.lines[max(0, len(l.lines)-n):] {
		text += line.Text + "\n"
	}
	return text
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"
)

// checkTimeout bounds one check. The slowest waits a second for something.
const checkTimeout = 30 * time.Second

// check is one promise: a name, and what finds out whether it is kept.
type check struct {
	name string
	// run returns what was seen, in a few words, or an error that says what was seen
	// instead of what.
	run func(ctx context.Context, st *stage) (string, error)
}

// result is what became of a check, as --json prints it.
type result struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail"`
	Millis int64  `json:"ms"`
}

// report runs checks and prints what became of them.
type report struct {
	out, progress io.Writer
	json          bool
	results       []result
}

// run runs one check.
func (r *report) run(ctx context.Context, c check, st *stage) {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	start := time.Now()
	detail, err := c.run(ctx, st)
	res := result{Name: c.name, OK: err == nil, Detail: detail, Millis: time.Since(start).Milliseconds()}
	if err != nil {
		res.Detail = err.Error()
	}
	r.add(res)
}

// abort reports every check as failed, because none could be run.
func (r *report) abort(err error) {
	fmt.Fprintf(r.progress, "demo: %v\n", err)
	for _, c := range checks {
		r.add(result{Name: c.name, Detail: fmt.Sprintf("not run: %v", err)})
	}
}

func (r *report) add(res result) {
	r.results = append(r.results, res)
	if r.json {
		fmt.Fprintf(r.progress, "demo: %s: %s\n", res.Name, res.verdict())
		return
	}
	fmt.Fprintf(r.out, "%-6s %-22s %6d ms  %s\n", res.verdict(), res.Name, res.Millis, res.Detail)
}

func (res result) verdict() string {
	if res.OK {
		return "ok"
	}
	return "FAILED"
}

// finish prints the summary, and returns whether all checks have passed.
func (r *report) finish() bool {
	ok := len(r.results) > 0
	failed := 0
	for _, res := range r.results {
		if !res.OK {
			ok = false
			failed++
		}
	}
	if r.json {
		summary := struct {
			Checks []result `json:"checks"`
			OK     bool     `json:"ok"`
		}{r.results, ok}
		if err := json.NewEncoder(r.out).Encode(summary); err != nil {
			fmt.Fprintf(r.progress, "demo: printing the results: %v\n", err)
			return false
		}
		return ok
	}
	fmt.Fprintf(r.out, "%d of %d checks passed\n", len(r.results)-failed, len(r.results))
	return ok
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// checkTimeout bounds one check. The slowest waits a second for something.
const checkTimeout = 30 * time.Second

// errInterrupted is why checks were not run after a signal.
var errInterrupted = errors.New("interrupted")

// check is one promise: a name, and what finds out whether it is kept.
type check struct {
	name string
	// run returns what was seen, in a few words, or an error that says what was seen
	// instead of what.
	run func(ctx context.Context, st *stage) (string, error)
}

// outcome is what became of a check, as a line about it begins.
type outcome string

const (
	passed      outcome = "ok"
	failed      outcome = "FAILED"
	interrupted outcome = "interrupted" // while it was looked at
	notRun      outcome = "not run"
)

// result is what became of a check, as --json prints it.
type result struct {
	Name string `json:"name"`
	OK   bool   `json:"ok"`
	// Detail is what was seen; of a check that came to no verdict, its outcome.
	Detail string `json:"detail"`
	Millis int64  `json:"ms"`

	outcome outcome
}

// report runs checks and prints what became of them.
type report struct {
	out, progress io.Writer
	json          bool
	results       []result
	// cause is why checks were not run; nil while all were.
	cause error
}

// run looks at the checks one after another. The end of ctx interrupts one, and those
// behind it are not run: that says nothing about what they promise.
func (r *report) run(ctx context.Context, checks []check, st *stage) {
	for i, c := range checks {
		res := look(ctx, c, st)
		r.add(res)
		rest := checks[i+1:]
		if ctx.Err() != nil && (res.outcome == interrupted || len(rest) > 0) {
			r.abort(errInterrupted, rest)
			return
		}
	}
}

// look finds out about one check.
func look(ctx context.Context, c check, st *stage) result {
	bounded, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	start := time.Now()
	detail, err := c.run(bounded, st)
	res := result{Name: c.name, OK: err == nil, Detail: detail, Millis: time.Since(start).Milliseconds(), outcome: passed}
	switch {
	case err != nil && ctx.Err() != nil:
		res.outcome = interrupted
		res.Detail = string(interrupted)
	case err != nil:
		res.outcome = failed
		res.Detail = err.Error()
	}
	return res
}

// abort says once why these checks cannot be run, and reports each as not run.
func (r *report) abort(cause error, checks []check) {
	r.cause = cause
	fmt.Fprintf(r.progress, "demo: %v\n", cause)
	for _, c := range checks {
		r.add(result{Name: c.name, Detail: string(notRun), outcome: notRun})
	}
}

func (r *report) add(res result) {
	r.results = append(r.results, res)
	switch {
	case r.json:
		fmt.Fprintf(r.progress, "demo: %s: %s\n", res.Name, res.outcome)
	case res.outcome == passed || res.outcome == failed:
		fmt.Fprintf(r.out, "%-6s %-22s %6d ms  %s\n", res.outcome, res.Name, res.Millis, res.Detail)
	default:
		fmt.Fprintf(r.out, "%-11s %s\n", res.outcome, res.Name)
	}
}

// finish prints the summary, and returns whether all checks have passed.
func (r *report) finish() bool {
	count := map[outcome]int{}
	for _, res := range r.results {
		count[res.outcome]++
	}
	ok := len(r.results) > 0 && count[passed] == len(r.results)
	if r.json {
		return r.finishJSON(ok)
	}
	fmt.Fprintf(r.out, "%d of %d checks passed", count[passed], len(r.results))
	for _, o := range []outcome{interrupted, notRun} {
		if n := count[o]; n > 0 {
			fmt.Fprintf(r.out, ", %d %s", n, o)
		}
	}
	fmt.Fprintln(r.out)
	return ok
}

// finishJSON prints all results as one object.
func (r *report) finishJSON(ok bool) bool {
	summary := struct {
		Checks []result `json:"checks"`
		Error  string   `json:"error,omitempty"` // why checks were not run
		OK     bool     `json:"ok"`
	}{Checks: r.results, OK: ok}
	if r.cause != nil {
		summary.Error = r.cause.Error()
	}
	if err := json.NewEncoder(r.out).Encode(summary); err != nil {
		fmt.Fprintf(r.progress, "demo: printing the results: %v\n", err)
		return false
	}
	return ok
}

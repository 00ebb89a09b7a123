// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"
)

// figure is a measured time, as the median of several.
type figure struct {
	samples []time.Duration
}

func (f *figure) add(d time.Duration) { f.samples = append(f.samples, d) }

// time adds how long fn takes.
func (f *figure) time(fn func() error) error {
	start := time.Now()
	err := fn()
	f.add(time.Since(start))
	return err
}

// quantile returns the sample below which a part q of them lies; 0 without samples.
func (f figure) quantile(q float64) time.Duration {
	if len(f.samples) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(f.samples))
	return sorted[int(q*float64(len(sorted)-1)+0.5)]
}

func (f figure) median() time.Duration { return f.quantile(0.5) }

// undisturbed is the figure of one sample alone, below which a tenth of them lies. What else the
// machine does weighs little on it, and neither does one lucky sample, which is what a minimum is.
func (f figure) undisturbed() figure { return figure{samples: []time.Duration{f.quantile(0.1)}} }

// row is one line of the table: a value, and how it must compare with a reference.
type row struct {
	Name string `json:"name"`
	// Value is what was measured, in Unit.
	Value float64 `json:"value"`
	Unit  string  `json:"unit"`
	// P90 is the 90th percentile where the value is a median; else 0.
	P90 float64 `json:"p90,omitempty"`
	// Ratio is Value divided by the reference named in Against; 0 where there is none.
	Ratio   float64 `json:"ratio,omitempty"`
	Against string  `json:"against,omitempty"`
	// Limit is what Ratio, or without a reference Value, may be at most; LimitText is how
	// it is agreed. Without a text the row only informs.
	Limit     float64 `json:"limit,omitempty"`
	LimitText string  `json:"limitText,omitempty"`
	Pass      bool    `json:"pass"`
}

// yardstickName is what the rows call two iptables-nft-restore runs.
const yardstickName = "R"

// duration makes a row of a figure compared with a reference.
func duration(name string, f figure, against string, reference time.Duration, limit float64, limitText string) row {
	r := row{
		Name: name, Value: micros(f.median()), Unit: "µs", P90: micros(f.quantile(0.9)),
		Against: against, Limit: limit, LimitText: limitText, Pass: true,
	}
	if reference > 0 {
		r.Ratio = float64(f.median()) / float64(reference)
	}
	if limit > 0 {
		r.Pass = r.Ratio > 0 && r.Ratio <= limit
	}
	return r
}

// amount makes a row of a number with a limit of its own.
func amount(name string, value float64, unit string, limit float64, limitText string) row {
	return row{Name: name, Value: value, Unit: unit, Limit: limit, LimitText: limitText, Pass: limit == 0 || value <= limit}
}

// none makes a row of a number that must be 0.
func none(name string, value int) row {
	return row{Name: name, Value: float64(value), LimitText: "none", Pass: value == 0}
}

// exactly makes a row of a number that must be that one.
func exactly(name string, value, want float64) row {
	return row{Name: name, Value: value, Limit: want, LimitText: number(want), Pass: value == want}
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }

// machine is where the figures were measured.
type machine struct {
	Kernel   string `json:"kernel"`
	CPUs     int    `json:"cpus"`
	Go       string `json:"go"`
	Arch     string `json:"arch"`
	IPTables string `json:"iptables"`
}

// results is what a run has found.
type results struct {
	Time      time.Time `json:"time"`
	Machine   machine   `json:"machine"`
	Yardstick row       `json:"yardstick"`
	Rows      []row     `json:"rows"`
	Pass      bool      `json:"pass"`
}

func newResults(b *bench) results {
	res := results{
		Time: time.Now().UTC().Truncate(time.Second), Machine: thisMachine(), Rows: b.rows, Pass: len(b.rows) > 0,
		Yardstick: duration("two iptables-nft-restore runs (v4, v6)", b.r, "", 0, 0, ""),
	}
	for _, r := range b.rows {
		res.Pass = res.Pass && r.Pass
	}
	return res
}

func thisMachine() machine {
	m := machine{CPUs: runtime.NumCPU(), Go: runtime.Version(), Arch: runtime.GOARCH}
	var name unix.Utsname
	if err := unix.Uname(&name); err == nil {
		m.Kernel = unix.ByteSliceToString(name.Release[:])
	}
	//nolint:noctx // prints a line and ends
	if version, err := exec.Command("iptables-nft-restore", "--version").Output(); err == nil {
		m.IPTables = strings.TrimSpace(string(version))
	}
	return m
}

// print writes the table.
func (res results) print(out io.Writer) error {
	fmt.Fprintf(out, "%s, %d CPUs, %s, %s\n", res.Machine.Kernel, res.Machine.CPUs, res.Machine.Go, res.Machine.IPTables)
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "median\tp90\t\tratio\tlimit\t\t")
	rows := res.Rows
	if res.Yardstick.Value > 0 {
		rows = append([]row{res.Yardstick}, rows...)
	}
	for i, r := range rows {
		p90, ratio, verdict := "", "", ""
		if r.P90 > 0 {
			p90 = fmt.Sprintf("%.0f", r.P90)
		}
		switch {
		case i == 0 && res.Yardstick.Value > 0:
			ratio = "= " + yardstickName
		case r.Ratio > 0 && r.Ratio < 0.5 && r.Against == yardstickName:
			ratio = fmt.Sprintf("%s/%.0f", yardstickName, 1/r.Ratio)
		case r.Ratio > 0:
			ratio = fmt.Sprintf("%.2f × %s", r.Ratio, r.Against)
		}
		if r.LimitText != "" {
			verdict = "ok"
			if !r.Pass {
				verdict = "MISSED"
			}
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\t  %s\n", number(r.Value), p90, r.Unit, ratio, r.LimitText, verdict, r.Name)
	}
	return table.Flush()
}

func number(v float64) string {
	if v < 10 && v != float64(int(v)) {
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.0f", v)
}

// write writes the results to a file named by the day, and returns its path.
func (res results) write(dir string) (string, error) {
	text, err := json.MarshalIndent(res, "", "  ")
	if err != nil {
		return "", fmt.Errorf("encoding the results: %w", err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("making the directory of results: %w", err)
	}
	path := filepath.Join(dir, res.Time.Format(time.DateOnly)+".json")
	if err := os.WriteFile(path, append(text, '\n'), 0o644); err != nil {
		return "", fmt.Errorf("writing the results: %w", err)
	}
	return path, nil
}

// saveRows writes rows for another run to add them to its own.
func saveRows(path string, rows []row) error {
	text, err := json.Marshal(rows)
	if err != nil {
		return fmt.Errorf("encoding rows: %w", err)
	}
	if err := os.WriteFile(path, text, 0o644); err != nil {
		return fmt.Errorf("saving rows: %w", err)
	}
	return nil
}

func loadRows(path string) ([]row, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading saved rows: %w", err)
	}
	var rows []row
	if err := json.Unmarshal(text, &rows); err != nil {
		return nil, fmt.Errorf("reading saved rows: %w", err)
	}
	return rows, nil
}

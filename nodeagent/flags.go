// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
)

// flags is a FlagSet whose help is in groups, in the order in which flags were
// added.
type flags struct {
	set   *flag.FlagSet
	lines []helpLine
}

// helpLine is one flag, or the title of a group.
type helpLine struct{ spec, usage string }

func newFlags(command string) *flags {
	return &flags{set: flag.NewFlagSet(command, flag.ContinueOnError)}
}

// group begins a group of flags.
func (f *flags) group(title string) { f.lines = append(f.lines, helpLine{usage: title}) }

// add adds the flag of spec, which is its name and, unless it is a boolean, a
// word for its value: "run-dir DIR". It returns the name.
func (f *flags) add(value flag.Value, spec, usage string) (name string) {
	switch deflt := value.String(); {
	case !strings.Contains(spec, " ") && deflt == "false":
		// A switch that is off shows nothing but its name.
	case !strings.Contains(spec, " "):
		return f.bind(value, spec, spec+"[=BOOL]", usage+" (default "+deflt+")")
	case deflt != "":
		usage += " (default " + deflt + ")"
	}
	return f.bind(value, spec, spec, usage)
}

// addDerived is add for a flag whose usage says what the default is.
func (f *flags) addDerived(value flag.Value, spec, usage string) (name string) {
	return f.bind(value, spec, spec, usage)
}

func (f *flags) bind(value flag.Value, spec, shown, usage string) (name string) {
	name, _, _ = strings.Cut(spec, " ")
	f.set.Var(value, name, usage)
	f.lines = append(f.lines, helpLine{spec: shown, usage: usage})
	return name
}

// help lists all flags with their values and defaults.
func (f *flags) help() string {
	var out strings.Builder
	table := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
	for _, line := range f.lines {
		if line.spec == "" {
			fmt.Fprintf(table, "\n%s:\n", line.usage)
			continue
		}
		fmt.Fprintf(table, "  --%s\t%s\n", line.spec, line.usage)
	}
	_ = table.Flush() // a strings.Builder takes everything
	return out.String()
}

// gnuStyle writes flags with two dashes in an error of package flag.
func gnuStyle(err error) error {
	text := err.Error()
	for _, before := range []string{"not defined: -", "for flag -", "an argument: -", "bad flag syntax: -"} {
		text = strings.Replace(text, before, before+"-", 1)
	}
	// A boolean's error has no "flag" in it.
	if strings.HasPrefix(text, "invalid boolean value") {
		text = strings.Replace(text, " for -", " for --", 1)
	}
	return errors.New(text)
}

// The kinds of values. Their errors say what a value has to look like; flag, key
// and value are put before them.
type (
	text     string
	duration time.Duration
	integer  int
	boolean  bool
	address  netip.Addr
	list     []string
)

func (t *text) Set(s string) error {
	*t = text(s)
	return nil
}

func (t *text) String() string { return string(*t) }

func (d *duration) Set(s string) error {
	parsed, err := time.ParseDuration(s)
	if err != nil {
		return errors.New("must be a duration with its unit, such as 700ms, 15s or 24h")
	}
	*d = duration(parsed)
	return nil
}

// String leaves out the zero minutes and seconds of 24h0m0s.
func (d *duration) String() string {
	s := time.Duration(*d).String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

func (i *integer) Set(s string) error {
	parsed, err := strconv.Atoi(s)
	if err != nil {
		return errors.New("must be a whole number")
	}
	*i = integer(parsed)
	return nil
}

func (i *integer) String() string { return strconv.Itoa(int(*i)) }

func (b *boolean) Set(s string) error {
	switch s {
	case "true":
		*b = true
	case "false":
		*b = false
	default:
		return errors.New("must be true or false")
	}
	return nil
}

func (b *boolean) String() string { return strconv.FormatBool(bool(*b)) }

// IsBoolFlag lets the flag stand without a value, for true.
func (b *boolean) IsBoolFlag() bool { return true }

func (a *address) Set(s string) error {
	parsed, err := netip.ParseAddr(s)
	if err != nil {
		return errors.New("must be an IP address")
	}
	*a = address(parsed)
	return nil
}

func (a *address) String() string {
	addr := netip.Addr(*a)
	if !addr.IsValid() {
		return ""
	}
	return addr.String()
}

func (l *list) Set(s string) error {
	var items []string
	for item := range strings.SplitSeq(s, ",") {
		if item = strings.TrimSpace(item); item != "" {
			items = append(items, item)
		}
	}
	*l = items
	return nil
}

// setItems is Set for what is a list already.
func (l *list) setItems(items []string) error {
	if slices.ContainsFunc(items, func(item string) bool { return item == "" || strings.Contains(item, ",") }) {
		return errors.New("an item must not be empty nor hold a comma")
	}
	*l = items
	return nil
}

func (l *list) String() string { return strings.Join(*l, ",") }

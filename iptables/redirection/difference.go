// SPDX-License-Identifier: Apache-2.0

package redirection

import (
	"fmt"
	"strings"
)

// Difference is one point in which the kernel's state is not what the options call for. Its strings are for operators;
// nothing parses them.
type Difference struct {
	Family Families // the families that it concerns; zero where it is about the whole table
	What   string   // the object, such as "chain nat_output" or "policy rule"
	Want   string   // what it should be; empty where nothing should be there
	Got    string   // what it is; empty where it is missing
}

// String returns the difference as one line: "route (ipv6): missing, want local default dev lo table 100".
func (d Difference) String() string {
	var b strings.Builder
	b.WriteString(d.What)
	if d.Family != 0 {
		fmt.Fprintf(&b, " (%s)", d.Family)
	}
	switch {
	case d.Got == "":
		fmt.Fprintf(&b, ": missing, want %s", d.Want)
	case d.Want == "":
		fmt.Fprintf(&b, ": unexpected %s", d.Got)
	default:
		fmt.Fprintf(&b, ": want %s, got %s", d.Want, d.Got)
	}
	return b.String()
}

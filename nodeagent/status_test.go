// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestAdviceNamesTheFlagInUse: of an agent that is not there, and of nothing else.
func TestAdviceNamesTheFlagInUse(t *testing.T) {
	for _, test := range []struct {
		args []string
		err  error
		want string // empty: the error as it is
	}{
		{nil, syscall.ENOENT, "give the --run-dir or --admin-socket that"},
		{[]string{"--run-dir=/r"}, syscall.ENOENT, "give the --run-dir that"},
		{[]string{"--admin-socket=/s"}, syscall.ECONNREFUSED, "give the --admin-socket that"},
		{[]string{"--run-dir=/r", "--admin-socket=/s", "--timeout=1s"}, syscall.ENOENT, "give the --admin-socket that"},
		{nil, syscall.EACCES, ""},
		{nil, nil, ""},
	} {
		c := newClient("status", time.Second)
		if err := parse(c.flags.set, test.args, io.Discard, c.help("")); err != nil {
			t.Fatal(err)
		}
		got := c.advise(test.err)
		if !errors.Is(got, test.err) || test.want == "" && got != test.err || test.want != "" && !strings.Contains(got.Error(), test.want) { //nolint:errorlint // the very same
			t.Errorf("%q, %v: %v, want %q", test.args, test.err, got, test.want)
		}
	}
}

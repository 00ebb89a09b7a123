// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// What slog writes is read back, whatever it had to quote.
func TestParseLineOfSlog(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, nil))
	log.Warn("cni event", "pod", "shop/cart", "uid", "u-1", "err", errors.New(`it said "no", a=b`), "empty", "", "last", "x\ny")
	got, err := ParseLine(strings.TrimSuffix(out.String(), "\n"))
	if err != nil {
		t.Fatal(err)
	}
	delete(got, "time")
	want := Line{"level": "WARN", "msg": "cni event", "pod": "shop/cart", "uid": "u-1", "err": `it said "no", a=b`, "empty": "", "last": "x\ny"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestParseLineRefuses(t *testing.T) {
	for _, raw := range []string{
		"", "panic: runtime error", "goroutine 1 [running]:", "time=t level=INFO", `time=t level=INFO msg="open`,
		"time=t level=INFO msg=m =v", "time=t level=INFO msg=m word",
	} {
		if got, err := ParseLine(raw); err == nil {
			t.Errorf("%q is read as %v", raw, got)
		}
	}
}

func TestMentionsOfPods(t *testing.T) {
	got := MentionsOfPods([]Line{
		{"msg": "ready"},
		{"pod": "a/x", "uid": "1", "container": "c"}, {"pod": "a/x", "uid": "1"}, {"pod": "a/x", "uid": "1", "container": "c"},
		{"pod": "a/x", "uid": "1", "container": "d"},
		{"pod": "a/x", "uid": "2", "container": "c"}, {"pod": "b/x", "uid": ""},
	})
	want := map[string]Mentions{"a/x 1": {Lines: 4, Sandboxes: 2}, "a/x 2": {Lines: 1, Sandboxes: 1}, "b/x ": {Lines: 1}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

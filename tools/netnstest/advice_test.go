// SPDX-License-Identifier: Apache-2.0

package netnstest

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

func TestAdviceNamesTheSwitch(t *testing.T) {
	for _, c := range []struct{ off, value, want string }{
		{"user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=10000"},
		{"kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"},
		{"kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"},
		{"", "", "in a container"},
	} {
		got := advice(func(path string) string {
			if path == c.off {
				return c.value
			}
			return ""
		})
		if !strings.Contains(got, c.want) {
			t.Errorf("with %s=%s the advice is %q, want %q in it", c.off, c.value, got, c.want)
		}
	}
}

// TestRefusedSkips: without namespaces a test skips and says why; without Main
// it fails.
func TestRefusedSkips(t *testing.T) {
	for _, c := range []struct{ name, stage, want string }{
		{"refused", refusal(errors.New("operation not permitted")), "skip: needs network and mount namespaces of its own: operation not permitted; run as root"},
		{"no Main", "", "fatal: this package's TestMain does not call netnstest.Main"},
		{"ready", stageReady, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv(stageEnv, c.stage)
			var rec recorder
			Require(&rec)
			if !strings.HasPrefix(rec.got, c.want) || (c.want == "") != (rec.got == "") {
				t.Errorf("Require did %q, want %q", rec.got, c.want)
			}
		})
	}
}

// recorder is a test that notes how it would have ended.
type recorder struct {
	testing.TB
	got string
}

func (r *recorder) Helper() {}

func (r *recorder) Skip(args ...any) { r.end("skip: ", args) }

func (r *recorder) Fatal(args ...any) { r.end("fatal: ", args) }

// end keeps the first outcome: the real methods would not have returned.
func (r *recorder) end(how string, args []any) {
	if r.got == "" {
		r.got = how + fmt.Sprint(args...)
	}
}

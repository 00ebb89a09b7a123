// SPDX-License-Identifier: Apache-2.0

package zdsclient

import (
	"fmt"
	"io/fs"
	"log/slog"
	"strings"
	"testing"
)

// That the agent's socket is not for this user does not change by waiting: it is a warning. Root, who
// tests, is refused nothing, so that only what is said of it is tested.
func TestPermissionIsWarnedOf(t *testing.T) {
	var log strings.Builder
	c := New(Config{Socket: "/run/zds.sock", Logger: slog.New(slog.NewTextHandler(&log, nil))})
	c.logEnd(fmt.Errorf("%w: %w", errAway, fs.ErrPermission))
	if text := log.String(); !strings.Contains(text, "level=WARN") || !strings.Contains(text, "only root") || !strings.Contains(text, "socket=/run/zds.sock") {
		t.Errorf("logged %q, want a warning", text)
	}
}

// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"bytes"
	"errors"
	"log/slog"
	"testing"

	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/klog/v2"
)

// What the libraries call an error is for debugging too, and not shown where nobody
// debugs: logr hands errors to the handler without asking whether it wants them.
func TestLibrariesLogForDebuggingOnly(t *testing.T) {
	for level, want := range map[slog.Level]int{slog.LevelInfo: 0, slog.LevelDebug: 2} {
		var out bytes.Buffer
		ctx := WithLog(t.Context(), slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: level})))
		utilruntime.HandleErrorWithContext(ctx, errors.New("no"), "Failed to watch", "resource", "pods")
		klog.FromContext(ctx).Info("Starting")
		lines, debug := bytes.Count(out.Bytes(), []byte("\n")), bytes.Count(out.Bytes(), []byte("level=DEBUG"))
		if lines != want || debug != want {
			t.Errorf("at level %s the log has, instead of %d lines for debugging:\n%s", level, want, out.String())
		}
	}
}

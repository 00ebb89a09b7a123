// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
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

// The role is advised to whom RBAC refuses something. What a policy or a webhook refuses, in the
// API server's words, it would not help with.
func TestExplainForbidden(t *testing.T) {
	for text, want := range map[string]bool{
		`User "system:serviceaccount:ambientd-system:ambientd" cannot patch resource "pods/status" in API group "" in the namespace "shop"`:                       true,
		`ValidatingAdmissionPolicy 'ambientd-pod-status' with binding 'ambientd-pod-status' denied request: the agent on node 'a' may not patch pods of node 'b'`: false,
		`admission webhook "pods.example.org" denied the request: no`:                                                                                             false,
	} {
		err := Explain(apierrors.NewForbidden(corev1.Resource("pods"), "web", errors.New(text)))
		if got := strings.Contains(err.Error(), "ClusterRole"); got != want || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: it is told as %q, with the role: %v, want %v", text, err, got, want)
		}
	}
}

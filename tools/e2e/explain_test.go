// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"ambientd/nodeagent/admin"
)

func (c *cluster) explainEvents(ctx context.Context, t *testing.T, namespace string) {
	t.Helper()
	for _, ns := range []string{namespace, systemNamespace} {
		events, err := c.client.CoreV1().Events(ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			t.Logf("events of %s: %v", ns, err)
			continue
		}
		for _, e := range events.Items {
			if e.Type != "Normal" || e.Source.Component == "ambientd" || ns == namespace {
				t.Logf("event of %s/%s, %d times: %s %s: %s", ns, e.InvolvedObject.Name, e.Count, e.Type, e.Reason, e.Message)
			}
		}
	}
}

// explainStatus shows what `ambientd status` does.
func (n node) explainStatus(ctx context.Context, t *testing.T) {
	t.Helper()
	status, err := n.status(ctx)
	if err != nil {
		t.Logf("%s: no status: %v", n.name, err)
		return
	}
	var table strings.Builder
	if err := admin.WriteTable(&table, status, time.Now()); err != nil {
		t.Logf("%s: %v", n.name, err)
	}
	t.Logf("%s:\n%s", n.name, table.String())
}

// keepLogs keeps the logs of the cluster's own programs, which goes away with them, if the
// test has failed.
func keepLogs(t *testing.T) {
	t.Helper()
	if !t.Failed() {
		return
	}
	const to = "../../out/e2e"
	err := os.RemoveAll(to)
	if err == nil {
		err = os.CopyFS(to, os.DirFS(filepath.Join(environment(t, "DEVCLUSTER_DIR"), "logs")))
	}
	t.Logf("the logs of the cluster's own programs are in out/e2e (%v)", err)
}

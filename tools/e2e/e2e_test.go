// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"testing"
	"time"
)

// deniedNamespace is the one to whose pods the proxy lets nobody through.
const deniedNamespace = "e2e-denied"

// TestCluster deploys ambientd on the cluster as an operator does, and then goes through what
// happens to pods. One subtest builds on no other but the first; those before the last look back
// at all, and the last one takes ambientd away again.
func TestCluster(t *testing.T) {
	c := join(t)
	t.Cleanup(func() { keepLogs(t) })
	if !t.Run("deploy", c.testDeploy) {
		return
	}
	for _, part := range c.parts() {
		t.Run(part.name, part.test)
	}
}

// part is a subtest.
type part struct {
	name string
	test func(*testing.T)
}

func (c *cluster) parts() []part {
	parts := []part{
		{"mutual TLS within a node", c.testMutualTLS},
		{"label on and off", c.testRelabel},
		{"Job ends", c.testJob},
		{"probes while the proxy denies everything", c.testDenied},
	}
	if c.proxy == Ztunnel {
		parts = nil // these need a proxy that forwards
	}
	return append(parts, []part{
		{"Deployment rolled from 3 to 20 to 3", c.testRollout},
		{"hostNetwork and opted-out pods", c.testUntouched},
		{"pod deleted while the agent is down", c.testDeletedWhileDown},
		{"agent killed while 20 pods start", c.testKilled},
		{"container runtime asked for pods", c.testRuntime},
		{"nothing is left", c.testNothingLeft},
		{"agent's requests", c.testRequests},
		{"agent's log", c.testLog},
		{"removal", c.testRemoval},
	}...)
}

func (c *cluster) testDeploy(t *testing.T) {
	t.Cleanup(func() { c.explain(t, systemNamespace) })
	for _, n := range c.nodes {
		files, err := n.runtimeFiles()
		must(t, err)
		c.runtimeFiles[n.name] = files
		c.labelNode(t, n.name, "on")
	}
	c.deploy(t, deniedNamespace)
	c.until(t, "agents and proxies ready", func() error { return c.allReady(t.Context()) })
}

// allReady says why not all pods of ambientd are.
func (c *cluster) allReady(ctx context.Context) error {
	pods := c.pods(systemNamespace)
	if want := 2 * len(c.nodes); len(pods) != want {
		return fmt.Errorf("%d pods of agents and proxies, not %d", len(pods), want)
	}
	for _, pod := range pods {
		if err := ready(pod); err != nil {
			return err
		}
	}
	for _, n := range c.nodes {
		if err := n.agentReady(ctx, time.Time{}); err != nil {
			return err
		}
	}
	return nil
}

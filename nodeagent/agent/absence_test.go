// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"ambientd/cni-plugin/podevent"
	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/agent"
	"ambientd/nodeagent/zds/zdstest"
)

// leave does what the plugin does with a DEL that no agent takes.
func (s *sandbox) leave(t *testing.T, cfg agent.Config) {
	t.Helper()
	must(t, podevent.Spool(filepath.Join(cfg.RunDir, "private", "spool"), podevent.Request{
		Command: podevent.CommandDel, Network: "net", ContainerID: "sandbox-of-" + s.name, IfName: "eth0",
		Pod: podevent.Pod{Namespace: "shop", Name: s.name, UID: s.uid},
	}))
}

// TestDelWhileDown is case 1: what the runtime ended while no agent ran is drained from the
// spool before a proxy's first snapshot, which omits the pod; nothing of it is left, whether
// its netns is still there or not, and though its object is.
func TestDelWhileDown(t *testing.T) {
	clearHost(t)
	cfg := config(t)
	r := begin(t, cfg)
	r.proxy(t)
	stays, goes, gone := newSandbox(t, 1), newSandbox(t, 2), newSandbox(t, 3)
	for _, s := range []*sandbox{stays, goes, gone} {
		s.enrol(r, "")
	}
	r.end()
	goes.leave(t, cfg)
	gone.leave(t, cfg)
	gone.unmount(t)

	peers := make(chan *zdstest.Peer, 1)
	go func() { peers <- dialEarly(t, cfg.ZDSSocket) }()
	r = start(t, cfg)
	peer := <-peers
	defer peer.Close()
	must(t, peer.AwaitReady(t.Context()))
	if pods := peer.State().Pods; len(pods) != 1 {
		t.Errorf("the first snapshot has %v, want %s only", pods, stays.name)
	}
	status := r.awaitStatus("the pod that stays", allEnrolled(1))
	if len(status.Pods) != 1 || len(status.Identities) != 1 {
		t.Errorf("status: %+v", status)
	}
	wantNoTraces(t, goes.ns)
	awaitEmpty(t, filepath.Join(cfg.RunDir, "private", "spool"))
	for _, s := range []*sandbox{goes, gone} {
		if _, err := os.Lstat(filepath.Join(cfg.RunDir, "private", "pods", s.uid+".json")); !os.IsNotExist(err) {
			t.Errorf("%s's record: %v", s.name, err)
		}
	}
	if result := r.verify(admin.VerifyRequest{}); !result.OK() || len(result.Pods) != 1 {
		t.Errorf("afterwards: %+v", result)
	}
	r.end()
}

// TestSpooledLate is case 27: an event that is written when the spool has been drained
// already is taken up while the agent runs.
func TestSpooledLate(t *testing.T) {
	clearHost(t)
	cfg := config(t)
	r := begin(t, cfg)
	r.proxy(t)
	s := newSandbox(t, 1)
	s.enrol(r, "")
	s.leave(t, cfg)
	r.awaitStatus("no pod", func(status admin.Status) bool { return len(status.Pods) == 0 && len(status.Identities) == 0 })
	wantNoTraces(t, s.ns)
	awaitEmpty(t, filepath.Join(cfg.RunDir, "private", "spool"))
	r.end()
}

// TestPolicyIsLeft: the policy for the time without an agent follows the pod source, and stays.
func TestPolicyIsLeft(t *testing.T) {
	cfg := config(t)
	cfg.ExcludeNamespaces = []string{"infra"}
	r := begin(t, cfg)
	r.manifest("plain", "apiVersion: v1\nkind: Namespace\nmetadata: {name: plain}\n")
	path := filepath.Join(cfg.RunDir, "private", "policy.json")
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); ; <-tick.C {
		policy, err := podevent.ReadPolicy(path)
		if err == nil && slices.Equal(policy.OutOfMesh, []string{"plain"}) && slices.Equal(policy.ExcludeNamespaces, cfg.ExcludeNamespaces) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the policy is %+v, %v", policy, err)
		}
	}
	r.end()
	if _, err := podevent.ReadPolicy(path); err != nil {
		t.Errorf("after the end: %v", err)
	}
}

// awaitEmpty waits until a directory holds nothing.
func awaitEmpty(t *testing.T, dir string) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); ; <-tick.C {
		entries, err := os.ReadDir(dir)
		must(t, err)
		if len(entries) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s still holds %v", dir, entries)
		}
	}
}

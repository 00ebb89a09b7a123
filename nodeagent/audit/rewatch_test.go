// SPDX-License-Identifier: Apache-2.0

package audit_test

import (
	"testing"
	"time"

	"ambientd/cni-plugin/podevent"
	"ambientd/iptables/backend"
	"ambientd/iptables/netnswatch"
	"ambientd/nodeagent/agent"
	"ambientd/nodeagent/audit"
	"ambientd/nodeagent/podnetns"
)

// opened returns a second Netns of the same network namespace, as the ADD of a second
// interface makes.
func opened(t *testing.T, ns *podnetns.Netns) *podnetns.Netns {
	t.Helper()
	host, err := podnetns.OpenHost()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { host.Close() })
	again, err := host.Adopt(ns.File())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { again.Close() })
	return again
}

// watchedBy returns what the watcher reads the packet rules of a pod through.
func (w *world) watchedBy(ns *podnetns.Netns) *podnetns.Netns {
	w.mu.Lock()
	defer w.mu.Unlock()
	for number, cookie := range w.numbers {
		if cookie == ns.Key().String() {
			return w.open[number]
		}
	}
	return nil
}

// The pins hold another descriptor of the same netns now, and have closed the one that the
// watcher was given.
func TestWatchesWhatIsPinned(t *testing.T) {
	spaces := namespaces(t, 1)
	second, third := opened(t, spaces[0]), opened(t, spaces[0])
	in(t, spaces, nil, func(w *world, _ *audit.Auditor) {
		pass(time.Millisecond)
		w.enrol("uid-0", second)
		if w.watchedBy(second) != second {
			t.Error("after a second ADD the netns is watched through a descriptor that is closed")
		}
		// An ADD that fails after the pin changes nothing that is told of; but the watcher cannot read
		// any more, which is a notification.
		w.mu.Lock()
		w.netns["uid-0"] = third
		w.mu.Unlock()
		w.change("uid-0")
		pass(time.Second)
		if w.watchedBy(third) != third {
			t.Error("after an ADD that failed the netns is watched through a descriptor that is closed")
		}
	})
}

// The number of a netns that is gone is another's before its end is told.
func TestNumberIsGivenAgain(t *testing.T) {
	spaces := namespaces(t, 2)
	in(t, spaces[:1], nil, func(w *world, _ *audit.Auditor) {
		pass(time.Millisecond)
		w.mu.Lock()
		number := w.last
		w.last-- // the next gets the same
		w.mu.Unlock()
		w.enrol("uid-1", spaces[1])
		w.enrol("uid-0", nil)
		if w.watchedBy(spaces[1]) == nil {
			t.Error("the netns that has the number now is not watched any more")
		}
		now := time.Now()
		w.events <- number
		pass(time.Second)
		if w.after("uid-1", now) == 0 || number == netnswatch.Own {
			t.Error("a notification of the netns that has the number now prompts nothing")
		}
	})
}

// TestFaultAfterASecondInterface is the whole agent on a real kernel.
func TestFaultAfterASecondInterface(t *testing.T) {
	n := startNode(t, func(cfg *agent.Config) { cfg.Redirection, cfg.AuditInterval = backend.NFTables, time.Hour })
	p := n.add()
	n.arm(p.ns, func() time.Time { return n.podStatus(p).Audit.LastAudit })
	reply, err := podevent.Call(t.Context(), n.cfg.CNISocketPath(), podevent.Request{
		Command: podevent.CommandAdd, Network: "second", ContainerID: "sandbox-of-" + p.name, IfName: "net1",
		Pod: podevent.Pod{Namespace: "shop", Name: p.name, UID: p.uid}, NetnsPath: p.path,
	}, p.ns.File())
	must(t, err)
	if reply.Result != podevent.ResultEnrolled {
		t.Fatalf("ADD: %+v", reply)
	}
	for i := range 3 { // the first may be met by an audit that the ADD itself has prompted
		run(t, p.ns, "nft", "flush", "ruleset")
		for deadline := time.Now().Add(patience); n.podStatus(p).Audit.Repairs <= i; {
			next := n.logs.next()
			select {
			case <-next:
			case <-time.After(time.Until(deadline)):
				t.Fatalf("flush %d was not repaired", i)
			}
		}
	}
}

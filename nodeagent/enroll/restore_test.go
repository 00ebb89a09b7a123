// SPDX-License-Identifier: Apache-2.0

package enroll_test

import (
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ambientd/cni-plugin/podevent"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/enroll"
	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/workload"
	"ambientd/tools/netnstest"
)

// restart makes the next agent on the same machine: kernel and records are as the
// first has left them, everything else is new.
func (r *rig) restart(t *testing.T, opts ...option) *rig {
	t.Helper()
	same := func(c *enroll.Config) { c.Records, c.Pods, c.Inventory = r.records, r.pods, r.pods }
	next := newRig(t, append(opts, same)...)
	next.pods = r.pods
	_, err := next.Restore(t.Context())
	must(t, err)
	return next
}

// resetting has pods that are enrolled while they run get the same rules as others.
func resetting(c *enroll.Config) { c.ExistingConnections = enroll.ResetConnections }

// TestRestore: a new agent takes all pods up before any proxy connects, without
// writing rules, and knows the attachments of the old one.
func TestRestore(t *testing.T) {
	old := newRig(t)
	old.proxy(t, nil)
	namespaces := map[string]*netnstest.NS{}
	for i := range 5 {
		pod := old.meshed(fmt.Sprint("p", i), "web")
		namespaces[pod.UID] = old.running(t, pod, i+1)
	}
	outside := old.pods.put(workload.Pod{UID: "uid-out", Namespace: "plain", Name: "out", ServiceAccount: "web"})
	old.running(t, outside, 99)
	gone := old.meshed("gone", "gone")
	goneNS := old.running(t, gone, 77)
	old.pods.remove(gone)
	generations := map[string]uint64{}
	for uid, ns := range namespaces {
		generations[uid] = old.generation(t, ns)
	}

	r := old.restart(t)
	if n := len(r.Pods()); n != len(namespaces) {
		t.Fatalf("%d pods were taken up, want %d: %+v", n, len(namespaces), r.Pods())
	}
	after := map[string]uint64{}
	for uid, ns := range namespaces {
		after[uid] = r.generation(t, ns)
	}
	if !maps.Equal(generations, after) {
		t.Errorf("rules were written: generations %v before, %v after", generations, after)
	}
	assertNoRules(t, goneNS)
	peer := r.proxy(t, nil)
	if n := len(peer.State().Pods); n != len(namespaces) {
		t.Errorf("the first snapshot has %d pods, want %d", n, len(namespaces))
	}
	if skipped := r.Skipped(); len(skipped) != 1 || skipped[0].Name != "out" {
		t.Errorf("skipped are %+v, want the pod that was", skipped)
	}
	for i := range 5 {
		pod := workload.Pod{UID: fmt.Sprint("uid-p", i), Namespace: "shop", Name: fmt.Sprint("p", i)}
		want(t, r.del(t.Context(), pod, "c-"+pod.Name, nil), podevent.ResultWithdrawn)
		assertNoRules(t, namespaces[pod.UID])
	}
	left, bad, err := old.records.All()
	must(t, err)
	if len(bad) != 0 || len(left) != 1 || left[0].UID != "uid-out" {
		t.Errorf("records left: %+v, %v; want the skipped pod's", left, bad)
	}
}

// TestRestoreInAnotherNetns: a pod whose recorded netns is gone, and that is found in another
// one, is enrolled there, and recorded there.
func TestRestoreInAnotherNetns(t *testing.T) {
	old := newRig(t)
	old.proxy(t, nil)
	pod := old.meshed("web", "web")
	old.running(t, pod, 1)
	known, _, err := old.records.All()
	must(t, err)
	known[0].Key.Cookie += 1 << 40 // another netns is at its path now
	must(t, old.records.Put(known[0]))
	ns := netnstest.New(t)
	holding(t, ns, known[0].IPs[0])
	var key podnetns.Key
	next := old.restart(t, lookingIn(t, filepath.Dir(mounted(t, ns))), resetting, func(c *enroll.Config) {
		adopted, err := c.Host.Adopt(ns.File())
		must(t, err)
		key = adopted.Key()
		must(t, adopted.Close())
	})
	next.assertRules(t, ns)
	if pods := next.Pods(); len(pods) != 1 || pods[0].Netns != key.String() {
		t.Errorf("taken up are %+v, want the pod in netns %s", pods, key)
	}
	known, _, err = old.records.All()
	must(t, err)
	if len(known) != 1 || known[0].Key != key || known[0].NetnsPath != "" || !slices.Equal(known[0].IPs, []netip.Addr{netip.MustParseAddr("10.1.0.1")}) {
		t.Errorf("the record is %+v, want netns %s, found without a path", known, key)
	}
	if finding, ok := next.Audit(t.Context(), pod.UID); !ok || finding.Err != nil || len(finding.Parts) > 0 {
		t.Errorf("the audit says %+v, %t", finding, ok)
	}
}

// TestRestoreIsQuietOfEndedPods: a pod that was deleted while no agent ran has no netns
// any more, as it should be. One whose netns is not found though its object is there is told of.
func TestRestoreIsQuietOfEndedPods(t *testing.T) {
	old := newRig(t)
	old.proxy(t, nil)
	ended, lost := old.meshed("ended", "web"), old.meshed("lost", "web")
	old.running(t, ended, 1)
	old.running(t, lost, 2)
	known, _, err := old.records.All()
	must(t, err)
	for _, record := range known {
		record.Key.Cookie += 1 << 40 // leads nowhere
		must(t, old.records.Put(record))
	}
	old.pods.remove(ended)
	var log strings.Builder
	next := newRig(t, func(c *enroll.Config) {
		c.Records, c.Pods, c.Inventory, c.Logger = old.records, old.pods, old.pods, slog.New(slog.NewTextHandler(&log, nil))
	})
	_, err = next.Restore(t.Context())
	must(t, err)
	if text := log.String(); strings.Contains(text, ended.UID) || !strings.Contains(text, "pod="+lost.String()+" uid="+lost.UID) {
		t.Errorf("the log has:\n%s", text)
	}
}

// TestRestoreKnowsRules: what the agent knows of a pod's packet rules is in its record, the
// next agent begins with that, and finds what was done to them meanwhile.
func TestRestoreKnowsRules(t *testing.T) {
	old := newRig(t)
	old.proxy(t, nil)
	pod := old.meshed("web", "web")
	ns := old.running(t, pod, 1)
	if _, ok := old.Audit(t.Context(), pod.UID); !ok { // the first of its kind on this node is looked at once
		t.Fatal("the pod is not enrolled")
	}
	known, _, err := old.records.All()
	must(t, err)
	seen, ok := old.rules.Seen(known[0].Key.Cookie)
	if !ok || known[0].Seen != seen || uint64(seen.Generation) != old.generation(t, ns) {
		t.Fatalf("the record says %+v, known is %+v, %t", known[0].Seen, seen, ok)
	}
	next := old.restart(t)
	if again, ok := next.rules.Seen(known[0].Key.Cookie); !ok || again != seen {
		t.Errorf("after a restart %+v is known, %t, want %+v", again, ok, seen)
	}

	must(t, next.rules.Remove(t.Context(), ns.Runner()))
	last := old.restart(t)
	last.assertRules(t, ns)
	known, _, err = old.records.All()
	must(t, err)
	if got := known[0].Seen; uint64(got.Generation) <= uint64(seen.Generation) && got != (redirection.Sighting{}) {
		t.Errorf("after a repair the record says %+v, before it said %+v", got, seen)
	}
}

// TestRestoreOfAnotherBoot: records of an earlier boot lead nowhere.
func TestRestoreOfAnotherBoot(t *testing.T) {
	old := newRig(t)
	old.proxy(t, nil)
	pod := old.meshed("web", "web")
	old.running(t, pod, 1)
	known, _, err := old.records.All()
	must(t, err)
	cookie := known[0].Key.Cookie
	known[0].Key = podnetns.Key{BootID: "another", Cookie: cookie}
	known[0].Seen = redirection.Sighting{Generation: 2, Rules: "of another boot"}
	must(t, old.records.Put(known[0]))
	r := old.restart(t)
	if n := len(r.Pods()); n != 0 {
		t.Errorf("%d pods were taken up by a record of another boot", n)
	}
	if seen, is := r.rules.Seen(cookie); is {
		t.Errorf("of a netns of another boot %+v is known", seen)
	}
}

func (r *rig) generation(t *testing.T, ns *netnstest.NS) uint64 {
	t.Helper()
	generation, err := r.rules.Generation(t.Context(), ns.Runner())
	must(t, err)
	return generation
}

// TestSandboxMadeAnewWhileAway: while no agent runs the runtime makes a pod a new sandbox, whose
// ADD nobody is told of. Though the DEL of the old one is, the pod is enrolled in the new one.
func TestSandboxMadeAnewWhileAway(t *testing.T) {
	for _, c := range []struct{ name, before string }{{"labelled later", ""}, {"labelled before", "ambient"}} {
		t.Run(c.name, func(t *testing.T) {
			old := newRig(t)
			old.proxy(t, nil)
			pod := old.pods.put(labelled(workload.Pod{
				UID: "uid-web", Namespace: "plain", Name: "web", ServiceAccount: "web", IPs: []netip.Addr{netip.MustParseAddr("10.1.0.1")},
			}, c.before))
			old.running(t, pod, 1)
			known, _, err := old.records.All()
			must(t, err)
			known[0].NetnsPath += "-ended"
			must(t, old.records.Put(known[0]))

			ns := netnstest.New(t)
			pod.IPs = []netip.Addr{netip.MustParseAddr("10.1.0.2")}
			holding(t, ns, pod.IPs[0])
			old.pods.put(pod)
			next := old.restart(t, lookingIn(t, filepath.Dir(mounted(t, ns))), resetting)
			want(t, next.del(t.Context(), pod, "c-web", nil), podevent.ResultWithdrawn)
			next.proxy(t, nil)
			next.follow(t)
			next.pods.put(labelled(pod, "ambient"))
			next.await(t, next.allInState(1))
			next.assertRules(t, ns)
		})
	}
}

// TestRestoreOfUnlabelledPod: a pod whose label went off while no agent ran is outside the mesh in
// every respect.
func TestRestoreOfUnlabelledPod(t *testing.T) {
	old := newRig(t)
	old.proxy(t, nil)
	pod := old.meshed("web", "web")
	ns := old.running(t, pod, 1)
	old.pods.put(labelled(pod, ""))
	next := old.restart(t)
	assertNoRules(t, ns)
	want(t, next.Handle(t.Context(), request(podevent.CommandCheck, pod, "c-web"), ns.File()), podevent.ResultSkipped)
	if skipped := next.Skipped(); len(skipped) != 1 || skipped[0].Name != "web" {
		t.Errorf("skipped are %+v, want the pod", skipped)
	}
	known, _, err := old.records.All()
	must(t, err)
	if len(known) != 1 || known[0].Skipped == "" || len(known[0].Attachments) != 1 {
		t.Errorf("the records are %+v, want the pod's, as skipped", known)
	}
}

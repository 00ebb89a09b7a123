// SPDX-License-Identifier: Apache-2.0

package enroll_test

import (
	"log/slog"
	"strings"
	"testing"

	"ambientd/cni-plugin/podevent"
	"ambientd/nodeagent/enroll"
	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/workload"
	"ambientd/nodeagent/zds/zdstest"
	"ambientd/tools/netnstest"
)

const (
	withdrawn = "an operator has withdrawn it"
	awaited   = "it is enrolled as soon as its network namespace is found"
	unmatched = "no selector matches the labels of the pod and its namespace"
)

// wantOutside fails unless status shows just the pods outside the mesh, as name and reason.
func (r *rig) wantOutside(t *testing.T, pods ...string) {
	t.Helper()
	skipped := r.Skipped()
	if len(skipped) != len(pods)/2 {
		t.Fatalf("outside are %+v, want %q", skipped, pods)
	}
	for i, s := range skipped {
		if s.Name != pods[2*i] || s.Reason != pods[2*i+1] {
			t.Errorf("outside is %s, because %q, want %q", s.Name, s.Reason, pods[2*i:2*i+2])
		}
	}
}

// TestOutsideAsThingsAre: the reason for which a pod is outside the mesh is the one that holds now, whatever held when
// its ADD came.
func TestOutsideAsThingsAre(t *testing.T) {
	r := newRig(t)
	r.proxy(t, nil)
	pod := r.pods.put(labelled(workload.Pod{UID: "uid-web", Namespace: "shop", Name: "web", ServiceAccount: "web"}, "none"))
	r.running(t, pod, 1)
	r.wantOutside(t, "web", unmatched)
	_, err := r.Withhold(t.Context(), []string{"shop/web"})
	must(t, err)
	r.wantOutside(t, "web", withdrawn)
	r.pods.put(labelled(pod, "ambient"))
	r.wantOutside(t, "web", withdrawn)
	_, err = r.Release(nil)
	must(t, err)
	r.wantOutside(t, "web", awaited)
	r.pods.put(labelled(pod, "none"))
	r.wantOutside(t, "web", unmatched)
}

// TestOutsideAfterRestart: a withdrawal ends with the agent, also that of a pod which the next one does not find.
func TestOutsideAfterRestart(t *testing.T) {
	old := newRig(t)
	old.proxy(t, nil)
	pod := old.meshed("web", "web")
	old.running(t, pod, 1)
	_, err := old.Withhold(t.Context(), nil)
	must(t, err)
	known, _, err := old.records.All()
	must(t, err)
	known[0].NetnsPath += "-ended"
	must(t, old.records.Put(known[0]))
	next := old.restart(t)
	next.wantOutside(t, "web", awaited)
}

// TestOutsideOnce: a pod with two attachments is one pod, and when its object is gone nobody keeps it out.
func TestOutsideOnce(t *testing.T) {
	for name, withhold := range map[string]bool{"enrolled": false, "withdrawn": true} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.proxy(t, nil)
			pod, ns := r.enrolled(t, "web", "web", "c-1")
			want(t, r.add(t.Context(), pod, "c-2", ns), podevent.ResultEnrolled)
			if withhold {
				_, err := r.Withhold(t.Context(), nil)
				must(t, err)
				r.wantOutside(t, "web", withdrawn)
			}
			r.follow(t)
			r.pods.remove(pod)
			other := r.meshed("other", "other")
			r.running(t, other, 2)
			r.pods.put(labelled(other, ""))
			r.await(t, r.allInState(0)) // so Run has looked at both
			r.wantOutside(t, "other", unmatched, "web", "its object is gone")
			assertNoRules(t, ns)
		})
	}
}

// TestWithholdBefore: what an operator says of a pod that is yet to start, or does not belong in the mesh, shows in
// status and in the log.
func TestWithholdBefore(t *testing.T) {
	var log strings.Builder
	r := newRig(t, func(c *enroll.Config) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
	r.proxy(t, nil)
	r.meshed("web", "web")
	r.pods.put(labelled(workload.Pod{UID: "uid-plain", Namespace: "shop", Name: "plain", ServiceAccount: "web"}, "none"))
	r.wantOutside(t)
	_, err := r.Withhold(t.Context(), []string{"shop/web", "uid-plain"})
	must(t, err)
	r.wantOutside(t, "plain", withdrawn, "web", withdrawn)
	for _, name := range []string{"plain", "web"} {
		if n := strings.Count(log.String(), `msg="pod that is not enrolled is kept out by an operator" pod=shop/`+name); n != 1 {
			t.Errorf("the log tells %d times of %s", n, name)
		}
	}
	_, err = r.Release(nil)
	must(t, err)
	r.wantOutside(t)
}

// TestOutsideAndTried: a pod that belongs in the mesh, runs and could not be enrolled is seen by who asks, with why; one
// that is yet to start is not.
func TestOutsideAndTried(t *testing.T) {
	old := newRig(t)
	old.proxy(t, nil)
	unfound, refused := old.meshed("unfound", "web"), old.meshed("refused", "web")
	old.running(t, unfound, 1)
	old.running(t, refused, 2)
	old.pods.put(labelled(refused, ""))
	old.meshed("starts", "web")
	known, _, err := old.records.All()
	must(t, err)
	for _, record := range known {
		if record.UID == unfound.UID {
			record.NetnsPath += "-ended"
			must(t, old.records.Put(record))
		}
	}
	next := old.restart(t)
	next.proxy(t, zdstest.NackUIDs("no room", refused.UID))
	next.follow(t)
	next.pods.put(labelled(refused, "ambient"))
	outside := func(i int, name, reason string) bool {
		s := next.Skipped()
		return len(s) == 2 && s[i].Name == name && strings.Contains(s[i].Reason, reason)
	}
	next.await(t, func() bool {
		return outside(0, "refused", "no room") && outside(1, "unfound", podnetns.ErrNotFound.Error())
	})
	want(t, next.add(t.Context(), unfound, "c-again", netnstest.New(t)), podevent.ResultEnrolled)
	next.await(t, func() bool { s := next.Skipped(); return len(s) == 1 && s[0].Name == "refused" })
}

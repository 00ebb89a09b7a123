// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/workload"
)

// A pod that runs and is not found is told of once, after the second search. One that is
// yet to start is not, nor one that was found meanwhile.
func TestUnfound(t *testing.T) {
	notFound := fmt.Errorf("no process: %w", podnetns.ErrNotFound)
	running := workload.Pod{UID: "u", Namespace: "shop", Name: "web", Phase: corev1.PodRunning, IPs: []netip.Addr{netip.MustParseAddr("10.0.0.2")}}
	pending, bare := running, running
	pending.Phase = corev1.PodPending
	bare.IPs = nil
	for name, tc := range map[string]struct {
		pod      workload.Pod
		outcomes []error
		told     int // at which outcome, from 1; 0 for never
	}{
		"runs, and is not found":     {running, []error{notFound, notFound, notFound}, 2},
		"is found the second time":   {running, []error{notFound, errors.New("no proxy"), notFound}, 0},
		"is yet to start":            {pending, []error{notFound, notFound, notFound}, 0},
		"has no address yet":         {bare, []error{notFound, notFound, notFound}, 0},
		"is not found later, either": {running, []error{errors.New("no proxy"), notFound, notFound, notFound}, 3},
	} {
		t.Run(name, func(t *testing.T) {
			again, now := retries{}, time.Now()
			for i, outcome := range tc.outcomes {
				var log strings.Builder
				e := &Enroller{cfg: Config{Logger: slog.New(slog.NewTextHandler(&log, nil)), Reporter: silent{}}}
				again.note(tc.pod.UID, outcome, now)
				e.reportUnfound(again.unfound([]workload.Pod{tc.pod}), again)
				if told := strings.Contains(log.String(), `err="no process: `); told != (i+1 == tc.told) {
					t.Errorf("outcome %d, %v: told %t: %q", i+1, outcome, told, log.String())
				}
			}
		})
	}
}

// A pod that goes on running without a sandbox is told of once, a while after; one that is being
// deleted, or whose object goes, is not.
func TestReportOver(t *testing.T) {
	stays := workload.Pod{UID: "stays", Phase: corev1.PodRunning, IPs: []netip.Addr{netip.MustParseAddr("10.0.0.2")}}
	goes, deleted := stays, stays
	goes.UID, deleted.UID, deleted.Deleting = "goes", "deleted", true
	var log strings.Builder
	e := &Enroller{cfg: Config{Logger: slog.New(slog.NewTextHandler(&log, nil)), Reporter: silent{}}}
	over, now := retries{}, time.Now()
	for round := range 4 {
		pods := []workload.Pod{stays, deleted}
		if round == 0 {
			pods = append(pods, goes)
		}
		e.reportOver(pods, over, now)
		e.reportOver(pods, over, now) // something else has changed
		if want := min(round, 1); strings.Count(log.String(), "uid=stays") != want || strings.Count(log.String(), "\n") != want {
			t.Errorf("after %s the log has %q, want %d lines", time.Duration(round)*searchTick, log.String(), want)
		}
		e.noteOutside(plan{over: pods}, nil, over)
		if told := e.outside["stays"] == sandboxOver; told != (round > 0) || len(e.outside) > 1 {
			t.Errorf("after %s status shows %v", time.Duration(round)*searchTick, e.outside)
		}
		now = now.Add(searchTick)
	}
	if pause := over.pause(now); pause > searchTick {
		t.Errorf("the next look is in %s, want within %s", pause, searchTick)
	}
}

// What is left in a pod outside the mesh is told of once, by the pod's name, and looked at again in
// growing pauses, which are not those of other pods.
func TestNoteCleared(t *testing.T) {
	var log strings.Builder
	e := &Enroller{cfg: Config{Logger: slog.New(slog.NewTextHandler(&log, nil))}}
	bad, good := workload.Pod{UID: "bad", Namespace: "shop", Name: "bad"}, workload.Pod{UID: "good"}
	left := retries{"bad": {pause: firstRetry}, "good": {pause: firstRetry}}
	for range 20 {
		e.noteCleared(bad, errors.New("owned by another"), left)
	}
	if left["bad"].pause != lastRetry || left["good"].pause != firstRetry {
		t.Errorf("pauses %s and %s", left["bad"].pause, left["good"].pause)
	}
	if strings.Count(log.String(), "\n") != 1 || !strings.Contains(log.String(), `pod=shop/bad uid=bad err="owned by another"`) {
		t.Errorf("told: %s", &log)
	}
	e.noteCleared(good, nil, left)
	if _, ok := left["good"]; ok {
		t.Error("a pod that holds nothing any more is looked at again")
	}
}

// TestNotFoundIsEnough: a pod of which nothing is known is not looked for again when it was not found, unless the
// search did not come to its end; one that holds rules of ours is.
func TestNotFoundIsEnough(t *testing.T) {
	missing, stopped := fmt.Errorf("no process: %w", podnetns.ErrNotFound), errors.New("too many open files")
	e := &Enroller{holds: map[string]holding{"ours": holdsOurs}}
	for _, c := range []struct {
		uid   string
		why   error
		again bool
	}{{"unknown", stopped, true}, {"unknown", missing, false}, {"ours", stopped, true}, {"ours", missing, true}} {
		if again := e.notFound(c.uid, c.why) != nil; again != c.again {
			t.Errorf("pod %s, %v: again %t", c.uid, c.why, again)
		}
	}
	if e.holds["unknown"] != holdsNone || e.holds["ours"] != holdsOurs {
		t.Errorf("known is %v", e.holds)
	}
}

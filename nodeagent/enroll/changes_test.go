// SPDX-License-Identifier: Apache-2.0

package enroll_test

import (
	"slices"
	"testing"

	"ambientd/cni-plugin/podevent"
)

// What has come and gone is told once, as it is when it is asked for.
func TestChanges(t *testing.T) {
	r := newRig(t)
	r.proxy(t, nil)
	check := func(when string, wantGone, wantEnrolled []string) {
		t.Helper()
		select {
		case <-r.Changed():
		default:
			t.Errorf("%s: no change is told", when)
		}
		gone, enrolled := r.Changes()
		if !slices.Equal(gone, wantGone) || !slices.Equal(enrolled, wantEnrolled) {
			t.Errorf("%s: gone %q, enrolled %q, want %q and %q", when, gone, enrolled, wantGone, wantEnrolled)
		}
		if gone, enrolled := r.Changes(); len(gone)+len(enrolled) > 0 {
			t.Errorf("%s: %q and %q are told twice", when, gone, enrolled)
		}
	}
	web, ns := r.enrolled(t, "web", "web", "c1")
	check("after an ADD", nil, []string{web.UID})
	want(t, r.del(t.Context(), web, "c1", ns.File()), podevent.ResultWithdrawn)
	db, _ := r.enrolled(t, "db", "db", "c2")
	check("after a DEL and another ADD", []string{web.UID}, []string{db.UID})
	want(t, r.add(t.Context(), web, "c3", ns), podevent.ResultEnrolled)
	want(t, r.del(t.Context(), web, "c3", ns.File()), podevent.ResultWithdrawn)
	check("after a pod that came and went", []string{web.UID}, nil)
}

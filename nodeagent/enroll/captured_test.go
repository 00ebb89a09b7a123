// SPDX-License-Identifier: Apache-2.0

package enroll_test

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ambientd/cni-plugin/podevent"
	"ambientd/iptables/iptables"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/enroll"
	"ambientd/tools/netnstest"
)

// soonOverdue makes pods wait for a proxy only for a moment.
func soonOverdue(c *enroll.Config) { c.ProxyTimeout = 100 * time.Millisecond }

// closed returns once the pod was looked for so many times, and fails where its traffic is led to no
// proxy meanwhile.
func (r *rig) closed(t *testing.T, ns *netnstest.NS, searched *finds, times int) {
	t.Helper()
	r.await(t, func() bool {
		theirs, err := r.rules.HasForeign(t.Context(), ns.Runner()) // first: theirs go once ours are in
		must(t, err)
		ours, err := r.rules.HasOwn(t.Context(), ns.Runner())
		must(t, err)
		if !theirs && !ours {
			t.Fatalf("the pod is not captured any more, after %d attempts", len(searched.searches()))
		}
		return len(searched.searches()) >= times
	})
}

// TestTakeoverFails: a pod of another ambient agent that cannot be enrolled, because no proxy is there or the CA
// denies its identity, is captured throughout, and enrolled when it can be.
func TestTakeoverFails(t *testing.T) {
	for _, why := range []string{"no proxy", "the CA denies"} {
		t.Run(why, func(t *testing.T) {
			dir, searched := t.TempDir(), &finds{}
			r := newRig(t, lookingIn(t, dir), soonOverdue, resetting, searched.watched)
			if why != "no proxy" {
				r.source.deny = map[string]bool{"web": true}
				r.proxy(t, nil)
			}
			pod, ns := r.outside(t, "web", dir, 1)
			ns.Do(t, func() error {
				out, err := exec.CommandContext(t.Context(), "nft", "add table inet istio-ambient-nat").CombinedOutput()
				if err != nil {
					err = fmt.Errorf("%w: %s", err, out)
				}
				return err
			})
			r.pods.put(labelled(pod, "ambient"))
			r.follow(t)
			r.closed(t, ns, searched, 2)
			if why == "no proxy" {
				r.proxy(t, nil)
				r.await(t, r.allInState(1))
			}
			r.assertRules(t, ns)
		})
	}
}

// TestRestoreLater: a pod that was enrolled, or had rules that no record tells of, and that the start did not take
// up, is captured while no proxy is there, as one that was taken up is.
func TestRestoreLater(t *testing.T) {
	for _, lost := range []string{"netns not found", "record lost"} {
		t.Run(lost, func(t *testing.T) {
			dir, searched := t.TempDir(), &finds{}
			old := newRig(t)
			old.proxy(t, nil)
			pod, ns := old.outside(t, "web", dir, 1)
			pod = old.pods.put(labelled(pod, "ambient"))
			req := request(podevent.CommandAdd, pod, "c-web")
			req.IPs, req.NetnsPath = pod.IPs, filepath.Join(dir, pod.Name)
			want(t, old.Handle(t.Context(), req, ns.File()), podevent.ResultEnrolled)
			if lost == "record lost" {
				must(t, old.records.Delete(pod.UID))
			} else {
				searched.fail = []error{unix.EMFILE}
			}
			next := old.restart(t, lookingIn(t, dir), soonOverdue, searched.watched)
			next.follow(t)
			next.closed(t, ns, searched, 3)
			next.proxy(t, nil)
			next.await(t, next.allInState(1))
		})
	}
}

// TestLeftoversOfTheOtherBackend: a pod's label went off while no agent ran, and the next one has another backend. What
// the first has left goes, recorded or not.
func TestLeftoversOfTheOtherBackend(t *testing.T) {
	for _, variant := range []iptables.Variant{iptables.NFTables, iptables.Legacy} {
		for _, recorded := range []string{"recorded", "not recorded"} {
			t.Run(fmt.Sprint(variant, ", ", recorded), func(t *testing.T) {
				b, err := iptables.New(t.Context(), iptables.Config{Variant: variant})
				if err != nil {
					t.Skip(err)
				}
				dir := t.TempDir()
				old := newRig(t, func(c *enroll.Config) { c.Redirection = b })
				old.proxy(t, nil)
				pod, ns := old.outside(t, "web", dir, 1)
				if recorded == "recorded" {
					r := request(podevent.CommandAdd, pod, "c-web")
					r.IPs, r.NetnsPath = pod.IPs, filepath.Join(dir, pod.Name)
					old.pods.put(labelled(pod, "ambient"))
					want(t, old.Handle(t.Context(), r, ns.File()), podevent.ResultEnrolled)
					old.pods.put(pod)
				} else {
					_, err := b.Apply(t.Context(), ns.Runner(), redirection.DefaultOptions())
					must(t, err)
				}
				next := old.restart(t, lookingIn(t, dir))
				next.follow(t)
				next.await(t, func() bool {
					there, err := b.HasOwn(t.Context(), ns.Runner())
					must(t, err)
					return !there
				})
				assertNoRules(t, ns)
			})
		}
	}
}

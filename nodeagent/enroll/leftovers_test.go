// SPDX-License-Identifier: Apache-2.0

package enroll_test

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"ambientd/cni-plugin/podevent"
	"ambientd/iptables/nftables"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/enroll"
	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/workload"
	"ambientd/tools/netnstest"
)

// finds is a Finder of which each search is told of, and may be made to fail.
type finds struct {
	enroll.Finder
	mu     sync.Mutex
	wanted [][]string            // UIDs, by search
	fail   []error               // of the next searches, for all that is wanted
	then   func(wanted []string) // called when netns are found; may be nil
}

func (f *finds) Find(ctx context.Context, wanted []podnetns.Wanted) (map[string]*podnetns.Netns, map[string]error) {
	var uids []string
	for _, w := range wanted {
		uids = append(uids, w.UID)
	}
	slices.Sort(uids)
	f.mu.Lock()
	f.wanted = append(f.wanted, uids)
	var failure error
	if len(f.fail) > 0 {
		failure, f.fail = f.fail[0], f.fail[1:]
	}
	f.mu.Unlock()
	if failure != nil {
		missing := map[string]error{}
		for _, uid := range uids {
			missing[uid] = failure
		}
		return nil, missing
	}
	found, missing := f.Finder.Find(ctx, wanted)
	if f.then != nil {
		f.then(uids)
	}
	return found, missing
}

func (f *finds) searches() [][]string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.wanted)
}

// watched puts f in the way of searches.
func (f *finds) watched(c *enroll.Config) { f.Finder, c.Finder = c.Finder, f }

// unmoved is a backend that does not remove rules a number of times.
type unmoved struct {
	*nftables.Backend
	mu    sync.Mutex
	times int
}

func (u *unmoved) Remove(ctx context.Context, ns redirection.Netns) error {
	u.mu.Lock()
	u.times--
	refused := u.times >= 0
	u.mu.Unlock()
	if refused {
		return unix.EMFILE
	}
	return u.Backend.Remove(ctx, ns)
}

func (r *rig) bare(t *testing.T, ns *netnstest.NS) func() bool {
	return func() bool {
		there, err := r.rules.HasOwn(t.Context(), ns.Runner())
		must(t, err)
		return !there
	}
}

// seenTo returns when Run has looked at all pods: a pod that begins to belong in the mesh is enrolled.
func (r *rig) seenTo(t *testing.T) {
	t.Helper()
	pod := r.pods.put(workload.Pod{UID: "uid-last", Namespace: "plain", Name: "last", ServiceAccount: "web"})
	r.running(t, pod, 999)
	r.pods.put(labelled(pod, "ambient"))
	r.await(t, func() bool { return slices.Contains(r.Enrolled(), pod.UID) })
}

// outside makes a pod outside the mesh that runs without an agent's knowledge, found by its address.
func (r *rig) outside(t *testing.T, name, dir string, number int) (workload.Pod, *netnstest.NS) {
	t.Helper()
	ns := netnstest.New(t)
	pod := r.pods.put(workload.Pod{
		UID: "uid-" + name, Namespace: "plain", Name: name, ServiceAccount: "web",
		IPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 1, 0, byte(number)})}, Phase: corev1.PodRunning,
	})
	holding(t, ns, pod.IPs[0])
	mountAt(t, ns, filepath.Join(dir, name))
	return pod, ns
}

// TestLeftoversWithoutRecord: an agent was killed between writing a running pod's rules and its record,
// and the pod's label went off before the next one started. That one takes the rules out. It looks once at each pod
// outside the mesh that runs, and writes nothing where nothing of ours is, be it another agent's.
func TestLeftoversWithoutRecord(t *testing.T) {
	old, dir := newRig(t), t.TempDir()
	_, ns := old.outside(t, "cut-off", dir, 1)
	_, err := old.rules.Apply(t.Context(), ns.Runner(), redirection.DefaultOptions())
	must(t, err)
	_, never := old.outside(t, "never", dir, 2)
	addOthersRule(t, never)
	for _, pod := range []workload.Pod{
		{Name: "host", HostNetwork: true, Phase: corev1.PodRunning}, {Name: "ended", Phase: corev1.PodSucceeded},
	} {
		pod.UID, pod.Namespace, pod.IPs = "uid-"+pod.Name, "plain", []netip.Addr{netip.MustParseAddr("10.1.0.3")}
		old.pods.put(pod)
	}
	old.pods.put(workload.Pod{UID: "uid-pending", Namespace: "plain", Name: "pending", Phase: corev1.PodPending})
	old.pods.put(workload.Pod{ // its processes cannot be found
		UID: "uid-hidden", Namespace: "plain", Name: "hidden", Phase: corev1.PodRunning, IPs: []netip.Addr{netip.MustParseAddr("10.1.0.4")},
	})
	over := old.pods.put(workload.Pod{
		UID: "uid-over", Namespace: "plain", Name: "over", Phase: corev1.PodRunning, IPs: []netip.Addr{netip.MustParseAddr("10.1.0.6")},
	})
	old.running(t, over, 6)
	generation := old.generation(t, never)

	var searched finds
	next := old.restart(t, lookingIn(t, dir), searched.watched)
	next.proxy(t, nil)
	want(t, next.del(t.Context(), over, "c-over", nil), podevent.ResultWithdrawn)
	next.running(t, next.pods.put(workload.Pod{UID: "uid-started", Namespace: "plain", Name: "started", Phase: corev1.PodRunning}), 5)
	next.follow(t)
	next.await(t, next.bare(t, ns))
	next.seenTo(t)
	assertNoRules(t, ns)
	if after := next.generation(t, never); after != generation {
		t.Errorf("in the netns of a pod outside the mesh was written: generation %d, then %d", generation, after)
	}
	if !hasOthersRule(t, never) {
		t.Error("a policy rule of another agent is gone")
	}
	if got := searched.searches(); len(got) != 2 || !slices.Equal(got[0], []string{"uid-cut-off", "uid-hidden", "uid-never"}) {
		t.Errorf("looked for %v, want each running pod outside the mesh once, and then the last", got)
	}
}

// othersRule is the policy rule that every ambient agent makes in its pods.
func othersRule() *netlink.Rule {
	rule, mask := netlink.NewRule(), redirection.MarkMask
	rule.Family, rule.Priority, rule.Table = netlink.FAMILY_V4, int(redirection.RulePriority), int(redirection.RouteTable)
	rule.Mark, rule.Mask = redirection.ConnMark, &mask
	return rule
}

func addOthersRule(t *testing.T, ns *netnstest.NS) {
	t.Helper()
	ns.Do(t, func() error { return netlink.RuleAdd(othersRule()) })
}

func hasOthersRule(t *testing.T, ns *netnstest.NS) (there bool) {
	t.Helper()
	ns.Do(t, func() error {
		rules, err := netlink.RuleListFiltered(netlink.FAMILY_V4, othersRule(), netlink.RT_FILTER_TABLE|netlink.RT_FILTER_MARK)
		there = len(rules) > 0
		return err
	})
	return there
}

// TestLeftoversNotFoundAtTheStart: the netns of a pod that was enrolled, and whose label went off while no agent ran,
// was not found by the one search at the start, for whatever reason. It is looked for again.
func TestLeftoversNotFoundAtTheStart(t *testing.T) {
	for name, failure := range map[string]error{
		"no descriptors": unix.EMFILE, "not found": fmt.Errorf("opening its netns: %w: %w", unix.EMFILE, podnetns.ErrNotFound),
	} {
		t.Run(name, func(t *testing.T) {
			old := newRig(t)
			old.proxy(t, nil)
			pod := old.meshed("web", "web")
			ns := old.running(t, pod, 1)
			old.pods.put(labelled(pod, ""))
			searched := finds{fail: []error{failure}}
			next := old.restart(t, searched.watched)
			next.assertRules(t, ns)
			next.follow(t)
			next.await(t, next.bare(t, ns))
			next.await(t, func() bool { return len(next.Skipped()) == 1 })
			assertNoRules(t, ns)
			want(t, next.Handle(t.Context(), request(podevent.CommandCheck, pod, "c-web"), ns.File()), podevent.ResultSkipped)
		})
	}
}

// TestLeftoversNotRemoved: what could not be taken out of a pod when it left the mesh is taken out later.
func TestLeftoversNotRemoved(t *testing.T) {
	refusing := func(u *unmoved) option {
		return func(c *enroll.Config) { u.Backend, c.Redirection = c.Redirection.(*nftables.Backend), u }
	}
	t.Run("label", func(t *testing.T) {
		r := newRig(t, refusing(&unmoved{times: 2}))
		r.proxy(t, nil)
		pod := r.meshed("web", "web")
		ns := r.running(t, pod, 1)
		r.follow(t)
		r.pods.put(labelled(pod, ""))
		r.await(t, r.bare(t, ns))
		assertNoRules(t, ns)
	})
	t.Run("operator", func(t *testing.T) {
		r := newRig(t, refusing(&unmoved{times: 1}))
		r.proxy(t, nil)
		ns := r.running(t, r.meshed("web", "web"), 1)
		r.follow(t)
		if _, err := r.Withhold(t.Context(), nil); err == nil {
			t.Error("the operator was not told")
		}
		r.await(t, r.bare(t, ns))
		assertNoRules(t, ns)
	})
	t.Run("start", func(t *testing.T) {
		old := newRig(t)
		old.proxy(t, nil)
		pod := old.meshed("web", "web")
		ns := old.running(t, pod, 1)
		old.pods.put(labelled(pod, ""))
		next := old.restart(t, refusing(&unmoved{times: 1}))
		next.assertRules(t, ns)
		next.follow(t)
		next.await(t, next.bare(t, ns))
		assertNoRules(t, ns)
	})
}

// TestLeftoversOfNobody: a pod that is enrolled while pods outside the mesh are looked for keeps its rules: the very
// pod, or another one in the netns that was taken for one of those.
func TestLeftoversOfNobody(t *testing.T) {
	for _, name := range []string{"web", "other"} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			var searched finds
			r := newRig(t, lookingIn(t, dir), searched.watched)
			r.proxy(t, nil)
			pod, ns := r.outside(t, "web", dir, 1)
			enrolled := pod
			enrolled.Name, enrolled.UID = name, "uid-"+name
			var once sync.Once
			searched.then = func([]string) {
				once.Do(func() {
					r.pods.put(labelled(enrolled, "ambient"))
					want(t, r.add(t.Context(), enrolled, "c-"+name, ns), podevent.ResultEnrolled)
				})
			}
			r.follow(t)
			r.await(t, func() bool { return slices.Contains(r.Enrolled(), enrolled.UID) })
			r.seenTo(t)
			r.assertRules(t, ns)
			if got := searched.searches(); len(got) < 2 || !slices.Equal(got[0], []string{"uid-web"}) {
				t.Errorf("looked for %v, want the pod first", got)
			}
		})
	}
}

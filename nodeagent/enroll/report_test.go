// SPDX-License-Identifier: Apache-2.0

package enroll_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"ambientd/cni-plugin/podevent"
	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/enroll"
	"ambientd/nodeagent/workload"
	"ambientd/nodeagent/zds/zdstest"
	"ambientd/tools/netnstest"
)

// reports is a Reporter that keeps all that it is told, as "web enabled" and
// "web Enrolled: text".
type reports struct {
	mu   sync.Mutex
	told []string
}

func (r *reports) State(pod workload.Pod, state enroll.State) {
	r.tell(fmt.Sprintf("%s %s", pod.Name, state))
}

func (r *reports) Event(pod workload.Pod, reason enroll.Reason, message string) {
	r.tell(fmt.Sprintf("%s %s: %s", pod.Name, reason, message))
}

func (r *reports) tell(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.told = append(r.told, text)
}

// has tells whether the last thing of these was told that begins so.
func (r *reports) has(prefix string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(r.told, func(text string) bool { return strings.HasPrefix(text, prefix) })
}

// take returns what was told, in order, each once, and forgets it.
func (r *reports) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	told := r.told
	r.told = nil
	return told
}

func (r *reports) want(t *testing.T, prefixes ...string) {
	t.Helper()
	told := r.take()
	matches := slices.EqualFunc(told, prefixes, strings.HasPrefix)
	if !matches {
		t.Errorf("told %q, want %q", told, prefixes)
	}
}

// Of each way into the mesh and out of it those hear who look at the pod's object.
func TestReports(t *testing.T) {
	told := &reports{}
	r := newRig(t, func(c *enroll.Config) { c.Reporter = told })
	r.proxy(t, nil)

	pod := r.meshed("web", "web")
	pod.Annotations = map[string]string{workload.AnnotationDNSCapture: "maybe"}
	r.pods.put(pod)
	ns := r.running(t, pod, 1)
	told.want(t, "web MalformedOption: annotation ambient.istio.io/dns-capture", "web enabled")

	r.follow(t)
	r.pods.put(labelled(pod, ""))
	r.await(t, func() bool { return told.has("web out") })
	told.take()
	r.pods.put(pod)
	r.await(t, func() bool { return told.has("web Enrolled: ") })
	told.want(t, "web MalformedOption: ", "web enabled", "web Enrolled: ")

	must(t, r.rules.Remove(t.Context(), ns.Runner()))
	if f, ok := r.Audit(t.Context(), pod.UID); !ok || f.Err != nil {
		t.Fatalf("audit: %+v", f)
	}
	told.want(t, "web Repaired: put back in place: redirection", "web enabled")

	want(t, r.del(t.Context(), pod, "c-web", nil), podevent.ResultWithdrawn)
	told.want(t, "web out")
}

// TestAuditLeavesEndingPodAlone: at a pod's end the runtime takes its loopback device down
// before our plugin is called. Nobody is told that rules of such a pod are lost and cannot be
// put back, unless it stays so.
func TestAuditLeavesEndingPodAlone(t *testing.T) {
	told := &reports{}
	r := newRig(t, func(c *enroll.Config) { c.Reporter = told })
	r.proxy(t, nil)
	pod := r.meshed("web", "web")
	ns := r.running(t, pod, 1)
	set := func(change func(netlink.Link) error) {
		ns.Do(t, func() error {
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			return change(lo)
		})
	}
	told.take()
	set(netlink.LinkSetDown)
	if f, ok := r.Audit(t.Context(), pod.UID); ok {
		t.Errorf("while it ends: %+v", f)
	}
	told.want(t)
	set(netlink.LinkSetUp)
	if f, ok := r.Audit(t.Context(), pod.UID); !ok || f.Err != nil || len(f.Differences) == 0 {
		t.Errorf("the device is up again: %+v, %t", f, ok)
	}
	told.want(t, "web Repaired: ", "web enabled")
	set(netlink.LinkSetDown)
	regular := time.NewTicker(100 * time.Millisecond)
	defer regular.Stop()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); <-regular.C {
		if f, ok := r.Audit(t.Context(), pod.UID); ok && f.Err != nil {
			break
		}
	}
	told.want(t, "web EnrolmentFailed: it cannot be audited or repaired: ")
}

// TestReportsStaleObjects: the agent ended between the withdrawal of a pod and the word of
// it. The next one sees that the object shows something else.
func TestReportsStaleObjects(t *testing.T) {
	told := &reports{}
	r := newRig(t, func(c *enroll.Config) { c.Reporter = told })
	r.proxy(t, nil)
	pod := labelled(r.meshed("web", "web"), "")
	pod.Annotations = map[string]string{workload.AnnotationRedirection: "enabled"}
	r.pods.put(pod)
	outside := labelled(r.meshed("never", "never"), "")
	r.pods.put(outside)
	r.follow(t)
	regular := time.NewTicker(time.Millisecond)
	defer regular.Stop()
	for end := time.Now().Add(20 * time.Second); !told.has("web out") && time.Now().Before(end); {
		<-regular.C
	}
	if got := slices.Compact(told.take()); !slices.Equal(got, []string{"web out"}) { // each look tells it again
		t.Errorf("told: %q", got)
	}
}

func TestReportsOfFailures(t *testing.T) {
	told := &reports{}
	r := newRig(t, func(c *enroll.Config) { c.Reporter = told })
	r.proxy(t, zdstest.NackUIDs("no", "uid-bad"))
	r.source.deny = map[string]bool{"denied": true}
	for name, wanted := range map[string]string{
		"denied": "denied CertificateRefused: certificate: ",
		"bad":    "bad EnrolmentFailed: node proxy: ",
	} {
		if reply := r.add(t.Context(), r.meshed(name, name), "c-"+name, netnstest.New(t)); reply.Error == nil {
			t.Errorf("%s is enrolled: %+v", name, reply)
		}
		told.want(t, name+" out", wanted)
	}
}

// TestRestoreWithoutObjects: the API server is away when the agent starts. Pods that
// were enrolled are taken up as they were recorded, with their options, and none is
// withdrawn for not being listed.
func TestRestoreWithoutObjects(t *testing.T) {
	old := newRig(t)
	old.proxy(t, nil)
	pod := old.meshed("web", "web")
	pod.Annotations = map[string]string{workload.AnnotationDNSCapture: "false"}
	old.pods.put(pod)
	ns := old.running(t, pod, 1)
	before := old.generation(t, ns)

	told := &reports{}
	away := &podMap{pods: map[string]workload.Pod{}, changed: make(chan struct{}, 1), incomplete: true}
	next := newRig(t, func(c *enroll.Config) {
		c.Records, c.Pods, c.Inventory, c.Reporter = old.records, away, away, told
	})
	next.pods = away
	_, err := next.Restore(t.Context())
	must(t, err)
	if s := next.statusOf(t, pod); s.Identity != "spiffe://cluster.local/ns/shop/sa/web" {
		t.Errorf("the pod is taken up as %+v", s)
	}
	if after := next.generation(t, ns); after != before {
		t.Errorf("rules were written: generation %d before, %d after", before, after)
	}
	told.want(t, "web pending") // until the proxy has it
	peer := next.proxy(t, nil)
	if pods := peer.State().Pods; len(pods) != 1 {
		t.Errorf("the first snapshot has %v", slices.Collect(maps.Keys(pods)))
	}
	next.follow(t)
	away.put(workload.Pod{UID: "uid-other", Namespace: "plain", Name: "other"}) // still not all
	if f, ok := next.Audit(t.Context(), pod.UID); !ok || len(f.Differences) > 0 {
		t.Errorf("audit: %+v, %v", f, ok)
	}

	away.setComplete(pod)
	next.await(t, func() bool { return next.statusOf(t, pod).State == admin.PodEnrolled })
	away.remove(pod)
	next.await(t, func() bool { return len(next.Pods()) == 0 })
	assertNoRules(t, ns)
}

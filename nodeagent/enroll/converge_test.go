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
	"time"

	"golang.org/x/sys/unix"

	"ambientd/cni-plugin/podevent"
	"ambientd/iptables/nftables"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/enroll"
	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/workload"
	"ambientd/nodeagent/zds/zdstest"
	"ambientd/tools/netnstest"
)

// labelled is the pod with the namespace's label on or off.
func labelled(pod workload.Pod, mode string) workload.Pod {
	pod.NamespaceLabels = map[string]string{"istio.io/dataplane-mode": mode}
	return pod
}

func (r *rig) allInState(want int) func() bool {
	return func() bool {
		enrolled := 0
		for _, s := range r.Pods() {
			if s.State == admin.PodEnrolled {
				enrolled++
			}
		}
		return enrolled == want && len(r.Pods()) == want
	}
}

// TestRelabel is case 15: a namespace's label goes on and off with pods running; in
// the end they are enrolled, with their rules once and nothing of earlier rounds.
func TestRelabel(t *testing.T) {
	r := newRig(t)
	peer := r.proxy(t, nil)
	const pods = 20
	namespaces := map[string]*netnstest.NS{}
	var all []workload.Pod
	for i := range pods {
		pod := r.pods.put(labelled(workload.Pod{UID: fmt.Sprint("uid-", i), Namespace: "shop", Name: fmt.Sprint("p", i), ServiceAccount: "web"}, ""))
		namespaces[pod.UID] = r.running(t, pod, i+1)
		all = append(all, pod)
	}
	if n := len(r.Skipped()); n != pods {
		t.Fatalf("%d pods are skipped, want all", n)
	}
	r.follow(t)
	for range 10 {
		for _, mode := range []string{"ambient", ""} {
			for _, pod := range all {
				r.pods.put(labelled(pod, mode))
			}
			want := map[string]int{"ambient": pods, "": 0}[mode]
			r.await(t, r.allInState(want))
		}
	}
	for _, pod := range all {
		r.pods.put(labelled(pod, "ambient"))
	}
	r.await(t, r.allInState(pods))
	running := redirection.DefaultOptions()
	running.KeepEstablished = true
	for uid, ns := range namespaces {
		_, differences, err := r.rules.Verify(t.Context(), ns.Runner(), running)
		must(t, err)
		for _, d := range differences {
			t.Errorf("pod %s: %s", uid, d)
		}
	}
	must(t, peer.Await(t.Context(), func(s zdstest.State) bool { return len(s.Pods) == pods }))
	if n := len(r.Skipped()); n != 0 {
		t.Errorf("status still shows %d pods as skipped", n)
	}
	// The attachments have outlived all of it: DEL finds its pod.
	want(t, r.del(t.Context(), all[0], "c-"+all[0].Name, nil), podevent.ResultWithdrawn)
	assertNoRules(t, namespaces[all[0].UID])
}

// TestObjectGone: a pod whose object is removed leaves, its netns alive or not.
func TestObjectGone(t *testing.T) {
	r := newRig(t)
	peer := r.proxy(t, nil)
	pod := r.meshed("web", "web")
	ns := r.running(t, pod, 1)
	r.follow(t)
	r.pods.remove(pod)
	r.await(t, r.allInState(0))
	must(t, peer.AwaitDel(t.Context(), pod.UID))
	r.assertNothing(t, peer, pod, ns)
}

// TestEndedSandbox: after its DEL a pod whose object and netns are still there is not
// enrolled there again; a new ADD does so.
func TestEndedSandbox(t *testing.T) {
	netnsDir := t.TempDir()
	r := newRig(t, lookingIn(t, netnsDir))
	peer := r.proxy(t, nil)
	pod := r.meshed("web", "web")
	ns := r.running(t, pod, 1)
	mountAt(t, ns, filepath.Join(netnsDir, "web"))
	pod.IPs = []netip.Addr{netip.MustParseAddr("10.1.0.1")}
	r.pods.put(pod)
	want(t, r.del(t.Context(), pod, "c-"+pod.Name, nil), podevent.ResultWithdrawn)
	r.follow(t)
	other := r.meshed("other", "other")
	r.running(t, other, 2)
	other.NamespaceLabels = nil
	r.pods.put(other)
	r.await(t, r.allInState(0)) // so Run has looked at both
	r.assertNothing(t, peer, pod, ns)
	want(t, r.add(t.Context(), pod, "c-again", ns), podevent.ResultEnrolled)
}

// TestEndedPodsAddress: a pod's address goes to another as soon as its sandbox has ended,
// while its object is still there. It is not taken for that pod, whose ADD has yet to come.
// Case 7 with a pod that is found by its address.
func TestEndedPodsAddress(t *testing.T) {
	netnsDir := t.TempDir()
	r := newRig(t, lookingIn(t, netnsDir))
	r.proxy(t, nil)
	old, next := r.meshed("old", "web"), r.meshed("next", "web")
	old.IPs = []netip.Addr{netip.MustParseAddr("10.1.0.1")}
	r.pods.put(old)
	r.running(t, old, 1)
	want(t, r.del(t.Context(), old, "c-old", nil), podevent.ResultWithdrawn)
	ns := netnstest.New(t)
	holding(t, ns, old.IPs[0])
	mountAt(t, ns, filepath.Join(netnsDir, "next"))
	r.follow(t)
	other := r.meshed("other", "other")
	r.running(t, other, 2)
	other.NamespaceLabels = nil
	r.pods.put(other)
	r.await(t, func() bool {
		return !slices.ContainsFunc(r.Pods(), func(p admin.PodStatus) bool { return p.UID == other.UID })
	}) // so Run has looked at all
	assertNoRules(t, ns)
	want(t, r.add(t.Context(), next, "c-next", ns), podevent.ResultEnrolled)
}

// TestOptionsChange: an annotation of a running pod is applied in place; one that
// cannot be read any more counts as absent.
func TestOptionsChange(t *testing.T) {
	r := newRig(t)
	r.proxy(t, nil)
	pod := r.meshed("web", "web")
	ns := r.running(t, pod, 1)
	r.follow(t)
	for _, c := range []struct {
		value string
		dns   bool
	}{{"false", false}, {"true", true}, {"false", false}, {"maybe", true}} {
		pod.Annotations = map[string]string{workload.AnnotationDNSCapture: c.value}
		r.pods.put(pod)
		wanted := redirection.DefaultOptions()
		wanted.DNSCapture = c.dns
		r.await(t, func() bool {
			_, differences, err := r.rules.Verify(t.Context(), ns.Runner(), wanted)
			must(t, err)
			return len(differences) == 0
		})
	}
}

// full is a backend without room for changed rules, which notes when it was asked.
type full struct {
	*nftables.Backend
	mu    sync.Mutex
	asked []time.Time
}

func (f *full) Apply(ctx context.Context, ns redirection.Netns, opts redirection.Options) (redirection.Families, error) {
	if opts.DNSCapture {
		return f.Backend.Apply(ctx, ns, opts)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked = append(f.asked, time.Now())
	return 0, unix.ENOMEM
}

// TestOptionsChangeFails: rules that cannot be changed stay, and are tried again with a growing pause.
func TestOptionsChangeFails(t *testing.T) {
	var f full
	r := newRig(t, func(c *enroll.Config) {
		f.Backend = c.Redirection.(*nftables.Backend)
		c.Redirection = &f
	})
	r.proxy(t, nil)
	pod := r.meshed("web", "web")
	ns := r.running(t, pod, 1)
	r.follow(t)
	pod.Annotations = map[string]string{workload.AnnotationDNSCapture: "false"}
	r.pods.put(pod)
	var asked []time.Time
	r.await(t, func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		asked = slices.Clone(f.asked)
		return len(asked) >= 3
	})
	// Half a second, then a second, each a fifth more or less.
	if pause := asked[2].Sub(asked[1]); pause < 800*time.Millisecond {
		t.Errorf("tried again after %s and then after %s", asked[1].Sub(asked[0]), pause)
	}
	r.assertRules(t, ns)
}

// TestWithhold: an operator's word keeps a pod out until it is taken back.
func TestWithhold(t *testing.T) {
	r := newRig(t)
	peer := r.proxy(t, nil)
	pod := r.meshed("web", "web")
	ns := r.running(t, pod, 1)
	r.follow(t)
	out, err := r.Withhold(t.Context(), []string{"shop/web"})
	must(t, err)
	if len(out) != 1 || out[0] != "shop/web" {
		t.Errorf("taken out were %v", out)
	}
	r.assertNothing(t, peer, pod, ns)
	other := r.meshed("other", "other")
	r.running(t, other, 2) // makes Run look again
	if len(r.Pods()) != 1 {
		t.Errorf("the withheld pod came back: %+v", r.Pods())
	}
	next := request(podevent.CommandAdd, pod, "c-next")
	next.IPs, next.NetnsPath = []netip.Addr{netip.MustParseAddr("10.1.0.1")}, mounted(t, ns)
	want(t, r.Handle(t.Context(), next, ns.File()), podevent.ResultSkipped) // it stays out
	r.assertNothing(t, peer, pod, ns)
	if _, err := r.Withhold(t.Context(), []string{"shop/nobody"}); err == nil {
		t.Error("withholding a pod that is not there succeeded")
	}
	if _, err := r.Release(nil); err != nil {
		t.Fatal(err)
	}
	r.await(t, r.allInState(2))
	out, err = r.Withhold(t.Context(), nil)
	must(t, err)
	if len(out) != 2 {
		t.Errorf("taken out were %v, want both", out)
	}
	assertNoRules(t, ns)
}

// searches tells of each search for running pods.
type searches struct {
	enroll.Finder
	begun chan struct{}
}

func (s searches) Find(ctx context.Context, wanted []podnetns.Wanted) (map[string]*podnetns.Netns, map[string]error) {
	select {
	case s.begun <- struct{}{}:
	default:
	}
	return s.Finder.Find(ctx, wanted)
}

// TestReleaseDoesNotWait: a pod that was looked for in vain before it ran, as one with a manifest
// is, comes back when its operator says so, and not with the next search in up to 30 s.
func TestReleaseDoesNotWait(t *testing.T) {
	begun := make(chan struct{}, 1)
	r := newRig(t, func(c *enroll.Config) { c.Finder = searches{c.Finder, begun} })
	r.proxy(t, nil)
	pod := r.meshed("web", "web")
	r.follow(t)
	<-begun
	r.running(t, pod, 1)
	_, err := r.Withhold(t.Context(), []string{"shop/web"})
	must(t, err)
	_, err = r.Release([]string{"shop/web"})
	must(t, err)
	before := time.Now()
	r.await(t, r.allInState(1))
	if took := time.Since(before); took > 10*time.Second {
		t.Errorf("it came back after %v", took)
	}
}

// TestReleasedSaysSo: until it is enrolled, status does not go on saying that it was withdrawn.
func TestReleasedSaysSo(t *testing.T) {
	r := newRig(t)
	r.proxy(t, nil)
	for i, name := range []string{"gone", "web"} {
		r.running(t, r.meshed(name, "web"), i+1)
	}
	_, err := r.Withhold(t.Context(), nil)
	must(t, err)
	unlabelled := r.meshed("gone", "web")
	unlabelled.NamespaceLabels = nil
	r.pods.put(unlabelled)
	_, err = r.Release(nil)
	must(t, err)
	r.wantOutside(t, "gone", unmatched, "web", awaited)
}

// TestAudit: a healthy pod costs no write; each part that is lost is named and put
// back.
func TestAudit(t *testing.T) {
	r := newRig(t)
	r.proxy(t, nil)
	pod := r.meshed("web", "web")
	ns := r.running(t, pod, 1)
	before := r.generation(t, ns)
	for range 3 {
		if f, ok := r.Audit(t.Context(), pod.UID); !ok || f.Err != nil || len(f.Differences) != 0 {
			t.Fatalf("a healthy pod: %+v, %t", f, ok)
		}
	}
	if after := r.generation(t, ns); after != before {
		t.Errorf("audits have written: generation %d, then %d", before, after)
	}
	must(t, r.rules.Remove(t.Context(), ns.Runner()))
	f, ok := r.Audit(t.Context(), pod.UID)
	if !ok || f.Err != nil || len(f.Differences) == 0 || len(f.Parts) != 1 || f.Parts[0] != "redirection" {
		t.Errorf("without its rules: %+v, %t", f, ok)
	}
	r.assertRules(t, ns)
	r.fetcher.Unregister(pod.UID)
	if f, _ := r.Audit(t.Context(), pod.UID); f.Err != nil || len(f.Differences) != 1 {
		t.Errorf("without its identity: %+v", f)
	}
	if f, _ := r.Audit(t.Context(), pod.UID); len(f.Differences) != 0 {
		t.Errorf("after the repair: %+v", f)
	}
	if _, ok := r.Audit(t.Context(), "nobody"); ok {
		t.Error("a pod that is not enrolled was audited")
	}
}

// TestRecordsOfGonePods: of a pod that no ADD has told of, nothing stays when its object is gone:
// no DEL says so.
func TestRecordsOfGonePods(t *testing.T) {
	dir := t.TempDir()
	r := newRig(t, lookingIn(t, dir))
	r.proxy(t, nil)
	r.follow(t)
	for i, first := range []string{"", "off"} {
		ns := netnstest.New(t)
		name := fmt.Sprint("p", i)
		pod := labelled(workload.Pod{
			UID: "uid-" + name, Namespace: "shop", Name: name, ServiceAccount: "web", IPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 1, 0, byte(1 + i)})},
		}, "ambient")
		holding(t, ns, pod.IPs[0])
		mountAt(t, ns, filepath.Join(dir, pod.Name))
		r.pods.put(pod)
		r.await(t, r.allInState(1))
		if first == "off" {
			r.pods.put(labelled(pod, ""))
			r.await(t, r.allInState(0))
		}
		r.pods.remove(pod)
		r.await(t, func() bool {
			left, _, err := r.records.All()
			must(t, err)
			return len(left) == 0
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package enroll_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	googlenft "github.com/google/nftables"
	"github.com/vishvananda/netlink"

	"ambientd/cni-plugin/podevent"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/enroll"
	"ambientd/nodeagent/workload"
	"ambientd/nodeagent/zds/zdstest"
	"ambientd/tools/netnstest"
)

// TestAddEnrolsWhole is case 14 as well: the pod's object names no address yet, and the
// pod is enrolled at once, in all parts, with those from prevResult.
func TestAddEnrolsWhole(t *testing.T) {
	r := newRig(t)
	peer := r.proxy(t, nil)
	pod, ns := r.enrolled(t, "web", "web", "c1")
	if len(pod.IPs) > 0 {
		t.Fatalf("the pod's object has addresses %v", pod.IPs)
	}

	r.assertRules(t, ns)
	probes := []redirection.HostEntry{{Addr: netip.MustParseAddr("10.0.0.9")}, {Addr: netip.MustParseAddr("fd00::9")}}
	differences, err := r.rules.VerifyHost(t.Context(), netnstest.Self(t).Runner(), hostOptions(), probes)
	// Entries of other tests' pods may be there still.
	differences = slices.DeleteFunc(differences, func(d redirection.Difference) bool { return d.Want == "" })
	if err != nil || len(differences) > 0 {
		t.Errorf("the host's set for probes differs from %v: %v, %v", probes, differences, err)
	}
	cookie, err := zdstest.Cookie(ns.File())
	must(t, err)
	got, err := peer.AwaitPod(t.Context(), pod.UID)
	must(t, err)
	if got.Cookie != cookie || got.Namespace != "shop" || got.Name != "web" || got.ServiceAccount != "web" {
		t.Errorf("the proxy was told %+v, want pod shop/web, account web, netns %d", got, cookie)
	}
	status := r.statusOf(t, pod)
	certificate := status.Certificate
	status.Certificate = admin.CertificateStatus{}
	want := admin.PodStatus{
		Namespace: "shop", Name: "web", UID: pod.UID, Netns: fmt.Sprint(cookie), State: admin.PodEnrolled, Backend: "nftables",
		Families: []string{"ipv4", "ipv6"}, IPs: []netip.Addr{netip.MustParseAddr("10.0.0.9"), netip.MustParseAddr("fd00::9")},
		Proxy: admin.ProxyAcked, Identity: "spiffe://cluster.local/ns/shop/sa/web",
	}
	if fmt.Sprint(status) != fmt.Sprint(want) {
		t.Errorf("status is\n%+v, want\n%+v", status, want)
	}
	if certificate.State != admin.CertificateReady || time.Until(certificate.NotAfter) < time.Hour {
		t.Errorf("certificate is %+v, want ready for about a day", certificate)
	}
}

// TestSkip is case 13, and the other reasons to stay out: the reply says why,
// and no part is put in place.
func TestSkip(t *testing.T) {
	ambient := map[string]string{"istio.io/dataplane-mode": "ambient"}
	for name, c := range map[string]struct {
		pod    workload.Pod
		reason string
	}{
		"sidecar":      {workload.Pod{Namespace: "shop", NamespaceLabels: ambient, Annotations: map[string]string{"sidecar.istio.io/status": "{}"}}, "sidecar"},
		"host network": {workload.Pod{Namespace: "shop", NamespaceLabels: ambient, HostNetwork: true}, "host"},
		"own pod":      {workload.Pod{Namespace: "mesh-system", NamespaceLabels: ambient}, "own pods"},
		"opted out":    {workload.Pod{Namespace: "shop", NamespaceLabels: ambient, Labels: map[string]string{"istio.io/dataplane-mode": "none"}}, "opts out"},
		"unlabelled":   {workload.Pod{Namespace: "plain"}, "no selector"},
		"excluded":     {workload.Pod{Namespace: "kube-system", NamespaceLabels: ambient}, "excluded"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			peer := r.proxy(t, nil)
			c.pod.Name, c.pod.UID, c.pod.ServiceAccount = "ztunnel-x", "uid-1", "account"
			pod, ns := r.pods.put(c.pod), netnstest.New(t)
			reply := r.add(t.Context(), pod, "c1", ns)
			want(t, reply, podevent.ResultSkipped)
			if !strings.Contains(reply.Reason, c.reason) {
				t.Errorf("reason is %q, want one about %q", reply.Reason, c.reason)
			}
			r.assertNothing(t, peer, pod, ns)
			if peer.State().Seen(zdstest.Add, pod.UID) {
				t.Error("the proxy was told of the pod")
			}
			if skipped := r.Skipped(); len(skipped) != 1 || skipped[0].Reason != reply.Reason {
				t.Errorf("status shows %+v as skipped", skipped)
			}
			want(t, r.Handle(t.Context(), request(podevent.CommandCheck, pod, "c1"), ns.File()), podevent.ResultSkipped)
			want(t, r.del(t.Context(), pod, "c1", nil), podevent.ResultWithdrawn)
			if skipped := r.Skipped(); len(skipped) != 0 {
				t.Errorf("after DEL status still shows %+v", skipped)
			}
		})
	}
}

// A pod that is out of the mesh by its name starts also when nothing is known of it, as
// while the API server is away. Any other is not guessed at.
func TestSkipUnknown(t *testing.T) {
	r := newRig(t)
	for name, skipped := range map[string]bool{"mesh-system/ztunnel-x": true, "kube-system/dns": true, "mesh-system/app": false, "shop/ztunnel-x": false} {
		var pod workload.Pod
		pod.Namespace, pod.Name, _ = strings.Cut(name, "/")
		pod.UID = "uid-" + name
		reply := r.add(t.Context(), pod, "c-"+name, netnstest.New(t))
		if (reply.Result == podevent.ResultSkipped) != skipped || (reply.Error == nil) != skipped {
			t.Errorf("%s: %+v, want skipped %t", name, reply, skipped)
		}
	}
}

// brokenRules writes the rules and then says that it failed: the worst case
// for whoever has to undo it.
type brokenRules struct{ enroll.Redirection }

func (b brokenRules) Apply(ctx context.Context, ns redirection.Netns, opts redirection.Options) (redirection.Families, error) {
	_, err := b.Redirection.Apply(ctx, ns, opts)
	return 0, errors.Join(errors.New("broken for the test"), err)
}

// TestWholeOrNothing fails an ADD in each of its steps in turn: the error names
// pod, step and next step, and nothing of the pod remains.
func TestWholeOrNothing(t *testing.T) {
	refuse := zdstest.NackUIDs("no room", "uid-web")
	silent := func(_ context.Context, e zdstest.Event) zdstest.Answer {
		if e.Kind == zdstest.Add {
			return zdstest.Silence()
		}
		return zdstest.Ack()
	}
	impatient := func(c *enroll.Config) { c.ProxyTimeout = 50 * time.Millisecond; c.DelProxyWait = 50 * time.Millisecond }
	for name, c := range map[string]struct {
		script  zdstest.Script
		denied  bool
		opts    []option
		code    uint
		message string
	}{
		"rules fail":         {opts: []option{func(c *enroll.Config) { c.Redirection = brokenRules{c.Redirection} }}, code: podevent.CodeRedirection, message: "redirection: broken for the test"},
		"proxy refuses":      {script: refuse, code: podevent.CodeTryAgain, message: `node proxy: the node proxy refused pod uid-web: "no room"`},
		"proxy does not ack": {script: silent, opts: []option{impatient}, code: podevent.CodeTryAgain, message: "node proxy: the node proxy has not answered: waited 50ms for it (--proxy-timeout)"},
		"CA denies":          {denied: true, code: podevent.CodeIdentityDenied, message: "certificate"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, c.opts...)
			r.source.deny = map[string]bool{"web": c.denied}
			peer := r.proxy(t, c.script)
			pod, ns := r.meshed("web", "web"), netnstest.New(t)
			reply := r.add(t.Context(), pod, "c1", ns)
			wantCode(t, reply, c.code)
			if !strings.Contains(reply.Error.Msg, "pod shop/web: ") || !strings.Contains(reply.Error.Msg, c.message) {
				t.Errorf("the message is %q, want pod shop/web and %q", reply.Error.Msg, c.message)
			}
			if reply.Error.Details == "" {
				t.Error("the error does not say what to do next")
			}
			r.assertNothing(t, peer, pod, ns)

			// The netns is free again: another pod may have it.
			r.source.mu.Lock()
			r.source.deny = nil
			r.source.mu.Unlock()
			if c.script == nil && len(c.opts) == 0 {
				other := r.meshed("other", "other")
				want(t, r.add(t.Context(), other, "c2", ns), podevent.ResultEnrolled)
			}
		})
	}
}

// TestWrongNetns: what is no netns, the host's own and another pod's are
// refused with code 8 and stay untouched.
func TestWrongNetns(t *testing.T) {
	r := newRig(t)
	peer := r.proxy(t, nil)
	_, taken := r.enrolled(t, "owner", "owner", "c0")
	null, err := os.Open(os.DevNull)
	must(t, err)
	defer null.Close()
	uts, err := os.Open("/proc/self/ns/uts")
	must(t, err)
	defer uts.Close()
	for name, f := range map[string]*os.File{
		"none": nil, "a device": null, "a UTS namespace": uts, "the host's": netnstest.Self(t).File(), "another pod's": taken.File(),
	} {
		t.Run(name, func(t *testing.T) {
			pod := r.meshed("web", "web")
			wantCode(t, r.Handle(t.Context(), request(podevent.CommandAdd, pod, "c1"), f), podevent.CodeInvalidNetns)
			if peer.State().Seen(zdstest.Add, pod.UID) || r.source.timesAsked("web") > 0 {
				t.Error("the proxy or the CA heard of the pod")
			}
		})
	}
	assertNoRules(t, netnstest.Self(t))
	r.assertRules(t, taken)
	want(t, r.Handle(t.Context(), request(podevent.CommandCheck, workload.Pod{Namespace: "shop", Name: "owner"}, "c0"), taken.File()), podevent.ResultOK)
}

// TestTakenNetnsOfEnrolledPod: an enrolled pod is added with another's netns. It
// fails, and the pod stays in the mesh where it is.
func TestTakenNetnsOfEnrolledPod(t *testing.T) {
	r := newRig(t)
	r.proxy(t, nil)
	_, taken := r.enrolled(t, "owner", "owner", "c0")
	pod, own := r.enrolled(t, "web", "web", "c1")
	wantCode(t, r.add(t.Context(), pod, "c2", taken), podevent.CodeInvalidNetns)
	r.assertRules(t, own)
	want(t, r.Handle(t.Context(), request(podevent.CommandCheck, pod, "c1"), own.File()), podevent.ResultOK)
}

func TestUnknownPod(t *testing.T) {
	r := newRig(t)
	reply := r.add(t.Context(), workload.Pod{Namespace: "shop", Name: "ghost"}, "c1", netnstest.New(t))
	wantCode(t, reply, podevent.CodeTryAgain)
	if !strings.Contains(reply.Error.Msg, "shop/ghost") || !strings.Contains(reply.Error.Msg, "pod lookup") {
		t.Errorf("the message is %q, want pod and step", reply.Error.Msg)
	}
	want(t, r.del(t.Context(), workload.Pod{}, "c1", nil), podevent.ResultWithdrawn)
}

// TestNewSandbox is case 26: the late DELs of a failed sandbox leave the pod
// that runs in the newer one alone.
func TestNewSandbox(t *testing.T) {
	r := newRig(t)
	peer := r.proxy(t, nil)
	pod, older := r.enrolled(t, "web", "web", "c1")
	newer := netnstest.New(t)
	want(t, r.add(t.Context(), pod, "c2", newer), podevent.ResultEnrolled)

	for range 2 {
		want(t, r.del(t.Context(), pod, "c1", nil), podevent.ResultWithdrawn)
	}
	r.assertRules(t, newer)
	cookie, err := zdstest.Cookie(newer.File())
	must(t, err)
	if got := peer.State().Pods[pod.UID]; got.Cookie != cookie {
		t.Errorf("the proxy has netns %d, want the newer sandbox's %d", got.Cookie, cookie)
	}
	if s := r.statusOf(t, pod); s.State != admin.PodEnrolled || s.Certificate.State != admin.CertificateReady {
		t.Errorf("status is %+v, want enrolled with its certificate", s)
	}
	if n := r.source.timesAsked("web"); n != 1 {
		t.Errorf("the CA was asked %d times, want once: the key lingers", n)
	}
	want(t, r.Handle(t.Context(), request(podevent.CommandCheck, pod, "c2"), newer.File()), podevent.ResultOK)

	// The older netns keeps its rules until its own DEL names it.
	r.assertRules(t, older)
	want(t, r.del(t.Context(), pod, "c2", newer.File()), podevent.ResultWithdrawn)
	r.assertNothing(t, peer, pod, newer)
}

// TestOlderSandboxCleared: a late DEL that still has its netns clears it, and
// only it.
func TestOlderSandboxCleared(t *testing.T) {
	r := newRig(t)
	r.proxy(t, nil)
	pod, older := r.enrolled(t, "web", "web", "c1")
	newer := netnstest.New(t)
	want(t, r.add(t.Context(), pod, "c2", newer), podevent.ResultEnrolled)
	want(t, r.del(t.Context(), pod, "c1", older.File()), podevent.ResultWithdrawn)
	assertNoRules(t, older)
	r.assertRules(t, newer)
}

// TestOlderSandboxClearedLast: the same when the pod has left the mesh before.
func TestOlderSandboxClearedLast(t *testing.T) {
	r := newRig(t)
	peer := r.proxy(t, nil)
	pod, older := r.enrolled(t, "web", "web", "c1")
	newer := netnstest.New(t)
	want(t, r.add(t.Context(), pod, "c2", newer), podevent.ResultEnrolled)
	want(t, r.del(t.Context(), pod, "c2", newer.File()), podevent.ResultWithdrawn)
	want(t, r.del(t.Context(), pod, "c1", older.File()), podevent.ResultWithdrawn)
	r.assertNothing(t, peer, pod, older)
	r.assertNothing(t, peer, pod, newer)
}

// TestSecondInterface: a pod attached twice in one netns leaves with the last.
func TestSecondInterface(t *testing.T) {
	r := newRig(t)
	peer := r.proxy(t, nil)
	pod, ns := r.enrolled(t, "web", "web", "c1")
	second := request(podevent.CommandAdd, pod, "c1")
	second.IfName, second.IPs = "net1", []netip.Addr{netip.MustParseAddr("192.0.2.1")}
	want(t, r.Handle(t.Context(), second, ns.File()), podevent.ResultEnrolled)
	if ips := r.statusOf(t, pod).IPs; len(ips) != 3 {
		t.Errorf("status shows addresses %v, want all three", ips)
	}
	second.Command, second.IPs = podevent.CommandDel, nil
	reply := r.Handle(t.Context(), second, nil)
	want(t, reply, podevent.ResultWithdrawn)
	if reply.Reason != "the attachment only: the pod stays enrolled through another one" {
		t.Errorf("withdrawn is %q", reply.Reason)
	}
	r.assertRules(t, ns)
	want(t, r.del(t.Context(), pod, "c1", nil), podevent.ResultWithdrawn)
	r.assertNothing(t, peer, pod, ns)
}

// TestSecondInterfaceWithoutProxy: attaching a pod once more fails while the node
// proxy is away, and takes nothing from the pod: the next proxy is told of it.
func TestSecondInterfaceWithoutProxy(t *testing.T) {
	r := newRig(t, func(c *enroll.Config) { c.ProxyTimeout = 50 * time.Millisecond })
	peer := r.proxy(t, nil)
	pod, ns := r.enrolled(t, "web", "web", "c1")
	r.hangUp(t, peer)
	second := request(podevent.CommandAdd, pod, "c1")
	second.IfName = "net1"
	wantCode(t, r.Handle(t.Context(), second, ns.File()), podevent.CodeTryAgain)

	next := r.proxy(t, nil)
	if _, has := next.State().Pods[pod.UID]; !has {
		t.Error("the next proxy is not told of the pod")
	}
	r.assertRules(t, ns)
	want(t, r.Handle(t.Context(), request(podevent.CommandCheck, pod, "c1"), ns.File()), podevent.ResultOK)
	want(t, r.del(t.Context(), pod, "c1", nil), podevent.ResultWithdrawn)
	r.assertNothing(t, next, pod, ns)
}

// TestAttachmentAddedAnew: a container ID comes again without a DEL before, for
// another pod, or for the same pod that has opted out meanwhile. What it stood for
// before is no longer in the mesh: no DEL will ever name it.
func TestAttachmentAddedAnew(t *testing.T) {
	t.Run("another pod", func(t *testing.T) {
		r := newRig(t)
		peer := r.proxy(t, nil)
		before, beforeNS := r.enrolled(t, "before", "before", "c1")
		after, afterNS := r.enrolled(t, "after", "after", "c1")
		r.assertNothing(t, peer, before, beforeNS)
		r.assertRules(t, afterNS)
		want(t, r.del(t.Context(), after, "c1", nil), podevent.ResultWithdrawn)
		r.assertNothing(t, peer, after, afterNS)
	})
	t.Run("opted out", func(t *testing.T) {
		r := newRig(t)
		peer := r.proxy(t, nil)
		pod, ns := r.enrolled(t, "web", "web", "c1")
		pod.Labels = map[string]string{"istio.io/dataplane-mode": "none"}
		r.pods.put(pod)
		want(t, r.add(t.Context(), pod, "c1", ns), podevent.ResultSkipped)
		r.assertNothing(t, peer, pod, ns)
		if skipped := r.Skipped(); len(skipped) != 1 {
			t.Errorf("status shows %+v as skipped, want the pod", skipped)
		}
	})
}

// TestDelEndsAdd: a DEL cancels the ADD of the same attachment and waits for
// its undoing; another pod's ADD goes on.
func TestDelEndsAdd(t *testing.T) {
	r := newRig(t)
	asked := make(chan struct{})
	peer := r.proxy(t, func(ctx context.Context, e zdstest.Event) zdstest.Answer {
		if e.Kind == zdstest.Add && e.UID == "uid-web" {
			close(asked)
			<-ctx.Done()
		}
		return zdstest.Ack()
	})
	pod, ns := r.meshed("web", "web"), netnstest.New(t)
	replies := make(chan podevent.Reply, 1)
	go func() { replies <- r.add(t.Context(), pod, "c1", ns) }()
	<-asked
	deleted := make(chan podevent.Reply, 1)
	go func() { deleted <- r.del(t.Context(), pod, "c1", ns.File()) }()
	reply := <-replies
	wantCode(t, reply, podevent.CodeTryAgain)
	if !strings.Contains(reply.Error.Msg, "DEL") {
		t.Errorf("the message is %q, want the DEL as the cause", reply.Error.Msg)
	}
	want(t, <-deleted, podevent.ResultWithdrawn)
	must(t, peer.Close())
	r.assertNothing(t, nil, pod, ns)
}

// TestHangUp: the plugin went away in the middle.
func TestHangUp(t *testing.T) {
	r := newRig(t)
	gone := errors.New("the plugin hung up")
	ctx, hangUp := context.WithCancelCause(t.Context())
	peer := r.proxy(t, func(_ context.Context, e zdstest.Event) zdstest.Answer {
		if e.Kind == zdstest.Add {
			hangUp(gone)
			return zdstest.Silence()
		}
		return zdstest.Ack()
	})
	pod, ns := r.meshed("web", "web"), netnstest.New(t)
	wantCode(t, r.add(ctx, pod, "c1", ns), podevent.CodeTryAgain)
	must(t, peer.Close())
	r.assertNothing(t, nil, pod, ns)
}

// TestDelUnrecorded: a DEL whose attachment is not recorded withdraws nothing
// that another, recorded one holds, whatever netns it names.
func TestDelUnrecorded(t *testing.T) {
	r := newRig(t)
	r.proxy(t, nil)
	pod, ns := r.enrolled(t, "web", "web", "c1")
	for _, netns := range []*os.File{nil, ns.File(), netnstest.New(t).File(), netnstest.Self(t).File()} {
		want(t, r.del(t.Context(), pod, "unheard-of", netns), podevent.ResultWithdrawn)
	}
	r.assertRules(t, ns)
	if s := r.statusOf(t, pod); s.State != admin.PodEnrolled {
		t.Errorf("state is %s, want enrolled", s.State)
	}
}

// TestCertificatePending: a slow CA does not keep a pod from starting.
func TestCertificatePending(t *testing.T) {
	r := newRig(t, func(c *enroll.Config) { c.CertWait = 10 * time.Millisecond })
	r.source.gate = make(chan struct{})
	r.proxy(t, nil)
	pod, ns := r.enrolled(t, "web", "web", "c1")
	if s := r.statusOf(t, pod); s.Certificate.State != admin.CertificatePending {
		t.Errorf("certificate is %+v, want pending", s.Certificate)
	}
	r.assertRules(t, ns)
	close(r.source.gate)
	must(t, r.fetcher.Wait(t.Context(), r.fetcher.Identities()[0].ID))
	if s := r.statusOf(t, pod); s.Certificate.State != admin.CertificateReady {
		t.Errorf("certificate is %+v, want ready", s.Certificate)
	}
}

// TestOneIdentityTwoPods: one CSR for both, and the identity goes with the last.
func TestOneIdentityTwoPods(t *testing.T) {
	r := newRig(t)
	peer := r.proxy(t, nil)
	first, ns1 := r.enrolled(t, "a", "shared", "c1")
	second, ns2 := r.enrolled(t, "b", "shared", "c2")
	if n := r.source.timesAsked("shared"); n != 1 {
		t.Errorf("the CA was asked %d times for one identity", n)
	}
	want(t, r.del(t.Context(), first, "c1", ns1.File()), podevent.ResultWithdrawn)
	if s := r.statusOf(t, second); s.Certificate.State != admin.CertificateReady {
		t.Errorf("certificate of the other pod is %+v", s.Certificate)
	}
	assertNoRules(t, ns1)
	r.assertRules(t, ns2)
	want(t, r.del(t.Context(), second, "c2", nil), podevent.ResultWithdrawn)
	r.assertNothing(t, peer, second, ns2)
}

// TestCheck: each part that is lost is named, with its own code.
func TestCheck(t *testing.T) {
	r := newRig(t)
	peer := r.proxy(t, nil)
	pod, ns := r.enrolled(t, "web", "web", "c1")
	check := func(netns *os.File) podevent.Reply {
		return r.Handle(t.Context(), request(podevent.CommandCheck, pod, "c1"), netns)
	}
	want(t, check(ns.File()), podevent.ResultOK)
	wantCode(t, check(netnstest.New(t).File()), podevent.CodeInvalidNetns)
	stranger := r.meshed("stranger", "stranger")
	wantCode(t, r.Handle(t.Context(), request(podevent.CommandCheck, stranger, "c9"), ns.File()), podevent.CodeTryAgain)

	must(t, peer.Close())
	fresh := r.proxy(t, zdstest.NackUIDs("not today", pod.UID))
	reply := check(ns.File())
	wantCode(t, reply, podevent.CodeTryAgain)
	if s := r.statusOf(t, pod); s.State != admin.PodDegraded || s.Proxy != admin.ProxyPending {
		t.Errorf("status is %+v, want degraded for want of the proxy", s)
	}
	must(t, fresh.Close())

	ns.Do(t, func() error {
		conn, err := googlenft.New()
		if err != nil {
			return err
		}
		conn.DelTable(&googlenft.Table{Name: redirection.NFTablesTable, Family: googlenft.TableFamilyINet})
		return conn.Flush()
	})
	reply = check(ns.File())
	wantCode(t, reply, podevent.CodeRedirection)
	if !strings.Contains(reply.Error.Msg, redirection.NFTablesTable) {
		t.Errorf("the message is %q, want the table that is gone", reply.Error.Msg)
	}
	if !strings.Contains(reply.Error.Details, "ambientd verify") {
		t.Errorf("the advice is %q", reply.Error.Details)
	}
}

// TestGC: what the runtime no longer lists goes, of its network only.
func TestGC(t *testing.T) {
	r := newRig(t)
	peer := r.proxy(t, nil)
	kept, keptNS := r.enrolled(t, "kept", "kept", "c1")
	gone, goneNS := r.enrolled(t, "gone", "gone", "c2")
	other, otherNS := r.meshed("other", "other"), netnstest.New(t)
	elsewhere := request(podevent.CommandAdd, other, "c3")
	elsewhere.Network = "another"
	want(t, r.Handle(t.Context(), elsewhere, otherNS.File()), podevent.ResultEnrolled)

	gc := podevent.Request{Command: podevent.CommandGC, Network: "net", ValidAttachments: []podevent.Attachment{{ContainerID: "c1", IfName: "eth0"}}}
	want(t, r.Handle(t.Context(), gc, nil), podevent.ResultOK)
	r.assertNothing(t, peer, gone, goneNS)
	r.assertRules(t, keptNS)
	r.assertRules(t, otherNS)

	gc.ValidAttachments = nil
	want(t, r.Handle(t.Context(), gc, nil), podevent.ResultOK)
	r.assertNothing(t, peer, kept, keptNS)
	r.assertRules(t, otherNS)
}

// TestManyAtOnce: pods come and go together; what stays at the end is exactly
// what was not deleted.
func TestManyAtOnce(t *testing.T) {
	r := newRig(t)
	peer := r.proxy(t, nil)
	const pods = 40
	namespaces := make([]*netnstest.NS, pods)
	for i := range namespaces {
		namespaces[i] = netnstest.New(t)
	}
	var all sync.WaitGroup
	for i, ns := range namespaces {
		all.Go(func() {
			pod := r.meshed(fmt.Sprintf("p%02d", i), fmt.Sprintf("sa%d", i%7))
			container := fmt.Sprint("c", i)
			if reply := r.add(t.Context(), pod, container, ns); reply.Result != podevent.ResultEnrolled {
				t.Errorf("ADD of %s: %+v", pod, reply)
			}
			if i%2 == 1 {
				if reply := r.del(t.Context(), pod, container, nil); reply.Error != nil {
					t.Errorf("DEL of %s: %+v", pod, reply)
				}
			}
		})
	}
	all.Wait()
	for i, ns := range namespaces {
		if i%2 == 1 {
			assertNoRules(t, ns)
			continue
		}
		r.assertRules(t, ns)
	}
	if n := len(r.Pods()); n != pods/2 {
		t.Errorf("%d pods are enrolled, want %d", n, pods/2)
	}
	must(t, peer.Await(t.Context(), func(s zdstest.State) bool { return len(s.Pods) == pods/2 }))
	var registered int
	for _, s := range r.fetcher.Identities() {
		registered += s.Pods
	}
	if registered != pods/2 {
		t.Errorf("%d registrations, want one for each of %d pods", registered, pods/2)
	}
	if !slices.IsSortedFunc(r.Pods(), func(a, b admin.PodStatus) int { return strings.Compare(a.Name, b.Name) }) {
		t.Error("status is not sorted")
	}
}

// TestAddWaitsForLoopback: the runtime may bring the loopback device up while it calls our
// plugin already, as containerd does.
func TestAddWaitsForLoopback(t *testing.T) {
	r := newRig(t)
	r.proxy(t, nil)
	ns := netnstest.New(t)
	set := func(change func(netlink.Link) error) error {
		return ns.Runner()(func() error {
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			return change(lo)
		})
	}
	must(t, set(netlink.LinkSetDown))
	up := make(chan error, 1)
	time.AfterFunc(200*time.Millisecond, func() { up <- set(netlink.LinkSetUp) })
	want(t, r.add(t.Context(), r.meshed("web", "web"), "c-web", ns), podevent.ResultEnrolled)
	must(t, <-up)
	r.assertRules(t, ns)
}

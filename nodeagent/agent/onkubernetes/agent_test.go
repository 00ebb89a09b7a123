// SPDX-License-Identifier: Apache-2.0

//go:build apitest

package onkubernetes

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"ambientd/cni-plugin/podevent"
	"ambientd/tools/apitest"
)

// A pod's life: enrolled at its start, without a read of the API server and with one patch
// outside of the path; withdrawn and enrolled as its namespace's label changes; withdrawn
// at its end, of which there are several. Nothing of it needs more than the role of deploy/.
func TestPodOfACluster(t *testing.T) {
	c := newCluster(t)
	c.label("ambient")
	c.start("ready")
	peer := c.proxy()
	web := c.pod("web", 1)
	if reply := c.call(podevent.CommandAdd, web); reply.Result != podevent.ResultEnrolled {
		t.Fatalf("ADD: %+v", reply)
	}
	c.phase(web, corev1.PodRunning)
	c.await("the annotation", func() bool { return c.shown(web) == "enabled" })

	// Pods that are known by the time of their ADD, which the first may not have been.
	known := c.pod("known", 2)
	c.await("the watch", func() bool { return c.call(podevent.CommandCheck, known).Error != nil })
	began := time.Now()
	since := func(r apitest.Request) bool { return r.RequestReceivedTimestamp.After(began) }
	if reply := c.call(podevent.CommandAdd, known); reply.Result != podevent.ResultEnrolled {
		t.Fatalf("ADD: %+v", reply)
	}
	c.phase(known, corev1.PodRunning)
	c.await("the annotation", func() bool { return c.shown(known) == "enabled" })
	c.await("its entry in the audit log", func() bool { return len(c.requests(since)) > 0 })
	for _, r := range c.requests(since) {
		if r.Verb != "patch" || r.ObjectRef.Name != "known" || r.ObjectRef.Subresource != "status" {
			t.Errorf("the ADD of a pod that is known makes the request %s %s", r.Verb, r.RequestURI)
		}
	}

	for range 2 {
		c.label("none")
		c.await("the withdrawal", func() bool { return c.enrolled() == 0 && c.shown(web) == "" && c.shown(known) == "" })
		c.label("ambient")
		c.await("the enrolment", func() bool { return c.enrolled() == 2 && c.shown(web) == "enabled" && c.shown(known) == "enabled" })
	}
	c.await("an event of it", func() bool { return c.has(web, "Enrolled") })

	c.phase(known, corev1.PodSucceeded)
	c.await("the end of a Job's pod", func() bool { return c.enrolled() == 1 && c.shown(known) == "" })

	// Being deleted, it still has traffic; it leaves with its sandbox.
	must(t, c.admin.CoreV1().Pods(c.namespace).Delete(t.Context(), "web", metav1.DeleteOptions{GracePeriodSeconds: new(int64(600))}))
	if reply := c.call(podevent.CommandCheck, web); reply.Error != nil {
		t.Errorf("CHECK of a pod that drains: %+v", reply.Error)
	}
	if reply := c.call(podevent.CommandDel, web); reply.Error != nil || c.enrolled() != 0 {
		t.Errorf("DEL: %+v; %d pods are enrolled", reply, c.enrolled())
	}
	if pods := peer.State().Pods; len(pods) > 0 {
		t.Errorf("the proxy still has %v", pods)
	}
	c.wantNoRefusal()
}

// TestRecreated is part of case 12: a StatefulSet's pod is made anew under its name; each
// is told by its UID, and the late DEL of the old one hurts nobody.
func TestRecreated(t *testing.T) {
	c := newCluster(t)
	c.label("ambient")
	c.start("ready")
	c.proxy()
	old := c.pod("db-0", 1)
	if reply := c.call(podevent.CommandAdd, old); reply.Result != podevent.ResultEnrolled {
		t.Fatalf("ADD: %+v", reply)
	}
	must(t, c.admin.CoreV1().Pods(c.namespace).Delete(t.Context(), "db-0", metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}))
	c.await("the end of the old one", func() bool { return c.enrolled() == 0 })
	renewed := c.pod("db-0", 2)
	if reply := c.call(podevent.CommandAdd, renewed); reply.Result != podevent.ResultEnrolled {
		t.Fatalf("ADD of the new one: %+v", reply)
	}
	if reply := c.call(podevent.CommandDel, old); reply.Error != nil || c.enrolled() != 1 {
		t.Errorf("late DEL: %+v, %d pods are enrolled", reply, c.enrolled())
	}
	c.await("the annotation", func() bool { return c.shown(renewed) == "enabled" })
	c.wantNoRefusal()
}

// The API server goes while the agent runs, and is away when the next one starts: pods in
// the mesh stay there, those that are known start, others are told to try again. When it
// is back, they do, and no pod is patched that shows how it stands.
func TestServerAway(t *testing.T) {
	c := newCluster(t)
	c.label("ambient")
	stop := c.start("ready")
	c.proxy()
	web, known := c.pod("web", 1), c.pod("known", 2)
	if reply := c.call(podevent.CommandAdd, web); reply.Result != podevent.ResultEnrolled {
		t.Fatalf("ADD: %+v", reply)
	}
	c.await("the annotation", func() bool { return c.shown(web) == "enabled" })
	c.await("the watch", func() bool { return c.call(podevent.CommandCheck, known).Error != nil })
	c.relay.Cut()
	unknown := c.pod("unknown", 3)
	if reply := c.call(podevent.CommandAdd, known); reply.Result != podevent.ResultEnrolled {
		t.Errorf("ADD of a pod that is known: %+v", reply)
	}
	if reply := c.call(podevent.CommandAdd, unknown); reply.Error == nil || reply.Error.Code != podevent.CodeTryAgain {
		t.Errorf("ADD of a pod that is not known: %+v", reply)
	}
	if n := c.enrolled(); n != 2 {
		t.Errorf("%d pods are enrolled, want both", n)
	}
	stop()

	c.cfg.AddTimeout = c.cfg.LookupTimeout + c.cfg.ProxyTimeout + c.cfg.CertWait + 1
	c.start("pods of an earlier agent taken up")
	peer := c.proxy()
	if pods := peer.State().Pods; len(pods) != 2 {
		t.Errorf("the proxy's snapshot has %d pods, want both", len(pods))
	}
	c.await("both pods", func() bool { return c.enrolled() == 2 })
	before := len(c.requests(isPatchOf("web")))
	c.relay.Mend(t)
	if reply := c.call(podevent.CommandAdd, unknown); reply.Result != podevent.ResultEnrolled {
		t.Errorf("ADD once the API server is back: %+v", reply)
	}
	c.await("all annotations", func() bool {
		return c.shown(web) == "enabled" && c.shown(unknown) == "enabled"
	})
	if n := len(c.requests(isPatchOf("web"))); n != before {
		t.Errorf("a pod that shows how it stands was patched %d times", n-before)
	}
	c.wantNoRefusal()
}

func isPatchOf(pod string) func(apitest.Request) bool {
	return func(r apitest.Request) bool { return r.Verb == "patch" && r.ObjectRef.Name == pod }
}

// has tells whether there is an event of the reason on the pod.
func (c *cluster) has(s *sandbox, reason string) bool {
	c.t.Helper()
	events, err := c.admin.CoreV1().Events(c.namespace).List(c.t.Context(), metav1.ListOptions{
		FieldSelector: "involvedObject.uid=" + string(s.UID) + ",reason=" + reason,
	})
	must(c.t, err)
	return len(events.Items) > 0
}

// wantNoRefusal fails if the API server has refused the agent anything, or not known it.
func (c *cluster) wantNoRefusal() {
	c.t.Helper()
	all := c.requests(func(apitest.Request) bool { return true })
	if len(all) == 0 {
		c.t.Error("no request of the agent's is in the audit log")
	}
	for _, r := range all {
		if r.Refused() {
			c.t.Errorf("refused: %s", r)
		}
	}
}

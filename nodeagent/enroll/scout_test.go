// SPDX-License-Identifier: Apache-2.0

package enroll_test

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"ambientd/cni-plugin/podevent"
	"ambientd/nodeagent/enroll"
	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/workload"
	"ambientd/tools/netnstest"
)

// heardFinder tells what is looked for.
type heardFinder struct {
	enroll.Finder
	asked chan []podnetns.Wanted
}

func (f heardFinder) Find(ctx context.Context, wanted []podnetns.Wanted) (map[string]*podnetns.Netns, map[string]error) {
	found, missing := f.Finder.Find(ctx, wanted)
	f.asked <- wanted
	return found, missing
}

// withFinder has the Enroller find netns among the files of a directory, and tells of it.
func withFinder(t *testing.T, netnsDir string, asked chan []podnetns.Wanted) option {
	return func(c *enroll.Config) {
		finder, err := podnetns.NewFinder(podnetns.FinderConfig{Host: c.Host, Holders: c.Pins, ProcRoot: t.TempDir(), NetnsDirs: []string{netnsDir}})
		must(t, err)
		c.Finder = heardFinder{Finder: finder, asked: asked}
	}
}

// unannounced is a pod that runs without an ADD of which the agent knows, with an address in
// a netns that is a file of the runtime's.
func (r *rig) unannounced(t *testing.T, netnsDir, name string, number int) (workload.Pod, *netnstest.NS) {
	t.Helper()
	ns := netnstest.New(t)
	ip := netip.AddrFrom4([4]byte{10, 1, byte(number >> 8), byte(number)})
	ns.Do(t, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.AddrAdd(lo, &netlink.Addr{IPNet: netlink.NewIPNet(ip.AsSlice())})
	})
	path := filepath.Join(netnsDir, name)
	must(t, os.WriteFile(path, nil, 0o600))
	must(t, unix.Mount(fmt.Sprintf("/proc/self/fd/%d", ns.File().Fd()), path, "", unix.MS_BIND, ""))
	t.Cleanup(func() { must(t, unix.Unmount(path, unix.MNT_DETACH)) })
	return r.pods.put(workload.Pod{
		UID: "uid-" + name, Namespace: "shop", Name: name, ServiceAccount: "web", IPs: []netip.Addr{ip}, Phase: corev1.PodRunning,
	}), ns
}

// TestScout: where a pod outside the mesh runs is found out before it is to be in there, and
// only once; what is known of it goes with its object.
func TestScout(t *testing.T) {
	netnsDir, asked := t.TempDir(), make(chan []podnetns.Wanted, 16)
	r := newRig(t, withFinder(t, netnsDir, asked))
	r.proxy(t, nil)
	pod, ns := r.unannounced(t, netnsDir, "web", 1)
	key := podnetns.Key{}
	for _, never := range []workload.Pod{
		{UID: "uid-host", Name: "host", IPs: pod.IPs, Phase: corev1.PodRunning, HostNetwork: true},
		{UID: "uid-ended", Name: "ended", IPs: pod.IPs, Phase: corev1.PodSucceeded},
		{UID: "uid-starting", Name: "starting", Phase: corev1.PodPending},
	} {
		never.Namespace, never.ServiceAccount = "shop", "web"
		r.pods.put(never)
	}
	r.follow(t)
	if wanted := <-asked; len(wanted) != 1 || wanted[0].UID != pod.UID || wanted[0].Key != key {
		t.Fatalf("looked for %+v, want only pod %s, of which nothing is known", wanted, pod)
	}

	r.pods.put(labelled(pod, "ambient"))
	wanted := <-asked
	if len(wanted) != 1 || wanted[0].UID != pod.UID {
		t.Fatalf("looked for %+v, want pod %s", wanted, pod)
	}
	if wanted[0].Key == key || wanted[0].NetnsPath != filepath.Join(netnsDir, "web") {
		t.Errorf("looked for %+v, want the netns that was found before", wanted[0])
	}
	r.await(t, r.allInState(1))
	r.pods.put(pod)
	r.await(t, r.allInState(0))
	assertNoRules(t, ns)

	// Of a pod that is gone nothing is known, whether it was ever in the mesh or not. Its place
	// is let go of while the other is enrolled.
	r.pods.remove(pod)
	other, _ := r.unannounced(t, netnsDir, "other", 2)
	r.pods.put(labelled(other, "ambient"))
	<-asked
	r.await(t, r.allInState(1))
	r.pods.put(labelled(pod, "ambient"))
	if wanted := <-asked; len(wanted) != 1 || wanted[0].UID != pod.UID || wanted[0].Key != key {
		t.Errorf("looked for %+v, want only pod %s, of which nothing is known any more", wanted, pod)
	}
	r.await(t, r.allInState(2))
}

// TestScoutFindsNothing: a pod that is not found is not looked for again while it is outside
// the mesh, and is enrolled as any other when it belongs in there.
func TestScoutFindsNothing(t *testing.T) {
	netnsDir, asked := t.TempDir(), make(chan []podnetns.Wanted, 16)
	r := newRig(t, withFinder(t, netnsDir, asked))
	r.proxy(t, nil)
	lost := r.pods.put(workload.Pod{
		UID: "uid-lost", Namespace: "shop", Name: "lost", ServiceAccount: "web",
		IPs: []netip.Addr{netip.MustParseAddr("10.9.9.9")}, Phase: corev1.PodRunning,
	})
	r.follow(t)
	if wanted := <-asked; len(wanted) != 1 || wanted[0].UID != lost.UID {
		t.Fatalf("looked for %+v, want pod %s", wanted, lost)
	}
	pod, _ := r.unannounced(t, netnsDir, "web", 1)
	if wanted := <-asked; len(wanted) != 1 || wanted[0].UID != pod.UID {
		t.Fatalf("looked for %+v, want only pod %s, which is new", wanted, pod)
	}
	want(t, r.add(t.Context(), labelled(r.pods.put(labelled(lost, "ambient")), "ambient"), "c-lost", netnstest.New(t)), podevent.ResultEnrolled)
}

// TestPathOfAProcess: a pod whose netns is recorded at a process has not moved when the
// process has ended and its number is another's. Docker's paths are such.
func TestPathOfAProcess(t *testing.T) {
	asked := make(chan []podnetns.Wanted, 1)
	r := newRig(t, withFinder(t, t.TempDir(), asked))
	r.proxy(t, nil)
	pod, ns := r.meshed("web", "web"), netnstest.New(t)
	req := request(podevent.CommandAdd, pod, "c-web")
	req.NetnsPath = fmt.Sprintf("/proc/%d/ns/net", os.Getpid()) // which is in another netns
	want(t, r.Handle(t.Context(), req, ns.File()), podevent.ResultEnrolled)
	if finding, ok := r.Audit(t.Context(), pod.UID); !ok || finding.Err != nil || len(finding.Differences) > 0 {
		t.Errorf("the audit finds %+v", finding)
	}
	select {
	case wanted := <-asked:
		t.Errorf("looked for %+v", wanted)
	default:
	}
}

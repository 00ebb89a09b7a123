// SPDX-License-Identifier: Apache-2.0

package workload_test

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"ambientd/nodeagent/workload"
)

func TestFromPod(t *testing.T) {
	now := metav1.NewTime(time.Unix(1, 0))
	got := workload.FromPod(&corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			UID: "uid", Namespace: "shop", Name: "web-0", DeletionTimestamp: &now,
			Labels: map[string]string{"a": "b"}, Annotations: map[string]string{"c": "d"},
		},
		Spec:   corev1.PodSpec{ServiceAccountName: "web", HostNetwork: true},
		Status: corev1.PodStatus{Phase: corev1.PodFailed},
	}, map[string]string{"e": "f"})
	want := workload.Pod{
		UID: "uid", Namespace: "shop", Name: "web-0", ServiceAccount: "web",
		Labels: map[string]string{"a": "b"}, Annotations: map[string]string{"c": "d"}, NamespaceLabels: map[string]string{"e": "f"},
		HostNetwork: true, Phase: corev1.PodFailed, Deleting: true,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	if got.String() != "shop/web-0" || !got.Ended() {
		t.Errorf("String %q, Ended %v", got, got.Ended())
	}
}

func TestPodIPs(t *testing.T) {
	addrs := func(texts ...string) (ips []netip.Addr) {
		for _, text := range texts {
			ips = append(ips, netip.MustParseAddr(text))
		}
		return ips
	}
	for _, test := range []struct {
		name   string
		status corev1.PodStatus
		want   []netip.Addr
	}{
		{"none yet", corev1.PodStatus{}, nil},
		{
			"both families, the first one first",
			corev1.PodStatus{PodIP: "fd00::2", PodIPs: []corev1.PodIP{{IP: "fd00::2"}, {IP: "10.0.0.2"}}},
			addrs("fd00::2", "10.0.0.2"),
		},
		{"the old field alone", corev1.PodStatus{PodIP: "10.0.0.2"}, addrs("10.0.0.2")},
		{"the new field alone", corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: "10.0.0.2"}}}, addrs("10.0.0.2")},
		{"IPv4 in IPv6", corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: "::ffff:10.0.0.2"}}}, addrs("10.0.0.2")},
		{
			"what is no address",
			corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: "pending"}, {IP: ""}, {IP: "fe80::1%eth0"}, {IP: "10.0.0.2"}}},
			addrs("10.0.0.2"),
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := workload.FromPod(&corev1.Pod{Status: test.status}, nil).IPs; !slices.Equal(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func TestStaticPods(t *testing.T) {
	const hash, mirror = "kubernetes.io/config.hash", "kubernetes.io/config.mirror"
	for _, test := range []struct {
		name        string
		account     string
		annotations map[string]string
		uid         string
		static      bool
	}{
		{"mirror", "", map[string]string{hash: "h", mirror: "h"}, "h", true},
		{"hash alone", "", map[string]string{hash: "h"}, "h", true},
		{"mirror with an account", "web", map[string]string{hash: "h", mirror: "h"}, "h", true},
		{"another pod's UID written there", "web", map[string]string{hash: "victim"}, "uid", false},
		{"empty hash", "", map[string]string{hash: "", mirror: ""}, "uid", false},
		{"ordinary", "web", nil, "uid", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := workload.FromPod(&corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{UID: "uid", Annotations: test.annotations},
				Spec:       corev1.PodSpec{ServiceAccountName: test.account},
			}, nil)
			if got.UID != test.uid || got.Static != test.static {
				t.Errorf("UID %q, static %v; want %q, %v", got.UID, got.Static, test.uid, test.static)
			}
		})
	}
}

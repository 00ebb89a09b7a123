// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"ambientd/nodeagent/workload"
)

// fixed is an Inventory that does not change.
type fixed []workload.Pod

func (f fixed) List() ([]workload.Pod, bool) { return f, true }
func (fixed) Changed() <-chan struct{}       { return nil }

// A tenant makes a mirror pod in his own namespace that gives itself the UID of another's pod. It
// stands for that pod in no place where rules of ours are.
func TestForgedMirror(t *testing.T) {
	victim := workload.Pod{UID: "u", Namespace: "shop", Name: "web", ServiceAccount: "web"}
	forged := workload.FromPod(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "evil", Name: "web", UID: "own",
		Annotations: map[string]string{"kubernetes.io/config.mirror": "x", "kubernetes.io/config.hash": victim.UID},
	}}, nil)
	if forged.UID != victim.UID {
		t.Fatalf("the forged pod has UID %q, and forges nothing", forged.UID)
	}
	for name, tc := range map[string]struct {
		pods fixed
		of   *Enroller
		want string
	}{
		"listed first":               {fixed{forged, victim}, &Enroller{}, "shop/web"},
		"listed last":                {fixed{victim, forged}, &Enroller{}, "shop/web"},
		"of a pod that is not there": {fixed{forged}, &Enroller{}, "evil/web"},
		"the pod is enrolled":        {fixed{forged}, &Enroller{pods: map[string]*enrolment{"u": {}}}, ""},
		"the pod was enrolled":       {fixed{forged}, &Enroller{holds: map[string]holding{"u": holdsOurs}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			e := tc.of
			e.cfg.Inventory = tc.pods
			got := ""
			if pod, ok := e.list().pod(victim.UID); ok {
				got = pod.String()
			}
			if got != tc.want {
				t.Errorf("UID %s is %q, want %q", victim.UID, got, tc.want)
			}
			// An operator who withdraws the forged pod does not withdraw the other.
			named, err := e.named([]string{"evil/web"})
			if isThere := tc.want == "evil/web"; errors.Is(err, ErrNoSuchPod) == isThere || len(named) == 1 != isThere {
				t.Errorf("named evil/web is %v, %v", named, err)
			}
		})
	}
}

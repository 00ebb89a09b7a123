// SPDX-License-Identifier: Apache-2.0

package enroll

import "ambientd/nodeagent/workload"

// listing is the inventory at one time.
type listing struct {
	pods     []workload.Pod
	byUID    map[string]int // where in pods
	complete bool           // what is missing is gone
}

func (e *Enroller) list() listing {
	pods, complete := e.cfg.Inventory.List()
	l := listing{pods: pods, byUID: make(map[string]int, len(pods)), complete: complete}
	e.mu.Lock()
	defer e.mu.Unlock()
	for i := range pods {
		if _, taken := l.byUID[pods[i].UID]; !pods[i].Static || !taken && !e.isMeshed(pods[i].UID) {
			l.byUID[pods[i].UID] = i
		}
	}
	return l
}

// isMeshed tells whether the pod is enrolled, or holds rules of an enrolment. What calls itself a
// static pod and has its UID is another's word then: the UID of such a pod is an annotation, which a
// tenant may write, and none is ever in the mesh. The caller holds Enroller.mu.
func (e *Enroller) isMeshed(uid string) bool {
	_, enrolled := e.pods[uid]
	return enrolled || e.holds[uid] == holdsOurs
}

func (l listing) pod(uid string) (workload.Pod, bool) {
	i, ok := l.byUID[uid]
	if !ok {
		return workload.Pod{}, false
	}
	return l.pods[i], true
}

// known returns one pod for each UID, the one that counts.
func (l listing) known() []workload.Pod {
	pods := make([]workload.Pod, 0, len(l.byUID))
	for _, i := range l.byUID {
		pods = append(pods, l.pods[i])
	}
	return pods
}

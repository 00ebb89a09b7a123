// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"context"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/workload"
)

// scoutRest is how long nothing has to change before the agent looks where pods outside the
// mesh run. Whoever starts or changes pods is not to wait for that.
const scoutRest = time.Second

// scouts knows by UID the pods that were looked for. One that was not found is not looked for
// again: should it come to belong in the mesh, it will be.
type scouts map[string]struct{}

// scout finds out where pods outside the mesh run, as far as no ADD has told, such as that of
// a pod which is older than the plugin. When their namespace is switched on they need not be
// looked for among all processes, of which a node may have thousands.
func (e *Enroller) scout(ctx context.Context, looked scouts) {
	pods := e.unplaced(e.list(), looked)
	if len(pods) == 0 {
		return
	}
	wanted := make([]podnetns.Wanted, 0, len(pods))
	for _, pod := range pods {
		looked[pod.UID] = struct{}{}
		wanted = append(wanted, podnetns.Wanted{UID: pod.UID, IPs: pod.IPs})
	}
	found, _ := e.cfg.Finder.Find(ctx, wanted)
	for _, pod := range pods {
		ns, ok := found[pod.UID]
		if !ok {
			continue
		}
		e.notePlace(pod, ns)
		if err := ns.Close(); err != nil {
			e.cfg.Logger.Debug("closing the netns of a pod outside the mesh", "pod", pod.String(), "uid", pod.UID, "err", err)
		}
	}
	e.cfg.Logger.Debug("looked for pods outside the mesh", "wanted", len(pods), "found", len(found))
}

// unplaced returns the pods outside the mesh of which it is not known where they run, but
// those that were looked for, and forgets among the latter those that are gone.
func (e *Enroller) unplaced(l listing, looked scouts) []workload.Pod {
	if l.complete {
		for uid := range looked {
			if _, ok := l.pod(uid); !ok {
				delete(looked, uid)
			}
		}
	}
	var pods []workload.Pod
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, i := range l.byUID {
		pod := l.pods[i]
		_, enrolled := e.pods[pod.UID]
		_, placed := e.places[pod.UID]
		_, before := looked[pod.UID]
		runs := pod.Phase == corev1.PodRunning && !pod.HostNetwork && len(pod.IPs) > 0 && !e.isOver(pod.UID)
		if runs && !enrolled && !placed && !before {
			pods = append(pods, pod)
		}
	}
	return pods
}

// notePlace notes where a pod outside the mesh was found, unless more is known meanwhile.
func (e *Enroller) notePlace(pod workload.Pod, ns *podnetns.Netns) {
	e.mu.Lock()
	defer e.mu.Unlock()
	_, enrolled := e.pods[pod.UID]
	_, placed := e.places[pod.UID]
	_, ended := e.ended[pod.UID]
	if !enrolled && !placed && !ended {
		e.places[pod.UID] = place{namespace: pod.Namespace, name: pod.Name, path: ns.Path(), key: ns.Key(), ips: pod.IPs}
	}
}

// keptFile is the file as which the runtime keeps the netns, or "". A path of a process is
// none: its number is given to another process when it has ended.
func (p place) keptFile() string {
	if strings.HasPrefix(p.path, "/proc/") {
		return ""
	}
	return p.path
}

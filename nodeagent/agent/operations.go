// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/enroll"
	"ambientd/nodeagent/workload"
)

// probesAtOnce bounds how many pods are connected to at the same time.
const probesAtOnce = 8

var (
	errNotEnrolled = errors.New("it is not enrolled")
	errBusy        = errors.New("it is ending, has left the mesh, or something else is being done to it")
)

// operations are what operators ask for, over all parts.
type operations struct {
	parts *parts

	mu      sync.Mutex
	checked map[string][]admin.ProbeFinding // by pod UID, of the last check
}

// Verify is part of admin.Operations.
func (o *operations) Verify(ctx context.Context, req admin.VerifyRequest) (admin.VerifyResult, error) {
	pods, err := o.selected(ctx, req.Pods)
	if err != nil {
		return admin.VerifyResult{}, err
	}
	var result admin.VerifyResult
	var host sync.WaitGroup
	host.Go(func() {
		differences, err := o.parts.auditor.Host(ctx)
		result.Host = admin.HostFinding{Differences: differences, Error: text(err)}
	})
	result.Pods = o.verifyPods(ctx, pods)
	host.Wait()
	if req.Probes {
		o.probe(ctx, pods, result.Pods)
	}
	return result, nil
}

// selected returns the enrolled pods that are meant, and those named that are not
// enrolled with nothing but their names, sorted.
func (o *operations) selected(ctx context.Context, names []string) ([]enroll.Member, error) {
	pods := o.parts.enroller.Members()
	if len(names) > 0 {
		pods = slices.DeleteFunc(pods, func(pod enroll.Member) bool { return !isNamed(pod, names) })
	}
	var listed []workload.Pod
	if len(names) > 0 {
		listed, _ = o.parts.pods.List()
	}
	for _, name := range names {
		if slices.ContainsFunc(pods, func(p enroll.Member) bool { return isNamed(p, []string{name}) }) {
			continue
		}
		i := slices.IndexFunc(listed, func(p workload.Pod) bool { return name == p.UID || name == p.String() })
		if i >= 0 {
			pods = append(pods, enroll.Member{Namespace: listed[i].Namespace, Name: listed[i].Name})
			continue
		}
		// What has just been written is not in the list yet.
		namespace, short, _ := strings.Cut(name, "/")
		if _, err := o.parts.pods.Lookup(ctx, namespace, short, ""); err != nil {
			return nil, fmt.Errorf("%s: %w", name, admin.ErrNoSuchPod)
		}
		pods = append(pods, enroll.Member{Namespace: namespace, Name: short})
	}
	slices.SortStableFunc(pods, func(a, b enroll.Member) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	return pods, nil
}

func isNamed(pod enroll.Member, names []string) bool {
	return slices.Contains(names, pod.UID) || slices.Contains(names, nameOf(pod))
}

func nameOf(pod enroll.Member) string { return pod.Namespace + "/" + pod.Name }

// verifyPods audits pods; findings are in their order.
func (o *operations) verifyPods(ctx context.Context, pods []enroll.Member) []admin.PodFinding {
	var uids []string
	for _, pod := range pods {
		if pod.UID != "" {
			uids = append(uids, pod.UID)
		}
	}
	byUID := make(map[string]enroll.Finding, len(uids))
	if len(uids) > 0 {
		for _, f := range o.parts.auditor.Pods(ctx, uids) {
			byUID[f.UID] = f
		}
	}
	findings := make([]admin.PodFinding, 0, len(pods))
	for _, pod := range pods {
		f := admin.PodFinding{Pod: nameOf(pod), UID: pod.UID}
		switch found, ok := byUID[pod.UID]; {
		case pod.UID == "":
			f.Error = errNotEnrolled.Error()
		case !ok:
			f.Error = errBusy.Error()
		default:
			f.Differences, f.Error = found.Differences, text(found.Err)
		}
		findings = append(findings, f)
	}
	return findings
}

// probe connects to each pod from the host and notes what arrived.
func (o *operations) probe(ctx context.Context, pods []enroll.Member, findings []admin.PodFinding) {
	var work errgroup.Group
	work.SetLimit(probesAtOnce)
	for i, pod := range pods {
		ns, pinned := o.parts.pins.Get(pod.UID)
		if !pinned {
			continue
		}
		work.Go(func() error {
			for _, arrival := range o.parts.probes.CheckSource(ctx, pod.UID, pod.IPs, ns.Do) {
				findings[i].Probes = append(findings[i].Probes, admin.ProbeFinding{
					Address: arrival.Addr, Want: arrival.Want, Got: arrival.Got, Error: text(arrival.Err), Checked: time.Now(),
				})
			}
			return nil
		})
	}
	_ = work.Wait() // what went wrong is in the findings
	o.keepProbes(findings)
}

// keepProbes remembers what was found, of pods that are still enrolled.
func (o *operations) keepProbes(findings []admin.PodFinding) {
	enrolled := o.parts.enroller.Enrolled()
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, f := range findings {
		if len(f.Probes) > 0 {
			o.checked[f.UID] = f.Probes
		}
	}
	for uid := range o.checked {
		if _, ok := slices.BinarySearch(enrolled, uid); !ok {
			delete(o.checked, uid)
		}
	}
}

func (o *operations) lastProbes(uid string) []admin.ProbeFinding {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.checked[uid]
}

// Withdraw is part of admin.Operations.
func (o *operations) Withdraw(ctx context.Context, pods admin.Selection) (admin.Outcome, error) {
	withdrawn, err := o.parts.enroller.Withhold(ctx, pods.Pods)
	o.keepProbes(nil) // what was found says nothing of what will be there after the way back in
	if pods.All && err == nil {
		err = o.parts.restHost(ctx)
	}
	return outcome(withdrawn, err)
}

// Enrol is part of admin.Operations.
func (o *operations) Enrol(_ context.Context, pods admin.Selection) (admin.Outcome, error) {
	return outcome(o.parts.enroller.Release(pods.Pods))
}

// outcome tells an operator's mistake from pods in which something did not work.
func outcome(pods []string, err error) (admin.Outcome, error) {
	if errors.Is(err, enroll.ErrNoSuchPod) {
		return admin.Outcome{}, noSuchPodError{err}
	}
	return admin.Outcome{Pods: pods, Error: text(err)}, nil
}

// noSuchPodError is an operator's mistake, in the enroller's words.
type noSuchPodError struct{ error }

// Is makes it admin.ErrNoSuchPod.
func (noSuchPodError) Is(target error) bool { return target == admin.ErrNoSuchPod }

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"ambientd/cni-plugin/podevent"
	"ambientd/tools/enclave"
)

const (
	addsPart, scalePart = "adds", "scale"

	// What other nodes' pods may do to the agent of this one, times without them.
	trafficLimit = 1.05
	memoryGrowth = 1.1
	cpuGrowth    = 1.5

	// kubeletClients is how many requests of kubelets are under way, of this node's and of
	// others', maxReports how often one of the others at most tells of each pod.
	kubeletClients = 4
	maxReports     = 1000
)

// scaleSize says how many pods a cluster has, and how much becomes of them.
type scaleSize struct {
	here, elsewhere int // pods: on the agent's node, all enrolled, and on others
	nodes           int // others
	namespaces      int
	reports         int           // of each pod of the node, in window
	window          time.Duration // how long they take
}

func fullScale() scaleSize {
	return scaleSize{here: 250, elsewhere: 5000, nodes: 20, namespaces: 20, reports: 2, window: 15 * time.Second}
}

// scale measures the agent of a node twice: while the cluster has no other pods, and while
// it has many, of which kubelets report all the time.
func (b *bench) scale(ctx context.Context) error {
	size := b.cfg.scale
	b.say("measuring an agent with %d pods on its node, alone and with %d on others", size.here, size.elsewhere)
	c, err := openCluster(ctx, b.dir)
	if err != nil {
		return err
	}
	defer c.close()
	m := &scaleMeasure{bench: b, cluster: c, size: size}
	for _, step := range []func(context.Context) error{
		m.populate, m.enrolAll,
		func(ctx context.Context) error { return m.measure(ctx, &m.alone) },
		m.populateOthers,
		func(ctx context.Context) error { return m.measure(ctx, &m.among) },
	} {
		if err := step(ctx); err != nil {
			return errors.Join(err, discard(m.sandboxes))
		}
	}
	b.addScale(m)
	return discard(m.sandboxes)
}

// scaleMeasure holds the figures of both.
type scaleMeasure struct {
	bench      *bench
	cluster    *cluster
	size       scaleSize
	namespaces []string
	pods       []apiPod
	others     []apiPod
	sandboxes  []sandbox

	alone, among agentLoad
}

// agentLoad is what an agent has cost.
type agentLoad struct {
	startTraffic, traffic int64         // bytes from the API server: until it was ready, and while kubelets reported
	cpu                   time.Duration // while kubelets reported
	unit                  time.Duration // of CPU that the same piece of work took in the bench meanwhile
	memory                float64       // afterwards, in MB
	elsewhere             int           // reports of other nodes' kubelets meanwhile
}

func (b *bench) addScale(m *scaleMeasure) {
	against := fmt.Sprintf("%d alone", m.size.here)
	ratio := func(name, unit string, value, reference, limit float64) row {
		r := row{Name: name, Value: value, Unit: unit, Ratio: value / reference, Against: against, Pass: true}
		if limit > 0 {
			r.Limit, r.LimitText, r.Pass = limit, fmt.Sprintf("%g × %s", limit, against), r.Ratio <= limit
		}
		return r
	}
	one, other := m.alone, m.among
	// A busy machine makes the same work dearer, and API servers and kubelets make it busy.
	dearer := float64(other.unit) / float64(one.unit)
	what := fmt.Sprintf("with %d pods here and %d on other nodes: ", m.size.here, m.size.elsewhere)
	b.rows = append(b.rows,
		amount(fmt.Sprintf("reports of other nodes' kubelets, while those of this node reported %d", m.size.here*m.size.reports), float64(other.elsewhere), "", 0, ""),
		ratio(what+"traffic from the API server for them", "kB", float64(other.traffic)/1e3, float64(one.traffic)/1e3, trafficLimit),
		ratio(what+"traffic until the agent is ready", "kB", float64(other.startTraffic)/1e3, float64(one.startTraffic)/1e3, trafficLimit),
		ratio(what+fmt.Sprintf("the agent's CPU for them, where other work took %.2f × as much", dearer), "ms", float64(other.cpu)/1e6, float64(one.cpu)/1e6*dearer, cpuGrowth),
		ratio(what+"its resident memory", "MB", other.memory, one.memory, memoryGrowth))
}

// populate makes the node's pods, all in the mesh.
func (m *scaleMeasure) populate(ctx context.Context) (err error) {
	if m.namespaces, err = m.cluster.makeNamespaces(ctx, "scale", m.size.namespaces, inMesh); err != nil {
		return err
	}
	m.pods, err = m.cluster.makePods(ctx, m.cluster.name, m.namespaces, m.size.here)
	return err
}

// populateOthers makes the pods of other nodes. They are in the same namespaces: only their
// node tells them from those here.
func (m *scaleMeasure) populateOthers(ctx context.Context) error {
	began := time.Now()
	m.others = make([]apiPod, m.size.elsewhere)
	err := each(ctx, m.size.elsewhere, func(ctx context.Context, i int) (err error) {
		node := fmt.Sprintf("%s-other-%d", m.cluster.name, i%m.size.nodes)
		m.others[i], err = m.cluster.makePod(ctx, node, m.namespaces[i%len(m.namespaces)], i)
		return err
	})
	m.bench.say("%d pods of other nodes made in %v", m.size.elsewhere, time.Since(began).Round(time.Second))
	return err
}

// enrolAll is what kubelet and the runtime do for each pod of the node, with an agent that
// ends afterwards: both agents that are measured are to find the same.
func (m *scaleMeasure) enrolAll(ctx context.Context) error {
	for i, pod := range m.pods {
		netns, err := enclave.MakeNetns("cni-" + pod.Name)
		if err != nil {
			return err
		}
		m.sandboxes = append(m.sandboxes, sandbox{id: "sandbox-" + pod.UID, number: i + 1, pod: pod.Pod, netns: netns})
		if err := netns.Do(func() error { return errors.Join(loopbackUp(), addToLoopback(pod.ips)) }); err != nil {
			return err
		}
	}
	return m.withAgent(ctx, func(node *node, _ int64) error {
		if _, err := callAll(ctx, podevent.CommandAdd, m.sandboxes); err != nil {
			return err
		}
		if err := m.cluster.reportAll(ctx, m.pods, 0); err != nil {
			return err
		}
		return quiet(ctx, node.agent, m.cluster.agents)
	})
}

// withAgent runs fn with an agent that has just become ready and is idle, and with what
// had come from the API server before it was started.
func (m *scaleMeasure) withAgent(ctx context.Context, fn func(node *node, before int64) error) error {
	before := m.cluster.agents.Answered()
	node, err := m.bench.startAPINode(ctx, m.cluster, m.cluster.name)
	if err != nil {
		return err
	}
	err = quiet(ctx, node.agent, m.cluster.agents)
	if err == nil {
		err = fn(node, before)
	}
	if err != nil {
		err = fmt.Errorf("%w; the agent's log ends with:\n%s", err, node.agent.Log().Tail(10))
	}
	return errors.Join(err, node.stop())
}

// measure measures an agent that finds all pods of its node enrolled, and then all kubelets
// report.
func (m *scaleMeasure) measure(ctx context.Context, into *agentLoad) error {
	return m.withAgent(ctx, func(node *node, before int64) error {
		ready := m.cluster.agents.Answered()
		into.startTraffic = ready - before
		if enrolled := node.proxy.held(); enrolled != len(m.pods) {
			return fmt.Errorf("the node proxy has %d pods, want %d", enrolled, len(m.pods))
		}
		idleCPU, err := cpuTime(node.agent.Pid())
		if err != nil {
			return err
		}
		var stop atomic.Bool
		unit := make(chan time.Duration, 1)
		go func() { unit <- workUnit(&stop) }()
		into.elsewhere, err = m.kubelets(ctx)
		stop.Store(true)
		into.unit = <-unit
		if err != nil {
			return err
		}
		if err := quiet(ctx, node.agent, m.cluster.agents); err != nil {
			return err
		}
		into.traffic = m.cluster.agents.Answered() - ready
		cpu, err := cpuTime(node.agent.Pid())
		if err != nil {
			return err
		}
		into.cpu = cpu - idleCPU
		memory, err := memoryOf(node.agent.Pid())
		into.memory = memory["VmRSS"]
		return err
	})
}

// kubelets report of all pods: those of the agent's node evenly over the window, others
// all the time. It returns how many reports those others' were.
func (m *scaleMeasure) kubelets(ctx context.Context) (others int, err error) {
	var stop atomic.Bool
	var count atomic.Int64
	group, ctx := errgroup.WithContext(ctx)
	for worker := range kubeletClients {
		group.Go(func() error {
			for i := worker; i < len(m.others)*maxReports && !stop.Load(); i += kubeletClients {
				if err := m.cluster.report(ctx, m.others[i%len(m.others)], i/len(m.others)); err != nil {
					return err
				}
				count.Add(1)
			}
			return nil
		})
	}
	group.Go(func() error {
		defer stop.Store(true)
		return m.reportEvenly(ctx)
	})
	err = group.Wait()
	return int(count.Load()), err
}

// reportEvenly reports of the node's pods. Those reports that the API server is slow to
// take do not hold up others.
func (m *scaleMeasure) reportEvenly(ctx context.Context) error {
	pace := time.NewTicker(m.size.window / time.Duration(m.size.reports*len(m.pods)))
	defer pace.Stop()
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(kubeletClients)
	for i := range m.size.reports * len(m.pods) {
		select {
		case <-pace.C:
		case <-ctx.Done():
			return group.Wait()
		}
		group.Go(func() error { return m.cluster.report(ctx, m.pods[i%len(m.pods)], 1+i/len(m.pods)) })
	}
	return group.Wait()
}

// workUnit returns what CPU time a piece of work like the agent's takes, each time after a
// pause as the agent has them: the median of many until it is to stop, at least of one.
func workUnit(stop *atomic.Bool) time.Duration {
	const pause = 20 * time.Millisecond
	object := apiPodObject("shop", "web", "node")
	var f figure
	for done := false; !done; done = stop.Load() {
		time.Sleep(pause)
		f.add(threadTime(func() {
			for range 4 {
				text, err := object.Marshal()
				if err == nil {
					err = new(corev1.Pod).Unmarshal(text)
				}
				if err != nil {
					panic(err) // it is the same each time
				}
			}
		}))
	}
	return f.median()
}

// threadTime returns the CPU time that fn takes.
func threadTime(fn func()) time.Duration {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	now := func() time.Duration {
		var t unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
			panic(err) // there is no clock that could be missing
		}
		return time.Duration(t.Nano())
	}
	start := now()
	fn()
	return now() - start
}

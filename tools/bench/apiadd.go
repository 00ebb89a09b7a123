// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"ambientd/cni-plugin/podevent"
	"ambientd/tools/apitest"
	"ambientd/tools/enclave"
)

const (
	// agentInLoopLimit is what an ADD may take with the real agent, times a plugin that
	// does nothing.
	agentInLoopLimit = 1.6
	// memoryLimit is what the agent may have in memory, in MB.
	memoryLimit = 35
	// apiLook is the pause between two looks at what the API server has done.
	apiLook = 10 * time.Millisecond
)

// nodeSize says what is at the API server for a node.
type nodeSize struct {
	namespaces, meshed int // in all, and of them in the mesh
	pods, enrolled     int // in all, and of them in the mesh
}

func fullNode() nodeSize { return nodeSize{namespaces: 100, meshed: 10, pods: 400, enrolled: 120} }

// adds measures what ADDs take with the real agent and its pods at a real API server, what
// they cost there, and what memory the agent has then.
func (b *bench) adds(ctx context.Context) (err error) {
	size := b.cfg.node
	b.say("measuring ADDs with a real API server: %d pods in %d namespaces, of which %d are enrolled", size.pods, size.namespaces, size.enrolled)
	c, err := openCluster(ctx, b.dir)
	if err != nil {
		return err
	}
	defer c.close()
	m := &addsMeasure{bench: b, cluster: c, size: size}
	if err := m.populate(ctx); err != nil {
		return err
	}
	if m.node, err = b.startAPINode(ctx, c, c.name); err != nil {
		return err
	}
	for _, step := range []func(context.Context) error{m.addAll, m.settle} {
		if err := step(ctx); err != nil {
			return errors.Join(err, fmt.Errorf("the agent's log ends with:\n%s", m.node.agent.Log().Tail(10)), m.node.stop(), discard(m.sandboxes))
		}
	}
	b.addAdds(m)
	return errors.Join(m.node.stop(), discard(m.sandboxes))
}

// startAPINode starts the agent for that node of the cluster, by nftables.
func (b *bench) startAPINode(ctx context.Context, c *cluster, name string) (*node, error) {
	return b.startNode(ctx, agentCommand{
		redirection: nftablesName, podsFrom: "kubernetes", args: []string{"--kubeconfig=" + c.kubeconfig, "--node-name=" + name},
	})
}

// addsMeasure holds the figures of ADDs.
type addsMeasure struct {
	bench     *bench
	cluster   *cluster
	size      nodeSize
	node      *node
	meshed    []string // namespaces
	pods      []apiPod // enrolled
	sandboxes []sandbox
	began     time.Time

	ours, noop             figure
	reads, patches, others int
	memory, peak, own      float64 // MB; own is without the pages of the program's file
}

func (b *bench) addAdds(m *addsMeasure) {
	what := fmt.Sprintf("%d pods known, %d enrolled, %d namespaces", m.size.pods, m.size.enrolled, m.size.namespaces)
	b.rows = append(b.rows,
		duration("a plugin that does nothing, in turns with the next", m.noop, "", 0, 0, ""),
		duration("ambient-cni and ambientd, pods from an API server: ADD to reply", m.ours, "noop", m.noop.median(), agentInLoopLimit, "1.6 × noop"),
		none(fmt.Sprintf("the agent's reads at the API server for %d ADDs", len(m.pods)), m.reads),
		exactly("its patches of pods/status for each ADD", float64(m.patches)/float64(len(m.pods)), 1),
		none("its other requests", m.others),
		amount("ambientd: resident memory, "+what, m.memory, "MB", memoryLimit, fmt.Sprintf("%d MB", memoryLimit)),
		amount("ambientd: of that its own, without the program's file", m.own, "MB", 0, ""),
		amount("ambientd: the most that it had", m.peak, "MB", 0, ""))
}

// populate makes everything at the API server but the pods that are to be enrolled.
func (m *addsMeasure) populate(ctx context.Context) (err error) {
	if m.meshed, err = m.cluster.makeNamespaces(ctx, "mesh", m.size.meshed, inMesh); err != nil {
		return err
	}
	plain, err := m.cluster.makeNamespaces(ctx, "plain", m.size.namespaces-m.size.meshed, outside)
	if err != nil {
		return err
	}
	others, err := m.cluster.makePods(ctx, m.cluster.name, plain, m.size.pods-m.size.enrolled)
	if err != nil {
		return err
	}
	return m.cluster.reportAll(ctx, others, 0)
}

// addAll enrols pods one by one, each soon after it has come to the API server.
func (m *addsMeasure) addAll(ctx context.Context) error {
	m.began = time.Now()
	for i := range m.size.enrolled {
		if err := m.add(ctx, i); err != nil {
			return err
		}
	}
	return nil
}

// add waits until the agent knows the pod and has nothing to do, and then takes a sample.
func (m *addsMeasure) add(ctx context.Context, number int) error {
	netns, err := enclave.MakeNetns(fmt.Sprintf("cni-%d", number))
	if err != nil {
		return err
	}
	m.sandboxes = append(m.sandboxes, sandbox{netns: netns})
	if err := netns.Do(loopbackUp); err != nil {
		return err
	}
	before := m.cluster.agents.Answered()
	pod, err := m.cluster.makePod(ctx, m.cluster.name, m.meshed[number%len(m.meshed)], number)
	if err != nil {
		return err
	}
	if err := awaitTraffic(ctx, m.cluster.agents, before); err != nil {
		return err
	}
	if _, err := idle(ctx, m.node.agent); err != nil {
		return err
	}
	before = m.cluster.agents.Answered()
	run := pluginRun{netns: netns.Path(), stdin: pluginStdin(podevent.DefaultSocket, netns.Path(), pod.ips), container: "sandbox-" + pod.UID, pod: pod.Pod}
	for _, p := range []struct {
		path   string
		figure *figure
	}{{m.bench.cfg.noop, &m.noop}, {filepath.Join(m.bench.cfg.bin, "ambient-cni"), &m.ours}} {
		run.path = p.path
		if err := p.figure.time(func() error { return run.do(ctx) }); err != nil {
			return err
		}
	}
	m.pods = append(m.pods, pod)
	// The patch of the pod's status comes later, and must not meet the next pod's ADD.
	if err := awaitTraffic(ctx, m.cluster.agents, before); err != nil {
		return err
	}
	_, err = idle(ctx, m.node.agent)
	return err
}

// awaitTraffic returns once more than before has come from the API server.
func awaitTraffic(ctx context.Context, relay *apitest.Relay, before int64) error {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	for relay.Answered() <= before {
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("waiting for the API server to tell the agent: %w", ctx.Err())
		}
	}
	return nil
}

// settle counts requests, and looks at memory once all pods have been reported to run.
func (m *addsMeasure) settle(ctx context.Context) error {
	if err := m.countRequests(ctx); err != nil {
		return err
	}
	if err := m.cluster.reportAll(ctx, m.pods, 0); err != nil {
		return err
	}
	if err := quiet(ctx, m.node.agent, m.cluster.agents); err != nil {
		return err
	}
	// Enrolled is what the proxy has.
	if enrolled := m.node.proxy.held(); enrolled != len(m.pods) {
		return fmt.Errorf("the node proxy has %d pods, want %d", enrolled, len(m.pods))
	}
	memory, err := memoryOf(m.node.agent.Pid())
	if err != nil {
		return err
	}
	m.memory, m.peak, m.own = memory["VmRSS"], memory["VmHWM"], memory["RssAnon"]
	return nil
}

// countRequests counts what the agent has asked of the API server, once that has written
// down a patch for each pod. A watch is no read: it goes on.
func (m *addsMeasure) countRequests(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	for {
		requests, err := m.cluster.requests(m.began)
		if err != nil {
			return err
		}
		m.reads, m.patches, m.others = 0, 0, 0
		for _, r := range requests {
			switch {
			case r.Verb == "get" || r.Verb == "list":
				m.reads++
			case r.Verb == "patch" && r.ObjectRef.Resource == "pods" && r.ObjectRef.Subresource == "status":
				m.patches++
			case r.Verb != "watch":
				m.others++
			}
		}
		if m.patches >= len(m.pods) {
			return nil
		}
		select {
		case <-time.After(apiLook):
		case <-ctx.Done():
			return fmt.Errorf("waiting for a patch of each of %d pods, %d have come: %w", len(m.pods), m.patches, ctx.Err())
		}
	}
}

// quiet waits until the agent has nothing to do, and nothing comes for it.
func quiet(ctx context.Context, agent *enclave.Process, relay *apitest.Relay) error {
	for {
		before := relay.Answered()
		for range 4 {
			if _, err := idle(ctx, agent); err != nil {
				return err
			}
		}
		if relay.Answered() == before {
			return nil
		}
	}
}

// memoryOf returns what /proc/PID/status says of a process' memory, in MB.
func memoryOf(pid int) (map[string]float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return nil, fmt.Errorf("reading the memory of process %d: %w", pid, err)
	}
	memory := map[string]float64{}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(line, ":")
		kib, ok := strings.CutSuffix(strings.TrimSpace(value), " kB")
		if !ok {
			continue
		}
		amount, err := strconv.ParseFloat(kib, 64)
		if err != nil {
			return nil, fmt.Errorf("reading the memory of process %d: %w", pid, err)
		}
		memory[name] = amount * 1024 / 1e6
	}
	return memory, nil
}

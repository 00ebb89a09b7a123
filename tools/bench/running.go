// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"ambientd/cni-plugin/podevent"
	"ambientd/nodeagent/admin"
	"ambientd/tools/enclave"
)

// Limits of what the agent does with pods that run already, times R in all.
const (
	auditLimit   = 1.5
	switchLimit  = 4
	restartLimit = 15

	// switchTimeout bounds a namespace's way in or out; iptables takes seconds.
	switchTimeout = time.Minute
	// adminSocket is where the agent takes operations.
	adminSocket = podevent.DefaultRunDir + "/private/admin.sock"
	// iptablesShare is how many times fewer samples the iptables backend gets, which takes a
	// hundred times as long.
	iptablesShare = 10

	nftablesName, iptablesName = "nftables", "iptables"

	// Parts that need the same crowd.
	finderPart, runningPart = "finder", "running"
)

// running measures what the real agent does with a crowd of pods that run before it knows
// of them, and what finding them takes.
func (b *bench) running(ctx context.Context) error {
	b.say("starting %d pods among %d processes", b.cfg.crowd.pods(), b.cfg.crowd.processes())
	crowd, err := newCrowd(ctx, b.cfg.crowd)
	if err != nil {
		return err
	}
	manifests := filepath.Join(b.dir, "crowd")
	parts := []func() error{func() error { return writeCrowd(manifests, crowd) }}
	if slices.Contains(b.cfg.parts, finderPart) {
		parts = append(parts, func() error { return b.finder(ctx, crowd) })
	}
	if slices.Contains(b.cfg.parts, runningPart) {
		for _, backend := range b.cfg.backends {
			rounds := b.cfg.rounds
			if backend == iptablesName {
				rounds = max(1, rounds/iptablesShare)
			}
			parts = append(parts, func() error { return b.runningOn(ctx, backend, crowd, manifests, rounds) })
		}
	}
	for _, part := range parts {
		if err := part(); err != nil {
			return errors.Join(err, crowd.disperse())
		}
	}
	return crowd.disperse()
}

// runningOn measures on one backend. It begins and ends with all pods outside of the mesh.
func (b *bench) runningOn(ctx context.Context, backend string, crowd *crowd, manifests string, rounds int) error {
	b.say("measuring running pods on %s: a namespace's label, audits, restarts; %d rounds", backend, rounds)
	m := &runningMeasure{bench: b, backend: backend, crowd: crowd, manifests: manifests, rounds: rounds}
	if err := m.start(ctx, nil); err != nil {
		return err
	}
	for _, step := range []func(context.Context) error{m.switches, m.audits, m.restarts, m.countRestart, m.leave} {
		if err := step(ctx); err != nil {
			return errors.Join(err, fmt.Errorf("ambientd's log ends with:\n%s", m.node.agent.Log().Tail(10)), m.node.stop())
		}
	}
	b.addRunning(m)
	return m.node.stop()
}

// runningMeasure holds the figures of one backend.
type runningMeasure struct {
	bench     *bench
	backend   string
	crowd     *crowd
	manifests string
	rounds    int
	node      *node

	switchOn, audit, restart figure
	switchCPU                figure // of the agent, until all were enrolled
	r                        figure // R, in turns with these
	children                 int    // of the restart
}

func (b *bench) addRunning(m *runningMeasure) {
	// The machine may have become another one since the rules were measured.
	limited := func(name string, f figure, limit float64) row {
		text := fmt.Sprintf("%g R", limit)
		if m.backend != nftablesName || limit == 0 {
			limit, text = 0, ""
		}
		return duration(m.backend+": "+name, f, yardstickName, m.r.median(), limit, text)
	}
	b.rows = append(b.rows,
		duration("R again, in turns with what follows", m.r, yardstickName, b.r.median(), 0, ""),
		limited(fmt.Sprintf("audit of %d healthy pods, in all", m.crowd.size.pods()), m.audit, auditLimit),
		limited(fmt.Sprintf("a namespace of %d running pods switched on, until all are enrolled", m.crowd.size.members), m.switchOn, switchLimit),
		limited("the agent's CPU for that", m.switchCPU, 0),
		limited(fmt.Sprintf("restart with %d enrolled pods, until all are verified and acked and the agent is ready", m.crowd.size.members), m.restart, restartLimit))
	name := m.backend + ": child processes of that restart"
	if m.backend == nftablesName {
		b.rows = append(b.rows, none(name, m.children))
		return
	}
	b.rows = append(b.rows, amount(name, float64(m.children), "", 0, ""))
}

// start starts the agent on a node whose processes are the crowd's. Keys do not linger:
// each time that a namespace is switched on is to be like the first.
func (m *runningMeasure) start(ctx context.Context, env []string) error {
	started, err := m.bench.startNode(ctx, agentCommand{
		redirection: m.backend, podsFrom: "manifests=" + m.manifests, env: env,
		args: []string{"--proc-root=" + m.crowd.proc, "--cert-linger=0s"},
	})
	if err == nil {
		m.node = started
	}
	return err
}

// switches switches a namespace on and off, and in the end leaves it on.
func (m *runningMeasure) switches(ctx context.Context) error {
	if _, _, err := m.change(ctx, switched, inMesh); err != nil {
		return err
	}
	for range m.rounds {
		if _, _, err := m.change(ctx, switched, outside); err != nil {
			return err
		}
		took, cpu, err := m.change(ctx, switched, inMesh)
		if err != nil {
			return err
		}
		m.switchOn.add(took)
		m.switchCPU.add(cpu)
	}
	return nil
}

// change switches a namespace and waits until all its pods have followed. It returns how
// long the last of them took, and what CPU time the agent spent meanwhile.
func (m *runningMeasure) change(ctx context.Context, namespace string, to membership) (took, cpu time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, switchTimeout)
	defer cancel()
	cpuBefore, err := m.pause(ctx)
	if err != nil {
		return 0, 0, err
	}
	pods := m.crowd.size.members
	if namespace == others {
		pods = m.crowd.size.bystanders
	}
	message, held := "running pod enrolled", m.node.proxy.held()+pods
	if to == outside {
		message, held = "running pod withdrawn", held-2*pods
	}
	from, began := m.node.agent.Log().Len(), time.Now()
	if err := switchNamespace(m.manifests, namespace, to); err != nil {
		return 0, 0, err
	}
	if err := m.node.proxy.awaitPods(ctx, held); err != nil {
		return 0, 0, fmt.Errorf("switching namespace %s: %w", namespace, err)
	}
	followed, last := 0, began
	_, err = m.node.agent.Log().Await(ctx, from, func(l enclave.Line) bool {
		if says(message)(l) {
			followed++
			last = l.Time()
		}
		return followed == pods
	})
	if err != nil {
		return 0, 0, fmt.Errorf("switching namespace %s: %d of %d pods have followed: %w", namespace, followed, pods, err)
	}
	cpuAfter, err := cpuTime(m.node.agent.Pid())
	return last.Sub(began), cpuAfter - cpuBefore, err
}

// pause takes a sample of R once the agent is idle, and returns what CPU time that had
// used before.
func (m *runningMeasure) pause(ctx context.Context) (time.Duration, error) {
	if _, err := idle(ctx, m.node.agent); err != nil {
		return 0, err
	}
	if err := m.bench.yardstick.sample(ctx, &m.r); err != nil {
		return 0, err
	}
	return idle(ctx, m.node.agent)
}

// audits enrols all pods, and has all of them compared with the kernel while nothing is
// wrong with them.
func (m *runningMeasure) audits(ctx context.Context) error {
	if _, _, err := m.change(ctx, others, inMesh); err != nil {
		return err
	}
	for range m.rounds {
		if _, err := m.pause(ctx); err != nil {
			return err
		}
		if err := m.audit.time(func() error { return m.verify(ctx) }); err != nil {
			return err
		}
	}
	_, _, err := m.change(ctx, others, outside)
	return err
}

// verify asks the agent for an audit, as `ambientd verify` does.
func (m *runningMeasure) verify(ctx context.Context) error {
	result, err := admin.Verify(ctx, adminSocket, admin.VerifyRequest{})
	if err != nil {
		return err
	}
	if !result.OK() || len(result.Pods) != len(m.crowd.pods) {
		return fmt.Errorf("an audit of %d healthy pods finds %+v", len(m.crowd.pods), result)
	}
	return nil
}

// restarts ends the agent and starts it again.
func (m *runningMeasure) restarts(ctx context.Context) error {
	for range m.rounds {
		if err := m.again(ctx, nil); err != nil {
			return err
		}
		m.restart.add(m.node.ready)
	}
	return nil
}

// again restarts the agent, which must find the pods of the namespace that is on.
func (m *runningMeasure) again(ctx context.Context, env []string) error {
	if _, err := m.pause(ctx); err != nil {
		return err
	}
	if err := m.node.stop(); err != nil {
		return err
	}
	if err := m.start(ctx, env); err != nil {
		return err
	}
	taken := m.node.agent.Log().Find(0, func(l enclave.Line) bool {
		return says("pods of an earlier agent taken up")(l) && l.Field("enrolled") == strconv.Itoa(m.crowd.size.members)
	})
	if acked := m.node.proxy.held(); len(taken) != 1 || acked != m.crowd.size.members {
		return fmt.Errorf("after a restart %d pods are with the node proxy, want %d, all taken up", acked, m.crowd.size.members)
	}
	return nil
}

// countRestart counts the child processes of a restart: it stands in for programs that
// the agent may start, and asks the kernel whether there was another one.
func (m *runningMeasure) countRestart(ctx context.Context) error {
	counter, err := newCounter(m.bench.dir)
	if err != nil {
		return err
	}
	m.children, err = counter.count(func() error { return m.again(ctx, counter.env()) })
	if err != nil {
		return err
	}
	some, err := hadChildren(m.node.agent.Pid())
	if err == nil && some {
		m.children = max(m.children, 1)
	}
	return err
}

// leave switches the namespace off again.
func (m *runningMeasure) leave(ctx context.Context) error {
	_, _, err := m.change(ctx, switched, outside)
	return err
}

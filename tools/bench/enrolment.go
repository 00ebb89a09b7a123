// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"ambientd/cni-plugin/podevent"
	"ambientd/tools/enclave"
)

const (
	// fewPods are on the smaller of the two nodes that are compared.
	fewPods = 10
	// atOnce is how many ADDs are under way at any time.
	atOnce = 16
	// batch is how many pods are enrolled for one sample of CPU time, and withdrawn again.
	batch = 160
	// turns is how often the node grows and shrinks: a machine's speed drifts more than what
	// is compared.
	turns = 3
	// cpuLimit is what an enrolment may cost the agent, times R.
	cpuLimit = 1.0 / 20
	// growthLimit is what a hundred times the pods may do to the latency.
	growthLimit = 1.2

	// callTimeout bounds one event; it is more than the agent's own limit of an ADD.
	callTimeout = 20 * time.Second
)

// enrolment measures enrolments through the agent's socket: the real agent, and a node
// proxy that acks at once.
func (b *bench) enrolment(ctx context.Context) error {
	b.say("measuring enrolments, %d at once, with %d and with %d pods", atOnce, fewPods, b.cfg.pods)
	manifests := filepath.Join(b.dir, "manifests")
	if err := writeManifests(manifests, b.cfg.pods); err != nil {
		return err
	}
	node, err := b.startNode(ctx, agentCommand{redirection: "nftables", podsFrom: "manifests=" + manifests})
	if err != nil {
		return err
	}
	m := &enrolmentMeasure{agent: node.agent}
	if err := m.run(ctx, b.cfg.pods); err != nil {
		return errors.Join(err, fmt.Errorf("the agent's log ends with:\n%s", node.agent.Log().Tail(10)), node.stop())
	}
	b.addEnrolment(m)
	return node.stop()
}

func (b *bench) addEnrolment(m *enrolmentMeasure) {
	r := b.r.median()
	b.rows = append(b.rows,
		duration(fmt.Sprintf("ambientd: enrolment, %d at once: its CPU for each", atOnce), m.few.cpu, yardstickName, r, cpuLimit, "R/20"),
		duration("ambientd: the same with an identity that is new to it: its CPU for each", m.fresh.cpu, yardstickName, r, 0, ""),
		duration(fmt.Sprintf("ambientd: the same with %d pods enrolled: its CPU for each", b.cfg.pods), m.many.cpu, yardstickName, r, 0, ""),
		duration(fmt.Sprintf("ambientd: latency with %d pods enrolled", fewPods), m.few.latency, yardstickName, r, 0, ""),
		duration(fmt.Sprintf("ambientd: latency with %d pods enrolled", b.cfg.pods), m.many.latency,
			fmt.Sprintf("%d pods", fewPods), m.few.latency.median(), growthLimit, "1.2 × 10 pods"))
}

// sample is what enrolments cost.
type sample struct {
	latency figure
	cpu     figure // the agent's for one enrolment; one value a batch
}

// enrolmentMeasure holds the figures of enrolments.
type enrolmentMeasure struct {
	agent *enclave.Process

	few, fresh, many sample
	sandboxes        int
}

// run measures on a node of fewPods and on one of pods, in turns. All sandboxes are made
// before and used again: the kernel would take old ones apart meanwhile.
func (m *enrolmentMeasure) run(ctx context.Context, pods int) error {
	var few, more, passers, newcomers []sandbox
	for _, group := range []struct {
		into     *[]sandbox
		kind     kind
		from, to int
	}{{&few, stayer, 0, fewPods}, {&more, stayer, fewPods, pods}, {&passers, passing, 0, batch}, {&newcomers, newcomer, 0, batch}} {
		var err error
		if *group.into, err = m.make(group.kind, group.from, group.to); err != nil {
			return err
		}
	}
	call := func(command string, sandboxes []sandbox) func() error {
		return func() error { _, err := callAll(ctx, command, sandboxes); return err }
	}
	measure := func(into *sample, sandboxes []sandbox) func() error {
		return func() error { return m.batch(ctx, into, sandboxes) }
	}
	// The first enrolments of a process are slower: caches fill, memory comes from the system.
	var warmUp sample
	steps := []func() error{call(podevent.CommandAdd, few), measure(&warmUp, passers), measure(&m.fresh, newcomers)}
	for range turns {
		steps = append(steps,
			measure(&m.few, passers), measure(&m.few, passers),
			call(podevent.CommandAdd, more),
			measure(&m.many, passers), measure(&m.many, passers),
			call(podevent.CommandDel, more))
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return discard(slices.Concat(few, more, passers, newcomers))
}

// batch enrols pods, atOnce at a time, adds what that cost to the sample, and
// withdraws them again.
func (m *enrolmentMeasure) batch(ctx context.Context, into *sample, sandboxes []sandbox) error {
	before, err := idle(ctx, m.agent)
	if err != nil {
		return err
	}
	latencies, err := callAll(ctx, podevent.CommandAdd, sandboxes)
	if err != nil {
		return err
	}
	after, err := idle(ctx, m.agent)
	if err != nil {
		return err
	}
	for _, latency := range latencies {
		into.latency.add(latency)
	}
	into.cpu.add((after - before) / time.Duration(len(sandboxes)))
	_, err = callAll(ctx, podevent.CommandDel, sandboxes)
	return err
}

// make makes sandboxes for the pods of a kind, numbers from to less than to.
func (m *enrolmentMeasure) make(kind kind, from, to int) ([]sandbox, error) {
	var made []sandbox
	for i := from; i < to; i++ {
		m.sandboxes++
		netns, err := enclave.MakeNetns(fmt.Sprintf("cni-%d", m.sandboxes))
		if err != nil {
			return made, err
		}
		made = append(made, sandbox{id: fmt.Sprintf("sandbox-%d", m.sandboxes), number: m.sandboxes, pod: kind.pod(i), netns: netns})
		if err := netns.Do(loopbackUp); err != nil {
			return made, err
		}
	}
	return made, nil
}

// sandbox is a pod's network namespace, and what the runtime knows of it.
type sandbox struct {
	id     string
	number int
	pod    podevent.Pod
	netns  *enclave.Netns
}

// discard takes the network namespaces away.
func discard(sandboxes []sandbox) error {
	var errs []error
	for _, s := range sandboxes {
		errs = append(errs, s.netns.Remove())
	}
	return errors.Join(errs...)
}

// callAll sends the command for each sandbox, atOnce at a time, and returns how long
// each took.
func callAll(ctx context.Context, command string, sandboxes []sandbox) ([]time.Duration, error) {
	latencies := make([]time.Duration, len(sandboxes))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(atOnce)
	for i, s := range sandboxes {
		group.Go(func() error {
			var took figure
			err := took.time(func() error { return s.call(ctx, command) })
			latencies[i] = took.median()
			return err
		})
	}
	return latencies, group.Wait()
}

// call sends one event to the agent, as the plugin does.
func (s sandbox) call(ctx context.Context, command string) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	netns, err := os.Open(s.netns.Path())
	if err != nil {
		return fmt.Errorf("opening a network namespace: %w", err)
	}
	defer netns.Close()
	request := podevent.Request{Command: command, Network: "bench", ContainerID: s.id, IfName: "eth0", Pod: s.pod}
	if command == podevent.CommandAdd {
		request.IPs = []netip.Addr{
			netip.AddrFrom4([4]byte{10, 88, byte(s.number >> 8), byte(s.number)}),
			netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x88, 14: byte(s.number >> 8), 15: byte(s.number)}),
		}
	}
	reply, err := podevent.Call(ctx, podevent.DefaultSocket, request, netns)
	switch {
	case err != nil:
		return fmt.Errorf("%s of pod %s: %w", command, s.pod, err)
	case reply.Error != nil:
		return fmt.Errorf("%s of pod %s: %w", command, s.pod, reply.Error)
	case command == podevent.CommandAdd && reply.Result != podevent.ResultEnrolled:
		return fmt.Errorf("%s of pod %s: %s: %s", command, s.pod, reply.Result, reply.Reason)
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"ambientd/cni-plugin/podevent"
	"ambientd/tools/enclave"
)

const (
	// maxPluginSize bounds the plugin's binary, in bytes.
	maxPluginSize = 5 << 20
	// pluginLimit is what an ADD may cost, times a plugin that does nothing.
	pluginLimit = 1.4
	// pluginSamples for each round of the rest: a process is quicker than a restore.
	pluginSamples = 3
	// agentDeadline bounds the answering agent's reads and writes.
	agentDeadline = 5 * time.Second
)

// plugin measures an ADD of the plugin, with an agent that answers at once, against a
// plugin of the same skeleton that does nothing.
func (b *bench) plugin(ctx context.Context) error {
	b.say("measuring the plugin's process")
	socket := filepath.Join(b.dir, "instant.sock")
	agent, err := startInstantAgent(ctx, socket)
	if err != nil {
		return err
	}
	netns, err := enclave.MakeNetns("bench-plugin")
	if err != nil {
		return errors.Join(err, agent.stop())
	}
	add := pluginRun{
		netns: netns.Path(), stdin: pluginStdin(socket, netns.Path(), podAddresses(2)), container: "bench",
		pod: podevent.Pod{Namespace: "shop", Name: "client-1", UID: "e0b4c7bc-3f1f-4f3d-8a55-0f2b7a1d9c11"},
	}

	var ours, noop figure
	for range b.cfg.rounds * pluginSamples {
		for _, p := range []struct {
			path   string
			figure *figure
		}{{b.cfg.noop, &noop}, {filepath.Join(b.cfg.bin, "ambient-cni"), &ours}} {
			add.path = p.path
			if err := p.figure.time(func() error { return add.do(ctx) }); err != nil {
				return errors.Join(err, agent.stop())
			}
		}
	}
	if err := errors.Join(agent.stop(), netns.Remove()); err != nil {
		return err
	}
	if answered := agent.answered(); answered != len(ours.samples) {
		return fmt.Errorf("%d ADDs reached the agent, want %d: the plugin decided without it", answered, len(ours.samples))
	}
	info, err := os.Stat(filepath.Join(b.cfg.bin, "ambient-cni"))
	if err != nil {
		return fmt.Errorf("looking at the plugin's size: %w", err)
	}
	const mib = 1 << 20
	b.rows = append(b.rows,
		duration("a plugin of the CNI skeleton that does nothing, ADD process", noop, yardstickName, b.r.median(), 0, ""),
		duration("ambient-cni: ADD process, agent answering at once", ours, "noop", noop.median(), pluginLimit, "1.4 × noop"),
		amount("ambient-cni: binary", float64(info.Size())/mib, "MiB", maxPluginSize/mib, "5 MiB"))
	return nil
}

// pluginRun is an ADD as a runtime runs it.
type pluginRun struct {
	path, netns, stdin, container string
	pod                           podevent.Pod
}

func (r pluginRun) do(ctx context.Context) error {
	cmd := exec.CommandContext(ctx, r.path)
	cmd.Stdin = bytes.NewBufferString(r.stdin)
	cmd.Env = append(os.Environ(), "CNI_COMMAND=ADD", "CNI_CONTAINERID="+r.container, "CNI_IFNAME=eth0", "CNI_PATH="+filepath.Dir(r.path), "CNI_NETNS="+r.netns,
		fmt.Sprintf("CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=%s;K8S_POD_NAME=%s;K8S_POD_UID=%s", r.pod.Namespace, r.pod.Name, r.pod.UID))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("running %s: %w: %s", r.path, err, out)
	}
	return nil
}

// pluginStdin is what a runtime passes to a plugin after another one has given the pod
// addresses.
func pluginStdin(socket, netnsPath string, ips []netip.Addr) string {
	return fmt.Sprintf(`{"cniVersion":"1.1.0","name":"bench","type":"ambient-cni","socket":%q,"prevResult":{
		"cniVersion":"1.1.0","interfaces":[{"name":"eth0","sandbox":%q}],
		"ips":[{"address":"%s/24","gateway":"10.88.0.1","interface":0},{"address":"%s/64","interface":0}],
		"routes":[{"dst":"0.0.0.0/0"}],"dns":{}}}`, socket, netnsPath, ips[0], ips[1])
}

// instantAgent answers every request with "enrolled", at once.
type instantAgent struct {
	listener *net.UnixListener
	serving  sync.WaitGroup

	mu    sync.Mutex
	count int
	err   error // of the first request that could not be answered
}

func startInstantAgent(ctx context.Context, socket string) (*instantAgent, error) {
	var listen net.ListenConfig
	listener, err := listen.Listen(ctx, "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("listening as the agent: %w", err)
	}
	unixListener, ok := listener.(*net.UnixListener)
	if !ok {
		return nil, fmt.Errorf("listening as the agent: got a %T", listener)
	}
	a := &instantAgent{listener: unixListener}
	a.serving.Go(func() {
		for {
			conn, err := unixListener.AcceptUnix()
			if err != nil {
				return // closed by stop
			}
			a.note(answer(conn))
		}
	})
	return a, nil
}

// answer answers one request.
func answer(conn *net.UnixConn) (err error) {
	defer func() { err = errors.Join(err, conn.Close()) }()
	if err := conn.SetDeadline(time.Now().Add(agentDeadline)); err != nil {
		return fmt.Errorf("setting a deadline: %w", err)
	}
	_, netns, err := podevent.ReadRequest(conn)
	if err != nil {
		return err
	}
	netns.Close()
	return podevent.WriteReply(conn, podevent.Reply{Result: podevent.ResultEnrolled})
}

func (a *instantAgent) note(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err != nil && a.err == nil {
		a.err = fmt.Errorf("answering as the agent: %w", err)
	}
	a.count++
}

// answered returns how many requests there were; all of them once stop has returned.
func (a *instantAgent) answered() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.count
}

// stop ends the agent and returns the first error of its requests.
func (a *instantAgent) stop() error {
	err := a.listener.Close()
	a.serving.Wait()
	return errors.Join(err, a.err)
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"ambientd/nodeagent/admin"
	"ambientd/tools/enclave"
)

const (
	trustDomain = "cluster.local"
	// meshed is the namespace that is enrolled by its label, plain one that is not.
	meshed, plain = "shop", "plain"
	// refusedPod is the one that the proxy is told to refuse.
	refusedPod = "refused-1"
	// startTimeout bounds the start of a process, until it says that it is ready.
	startTimeout = 20 * time.Second
	// Where ambientd listens unless told otherwise: the demo shows the defaults.
	adminSocket = "/run/ambientd/private/admin.sock"
	sdsSocket   = "/run/ambientd/sds/sds.sock"
)

// stage is the node of the demo: its agent, its proxy, its runtime and its pods.
type stage struct {
	cfg      config
	dir      string // of logs, manifests and the runtime's files
	progress io.Writer

	starter *enclave.Starter
	runtime *cniRuntime
	agent   *enclave.Process
	proxy   *enclave.Process

	client, client2, server, outside, optedOut, refused *pod
}

// setUp starts agent and proxy, and makes the pods that the checks begin with. It
// returns what there is also with an error, so that it can be stopped; nil if nothing is.
func setUp(ctx context.Context, cfg config, dir string, progress io.Writer) (*stage, error) {
	starter, err := enclave.NewStarter()
	if err != nil {
		return nil, err
	}
	st := &stage{cfg: cfg, dir: dir, progress: progress, starter: starter}
	st.client = newPod(meshed, "client-1", "client", nil)
	st.client2 = newPod(meshed, "client-2", "client", nil)
	st.server = newPod(meshed, "server-1", "server", nil)
	st.outside = newPod(plain, "outside-1", "outside", nil)
	st.optedOut = newPod(meshed, "opted-out-1", "opted-out", map[string]string{"istio.io/dataplane-mode": "none"})
	st.refused = newPod(meshed, refusedPod, "refused", nil)

	if err := writeNamespaces(st.path("manifests")); err != nil {
		return st, err
	}
	st.runtime, err = newRuntime(dir, cfg.cniBin, cfg.bin)
	if err != nil {
		return st, err
	}
	if err := st.startAgent(ctx); err != nil {
		return st, err
	}
	if err := st.startProxy(ctx); err != nil {
		return st, err
	}
	return st, st.populate(ctx)
}

// path returns the path of a file of this run.
func (st *stage) path(name string) string { return filepath.Join(st.dir, name) }

func (st *stage) say(format string, args ...any) {
	fmt.Fprintf(st.progress, "demo: "+format+"\n", args...)
}

func (st *stage) startAgent(ctx context.Context) error {
	st.say("starting ambientd")
	var err error
	st.agent, err = st.start(ctx, "ambientd", "ready",
		"run", "--pods-from=manifests="+st.path("manifests"), "--node-name=demo", "--trust-domain="+trustDomain,
		"--redirection="+st.cfg.redirection, "--ca=builtin", "--cert-holder=agent", "--log-format=json")
	return err
}

// startProxy waits until the agent sees the proxy as ready: from then on a pod can be
// enrolled without waiting for one.
func (st *stage) startProxy(ctx context.Context) error {
	st.say("starting devproxy")
	var err error
	st.proxy, err = st.start(ctx, "devproxy", "", "--nack="+meshed+"/"+refusedPod, "--trust-domain="+trustDomain, "--log-format=json")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	var status admin.Status
	err = poll(ctx, func() (bool, error) {
		status, err = st.status(ctx)
		return err == nil && len(status.Proxies) == 1 && status.Proxies[0].Ready, err
	})
	if err != nil {
		return fmt.Errorf("waiting for the agent to see the proxy: %w; devproxy's log:\n%s", err, strings.TrimSpace(st.proxy.Log().Tail(20)))
	}
	st.say("redirection by %s: %s", status.Redirection.Backend, status.Redirection.Reason)
	return nil
}

// start starts one of our programs, and waits for its log to have the message
// awaited, if any. What does not get there is ended again.
func (st *stage) start(ctx context.Context, program, awaited string, args ...string) (*enclave.Process, error) {
	p, err := st.starter.Start(enclave.Command{
		Name: program, Path: filepath.Join(st.cfg.bin, program), Args: args, LogFile: st.path(program + ".log"),
	})
	if err != nil || awaited == "" {
		return p, err
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if _, err := p.Log().Await(ctx, 0, withMessage(awaited)); err != nil {
		if ended := p.Stop(); ended != nil {
			err = fmt.Errorf("%w (%w)", err, ended)
		}
		return nil, fmt.Errorf("waiting for %s to be %s: %w; its log:\n%s", program, awaited, err, strings.TrimSpace(p.Log().Tail(20)))
	}
	return p, nil
}

// populate makes the pods that the checks begin with.
func (st *stage) populate(ctx context.Context) error {
	for _, p := range []*pod{st.server, st.client, st.outside, st.optedOut} {
		if err := st.add(ctx, p); err != nil {
			return err
		}
	}
	return st.startServers(ctx)
}

// startServers starts the servers of those pods that are asked something.
func (st *stage) startServers(ctx context.Context) error {
	for _, p := range []*pod{st.server, st.optedOut} {
		if err := p.startServer(ctx, st.starter); err != nil {
			return err
		}
	}
	return nil
}

// add makes a pod: its manifest, as Kubernetes would have it, then its sandbox, as a
// runtime does. What the agent says at the moment ADD has returned is kept.
func (st *stage) add(ctx context.Context, p *pod) error {
	st.say("adding pod %s", p)
	if err := p.writeManifest(st.path("manifests")); err != nil {
		return err
	}
	if err := st.runtime.add(ctx, p); err != nil {
		return fmt.Errorf("adding pod %s: %w", p, err)
	}
	p.added = time.Now()
	status, err := st.status(ctx)
	if err != nil {
		return fmt.Errorf("asking the agent about pod %s: %w", p, err)
	}
	p.statusWhenAdded = status
	return nil
}

func (st *stage) status(ctx context.Context) (admin.Status, error) {
	return admin.Fetch(ctx, adminSocket)
}

// stop ends all processes, the proxy last so that the agent's farewell finds it.
func (st *stage) stop() error {
	var errs []error
	for _, p := range []*pod{st.client, st.client2, st.server, st.outside, st.optedOut, st.refused} {
		errs = append(errs, p.stopServer())
	}
	for _, p := range []*enclave.Process{st.agent, st.proxy} {
		if p != nil {
			errs = append(errs, p.Stop())
		}
	}
	return errors.Join(errs...)
}

// pollInterval is how often what gives no event is looked at.
const pollInterval = 10 * time.Millisecond

// poll calls fn until it returns true or an error, or ctx ends.
func poll(ctx context.Context, fn func() (bool, error)) error {
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for {
		done, err := fn()
		if done || err != nil {
			return err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// writeNamespaces writes the manifests of both namespaces.
func writeNamespaces(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("making the manifests' directory: %w", err)
	}
	return errors.Join(
		writeManifest(dir, "namespace-"+meshed, namespaceManifest(meshed, map[string]string{"istio.io/dataplane-mode": "ambient"})),
		writeManifest(dir, "namespace-"+plain, namespaceManifest(plain, nil)),
	)
}

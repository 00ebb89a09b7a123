// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"ambientd/certfetch"
	"ambientd/certfetch/ca"
	"ambientd/certfetch/sds"
	"ambientd/certfetch/spiffeid"
	"ambientd/iptables/backend"
	"ambientd/iptables/iptables"
	"ambientd/iptables/netnswatch"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/audit"
	"ambientd/nodeagent/enroll"
	"ambientd/nodeagent/hostprobe"
	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/policyfile"
	"ambientd/nodeagent/records"
	"ambientd/nodeagent/spool"
	"ambientd/nodeagent/watch"
	"ambientd/nodeagent/workload"
	"ambientd/nodeagent/zds"
)

// Run runs the agent until ctx ends, and then returns nil: sockets are gone, and
// rules stay in the kernel, so that enrolled pods fail closed. If one part fails,
// all end, and its error is returned.
//
// Sockets listen from the beginning, so that whoever comes early waits. They are
// served once pods that an earlier agent had enrolled have been taken up: the first
// thing that a node proxy is told is the whole.
func Run(ctx context.Context, cfg Config) (err error) {
	if cfg.Logger == nil {
		return errors.New("agent: no logger given")
	}
	if err := cfg.Validate(); err != nil {
		return err
	}
	host, err := podnetns.OpenHost()
	if err != nil {
		return fmt.Errorf("opening the host's netns: %w", err)
	}
	defer func() { err = errors.Join(err, host.Close()) }()
	sockets, err := openSockets(ctx, cfg)
	if err != nil {
		return err
	}
	defer sockets.close(cfg.Logger)
	parts, err := assemble(ctx, cfg, host, sockets)
	if err != nil {
		return err
	}
	return parts.run(ctx)
}

// parts are what an agent is made of.
type parts struct {
	cfg     Config
	started time.Time

	backend  backend.Decision
	policy   workload.Policy
	pods     podSource
	records  *records.Store
	fetcher  *certfetch.Fetcher
	proxies  *zds.Server
	pins     *podnetns.Pins
	probes   *hostprobe.Set
	enroller *enroll.Enroller
	auditor  *audit.Auditor
	watcher  *netnswatch.Watcher // nil where the kernel does not let us

	plugin     *watch.Server // events of the CNI plugin
	spool      *spool.Spool  // those that it could not deliver
	forPlugin  *policyfile.File
	sds        *sdsServer
	admin      *admin.Server
	operations *operations
	metrics    *admin.Metrics
	health     *admin.Server // nil where it is not served
	ready      readiness

	earlier map[string]struct{} // UIDs of the pods that an earlier agent had enrolled
}

// assemble makes the parts, each from those before it.
func assemble(ctx context.Context, cfg Config, host *podnetns.Host, sockets *sockets) (*parts, error) {
	p := &parts{cfg: cfg, started: time.Now(), pins: podnetns.NewPins()}
	for _, assemble := range []func() error{
		func() error { return p.decideOnBackend(ctx, host) },
		p.openPods,
		func() error { return p.makeCertificates(sockets) },
		func() error { return p.makeEnrolment(host, sockets) },
		func() error { return p.makeAudit(ctx) },
		func() error { return p.makeServers(sockets) },
		func() error { return p.makeForAbsence(host) },
	} {
		if err := assemble(); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func (p *parts) decideOnBackend(ctx context.Context, host *podnetns.Host) (err error) {
	p.backend, err = backend.Decide(ctx, backend.Request{
		Mode: p.cfg.Redirection, OnRepair: iptables.OnRepair(p.cfg.OnRepair), BootID: host.Key().BootID,
		File: p.cfg.decisionFile(), Scratch: scratch(host), Logger: p.cfg.Logger,
	})
	if err != nil {
		return fmt.Errorf("choosing how to program redirection: %w", err)
	}
	return nil
}

// scratch gives the probe of a backend a netns of its own.
func scratch(host *podnetns.Host) func() (redirection.Runner, func() error, error) {
	return func() (redirection.Runner, func() error, error) {
		n, err := host.Scratch()
		if err != nil {
			return nil, nil, err
		}
		return n.Do, n.Close, nil
	}
}

// openPods opens what says which pods there are, and what is remembered of them.
func (p *parts) openPods() (err error) {
	if p.pods, err = openSource(p.cfg); err != nil {
		return err
	}
	if p.policy, err = p.cfg.policy(); err != nil {
		return err
	}
	p.records, err = records.Open(p.cfg.recordsDir())
	return err
}

func (p *parts) makeCertificates(sockets *sockets) error {
	trustDomain, err := spiffeid.ParseTrustDomain(p.cfg.TrustDomain)
	if err != nil {
		return err
	}
	authority, err := ca.New(ca.Config{TrustDomain: trustDomain, LeafTTL: p.cfg.CertTTL, Logger: p.cfg.Logger})
	if err != nil {
		return fmt.Errorf("making the built-in CA: %w", err)
	}
	p.fetcher, err = certfetch.New(certfetch.Config{
		Source: authority, TTL: p.cfg.CertTTL, Workers: p.cfg.CertWorkers, Linger: p.cfg.CertLinger, Logger: p.cfg.Logger,
	})
	if err != nil {
		return err
	}
	p.sds, err = newSDSServer(sockets.sds, sds.Config{Fetcher: p.fetcher, Logger: p.cfg.Logger})
	return err
}

func (p *parts) makeServers(sockets *sockets) (err error) {
	if p.metrics, err = admin.NewMetrics(p.status); err != nil {
		return err
	}
	p.plugin, err = watch.New(watch.Config{
		Listener: sockets.cni, Handler: countedHandler{p.enroller, p.metrics}, Logger: p.cfg.Logger,
		AddTimeout: p.cfg.AddTimeout, CheckTimeout: p.cfg.AddTimeout,
	})
	if err != nil {
		return err
	}
	p.operations = &operations{parts: p, checked: map[string][]admin.ProbeFinding{}}
	p.admin = admin.NewOperationsServer(sockets.admin, p.status, p.operations, p.cfg.Logger)
	if sockets.http != nil {
		p.health = admin.NewHealthServer(sockets.http, p.ready.check, p.metrics.Handler(p.cfg.Logger), p.cfg.Logger)
	}
	return nil
}

// run runs the parts until ctx ends or one fails. Those that change pods end first:
// what they have begun still needs all others.
func (p *parts) run(ctx context.Context) error {
	group, front := errgroup.WithContext(ctx)
	behind, stop := context.WithCancel(context.WithoutCancel(ctx))
	group.Go(func() error { return p.pods.run(behind) })
	if err := p.restore(front); err != nil {
		stop()
		return errors.Join(err, group.Wait())
	}
	var changing sync.WaitGroup
	for _, part := range []func(context.Context) error{
		p.plugin.Run, p.spool.Run, p.admin.Run, p.enroller.Run, p.auditor.Run, p.settleHost,
	} {
		changing.Add(1)
		group.Go(func() error {
			defer changing.Done()
			return part(front)
		})
	}
	group.Go(func() error {
		changing.Wait()
		p.leaveHost(behind)
		stop()
		return nil
	})
	rest := []func(context.Context) error{p.fetcher.Run, p.proxies.Run, p.sds.run, p.forPlugin.Run, p.awaitReady}
	if p.watcher != nil {
		rest = append(rest, p.watcher.Run)
	}
	if p.health != nil {
		rest = append(rest, p.health.Run)
	}
	if p.pods.report != nil {
		rest = append(rest, p.pods.report.Run)
	}
	for _, part := range rest {
		group.Go(func() error { return part(behind) })
	}
	return group.Wait()
}

// leaveTimeout bounds what the agent still does when nothing changes pods any more.
const leaveTimeout = 3 * time.Second

// leaveHost takes the rule for probes away where no pod is in the mesh: this may be the
// last agent of the node.
func (p *parts) leaveHost(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	if err := p.restHost(ctx); err != nil {
		p.cfg.Logger.Warn("the host's rule for probes stays, though no pod needs it", "err", err)
	}
}

// awaitReady says once that the agent is ready: sockets listen and earlier pods have been
// taken up before it is called, all pods are known as soon as their source has been read,
// and the CA can be used as soon as its roots are known. A node proxy is not needed for
// that; pods wait for one by themselves.
func (p *parts) awaitReady(ctx context.Context) error {
	p.ready.await("the pod source has not been read yet")
	if err := p.pods.awaitSync(ctx); err != nil {
		return nil // the agent ends; who cannot read the source has said why
	}
	p.ready.await("the CA's roots are not known yet")
	roots := p.fetcher.Subscribe()
	defer roots.Close()
	for len(p.fetcher.Bundle().Roots) == 0 {
		select {
		case <-ctx.Done():
			return nil
		case <-roots.Changed():
		}
	}
	p.ready.set()
	p.cfg.Logger.Info("ready", "node", p.cfg.NodeName, "version", p.cfg.Version, "trust_domain", p.cfg.TrustDomain,
		"redirection", p.backend.Name, "reason", p.backend.Reason, "cni_socket", p.cfg.CNISocketPath(), "http_addr", p.httpAddr())
	if p.cfg.OnReady != nil {
		p.cfg.OnReady()
	}
	return nil
}

// httpAddr is the address that was asked for, with the port that was got.
func (p *parts) httpAddr() string {
	if p.health == nil {
		return ""
	}
	return p.health.Addr().String()
}

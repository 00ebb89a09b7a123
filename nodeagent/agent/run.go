// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"ambientd/certfetch"
	"ambientd/certfetch/ca"
	"ambientd/certfetch/sds"
	"ambientd/certfetch/spiffeid"
	"ambientd/iptables/backend"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/enroll"
	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/podsource/manifests"
	"ambientd/nodeagent/watch"
	"ambientd/nodeagent/workload"
	"ambientd/nodeagent/zds"
)

// Run runs the agent until ctx ends, and then returns nil: sockets are gone, and
// rules stay in the kernel, so that enrolled pods fail closed. If one part fails,
// all end, and its error is returned.
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

	backend  backend.Chosen
	pods     *manifests.Source
	fetcher  *certfetch.Fetcher
	proxies  *zds.Server
	enroller *enroll.Enroller

	plugin *watch.Server // events of the CNI plugin
	sds    *sdsServer
	admin  *admin.Server
	health *admin.Server // nil where it is not served
	ready  readiness
}

// assemble makes the parts, each from those before it.
func assemble(ctx context.Context, cfg Config, host *podnetns.Host, sockets *sockets) (*parts, error) {
	p := &parts{cfg: cfg, started: time.Now()}
	var err error
	if p.backend, err = backend.Choose(ctx, cfg.Redirection, scratch(host), cfg.Logger); err != nil {
		return nil, fmt.Errorf("choosing how to program redirection: %w", err)
	}
	if p.pods, err = openManifests(cfg); err != nil {
		return nil, err
	}
	trustDomain, err := spiffeid.ParseTrustDomain(cfg.TrustDomain)
	if err != nil {
		return nil, err
	}
	authority, err := ca.New(ca.Config{TrustDomain: trustDomain, LeafTTL: cfg.CertTTL, Logger: cfg.Logger})
	if err != nil {
		return nil, fmt.Errorf("making the built-in CA: %w", err)
	}
	p.fetcher, err = certfetch.New(certfetch.Config{
		Source: authority, TTL: cfg.CertTTL, Workers: cfg.CertWorkers, Linger: cfg.CertLinger, Logger: cfg.Logger,
	})
	if err != nil {
		return nil, err
	}
	if p.proxies, err = zds.New(zds.Config{Listener: sockets.zds, Logger: cfg.Logger}); err != nil {
		return nil, err
	}
	if p.enroller, err = p.newEnroller(host, trustDomain); err != nil {
		return nil, err
	}
	p.plugin, err = watch.New(watch.Config{
		Listener: sockets.cni, Handler: p.enroller, Logger: cfg.Logger, AddTimeout: cfg.AddTimeout, CheckTimeout: cfg.AddTimeout,
	})
	if err != nil {
		return nil, err
	}
	if p.sds, err = newSDSServer(sockets.sds, sds.Config{Fetcher: p.fetcher, Logger: cfg.Logger}); err != nil {
		return nil, err
	}
	p.admin = admin.NewStatusServer(sockets.admin, p.status, cfg.Logger)
	if sockets.http != nil {
		p.health = admin.NewHealthServer(sockets.http, p.ready.check, cfg.Logger)
	}
	return p, nil
}

func openManifests(cfg Config) (*manifests.Source, error) {
	dir, err := cfg.manifestDir()
	if err != nil {
		return nil, err
	}
	return manifests.New(manifests.Config{Dir: dir, Logger: cfg.Logger})
}

func (p *parts) newEnroller(host *podnetns.Host, trustDomain spiffeid.TrustDomain) (*enroll.Enroller, error) {
	policy, err := p.cfg.policy()
	if err != nil {
		return nil, err
	}
	return enroll.New(enroll.Config{
		Host:         host,
		Pods:         p.pods,
		Policy:       policy,
		Defaults:     workload.Defaults(p.cfg.redirectionOptions()),
		TrustDomain:  trustDomain,
		Redirection:  p.backend.Backend,
		BackendName:  p.backend.Name,
		Identities:   p.fetcher,
		Fetched:      p.fetcher.Identities,
		NodeProxy:    p.proxies,
		ProxyTimeout: p.cfg.ProxyTimeout,
		CertWait:     p.cfg.CertWait,
		DelProxyWait: p.cfg.DelProxyWait,
		Logger:       p.cfg.Logger,
	})
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

// run runs the parts until ctx ends or one fails. The plugin's server ends first:
// requests that it has begun still need all others.
func (p *parts) run(ctx context.Context) error {
	group, front := errgroup.WithContext(ctx)
	behind, stop := context.WithCancel(context.WithoutCancel(ctx))
	group.Go(func() error {
		defer stop()
		return p.plugin.Run(front)
	})
	for _, part := range []func(context.Context) error{
		p.pods.Run, p.fetcher.Run, p.proxies.Run, p.sds.run, p.admin.Run, p.awaitReady,
	} {
		group.Go(func() error { return part(behind) })
	}
	if p.health != nil {
		group.Go(func() error { return p.health.Run(behind) })
	}
	return group.Wait()
}

// awaitReady says once that the agent is ready: sockets listen and manifests have
// been read before it is called, and the CA can be used as soon as its roots are
// known. A node proxy is not needed for that; pods wait for one by themselves.
func (p *parts) awaitReady(ctx context.Context) error {
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
	return nil
}

// httpAddr is the address that was asked for, with the port that was got.
func (p *parts) httpAddr() string {
	if p.health == nil {
		return ""
	}
	return p.health.Addr().String()
}

// status is what `ambientd status` shows.
func (p *parts) status() admin.Status {
	s := admin.Status{
		Node:        p.cfg.NodeName,
		Version:     p.cfg.Version,
		Started:     p.started,
		TrustDomain: p.cfg.TrustDomain,
		Redirection: admin.RedirectionStatus{Backend: p.backend.Name, Reason: p.backend.Reason},
		Ready:       p.ready.check() == nil,
		Pods:        p.enroller.Pods(),
		Skipped:     p.enroller.Skipped(),
	}
	for _, peer := range p.proxies.Peers() {
		s.Proxies = append(s.Proxies, admin.ProxyStatus{Since: peer.Since, Ready: peer.Ready})
	}
	for _, id := range p.fetcher.Identities() {
		s.Identities = append(s.Identities, admin.IdentityStatus{
			ID: id.ID.String(), Pods: id.Pods, State: string(id.State), NotAfter: id.NotAfter, LastError: id.LastError,
		})
	}
	return s
}

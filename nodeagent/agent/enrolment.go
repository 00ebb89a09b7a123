// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"

	"ambientd/certfetch"
	"ambientd/certfetch/spiffeid"
	"ambientd/cni-plugin/podevent"
	"ambientd/iptables/conntrack"
	"ambientd/iptables/netnswatch"
	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/audit"
	"ambientd/nodeagent/enroll"
	"ambientd/nodeagent/hostprobe"
	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/podnetns/cri"
	"ambientd/nodeagent/watch"
	"ambientd/nodeagent/workload"
	"ambientd/nodeagent/zds"
)

// newFinder makes what finds the netns of pods that run already.
func (p *parts) newFinder(host *podnetns.Host) (*podnetns.Finder, error) {
	cfg := podnetns.FinderConfig{Host: host, Holders: p.pins, ProcRoot: p.cfg.ProcRoot}
	if p.cfg.CRISocket != "" {
		runtime, err := cri.New(cri.Config{Socket: p.cfg.CRISocket})
		if err != nil {
			return nil, err
		}
		cfg.Runtime = runtime
	}
	return podnetns.NewFinder(cfg)
}

// makeEnrolment makes what puts pods in the mesh.
func (p *parts) makeEnrolment(host *podnetns.Host, sockets *sockets) (err error) {
	if p.proxies, err = zds.New(zds.Config{Listener: sockets.zds, Logger: p.cfg.Logger}); err != nil {
		return err
	}
	p.probes, err = hostprobe.New(hostprobe.Config{Kernel: p.backend.Host, Run: onHost, Options: p.cfg.hostOptions()})
	if err != nil {
		return err
	}
	finder, err := p.newFinder(host)
	if err != nil {
		return err
	}
	trustDomain, err := spiffeid.ParseTrustDomain(p.cfg.TrustDomain)
	if err != nil {
		return err
	}
	p.enroller, err = enroll.New(enroll.Config{
		Host:         host,
		Pins:         p.pins,
		Pods:         p.pods,
		Inventory:    p.pods,
		Finder:       finder,
		Records:      p.records,
		Policy:       p.policy,
		Defaults:     workload.Defaults{Redirection: p.cfg.redirectionOptions(), Allowed: p.cfg.AllowedPodOptions},
		TrustDomain:  trustDomain,
		Redirection:  p.backend.Backend,
		BackendName:  p.backend.Name,
		Predecessors: p.backend.Predecessors,
		Probes:       p.probes,
		Identities:   p.fetcher,
		Fetched:      p.fetcher.Identities,
		Registered:   p.registered,
		NodeProxy:    p.proxies,
		ProxySet:     p.proxies,
		Reporter:     countedReports{p},

		ExistingConnections: enroll.ExistingConnections(p.cfg.ExistingConnections),
		Connections:         conntrack.New(),

		ProxyTimeout: p.cfg.ProxyTimeout,
		CertWait:     p.cfg.CertWait,
		DelProxyWait: p.cfg.DelProxyWait,
		Logger:       p.cfg.Logger,
	})
	return err
}

// registered tells whether the fetcher has the identity of some pod.
func (p *parts) registered(id spiffeid.ID) bool {
	_, err := p.fetcher.SVID(id)
	return !errors.Is(err, certfetch.ErrNotRegistered)
}

// onHost runs fn in the host's netns, where all threads are but those inside a
// [podnetns.Netns.Do]. The thread stays the same throughout: a child process dies with
// the one that started it.
func onHost(fn func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return fn()
}

// makeAudit makes what compares pods with the kernel.
func (p *parts) makeAudit(ctx context.Context) (err error) {
	cfg := audit.Config{
		Pods: p.enroller, Changes: p.enroller, Pins: p.pins, Host: p.probes, Interval: p.cfg.AuditInterval, Recorder: recorder{p}, Logger: p.cfg.Logger,
	}
	if watcher, err := watchHost(ctx); err != nil {
		p.cfg.Logger.Warn("changes in pods are noticed late, once an interval", "interval", p.cfg.AuditInterval, "err", err)
	} else {
		p.watcher, cfg.Watcher = watcher, watcher
	}
	p.auditor, err = audit.New(cfg)
	return err
}

// hostNetns is the host's network namespace as something to watch.
type hostNetns struct{ file *os.File }

// File is part of netnswatch.Netns.
func (h hostNetns) File() *os.File { return h.file }

// Do runs fn where all threads are.
func (hostNetns) Do(fn func() error) error { return onHost(fn) }

// watchHost begins to notice changes, those in the host's netns first.
func watchHost(ctx context.Context) (*netnswatch.Watcher, error) {
	own, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("opening the host's netns: %w", err)
	}
	defer own.Close()
	w, err := netnswatch.New()
	if err != nil {
		return nil, err
	}
	_, err = w.Watch(ctx, hostNetns{own})
	return w, err
}

// recorder is the metrics, which are made later than the auditor and before it runs.
type recorder struct{ *parts }

// Audited is part of audit.Recorder, as the two next.
func (r recorder) Audited(subject string, took time.Duration) { r.metrics.Audited(subject, took) }

// Repaired passes on.
func (r recorder) Repaired(part string) { r.metrics.Repaired(part) }

// RepairFailed passes on.
func (r recorder) RepairFailed(subject string) { r.metrics.RepairFailed(subject) }

// countedHandler counts the plugin's events.
type countedHandler struct {
	watch.Handler
	metrics *admin.Metrics
}

// Handle is part of watch.Handler.
func (h countedHandler) Handle(ctx context.Context, req podevent.Request, netns *os.File) podevent.Reply {
	began := time.Now()
	reply := h.Handler.Handle(ctx, req, netns)
	result, code := reply.Result, uint(0)
	if reply.Error != nil {
		result, code = "error", reply.Error.Code
	}
	h.metrics.CNIRequest(req.Command, result, code, time.Since(began))
	return reply
}

// sourcePatience is how long the pod source may take to be read before pods are taken up
// as they were recorded. Whoever waits for the agent meanwhile, a plugin or a node proxy,
// has to be able to.
const sourcePatience = 3 * time.Second

// awaitPods waits for the pod source to be read, as long as it may take.
func (p *parts) awaitPods(ctx context.Context) error {
	patient, cancel := context.WithTimeout(ctx, sourcePatience)
	defer cancel()
	err := p.pods.awaitSync(patient)
	if err == nil || ctx.Err() != nil {
		return context.Cause(ctx)
	}
	p.cfg.Logger.Warn("pods are taken up as they were recorded, since what they are now cannot be read", "err", err)
	return nil
}

// restore takes up what an earlier agent has left, and what the plugin had to say
// meanwhile: so a pod that has ended leaves nothing, and no proxy is told of it.
func (p *parts) restore(ctx context.Context) error {
	if err := p.awaitPods(ctx); err != nil {
		return err
	}
	began := time.Now()
	earlier, err := p.enroller.Restore(ctx)
	if err != nil {
		return err
	}
	p.earlier = map[string]struct{}{}
	for _, uid := range earlier {
		p.earlier[uid] = struct{}{}
	}
	if err := p.spool.Drain(ctx); err != nil {
		return err
	}
	if len(p.earlier) > 0 {
		p.cfg.Logger.Info("pods of an earlier agent taken up", "recorded", len(p.earlier), "enrolled", len(p.enroller.Enrolled()),
			"took", time.Since(began).Round(time.Millisecond))
	}
	return nil
}

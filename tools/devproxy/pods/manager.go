// SPDX-License-Identifier: Apache-2.0

// Package pods is the proxy itself: for each pod it listens inside the pod's
// network namespace and relays what the redirection sends there.
//
// It owns the decision how a connection goes on: to a pod in the mesh by HBONE
// and in no other way, elsewhere as it came. It fails closed: without a
// certificate, or without knowing whether the destination is in the mesh, a
// connection is refused.
package pods

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path"
	"slices"
	"sync"
	"time"

	"ambientd/certfetch/spiffeid"
	"ambientd/tools/devproxy/mtls"
	"ambientd/tools/devproxy/podnet"
	"ambientd/tools/devproxy/zdsclient"
)

// drain is how long the connections of a removed pod may go on.
const drain = time.Second

// Peers knows the pods of the mesh.
type Peers interface {
	// Identity returns whose address addr is; false if nobody's in the mesh.
	Identity(ctx context.Context, addr netip.Addr) (spiffeid.ID, bool, error)
}

// Certificates holds those of the pods' identities.
type Certificates interface {
	mtls.Source
	// Acquire keeps an identity's certificate at hand until release is called.
	Acquire(ctx context.Context, id spiffeid.ID) (release func())
}

// SourceAddress says which source address a pod's application sees.
type SourceAddress string

const (
	// OriginalSource is the client's own, as without a proxy.
	OriginalSource SourceAddress = "original"
	// PodSource is the pod's: for a netns without the redirection's routes.
	PodSource SourceAddress = "pod"
)

// Config is the same for all pods.
type Config struct {
	TrustDomain  spiffeid.TrustDomain
	Certificates Certificates
	Peers        Peers
	Source       SourceAddress
	// Refuse and Deny have patterns of path.Match on "namespace/name", for tests of
	// the agent: pods that are refused, and pods that are served but to which
	// nobody gets through, as if a policy denied all.
	Refuse []string
	Deny   []string
	Logger *slog.Logger
}

// Manager keeps the pods. It is a zdsclient.Handler.
type Manager struct {
	cfg Config

	mu      sync.Mutex
	pods    map[string]*pod // by UID
	closing sync.WaitGroup  // pods that still drain
}

// NewManager returns a Manager without pods.
func NewManager(cfg Config) (*Manager, error) {
	for _, pattern := range slices.Concat(cfg.Refuse, cfg.Deny) {
		if _, err := path.Match(pattern, ""); err != nil {
			return nil, fmt.Errorf("pattern %q of pods: %w", pattern, err)
		}
	}
	switch cfg.Source {
	case OriginalSource, PodSource:
	default:
		return nil, fmt.Errorf("unknown source address %q", cfg.Source)
	}
	return &Manager{cfg: cfg, pods: make(map[string]*pod)}, nil
}

// Add starts to serve a pod. The pod's connections end with ctx. A pod that is
// served in the same netns already is left as it is.
func (m *Manager) Add(ctx context.Context, w zdsclient.Workload, file *os.File) error {
	log := m.cfg.Logger.With("pod", w.Namespace+"/"+w.Name, "uid", w.UID)
	added, err := m.add(ctx, w, file, log)
	switch {
	case err != nil:
		log.Warn("workload refused", "err", err)
	case added:
		log.Info("workload added")
	}
	return err
}

func (m *Manager) add(ctx context.Context, w zdsclient.Workload, file *os.File, log *slog.Logger) (added bool, err error) {
	netns, err := podnet.New(file)
	if err != nil {
		return false, errors.Join(err, file.Close())
	}
	if err := m.allowed(w); err != nil {
		return false, errors.Join(err, netns.Close())
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if old := m.pods[w.UID]; old != nil {
		same, err := old.netns.Same(netns)
		if err != nil || same {
			return false, errors.Join(err, netns.Close())
		}
		m.drop(w.UID)
	}
	p, err := start(ctx, m.cfg, w, netns, log)
	if err != nil {
		return false, errors.Join(err, netns.Close())
	}
	m.pods[w.UID] = p
	return true, nil
}

func (m *Manager) allowed(w zdsclient.Workload) error {
	name := w.Namespace + "/" + w.Name
	if pattern, ok := matching(m.cfg.Refuse, name); ok {
		return fmt.Errorf("pod %s is to be refused, as pattern %s says", name, pattern)
	}
	return nil
}

// matching returns the first of the patterns, which [NewManager] has checked, that
// the pod's name matches.
func matching(patterns []string, name string) (pattern string, ok bool) {
	for _, pattern := range patterns {
		if matched, err := path.Match(pattern, name); err == nil && matched {
			return pattern, true
		}
	}
	return "", false
}

// Del stops to listen for a pod before it returns, and gives its connections a
// moment.
func (m *Manager) Del(uid string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.pods[uid] != nil {
		m.drop(uid)
	}
}

// Retain drops the pods that are not among uids.
func (m *Manager) Retain(uids map[string]struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for uid := range m.pods {
		if _, ok := uids[uid]; !ok {
			m.drop(uid)
		}
	}
}

// Close drops all pods, and returns once their connections have ended.
func (m *Manager) Close() {
	m.Retain(nil)
	m.closing.Wait()
}

// drop is called with m.mu held, for a pod that is there.
func (m *Manager) drop(uid string) {
	p := m.pods[uid]
	delete(m.pods, uid)
	p.stopListening()
	m.closing.Go(p.end)
	p.log.Info("workload removed")
}

// SPDX-License-Identifier: Apache-2.0

// Package svid holds the certificates of a node proxy's pods, as an agent
// serves them over SDS: one stream for each identity, one for the roots.
//
// It owns the question whether an identity may be shown right now. A
// certificate that the agent took back or refuses, or that has expired, is
// gone at once; one whose stream broke because the agent is away stays, and
// the stream is opened again with backoff.
package svid

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	secretv3 "github.com/envoyproxy/go-control-plane/envoy/service/secret/v3"

	"ambientd/certfetch/spiffeid"
	"ambientd/tools/devproxy/mtls"
)

// rootsName is the SDS resource that holds the trust bundle.
const rootsName = "ROOTCA"

// ErrNoCertificate is returned for an identity that cannot be shown now.
var ErrNoCertificate = errors.New("no certificate")

// Config says where a Store gets its certificates.
type Config struct {
	Client secretv3.SecretDiscoveryServiceClient
	Logger *slog.Logger
}

// Store is what its streams have brought so far.
type Store struct {
	cfg Config

	mu         sync.Mutex
	roots      *x509.CertPool // nil before the first
	identities map[spiffeid.ID]*identity
	changed    chan struct{} // closed and replaced whenever a certificate or the roots change
}

type identity struct {
	log         *slog.Logger
	stop        context.CancelFunc
	users       int
	certificate *tls.Certificate // nil while there is none
}

// New returns an empty Store.
func New(cfg Config) *Store {
	return &Store{cfg: cfg, identities: make(map[spiffeid.ID]*identity), changed: make(chan struct{})}
}

// Run follows the roots until ctx ends.
func (s *Store) Run(ctx context.Context) error {
	f := follower{client: s.cfg.Client, name: rootsName, log: s.cfg.Logger, apply: s.setRoots, gone: func() { s.replaceRoots(nil) }}
	f.run(ctx)
	return nil
}

// Acquire follows an identity until every caller has called its release, which
// may be called once. The certificate comes later, if at all.
func (s *Store) Acquire(ctx context.Context, id spiffeid.ID) (release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	entry := s.identities[id]
	if entry == nil {
		// It outlives the caller's pod while other pods have the identity.
		followCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
		log := s.cfg.Logger.With("identity", id.String())
		entry = &identity{stop: cancel, log: log}
		s.identities[id] = entry
		f := follower{
			client: s.cfg.Client,
			name:   id.String(),
			log:    log,
			apply:  func(secret *tlsv3.Secret) error { return s.setCertificate(id, entry, secret) },
			gone:   func() { s.replaceCertificate(entry, nil) },
		}
		go f.run(followCtx)
	}
	entry.users++
	return func() { s.release(id, entry) }
}

func (s *Store) release(id spiffeid.ID, entry *identity) {
	s.mu.Lock()
	defer s.mu.Unlock()
	entry.users--
	if entry.users > 0 {
		return
	}
	entry.stop()
	delete(s.identities, id)
	s.notify()
}

// Certificate returns the newest certificate of an acquired identity, or
// ErrNoCertificate with the reason.
func (s *Store) Certificate(id spiffeid.ID) (*tls.Certificate, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch entry := s.identities[id]; {
	case entry == nil:
		return nil, fmt.Errorf("%w for %s: it has no pod here", ErrNoCertificate, id)
	case entry.certificate == nil:
		return nil, fmt.Errorf("%w for %s: the agent has given none", ErrNoCertificate, id)
	case time.Now().After(entry.certificate.Leaf.NotAfter):
		return nil, fmt.Errorf("%w for %s: it has expired", ErrNoCertificate, id)
	default:
		return entry.certificate, nil
	}
}

// Roots returns the newest trust bundle.
func (s *Store) Roots() (*x509.CertPool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.roots == nil {
		return nil, errors.New("no roots: the agent has given none")
	}
	return s.roots, nil
}

// Changed returns a channel that is closed at the next change of a certificate
// or of the roots. Ask for it before looking at them.
func (s *Store) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

func (s *Store) notify() {
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *Store) setRoots(secret *tlsv3.Secret) error {
	rest := secret.GetValidationContext().GetTrustedCa().GetInlineBytes()
	roots, found := x509.NewCertPool(), 0
	for {
		var block *pem.Block
		block, rest = pem.Decode(rest)
		if block == nil {
			break
		}
		root, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return fmt.Errorf("parsing a root: %w", err)
		}
		roots.AddCert(root)
		found++
	}
	if found == 0 {
		return errors.New("the trust bundle has no certificate")
	}
	s.replaceRoots(roots)
	return nil
}

func (s *Store) replaceRoots(roots *x509.CertPool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.roots = roots
	s.notify()
}

func (s *Store) setCertificate(id spiffeid.ID, entry *identity, secret *tlsv3.Secret) error {
	c := secret.GetTlsCertificate()
	pair, err := tls.X509KeyPair(c.GetCertificateChain().GetInlineBytes(), c.GetPrivateKey().GetInlineBytes())
	if err != nil {
		return fmt.Errorf("parsing the certificate: %w", err)
	}
	got, err := mtls.Identity(pair.Leaf)
	if err != nil {
		return err
	}
	if got != id {
		return fmt.Errorf("the certificate is %s's", got)
	}
	s.replaceCertificate(entry, &pair)
	return nil
}

// replaceCertificate keeps the value it has if c is the same certificate, which
// a new stream begins with: connections made with it are not outdated.
func (s *Store) replaceCertificate(entry *identity, c *tls.Certificate) {
	old := s.swap(entry, c)
	switch {
	case c != nil && c != old:
		entry.log.Info("certificate taken", "not_after", c.Leaf.NotAfter)
	case c == nil && old != nil:
		entry.log.Info("certificate gone")
	}
}

// swap returns what was there before; c itself stands for "the same".
func (s *Store) swap(entry *identity, c *tls.Certificate) (old *tls.Certificate) {
	s.mu.Lock()
	defer s.mu.Unlock()
	old = entry.certificate
	if c != nil && old != nil && c.Leaf.Equal(old.Leaf) {
		return c
	}
	entry.certificate = c
	s.notify()
	return old
}

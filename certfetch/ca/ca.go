// SPDX-License-Identifier: Apache-2.0

// Package ca is the built-in CA: an authority whose root key is made at the start, lives in memory,
// and dies with the process.
//
// It owns the decision what a certificate looks like, and the checks of the request that leads to
// one. It refuses to take anything from a request but the public key: names come from the identity
// that the caller decided on, all else from here. It does not know who is asking; whoever calls
// Issue answers for that.
package ca

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"ambientd/certfetch"
	"ambientd/certfetch/spiffeid"
)

const (
	// DefaultLeafTTL is both what is granted to who asks for nothing, and the most.
	DefaultLeafTTL = 24 * time.Hour
	// MinLeafTTL leaves room for a renewal.
	MinLeafTTL = 10 * time.Second
	// MaxLeafTTL keeps leaves short-lived: there is no revocation.
	MaxLeafTTL = 90 * 24 * time.Hour

	// backdate is how far a peer's clock may be behind ours.
	backdate = 2 * time.Minute
	// rootTTL outlasts any process; the root is not meant to be kept.
	rootTTL = 10 * 365 * 24 * time.Hour
)

// Config says for whom an [Authority] signs.
type Config struct {
	// TrustDomain is the only one whose identities are signed. Required.
	TrustDomain spiffeid.TrustDomain
	// LeafTTL is the longest lifetime granted; what exceeds it is cut down to it. Default 24 h, 10 s
	// to 90 days.
	LeafTTL time.Duration
	// Logger gets one line for every request: signed, or refused and why. Default: discard.
	Logger *slog.Logger
}

// Validate says what is wrong with c once the defaults are in.
func (c Config) Validate() error {
	c = c.withDefaults()
	var errs []error
	if c.TrustDomain.IsZero() {
		errs = append(errs, errors.New("the CA needs a trust domain"))
	}
	if c.LeafTTL < MinLeafTTL || c.LeafTTL > MaxLeafTTL {
		errs = append(errs, fmt.Errorf("leaf TTL is %s, must be %s to %s", c.LeafTTL, MinLeafTTL, MaxLeafTTL))
	}
	return errors.Join(errs...)
}

func (c Config) withDefaults() Config {
	if c.LeafTTL == 0 {
		c.LeafTTL = DefaultLeafTTL
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// Authority signs workload certificates. It is a [certfetch.Source], and has no state but its root.
type Authority struct {
	cfg     Config
	key     *ecdsa.PrivateKey
	root    *x509.Certificate
	pattern leafPattern
}

var _ certfetch.Source = (*Authority)(nil)

// New makes an authority with a root of its own. Another one, even of the same trust domain, is
// trusted by nobody who trusts this one.
func New(cfg Config) (*Authority, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making the CA's key: %w", err)
	}
	now := time.Now()
	template := &x509.Certificate{
		Subject:               pkix.Name{Organization: []string{cfg.TrustDomain.String()}, CommonName: "ambientd built-in CA"},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(rootTTL),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true, // signs leaves, never another CA
	}
	// The URI is for the X.509-SVID specification, section 4.1: a signing certificate is named by its
	// trust domain.
	template.URIs = append(template.URIs, cfg.TrustDomain.URL())
	root, err := create(template, template, &key.PublicKey, key)
	if err != nil {
		return nil, fmt.Errorf("making the CA's root: %w", err)
	}
	pattern, err := newLeafPattern(root, key, cfg.TrustDomain)
	if err != nil {
		return nil, fmt.Errorf("making the pattern of the CA's leaves: %w", err)
	}
	return &Authority{cfg: cfg, key: key, root: root, pattern: pattern}, nil
}

// Roots returns the one root.
func (a *Authority) Roots(context.Context) ([]*x509.Certificate, error) {
	return []*x509.Certificate{a.root}, nil
}

// Issue certifies the key of the request csrDER for id, for ttl cut down to the configured maximum.
// A request that is not exactly one for id, and an identity of another trust domain, is refused
// with an error that wraps [certfetch.ErrDenied].
//
// Every call logs one line, so that the log is the list of all that reached the CA.
func (a *Authority) Issue(ctx context.Context, id spiffeid.ID, csrDER []byte, ttl time.Duration) (certfetch.Issued, error) {
	leaf, err := a.sign(id, csrDER, ttl)
	if err != nil {
		a.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "signing refused",
			slog.String("identity", id.String()), slog.String("reason", err.Error()))
		return certfetch.Issued{}, fmt.Errorf("signing for %s: %w: %w", id, certfetch.ErrDenied, err)
	}
	a.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "certificate signed", slog.String("identity", id.String()),
		slog.String("serial", serialText(leaf.SerialNumber)), slog.Time("not_after", leaf.NotAfter))
	return certfetch.Issued{Chain: []*x509.Certificate{leaf}, Roots: []*x509.Certificate{a.root}}, nil
}

func (a *Authority) sign(id spiffeid.ID, csrDER []byte, ttl time.Duration) (*x509.Certificate, error) {
	if td := id.TrustDomain(); td != a.cfg.TrustDomain {
		return nil, fmt.Errorf("trust domain %q is not this CA's, which is %q", td, a.cfg.TrustDomain)
	}
	publicKeyDER, err := checkRequest(csrDER, id)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	return a.pattern.sign(id, publicKeyDER, now.Add(-backdate), now.Add(a.clamp(ttl)), a.key)
}

// clamp is the lifetime granted to who asks for ttl.
func (a *Authority) clamp(ttl time.Duration) time.Duration {
	if ttl <= 0 {
		return a.cfg.LeafTTL
	}
	return max(MinLeafTTL, min(ttl, a.cfg.LeafTTL))
}

func create(template, parent *x509.Certificate, publicKey *ecdsa.PublicKey, key *ecdsa.PrivateKey) (*x509.Certificate, error) {
	der, err := x509.CreateCertificate(rand.Reader, template, parent, publicKey, key)
	if err != nil {
		return nil, fmt.Errorf("creating the certificate: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("reading the certificate back: %w", err)
	}
	return cert, nil
}

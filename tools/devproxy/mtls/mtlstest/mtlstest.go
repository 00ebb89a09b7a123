// SPDX-License-Identifier: Apache-2.0

// Package mtlstest has certificates for tests of the mesh's TLS, signed by a
// real CA in memory.
package mtlstest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"sync"
	"testing"

	"ambientd/certfetch/ca"
	"ambientd/certfetch/spiffeid"
)

// Source is an mtls.Source with what a test has issued.
type Source struct {
	authority *ca.Authority

	mu    sync.Mutex
	certs map[spiffeid.ID]*tls.Certificate
	roots *x509.CertPool
}

// ID returns an identity, in namespace "test".
func ID(tb testing.TB, trustDomain, serviceAccount string) spiffeid.ID {
	tb.Helper()
	td, err := spiffeid.ParseTrustDomain(trustDomain)
	if err != nil {
		tb.Fatal(err)
	}
	id, err := spiffeid.New(td, "test", serviceAccount)
	if err != nil {
		tb.Fatal(err)
	}
	return id
}

// New returns a Source whose CA signs for one trust domain.
func New(tb testing.TB, trustDomain string) *Source {
	tb.Helper()
	td, err := spiffeid.ParseTrustDomain(trustDomain)
	if err != nil {
		tb.Fatal(err)
	}
	authority, err := ca.New(ca.Config{TrustDomain: td})
	if err != nil {
		tb.Fatal(err)
	}
	s := &Source{authority: authority, certs: make(map[spiffeid.ID]*tls.Certificate)}
	s.Trust(tb, s)
	return s
}

// Trust makes the roots of others the ones that s verifies against.
func (s *Source) Trust(tb testing.TB, others ...*Source) {
	tb.Helper()
	pool := x509.NewCertPool()
	for _, o := range others {
		roots, err := o.authority.Roots(tb.Context())
		if err != nil {
			tb.Fatal(err)
		}
		for _, r := range roots {
			pool.AddCert(r)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.roots = pool
}

// Issue gives an identity a new certificate.
func (s *Source) Issue(tb testing.TB, id spiffeid.ID) {
	tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader,
		&x509.CertificateRequest{ExtraExtensions: []pkix.Extension{id.SubjectAltName()}}, key)
	if err != nil {
		tb.Fatal(err)
	}
	issued, err := s.authority.Issue(context.Background(), id, csr, 0)
	if err != nil {
		tb.Fatal(err)
	}
	cert := &tls.Certificate{PrivateKey: key, Leaf: issued.Chain[0]}
	for _, c := range issued.Chain {
		cert.Certificate = append(cert.Certificate, c.Raw)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.certs[id] = cert
}

// Withdraw takes an identity's certificate away.
func (s *Source) Withdraw(id spiffeid.ID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.certs, id)
}

// Pretend has id show the certificate of another identity.
func (s *Source) Pretend(id, other spiffeid.ID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.certs[id] = s.certs[other]
}

// Errors of a Source.
var (
	ErrNone    = errors.New("the test has issued no certificate")
	ErrNoRoots = errors.New("the test has given no roots")
)

// Certificate returns what was issued last, or ErrNone.
func (s *Source) Certificate(id spiffeid.ID) (*tls.Certificate, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.certs[id]; c != nil {
		return c, nil
	}
	return nil, ErrNone
}

// Roots returns the roots, or ErrNoRoots after Trust of nobody.
func (s *Source) Roots() (*x509.CertPool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.roots == nil {
		return nil, ErrNoRoots
	}
	return s.roots, nil
}

// SPDX-License-Identifier: Apache-2.0

// Package mtls is the mesh's TLS: version 1.3, both sides show an X.509-SVID,
// and what counts is the SPIFFE ID in it. Host names play no part.
//
// It owns the verification of the other side. It refuses to hold certificates:
// it asks for them anew at each handshake, so that a renewed one is used at
// once and a withdrawn one never again.
package mtls

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"

	"ambientd/certfetch/spiffeid"
)

// Source has the certificates at the time of a handshake.
type Source interface {
	// Certificate returns the one to show as id, or why there is none. Another
	// pointer means another certificate.
	Certificate(id spiffeid.ID) (*tls.Certificate, error)
	// Roots returns what the other side's certificate must lead to.
	Roots() (*x509.CertPool, error)
}

// Server returns the configuration of a server that is id, and accepts any
// identity of trust domain td.
func Server(src Source, id spiffeid.ID, td spiffeid.TrustDomain) *tls.Config {
	c := config(src, x509.ExtKeyUsageClientAuth, func(peer spiffeid.ID) error {
		if peer.TrustDomain() != td {
			return fmt.Errorf("client %s is not of trust domain %s", peer, td)
		}
		return nil
	})
	c.ClientAuth = tls.RequireAnyClientCert // verified by VerifyConnection
	c.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return src.Certificate(id) }
	return c
}

// Client returns the configuration of a client that shows cert and accepts no
// server but the one that is want.
func Client(src Source, cert *tls.Certificate, want spiffeid.ID) *tls.Config {
	c := config(src, x509.ExtKeyUsageServerAuth, func(peer spiffeid.ID) error {
		if peer != want {
			return fmt.Errorf("server is %s, not %s", peer, want)
		}
		return nil
	})
	// The library would verify a host name. VerifyConnection verifies the rest.
	c.InsecureSkipVerify = true
	c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return cert, nil }
	return c
}

func config(src Source, usage x509.ExtKeyUsage, allow func(spiffeid.ID) error) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: []string{"h2"},
		// Resumption would go on by a certificate that has been withdrawn.
		SessionTicketsDisabled: true,
		VerifyConnection: func(cs tls.ConnectionState) error {
			roots, err := src.Roots()
			if err != nil {
				return err
			}
			peer, err := verify(cs.PeerCertificates, roots, usage)
			if err != nil {
				return err
			}
			return allow(peer)
		},
	}
}

func verify(chain []*x509.Certificate, roots *x509.CertPool, usage x509.ExtKeyUsage) (spiffeid.ID, error) {
	if len(chain) == 0 {
		return spiffeid.ID{}, errors.New("the other side showed no certificate")
	}
	intermediates := x509.NewCertPool()
	for _, c := range chain[1:] {
		intermediates.AddCert(c)
	}
	_, err := chain[0].Verify(x509.VerifyOptions{
		Roots:         roots,
		Intermediates: intermediates,
		KeyUsages:     []x509.ExtKeyUsage{usage},
	})
	if err != nil {
		return spiffeid.ID{}, fmt.Errorf("verifying the other side's certificate: %w", err)
	}
	return Identity(chain[0])
}

// Identity returns the SPIFFE ID of an X.509-SVID: its only URI.
func Identity(leaf *x509.Certificate) (spiffeid.ID, error) {
	if len(leaf.URIs) != 1 {
		return spiffeid.ID{}, fmt.Errorf("certificate has %d URIs, an X.509-SVID has one", len(leaf.URIs))
	}
	id, err := spiffeid.Parse(leaf.URIs[0].String())
	if err != nil {
		return spiffeid.ID{}, fmt.Errorf("reading the certificate's identity: %w", err)
	}
	return id, nil
}

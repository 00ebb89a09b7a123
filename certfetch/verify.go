// SPDX-License-Identifier: Apache-2.0

package certfetch

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"slices"
	"time"

	"ambientd/certfetch/spiffeid"
)

// Limits on what a CA may make us hold and send to every proxy.
const (
	maxChain       = 8
	maxRoots       = 64
	maxIssuedBytes = 1 << 20 // DER of all certificates of one answer
)

// verify turns a CA's answer into what may be served for id, or says why it may not. The answer is
// a stranger's until then: the CA may be another one, or wrong.
func verify(issued Issued, id spiffeid.ID, key *ecdsa.PrivateKey, now time.Time) (*SVID, error) {
	if n := len(issued.Chain); n == 0 || n > maxChain {
		return nil, fmt.Errorf("the chain has %d certificates, 1 to %d are possible", n, maxChain)
	}
	if err := checkRoots(issued.Roots); err != nil {
		return nil, err
	}
	if err := checkSize(issued.Chain); err != nil {
		return nil, err
	}
	leaf := issued.Chain[0]
	if err := checkLeaf(leaf, id, key); err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	for _, root := range issued.Roots {
		roots.AddCert(root)
	}
	intermediates := x509.NewCertPool()
	for _, cert := range issued.Chain[1:] {
		intermediates.AddCert(cert)
	}
	chains, err := leaf.Verify(x509.VerifyOptions{
		Roots:         roots,
		Intermediates: intermediates,
		CurrentTime:   now,
		KeyUsages:     []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	})
	if err != nil {
		return nil, fmt.Errorf("the chain does not lead to the CA's roots: %w", err)
	}
	// Peers may find any of the chains; the one that lasts longest keeps the certificate useful.
	best := slices.MaxFunc(chains, func(a, b []*x509.Certificate) int { return endOf(a).Compare(endOf(b)) })
	return &SVID{ID: id, Chain: issued.Chain, Key: key, NotAfter: endOf(best), anchor: best[len(best)-1]}, nil
}

// checkLeaf holds the leaf against what was asked for, and against the X.509-SVID specification
// (sections 4 and 5 and appendix A), which peers verify by.
func checkLeaf(leaf *x509.Certificate, id spiffeid.ID, key *ecdsa.PrivateKey) error {
	// crypto/x509 has seen to it that there is one at most.
	san := slices.IndexFunc(leaf.Extensions, func(e pkix.Extension) bool { return spiffeid.IsSubjectAltName(e.Id) })
	switch {
	case san < 0:
		return fmt.Errorf("the certificate has no subject alternative name, wanted %s", id)
	case !bytes.Equal(leaf.Extensions[san].Value, id.SubjectAltName().Value):
		return fmt.Errorf("the certificate names %s, not exactly %s", namesOf(leaf), id)
	case !key.PublicKey.Equal(leaf.PublicKey):
		return errors.New("the certificate is for another key than ours")
	case leaf.IsCA || leaf.KeyUsage&(x509.KeyUsageCertSign|x509.KeyUsageCRLSign) != 0:
		return errors.New("the certificate may sign others, which a workload's must not")
	case leaf.KeyUsage&x509.KeyUsageDigitalSignature == 0:
		return errors.New("the certificate is not for digital signatures, which TLS needs")
	case !servesBothSides(leaf):
		return errors.New("the certificate is not for both sides of mutual TLS (server and client authentication)")
	}
	return nil
}

// servesBothSides reports whether the leaf's extended key usage, if it has one, lets a workload be
// a client and a server with it.
func servesBothSides(leaf *x509.Certificate) bool {
	if len(leaf.ExtKeyUsage)+len(leaf.UnknownExtKeyUsage) == 0 || slices.Contains(leaf.ExtKeyUsage, x509.ExtKeyUsageAny) {
		return true
	}
	return slices.Contains(leaf.ExtKeyUsage, x509.ExtKeyUsageServerAuth) &&
		slices.Contains(leaf.ExtKeyUsage, x509.ExtKeyUsageClientAuth)
}

// checkRoots takes a set of roots as a whole or not at all: one of them that is no CA means that
// the list is not what it should be.
func checkRoots(roots []*x509.Certificate) error {
	if n := len(roots); n == 0 || n > maxRoots {
		return fmt.Errorf("the CA names %d roots, 1 to %d are possible", n, maxRoots)
	}
	if err := checkSize(roots); err != nil {
		return err
	}
	for _, root := range roots {
		if !root.BasicConstraintsValid || !root.IsCA {
			return fmt.Errorf("the CA names a root that is no CA certificate: %.100q, serial %x", root.Subject.String(), root.SerialNumber)
		}
	}
	return nil
}

func checkSize(certs []*x509.Certificate) error {
	var size int
	for _, cert := range certs {
		if cert == nil {
			return errors.New("the CA's answer has an empty certificate in it")
		}
		size += len(cert.Raw)
	}
	if size > maxIssuedBytes {
		return fmt.Errorf("the CA's certificates have %d bytes, at most %d are taken", size, maxIssuedBytes)
	}
	return nil
}

// endOf is when the first certificate of a chain ends.
func endOf(chain []*x509.Certificate) time.Time {
	end := chain[0].NotAfter
	for _, cert := range chain[1:] {
		if cert.NotAfter.Before(end) {
			end = cert.NotAfter
		}
	}
	return end
}

// namesOf is what an operator should see of a certificate's names: short, and harmless in a log.
func namesOf(cert *x509.Certificate) string {
	return fmt.Sprintf("%.200q", fmt.Sprint(cert.URIs, cert.DNSNames, cert.IPAddresses, cert.EmailAddresses))
}

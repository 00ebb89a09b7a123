// SPDX-License-Identifier: Apache-2.0

package ca

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"fmt"
	"math/big"
	"slices"
	"time"

	"ambientd/certfetch/spiffeid"
)

// leafPattern is what all leaves of one authority have in common. It is lifted from a certificate
// that crypto/x509 made, so that the encoding of every part is crypto/x509's; a leaf puts its own
// serial number, validity, key and name in.
//
// x509.CreateCertificate itself takes twice the CPU (BenchmarkLeaf): it encodes what is always the
// same, and verifies the signature that it has just made, which [certfetch.Fetcher] does again with
// all that it is given.
type leafPattern struct {
	algorithm  pkix.AlgorithmIdentifier
	issuer     asn1.RawValue
	extensions []pkix.Extension
	// san is the index of the one extension that differs.
	san int
}

// The structures of RFC 5280, section 4.1.
type (
	certificate struct {
		TBS       asn1.RawValue
		Algorithm pkix.AlgorithmIdentifier
		Signature asn1.BitString
	}
	tbsCertificate struct {
		Version    int `asn1:"explicit,tag:0"`
		Serial     *big.Int
		Algorithm  pkix.AlgorithmIdentifier
		Issuer     asn1.RawValue
		Validity   validity
		Subject    pkix.RDNSequence // empty: the name is in the SAN, which is therefore critical
		PublicKey  asn1.RawValue
		Extensions []pkix.Extension `asn1:"explicit,tag:3"`
	}
	validity struct{ NotBefore, NotAfter time.Time }
)

const (
	version3   = 2 // X.509 counts from zero
	serialBits = 128
)

// serialText is a leaf's serial number as other tools print its bytes: in hexadecimal, two digits
// for each, leading zeros too.
func serialText(serial *big.Int) string {
	return fmt.Sprintf("%0*x", serialBits/4, serial)
}

// newLeafPattern has crypto/x509 make a leaf for a placeholder of a name, and takes it apart.
func newLeafPattern(root *x509.Certificate, key *ecdsa.PrivateKey, td spiffeid.TrustDomain) (leafPattern, error) {
	placeholder, err := spiffeid.New(td, "pattern", "pattern")
	if err != nil {
		return leafPattern{}, err
	}
	leaf, err := create(leafTemplate(placeholder), root, &key.PublicKey, key)
	if err != nil {
		return leafPattern{}, err
	}
	var parts certificate
	if _, err := asn1.Unmarshal(leaf.Raw, &parts); err != nil {
		return leafPattern{}, fmt.Errorf("taking the pattern apart: %w", err)
	}
	return leafPattern{
		algorithm:  parts.Algorithm,
		issuer:     asn1.RawValue{FullBytes: leaf.RawIssuer},
		extensions: leaf.Extensions,
		san:        slices.IndexFunc(leaf.Extensions, func(e pkix.Extension) bool { return spiffeid.IsSubjectAltName(e.Id) }),
	}, nil
}

// leafTemplate is what a leaf is, but for serial number and validity: for both sides of mutual TLS,
// never a CA, and named id and nothing else.
func leafTemplate(id spiffeid.ID) *x509.Certificate {
	return &x509.Certificate{
		ExtraExtensions:       []pkix.Extension{id.SubjectAltName()},
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true,
	}
}

// sign makes the leaf for id and the key publicKeyDER (a SubjectPublicKeyInfo) from the pattern.
func (p leafPattern) sign(id spiffeid.ID, publicKeyDER []byte, notBefore, notAfter time.Time, key *ecdsa.PrivateKey) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), serialBits))
	if err != nil {
		return nil, fmt.Errorf("drawing a serial number: %w", err)
	}
	extensions := slices.Clone(p.extensions)
	extensions[p.san] = id.SubjectAltName()
	tbs, err := asn1.Marshal(tbsCertificate{
		Version:    version3,
		Serial:     serial,
		Algorithm:  p.algorithm,
		Issuer:     p.issuer,
		Validity:   validity{notBefore.UTC(), notAfter.UTC()},
		PublicKey:  asn1.RawValue{FullBytes: publicKeyDER},
		Extensions: extensions,
	})
	if err != nil {
		return nil, fmt.Errorf("encoding the certificate: %w", err)
	}
	digest := sha256.Sum256(tbs)
	signature, err := key.Sign(rand.Reader, digest[:], crypto.SHA256)
	if err != nil {
		return nil, fmt.Errorf("signing the certificate: %w", err)
	}
	der, err := asn1.Marshal(certificate{
		TBS:       asn1.RawValue{FullBytes: tbs},
		Algorithm: p.algorithm,
		Signature: asn1.BitString{Bytes: signature, BitLength: 8 * len(signature)},
	})
	if err != nil {
		return nil, fmt.Errorf("encoding the signed certificate: %w", err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("reading the certificate back: %w", err)
	}
	return leaf, nil
}

// SPDX-License-Identifier: Apache-2.0

package certfetch

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"fmt"

	"ambientd/certfetch/spiffeid"
)

// The structures of PKCS #10 (RFC 2986, section 4), as far as a request with an empty subject and
// one extension needs them.
type (
	certificationRequest struct {
		Info      asn1.RawValue
		Algorithm pkix.AlgorithmIdentifier
		Signature asn1.BitString
	}
	certificationRequestInfo struct {
		Version    int
		Subject    pkix.RDNSequence
		PublicKey  asn1.RawValue
		Attributes []extensionRequest `asn1:"tag:0,set"`
	}
	extensionRequest struct {
		Type       asn1.ObjectIdentifier
		Extensions [][]pkix.Extension `asn1:"set"`
	}
)

// newRequest returns a PKCS #10 request, in DER, signed by key, for id and nothing else: empty
// subject, and id as the only name in a critical extension.
//
// x509.CreateCertificateRequest would do too, but takes almost three times the CPU
// (BenchmarkRequest): it verifies the signature that it has just made, with a key that is in our own
// memory, and that the CA verifies next.
func newRequest(key *ecdsa.PrivateKey, id spiffeid.ID) ([]byte, error) {
	publicKey, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return nil, fmt.Errorf("encoding the public key: %w", err)
	}
	info, err := asn1.Marshal(certificationRequestInfo{
		PublicKey: asn1.RawValue{FullBytes: publicKey},
		Attributes: []extensionRequest{{
			Type:       asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 14}, // extensionRequest, RFC 2985
			Extensions: [][]pkix.Extension{{id.SubjectAltName()}},
		}},
	})
	if err != nil {
		return nil, fmt.Errorf("encoding the request: %w", err)
	}
	digest := sha256.Sum256(info)
	signature, err := key.Sign(rand.Reader, digest[:], crypto.SHA256)
	if err != nil {
		return nil, fmt.Errorf("signing the request: %w", err)
	}
	der, err := asn1.Marshal(certificationRequest{
		Info: asn1.RawValue{FullBytes: info},
		// ecdsa-with-SHA256, RFC 5758
		Algorithm: pkix.AlgorithmIdentifier{Algorithm: asn1.ObjectIdentifier{1, 2, 840, 10045, 4, 3, 2}},
		Signature: asn1.BitString{Bytes: signature, BitLength: 8 * len(signature)},
	})
	if err != nil {
		return nil, fmt.Errorf("encoding the signed request: %w", err)
	}
	return der, nil
}

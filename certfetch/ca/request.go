// SPDX-License-Identifier: Apache-2.0

package ca

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/x509"
	"encoding/asn1"
	"errors"
	"fmt"

	"ambientd/certfetch/spiffeid"
)

// maxRequest is the largest request that is parsed, in bytes: four times the largest one for a
// P-384 key and the longest identity.
const maxRequest = 4096

// checkRequest takes a PKCS #10 request apart and returns its key (a SubjectPublicKeyInfo in DER), if
// the request is for exactly id and proves that the requester has the key.
func checkRequest(der []byte, id spiffeid.ID) ([]byte, error) {
	if len(der) > maxRequest {
		return nil, fmt.Errorf("the request has %d bytes, at most %d are read", len(der), maxRequest)
	}
	request, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, fmt.Errorf("the request cannot be parsed: %w", err)
	}
	if err := checkNames(request, id); err != nil {
		return nil, err
	}
	key, err := checkKey(request)
	if err != nil {
		return nil, err
	}
	// Last, because it costs a hundred times the rest.
	if err := request.CheckSignature(); err != nil {
		return nil, fmt.Errorf("the request is not signed with the key that it is for: %w", err)
	}
	// Encoded anew: the request's own encoding may have more in it than the key.
	publicKeyDER, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		return nil, fmt.Errorf("encoding the public key: %w", err)
	}
	return publicKeyDER, nil
}

// checkNames refuses a request that asks to be called anything but id, or to be a CA. Other
// extensions, such as key usages, are without effect: nothing is copied.
func checkNames(request *x509.CertificateRequest, id spiffeid.ID) error {
	if emptySubject := []byte{0x30, 0x00}; !bytes.Equal(request.RawSubject, emptySubject) {
		return fmt.Errorf("the request has a subject, which must be empty: %.100q", request.Subject.String())
	}
	switch {
	case len(request.DNSNames) > 0:
		return errors.New("the request has DNS names")
	case len(request.IPAddresses) > 0:
		return errors.New("the request has IP addresses")
	case len(request.EmailAddresses) > 0:
		return errors.New("the request has e-mail addresses")
	case len(request.URIs) != 1:
		return fmt.Errorf("the request has %d URIs, must be 1", len(request.URIs))
	}
	want := id.SubjectAltName().Value
	var names int
	for _, extension := range request.Extensions {
		switch {
		case spiffeid.IsSubjectAltName(extension.Id):
			names++
			if !bytes.Equal(extension.Value, want) {
				return fmt.Errorf("the request is for %.200q, or for more than that, must be for exactly %s", request.URIs[0].String(), id)
			}
		case extension.Id.Equal(asn1.ObjectIdentifier{2, 5, 29, 19}): // basicConstraints, RFC 5280, section 4.2.1.9
			if err := checkBasicConstraints(extension.Value); err != nil {
				return err
			}
		}
	}
	if names != 1 {
		return fmt.Errorf("the request has %d subject alternative name extensions, must be 1", names)
	}
	return nil
}

func checkBasicConstraints(der []byte) error {
	var constraints struct {
		IsCA       bool `asn1:"optional"`
		MaxPathLen int  `asn1:"optional,default:-1"`
	}
	rest, err := asn1.Unmarshal(der, &constraints)
	if err != nil || len(rest) > 0 {
		return errors.New("the request has basic constraints that cannot be parsed")
	}
	if constraints.IsCA {
		return errors.New("the request asks for a CA certificate")
	}
	return nil
}

// checkKey admits what every TLS library takes and nothing weaker: ECDSA on P-256 or P-384, with a
// SHA-2 signature.
func checkKey(request *x509.CertificateRequest) (*ecdsa.PublicKey, error) {
	key, ok := request.PublicKey.(*ecdsa.PublicKey)
	if !ok {
		return nil, fmt.Errorf("the request is for a key of type %s, must be ECDSA", request.PublicKeyAlgorithm)
	}
	if key.Curve != elliptic.P256() && key.Curve != elliptic.P384() {
		return nil, fmt.Errorf("the request is for a key on curve %s, must be P-256 or P-384", key.Curve.Params().Name)
	}
	switch request.SignatureAlgorithm {
	case x509.ECDSAWithSHA256, x509.ECDSAWithSHA384, x509.ECDSAWithSHA512:
		return key, nil
	default:
		return nil, fmt.Errorf("the request is signed with %s, must be ECDSA with SHA-2", request.SignatureAlgorithm)
	}
}

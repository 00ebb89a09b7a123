// SPDX-License-Identifier: Apache-2.0

package certfetch

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"strings"
	"testing"

	"ambientd/certfetch/spiffeid"
)

// A request must be, but for the signature, what crypto/x509 makes of the same template: byte for
// byte, for the shortest and the longest identity.
func TestRequestIsWhatX509Makes(t *testing.T) {
	longName := strings.Repeat("a.", 126) + "b"
	for _, text := range []string{
		"spiffe://a/ns/b/sa/c",
		"spiffe://cluster.local/ns/shop/sa/cart",
		"spiffe://" + longName + "/ns/" + strings.Repeat("n", 63) + "/sa/" + longName,
	} {
		id, err := spiffeid.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		der, err := newRequest(key, id)
		if err != nil {
			t.Fatal(err)
		}
		got, err := x509.ParseCertificateRequest(der)
		if err != nil {
			t.Fatal(err)
		}
		if err := got.CheckSignature(); err != nil {
			t.Error(err)
		}
		wantDER, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
			ExtraExtensions: []pkix.Extension{id.SubjectAltName()},
		}, key)
		if err != nil {
			t.Fatal(err)
		}
		want, err := x509.ParseCertificateRequest(wantDER)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got.RawTBSCertificateRequest, want.RawTBSCertificateRequest) {
			t.Errorf("the request for %s:\n%x\ncrypto/x509 makes:\n%x", id, got.RawTBSCertificateRequest, want.RawTBSCertificateRequest)
		}
	}
}

// BenchmarkRequest compares the two ways to the same request.
func BenchmarkRequest(b *testing.B) {
	id, err := spiffeid.Parse("spiffe://cluster.local/ns/shop/sa/cart")
	if err != nil {
		b.Fatal(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		b.Fatal(err)
	}
	b.Run("own", func(b *testing.B) {
		for b.Loop() {
			if _, err := newRequest(key, id); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("x509", func(b *testing.B) {
		for b.Loop() {
			template := &x509.CertificateRequest{ExtraExtensions: []pkix.Extension{id.SubjectAltName()}}
			if _, err := x509.CreateCertificateRequest(rand.Reader, template, key); err != nil {
				b.Fatal(err)
			}
		}
	})
}

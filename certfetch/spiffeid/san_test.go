// SPDX-License-Identifier: Apache-2.0

package spiffeid_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"net/url"
	"strings"
	"testing"
	"time"

	"ambientd/certfetch/spiffeid"
)

// The extension must be what crypto/x509 writes for a certificate with that one URI and an empty
// subject, also for the lengths at which DER changes its form.
func TestSubjectAltNameIsWhatX509Writes(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	longName := strings.Repeat("a.", 126) + "b"
	for _, text := range []string{
		"spiffe://cluster.local/ns/a/sa/b",
		// 126 to 128 and 254 to 256 bytes of name, 2 or 3 more of list: where lengths grow a byte.
		"spiffe://cluster.local/ns/a/sa/" + strings.Repeat("b", 94),
		"spiffe://cluster.local/ns/a/sa/" + strings.Repeat("b", 95),
		"spiffe://cluster.local/ns/a/sa/" + strings.Repeat("b", 96),
		"spiffe://cluster.local/ns/a/sa/" + strings.Repeat("b", 97),
		"spiffe://cluster.local/ns/a/sa/" + strings.Repeat("b", 221),
		"spiffe://cluster.local/ns/a/sa/" + strings.Repeat("b", 224),
		"spiffe://cluster.local/ns/a/sa/" + strings.Repeat("b", 225),
		"spiffe://cluster.local/ns/a/sa/" + strings.Repeat("b", 253),
		"spiffe://" + longName + "/ns/" + strings.Repeat("n", 63) + "/sa/" + longName,
	} {
		id, err := spiffeid.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		template := &x509.Certificate{NotAfter: time.Now().Add(time.Hour), URIs: []*url.URL{id.URL()}}
		der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatalf("the certificate for %s does not parse: %v", id, err)
		}
		if len(cert.URIs) != 1 || cert.URIs[0].String() != text {
			t.Errorf("the certificate names %v, want %s", cert.URIs, text)
		}
		got := id.SubjectAltName()
		if want := find(t, cert); !bytes.Equal(got.Value, want.Value) || got.Critical != want.Critical || !got.Id.Equal(want.Id) {
			t.Errorf("SubjectAltName of %s = %+v, want %+v", id, got, want)
		}
	}
}

func find(t *testing.T, cert *x509.Certificate) pkix.Extension {
	t.Helper()
	for _, extension := range cert.Extensions {
		if spiffeid.IsSubjectAltName(extension.Id) {
			return extension
		}
	}
	t.Fatal("the certificate has no subject alternative name")
	return pkix.Extension{}
}

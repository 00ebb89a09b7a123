// SPDX-License-Identifier: Apache-2.0

package ca

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"math/big"
	"strings"
	"testing"
	"time"

	"ambientd/certfetch/spiffeid"
)

// A leaf from the pattern must be, but for the signature, the certificate that crypto/x509 makes:
// byte for byte, on both sides of the year in which the encoding of times changes.
func TestPatternMakesWhatX509Makes(t *testing.T) {
	td, err := spiffeid.ParseTrustDomain("cluster.local")
	if err != nil {
		t.Fatal(err)
	}
	authority, err := New(Config{TrustDomain: td})
	if err != nil {
		t.Fatal(err)
	}
	for _, account := range []string{"a", strings.Repeat("b", 200), strings.Repeat("c.", 126) + "d"} {
		for _, curve := range []elliptic.Curve{elliptic.P256(), elliptic.P384()} {
			for _, year := range []int{2026, 2051} {
				id, err := spiffeid.New(td, "shop", account)
				if err != nil {
					t.Fatal(err)
				}
				key, err := ecdsa.GenerateKey(curve, rand.Reader)
				if err != nil {
					t.Fatal(err)
				}
				notBefore := time.Date(year, time.May, 6, 7, 8, 9, 123, time.FixedZone("", 3600))
				assertSameAsX509(t, authority, id, key, notBefore)
			}
		}
	}
}

func assertSameAsX509(t *testing.T, authority *Authority, id spiffeid.ID, key *ecdsa.PrivateKey, notBefore time.Time) {
	t.Helper()
	publicKeyDER, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	notAfter := notBefore.Add(24 * time.Hour)
	leaf, err := authority.pattern.sign(id, publicKeyDER, notBefore, notAfter, authority.key)
	if err != nil {
		t.Fatal(err)
	}
	if err := leaf.CheckSignatureFrom(authority.root); err != nil {
		t.Errorf("the leaf for %s: %v", id, err)
	}
	template := leafTemplate(id)
	template.SerialNumber = new(big.Int).Set(leaf.SerialNumber)
	template.NotBefore, template.NotAfter = notBefore, notAfter
	want, err := create(template, authority.root, &key.PublicKey, authority.key)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(leaf.RawTBSCertificate, want.RawTBSCertificate) {
		t.Errorf("the leaf for %s, valid from %s:\n%x\ncrypto/x509 makes:\n%x", id, notBefore, leaf.RawTBSCertificate, want.RawTBSCertificate)
	}
}

// BenchmarkLeaf compares the pattern with crypto/x509's way to the same certificate.
func BenchmarkLeaf(b *testing.B) {
	td, err := spiffeid.ParseTrustDomain("cluster.local")
	if err != nil {
		b.Fatal(err)
	}
	authority, err := New(Config{TrustDomain: td})
	if err != nil {
		b.Fatal(err)
	}
	id, err := spiffeid.New(td, "shop", "cart")
	if err != nil {
		b.Fatal(err)
	}
	publicKeyDER, err := x509.MarshalPKIXPublicKey(&authority.key.PublicKey)
	if err != nil {
		b.Fatal(err)
	}
	now := time.Now()
	b.Run("pattern", func(b *testing.B) {
		for b.Loop() {
			if _, err := authority.pattern.sign(id, publicKeyDER, now, now.Add(time.Hour), authority.key); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("x509", func(b *testing.B) {
		for b.Loop() {
			template := leafTemplate(id)
			template.NotBefore, template.NotAfter = now, now.Add(time.Hour)
			if _, err := create(template, authority.root, &authority.key.PublicKey, authority.key); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func TestSerialTextHasAFixedWidth(t *testing.T) {
	for _, test := range []struct{ serial, want string }{
		{"1", "00000000000000000000000000000001"},
		{"5a68e4cff8155157884185648849ad", "005a68e4cff8155157884185648849ad"},
		{"f5a68e4cff8155157884185648849ad", "0f5a68e4cff8155157884185648849ad"},
		{"ffffffffffffffffffffffffffffffff", "ffffffffffffffffffffffffffffffff"},
	} {
		serial, ok := new(big.Int).SetString(test.serial, 16)
		if !ok {
			t.Fatalf("%s is no number", test.serial)
		}
		if got := serialText(serial); got != test.want {
			t.Errorf("%s is shown as %s, want %s", test.serial, got, test.want)
		}
	}
}

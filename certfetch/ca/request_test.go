// SPDX-License-Identifier: Apache-2.0

package ca_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"net"
	"net/url"
	"runtime"
	"strings"
	"testing"
	"time"
)

// extension is a requested extension with whatever value.
func extension(t *testing.T, oid asn1.ObjectIdentifier, value any) pkix.Extension {
	t.Helper()
	der, err := asn1.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return pkix.Extension{Id: oid, Value: der}
}

// names is a SAN with these GeneralNames, in order.
func names(t *testing.T, list ...asn1.RawValue) pkix.Extension {
	t.Helper()
	return extension(t, asn1.ObjectIdentifier{2, 5, 29, 17}, list)
}

func name(tag int, value string) asn1.RawValue {
	return asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: tag, Bytes: []byte(value)}
}

type basicConstraints struct {
	IsCA bool `asn1:"optional"`
}

// Requests that ask for anything but the identity decided on: case 20 among others.
func TestRequestForAnythingElseIsRefused(t *testing.T) {
	basicConstraintsOID := asn1.ObjectIdentifier{2, 5, 29, 19}
	otherURI := &url.URL{Scheme: "spiffe", Host: "cluster.local", Path: "/ns/shop/sa/admin"}
	for title, test := range map[string]struct {
		change func(t *testing.T, csr *x509.CertificateRequest)
		reason string
	}{
		"another identity":  {func(_ *testing.T, csr *x509.CertificateRequest) { csr.URIs = []*url.URL{otherURI} }, "must be for exactly"},
		"a second identity": {func(_ *testing.T, csr *x509.CertificateRequest) { csr.URIs = append(csr.URIs, otherURI) }, "2 URIs"},
		"itself twice":      {func(_ *testing.T, csr *x509.CertificateRequest) { csr.URIs = append(csr.URIs, csr.URIs[0]) }, "2 URIs"},
		"no name":           {func(_ *testing.T, csr *x509.CertificateRequest) { csr.URIs = nil }, "0 URIs"},
		"a DNS name too":    {func(_ *testing.T, csr *x509.CertificateRequest) { csr.DNSNames = []string{"kubernetes.default.svc"} }, "DNS"},
		"an IP address too": {func(_ *testing.T, csr *x509.CertificateRequest) { csr.IPAddresses = []net.IP{net.IPv4(10, 0, 0, 1)} }, "IP"},
		"an e-mail too":     {func(_ *testing.T, csr *x509.CertificateRequest) { csr.EmailAddresses = []string{"a@example.org"} }, "e-mail"},
		"a common name":     {func(_ *testing.T, csr *x509.CertificateRequest) { csr.Subject.CommonName = "admin" }, "subject"},
		"an organisation": {func(_ *testing.T, csr *x509.CertificateRequest) {
			csr.Subject.Organization = []string{"system:masters"}
		}, "subject"},
		"the account in upper case": {func(_ *testing.T, csr *x509.CertificateRequest) {
			csr.URIs = []*url.URL{{Scheme: "spiffe", Host: "cluster.local", Path: "/ns/shop/sa/Cart"}}
		}, "must be for exactly"},
		"the scheme in upper case": {func(t *testing.T, csr *x509.CertificateRequest) {
			csr.ExtraExtensions = []pkix.Extension{names(t, name(6, strings.Replace(workload, "spiffe", "SPIFFE", 1)))}
		}, "must be for exactly"},
		"another spelling of itself": {func(t *testing.T, csr *x509.CertificateRequest) {
			csr.ExtraExtensions = []pkix.Extension{names(t, name(6, strings.Replace(workload, "cart", "%63art", 1)))}
		}, "must be for exactly"},
		"a percent-encoded slash": {func(t *testing.T, csr *x509.CertificateRequest) {
			csr.ExtraExtensions = []pkix.Extension{names(t, name(6, workload+"%2fx"))}
		}, "must be for exactly"},
		"a NUL at the end": {func(t *testing.T, csr *x509.CertificateRequest) {
			csr.ExtraExtensions = []pkix.Extension{names(t, name(6, workload+"\x00"))}
		}, "cannot be parsed"},
		"two identities with a comma": {func(t *testing.T, csr *x509.CertificateRequest) {
			csr.ExtraExtensions = []pkix.Extension{names(t, name(6, workload+",spiffe://cluster.local/ns/a/sa/b"))}
		}, "must be for exactly"},
		"a name of a kind that crypto/x509 skips: otherName": {func(t *testing.T, csr *x509.CertificateRequest) {
			csr.ExtraExtensions = []pkix.Extension{names(t, name(6, workload), asn1.RawValue{
				Class: asn1.ClassContextSpecific, Tag: 0, IsCompound: true, Bytes: []byte{0x06, 0x01, 0x2a},
			})}
		}, "must be for exactly"},
		"a name of a kind that crypto/x509 skips: registeredID": {func(t *testing.T, csr *x509.CertificateRequest) {
			csr.ExtraExtensions = []pkix.Extension{names(t, name(8, "\x2a"), name(6, workload))}
		}, "must be for exactly"},
		"to be a CA": {func(t *testing.T, csr *x509.CertificateRequest) {
			csr.ExtraExtensions = []pkix.Extension{extension(t, basicConstraintsOID, basicConstraints{IsCA: true})}
		}, "CA certificate"},
		"broken basic constraints": {func(_ *testing.T, csr *x509.CertificateRequest) {
			csr.ExtraExtensions = []pkix.Extension{{Id: basicConstraintsOID, Value: []byte{0x30, 0x03, 0x01}}}
		}, "basic constraints"},
	} {
		t.Run(title, func(t *testing.T) {
			authority, log := newAuthority(t, 0)
			csr := request(t, newKey(t, elliptic.P256()), workload, func(csr *x509.CertificateRequest) { test.change(t, csr) })
			assertRefused(t, authority, log, parse(t, workload), csr, test.reason)
		})
	}
}

func TestRequestWithAnotherKindOfKeyIsRefused(t *testing.T) {
	// crypto/rsa makes so short a key only when told to.
	t.Setenv("GODEBUG", "rsa1024min=0")
	authority, log := newAuthority(t, 0)
	for _, bits := range []int{1024, 2048} {
		key, err := rsa.GenerateKey(rand.Reader, bits)
		if err != nil {
			t.Fatal(err)
		}
		assertRefused(t, authority, log, parse(t, workload), request(t, key, workload, nil), "RSA")
	}
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	assertRefused(t, authority, log, parse(t, workload), request(t, key, workload, nil), "Ed25519")
	for _, curve := range []elliptic.Curve{elliptic.P224(), elliptic.P521()} {
		assertRefused(t, authority, log, parse(t, workload), request(t, newKey(t, curve), workload, nil), curve.Params().Name)
	}
}

func TestRequestWithABadSignatureIsRefused(t *testing.T) {
	authority, log := newAuthority(t, 0)
	id := parse(t, workload)
	csr := request(t, newKey(t, elliptic.P256()), workload, nil)

	// The signature is the last thing in a request.
	flipped := bytes.Clone(csr)
	flipped[len(flipped)-1] ^= 1
	assertRefused(t, authority, log, id, flipped, "not signed with the key")

	// Another's key in a request that we sign: what a thief of an identity would send.
	victim, thief := newKey(t, elliptic.P256()), newKey(t, elliptic.P256())
	stolen := bytes.Replace(request(t, thief, workload, nil), point(t, thief), point(t, victim), 1)
	assertRefused(t, authority, log, id, stolen, "not signed with the key")

	sha1 := request(t, victim, workload, func(csr *x509.CertificateRequest) { csr.SignatureAlgorithm = x509.ECDSAWithSHA1 })
	assertRefused(t, authority, log, id, sha1, "must be ECDSA with SHA-2")
}

// point is a public key as it stands in a request.
func point(t *testing.T, key *ecdsa.PrivateKey) []byte {
	t.Helper()
	raw, err := key.PublicKey.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func TestRequestThatIsNoneIsRefused(t *testing.T) {
	authority, log := newAuthority(t, 0)
	id := parse(t, workload)
	csr := request(t, newKey(t, elliptic.P256()), workload, nil)
	assertRefused(t, authority, log, id, nil, "cannot be parsed")
	assertRefused(t, authority, log, id, csr[:len(csr)-1], "cannot be parsed")
	assertRefused(t, authority, log, id, append(bytes.Clone(csr), 0), "cannot be parsed")
	assertRefused(t, authority, log, id, []byte("-----BEGIN CERTIFICATE REQUEST-----"), "cannot be parsed")
}

// A long request is not even parsed: it costs what its length check costs.
func TestLongRequestIsRefusedUnparsed(t *testing.T) {
	authority, log := newAuthority(t, 0)
	id := parse(t, workload)
	long := request(t, newKey(t, elliptic.P256()), workload, func(csr *x509.CertificateRequest) {
		csr.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{1, 2, 3}, Value: make([]byte, 1<<20)}}
	})
	if len(long) < 1<<20 {
		t.Fatalf("the request has only %d bytes", len(long))
	}
	assertRefused(t, authority, log, id, long, "at most 4096 are read")
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 10 {
		if _, err := authority.Issue(t.Context(), id, long, time.Hour); err == nil {
			t.Fatal("signed")
		}
	}
	runtime.ReadMemStats(&after)
	if allocated := (after.TotalAlloc - before.TotalAlloc) / 10; allocated > 64<<10 {
		t.Errorf("refusing it allocated %d bytes: it was parsed", allocated)
	}
}

// The longest identity with the longest key fits, with room for extensions.
func TestLongestRequestIsSigned(t *testing.T) {
	authority, _ := newAuthority(t, 0)
	longest := "spiffe://cluster.local/ns/" + strings.Repeat("n", 63) + "/sa/" + strings.Repeat("a.", 126) + "b"
	csr := request(t, newKey(t, elliptic.P384()), longest, func(csr *x509.CertificateRequest) {
		csr.ExtraExtensions = []pkix.Extension{
			extension(t, asn1.ObjectIdentifier{2, 5, 29, 19}, basicConstraints{}),
			extension(t, asn1.ObjectIdentifier{2, 5, 29, 37}, []asn1.ObjectIdentifier{{1, 3, 6, 1, 5, 5, 7, 3, 3}}), // code signing
		}
	})
	issued, err := authority.Issue(t.Context(), parse(t, longest), csr, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	leaf := issued.Chain[0]
	if leaf.URIs[0].String() != longest {
		t.Errorf("signed for %s", leaf.URIs[0])
	}
	if len(leaf.ExtKeyUsage) != 2 || leaf.ExtKeyUsage[0] != x509.ExtKeyUsageServerAuth || leaf.ExtKeyUsage[1] != x509.ExtKeyUsageClientAuth {
		t.Errorf("usages %v: something of the request was copied", leaf.ExtKeyUsage)
	}
}

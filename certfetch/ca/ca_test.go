// SPDX-License-Identifier: Apache-2.0

package ca_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"testing"
	"time"

	"ambientd/certfetch"
	"ambientd/certfetch/ca"
	"ambientd/certfetch/spiffeid"
)

const workload = "spiffe://cluster.local/ns/shop/sa/cart"

func parse(t testing.TB, s string) spiffeid.ID {
	t.Helper()
	id, err := spiffeid.Parse(s)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// newAuthority returns a CA for cluster.local and the log that it writes.
func newAuthority(t testing.TB, leafTTL time.Duration) (*ca.Authority, *bytes.Buffer) {
	t.Helper()
	td, err := spiffeid.ParseTrustDomain("cluster.local")
	if err != nil {
		t.Fatal(err)
	}
	log := new(bytes.Buffer)
	authority, err := ca.New(ca.Config{TrustDomain: td, LeafTTL: leafTTL, Logger: slog.New(slog.NewJSONHandler(log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	return authority, log
}

func newKey(t testing.TB, curve elliptic.Curve) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(curve, rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// request makes a CSR for one URI, as change would have it.
func request(t testing.TB, key crypto.Signer, uri string, change func(*x509.CertificateRequest)) []byte {
	t.Helper()
	u, err := url.Parse(uri)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.CertificateRequest{URIs: []*url.URL{u}}
	if change != nil {
		change(template)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

// logLines decodes what was logged since the last call.
func logLines(t testing.TB, log *bytes.Buffer) []map[string]any {
	t.Helper()
	var lines []map[string]any
	for line := range strings.Lines(log.String()) {
		var fields map[string]any
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			t.Fatalf("log line %q: %v", line, err)
		}
		lines = append(lines, fields)
	}
	log.Reset()
	return lines
}

func TestLeafHasTheIdentityAndNothingElse(t *testing.T) {
	authority, log := newAuthority(t, 0)
	for _, curve := range []elliptic.Curve{elliptic.P256(), elliptic.P384()} {
		key := newKey(t, curve)
		before := time.Now().Truncate(time.Second)
		issued, err := authority.Issue(t.Context(), parse(t, workload), request(t, key, workload, nil), time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		after := time.Now()
		if len(issued.Chain) != 1 || len(issued.Roots) != 1 {
			t.Fatalf("issued %d certificates and %d roots, want one each", len(issued.Chain), len(issued.Roots))
		}
		leaf := issued.Chain[0]
		if !key.PublicKey.Equal(leaf.PublicKey) {
			t.Error("the leaf has another key")
		}
		if len(leaf.URIs) != 1 || leaf.URIs[0].String() != workload || len(leaf.DNSNames)+len(leaf.IPAddresses)+len(leaf.EmailAddresses) != 0 {
			t.Errorf("the leaf names %v %v %v %v", leaf.URIs, leaf.DNSNames, leaf.IPAddresses, leaf.EmailAddresses)
		}
		if leaf.Subject.String() != "" {
			t.Errorf("the leaf has the subject %q, want none", leaf.Subject)
		}
		for _, extension := range leaf.Extensions {
			if spiffeid.IsSubjectAltName(extension.Id) && !extension.Critical {
				t.Error("the name is not critical, though the subject is empty")
			}
		}
		if leaf.IsCA || !leaf.BasicConstraintsValid || leaf.KeyUsage != x509.KeyUsageDigitalSignature {
			t.Errorf("CA %v (said so: %v), key usage %b", leaf.IsCA, leaf.BasicConstraintsValid, leaf.KeyUsage)
		}
		if leaf.NotBefore.Before(before.Add(-2*time.Minute)) || leaf.NotBefore.After(after.Add(-2*time.Minute)) {
			t.Errorf("valid from %s, want 2 minutes before %s", leaf.NotBefore, before)
		}
		if leaf.NotAfter.Before(before.Add(time.Hour)) || leaf.NotAfter.After(after.Add(time.Hour)) {
			t.Errorf("valid until %s, want an hour after %s", leaf.NotAfter, before)
		}
		for _, usage := range []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth} {
			roots := x509.NewCertPool()
			roots.AddCert(issued.Roots[0])
			if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{usage}}); err != nil {
				t.Errorf("for usage %d: %v", usage, err)
			}
		}
		lines := logLines(t, log)
		if len(lines) != 1 || lines[0]["msg"] != "certificate signed" || lines[0]["level"] != "INFO" ||
			lines[0]["identity"] != workload || lines[0]["serial"] != fmt.Sprintf("%032x", leaf.SerialNumber) ||
			lines[0]["not_after"] != leaf.NotAfter.Format(time.RFC3339) {
			t.Errorf("logged %v, want one line for serial %032x", lines, leaf.SerialNumber)
		}
	}
}

func TestSerialNumbersAreRandom(t *testing.T) {
	authority, _ := newAuthority(t, 0)
	csr := request(t, newKey(t, elliptic.P256()), workload, nil)
	seen := make(map[string]bool)
	longest := 0
	for range 20 {
		issued, err := authority.Issue(t.Context(), parse(t, workload), csr, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		serial := issued.Chain[0].SerialNumber
		if serial.Sign() <= 0 || serial.BitLen() > 159 || seen[serial.String()] {
			t.Errorf("serial number %x is negative, zero, too long (RFC 5280, section 4.1.2.2) or a repetition", serial)
		}
		seen[serial.String()] = true
		longest = max(longest, serial.BitLen())
	}
	if longest < 100 {
		t.Errorf("the longest of 20 serial numbers has %d bits: guessable", longest)
	}
}

func TestTTLIsClamped(t *testing.T) {
	authority, _ := newAuthority(t, time.Hour)
	csr := request(t, newKey(t, elliptic.P256()), workload, nil)
	for asked, want := range map[time.Duration]time.Duration{
		0:                 time.Hour,
		-time.Hour:        time.Hour,
		time.Nanosecond:   ca.MinLeafTTL,
		time.Minute:       time.Minute,
		time.Hour:         time.Hour,
		24 * time.Hour:    time.Hour,
		1<<63 - 1:         time.Hour,
		-(1<<63 - 1):      time.Hour,
		2 * time.Minute:   2 * time.Minute,
		3*time.Minute + 1: 3 * time.Minute,
	} {
		now := time.Now()
		issued, err := authority.Issue(t.Context(), parse(t, workload), csr, asked)
		if err != nil {
			t.Fatal(err)
		}
		got := issued.Chain[0].NotAfter.Sub(now)
		if got < want-time.Second || got > want+10*time.Second {
			t.Errorf("asked for %s, got %s, want about %s", asked, got, want)
		}
	}
}

func TestRootIsACAForLeavesOnly(t *testing.T) {
	authority, _ := newAuthority(t, 0)
	roots, err := authority.Roots(t.Context())
	if err != nil || len(roots) != 1 {
		t.Fatalf("Roots() = %v, %v", roots, err)
	}
	root := roots[0]
	if !root.IsCA || !root.MaxPathLenZero || root.KeyUsage&x509.KeyUsageCertSign == 0 {
		t.Errorf("root: CA %v, path length %d, key usage %b", root.IsCA, root.MaxPathLen, root.KeyUsage)
	}
	if len(root.URIs) != 1 || root.URIs[0].String() != "spiffe://cluster.local" {
		t.Errorf("root names %v, want spiffe://cluster.local", root.URIs)
	}
	other, _ := newAuthority(t, 0)
	otherRoots, err := other.Roots(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if root.Equal(otherRoots[0]) || root.PublicKey.(*ecdsa.PublicKey).Equal(otherRoots[0].PublicKey) {
		t.Error("two authorities have the same root")
	}
}

func TestConfigIsChecked(t *testing.T) {
	td, err := spiffeid.ParseTrustDomain("cluster.local")
	if err != nil {
		t.Fatal(err)
	}
	for name, cfg := range map[string]ca.Config{
		"no trust domain": {},
		"short TTL":       {TrustDomain: td, LeafTTL: time.Second},
		"negative TTL":    {TrustDomain: td, LeafTTL: -time.Hour},
		"long TTL":        {TrustDomain: td, LeafTTL: 91 * 24 * time.Hour},
	} {
		if _, err := ca.New(cfg); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if _, err := ca.New(ca.Config{TrustDomain: td}); err != nil {
		t.Errorf("with defaults: %v", err)
	}
}

// Identities of other trust domains, and the zero one, are refused whatever the request says.
// Those strings of case 17 that are no identity do not get this far: spiffeid refuses them.
func TestForeignIdentityIsRefused(t *testing.T) {
	authority, log := newAuthority(t, 0)
	key := newKey(t, elliptic.P256())
	foreign := "spiffe://example.org/ns/shop/sa/cart"
	for id, csr := range map[spiffeid.ID][]byte{
		parse(t, foreign): request(t, key, foreign, nil),
		parse(t, "spiffe://cluster/ns/shop/sa/cart"): request(t, key, workload, nil),
		{}: request(t, key, workload, nil),
		parse(t, "spiffe://x.cluster.local/ns/a/sa/b"): request(t, key, "spiffe://x.cluster.local/ns/a/sa/b", nil),
	} {
		assertRefused(t, authority, log, id, csr, "trust domain")
	}
}

// assertRefused has the CA refuse with a denial that names the reason, and with one log line.
func assertRefused(t *testing.T, authority *ca.Authority, log *bytes.Buffer, id spiffeid.ID, csr []byte, reason string) {
	t.Helper()
	issued, err := authority.Issue(context.Background(), id, csr, time.Hour)
	if err == nil {
		t.Fatalf("signed %v", issued.Chain[0].URIs)
	}
	if !errors.Is(err, certfetch.ErrDenied) || !strings.Contains(err.Error(), reason) {
		t.Errorf("refused with %q, want a denial about %q", err, reason)
	}
	if len(issued.Chain)+len(issued.Roots) != 0 {
		t.Errorf("returned certificates with the refusal: %v", issued)
	}
	lines := logLines(t, log)
	if len(lines) != 1 || lines[0]["msg"] != "signing refused" || lines[0]["level"] != "INFO" || lines[0]["identity"] != id.String() {
		t.Fatalf("logged %v, want one refusal", lines)
	}
	if got, _ := lines[0]["reason"].(string); !strings.Contains(got, reason) || len(got) > 1000 {
		t.Errorf("logged the reason %q, want a short one about %q", got, reason)
	}
}

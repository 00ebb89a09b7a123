// SPDX-License-Identifier: Apache-2.0

package certfetch_test

import (
	"context"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"ambientd/certfetch"
	"ambientd/certfetch/catest"
)

// badAnswers is everything that a CA may return and that must be discarded, with what the operator
// reads about it.
func badAnswers(ca *catest.CA) map[string]struct {
	answer catest.Answer
	reason string
} {
	changed := ca.SignChanged
	without := func(what string) catest.Answer {
		return func(ctx context.Context, r catest.Request) (certfetch.Issued, error) {
			issued, err := ca.Sign(ctx, r)
			switch what {
			case "chain":
				issued.Chain = nil
			case "roots":
				issued.Roots = nil
			case "leaf":
				issued.Chain = []*x509.Certificate{nil}
			case "CA root":
				issued.Roots = append(issued.Roots, issued.Chain[0])
			case "bound":
				for range 20 {
					issued.Chain = append(issued.Chain, issued.Roots[0])
				}
			}
			return issued, err
		}
	}
	return map[string]struct {
		answer catest.Answer
		reason string
	}{
		"wrong name":             {ca.WrongName("/ns/test/sa/admin"), "not exactly spiffe://"},
		"upper case name":        {ca.WrongName("/ns/test/sa/A"), "not exactly spiffe://"},
		"two names":              {changed(func(c *x509.Certificate) { c.URIs = append(c.URIs, c.URIs[0]) }), "not exactly spiffe://"},
		"DNS name too":           {changed(func(c *x509.Certificate) { c.DNSNames = []string{"kubernetes"} }), "not exactly spiffe://"},
		"IP address too":         {changed(func(c *x509.Certificate) { c.IPAddresses = []net.IP{net.IPv4(10, 0, 0, 1)} }), "not exactly spiffe://"},
		"no name":                {changed(func(c *x509.Certificate) { c.URIs, c.Subject.CommonName = nil, "a" }), "no subject alternative name"},
		"hidden name":            {changed(hideName), "not exactly spiffe://"},
		"wrong key":              {ca.WrongKey, "another key"},
		"unknown root":           {ca.UnknownRoot, "does not lead to the CA's roots"},
		"expired":                {ca.Expired, "expired"},
		"not yet valid":          {changed(func(c *x509.Certificate) { c.NotBefore = c.NotAfter.Add(-time.Second) }), "not yet valid"},
		"CA certificate":         {changed(func(c *x509.Certificate) { c.IsCA = true }), "may sign others"},
		"certificate signing":    {changed(func(c *x509.Certificate) { c.KeyUsage |= x509.KeyUsageCertSign }), "may sign others"},
		"no signatures":          {changed(func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageKeyAgreement }), "digital signatures"},
		"server only":            {changed(func(c *x509.Certificate) { c.ExtKeyUsage = c.ExtKeyUsage[:1] }), "both sides"},
		"code signing":           {changed(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageCodeSigning} }), "both sides"},
		"unknown critical":       {changed(unknownCritical), "critical extension"},
		"expired intermediate":   {ca.SignBelow(2 * time.Hour), "expired"},
		"no chain":               {without("chain"), "0 certificates"},
		"no leaf":                {without("leaf"), "empty certificate"},
		"no roots":               {without("roots"), "0 roots"},
		"leaf among the roots":   {without("CA root"), "no CA certificate"},
		"an endless chain":       {without("bound"), "21 certificates"},
		"denial":                 {catest.Deny, "denies"},
		"unavailable":            {catest.Unavailable, "connection refused"},
		"a hang within its time": {catest.Hang, "no answer within 10s"},
	}
}

// hideName adds a name of a kind that crypto/x509 does not show: registeredID.
func hideName(cert *x509.Certificate) {
	uri := cert.URIs[0].String()
	value, err := asn1.Marshal([]asn1.RawValue{
		{Class: asn1.ClassContextSpecific, Tag: 6, Bytes: []byte(uri)},
		{Class: asn1.ClassContextSpecific, Tag: 8, Bytes: []byte{0x2a}},
	})
	if err != nil {
		panic(err) // two constants
	}
	cert.URIs = nil
	cert.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Critical: true, Value: value}}
}

func unknownCritical(cert *x509.Certificate) {
	cert.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{1, 2, 3}, Critical: true, Value: []byte{5, 0}}}
}

// Case 23: whatever the CA returns, the valid certificate goes on being served to its end, and not
// a moment longer; and when the CA is well again, so is the identity.
func TestBadAnswersAreDiscarded(t *testing.T) {
	for name, test := range badAnswers(catest.New(t)) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ca := catest.New(t)
				bad := badAnswers(ca)[name].answer
				f := start(t, ca, certfetch.Config{TTL: time.Hour, Workers: 1})
				id, other := account(t, "a"), account(t, "b")
				first := await(t, f, "pod-1", id)
				bundle := f.Bundle()
				if len(bundle.Roots) != 1 {
					t.Fatalf("%d roots, want 1", len(bundle.Roots))
				}

				ca.AnswerFor(id, bad)
				pass(time.Until(first.NotAfter) - time.Second)
				if held(t, f, id) != first {
					t.Error("the valid certificate was replaced")
				}
				if s := status(t, f, id); s.State != certfetch.StateReady || !strings.Contains(s.LastError, test.reason) {
					t.Errorf("status %+v, want ready with an error about %q", s, test.reason)
				}
				if n := len(ca.Requests(id)); n < 5 || n > 60 {
					t.Errorf("%d CSRs in the second half of an hour, want retries with a growing pause", n)
				}
				if f.Bundle().Version != bundle.Version {
					t.Error("a discarded answer changed the roots")
				}
				// The only worker is not held by the one that does not work.
				await(t, f, "pod-2", other)

				pass(time.Second)
				assertPending(t, f, id)
				if s := status(t, f, id); s.State == certfetch.StateReady || !s.NotAfter.IsZero() {
					t.Errorf("status %+v after the end of the certificate", s)
				}

				ca.AnswerFor(id, ca.Sign)
				pass(2 * time.Minute)
				if held(t, f, id) == first {
					t.Error("the expired certificate is served")
				}
				if s := status(t, f, id); s.State != certfetch.StateReady || s.LastError != "" {
					t.Errorf("status %+v, want ready without an error", s)
				}
			})
		})
	}
}

// The same answers to a first request: nothing is served, and nobody is told that anything is.
func TestBadFirstAnswersLeaveTheIdentityPending(t *testing.T) {
	for name := range badAnswers(catest.New(t)) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ca := catest.New(t)
				ca.AnswerAll(badAnswers(ca)[name].answer)
				f := start(t, ca, certfetch.Config{})
				id := account(t, "a")
				register(t, f, "pod-1", id)
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				defer cancel()
				err := f.Wait(ctx, id)
				if denied := name == "denial"; errors.Is(err, certfetch.ErrDenied) != denied || errors.Is(err, context.DeadlineExceeded) == denied {
					t.Errorf("Wait = %v", err)
				}
				assertPending(t, f, id)
				if n := ca.MostAtOnce(id); n != 1 {
					t.Errorf("%d CSRs at once, want 1", n)
				}
			})
		})
	}
}

func TestChainEndsWithItsFirstCertificateToEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		ca.AnswerAll(ca.SignBelow(10 * time.Minute))
		f := start(t, ca, certfetch.Config{TTL: time.Hour})
		id, began := account(t, "a"), time.Now()
		svid := await(t, f, "pod-1", id)
		if len(svid.Chain) != 2 {
			t.Errorf("%d certificates in the chain, want leaf and intermediate", len(svid.Chain))
		}
		if want := began.Add(50 * time.Minute); !svid.NotAfter.Equal(want) {
			t.Errorf("NotAfter %s, want the intermediate's, %s", svid.NotAfter, want)
		}
		ca.AnswerAll(catest.Unavailable)
		pass(50 * time.Minute)
		assertPending(t, f, id)
	})
}

// A hanging CA costs its deadline, 10 s, and no worker.
func TestHangingCallEndsAtItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		hanging, fine := account(t, "hanging"), account(t, "fine")
		ca.AnswerFor(hanging, catest.Hang)
		f := start(t, ca, certfetch.Config{Workers: 1})
		register(t, f, "pod-1", hanging)
		synctest.Wait()
		began := time.Now()
		await(t, f, "pod-2", fine)
		if waited := time.Since(began); waited != certfetch.MaxIssueTimeout {
			t.Errorf("the only worker was free after %s, want %s", waited, certfetch.MaxIssueTimeout)
		}
		synctest.Wait()
		if s := status(t, f, hanging); s.State != certfetch.StatePending || s.LastError == "" {
			t.Errorf("status %+v, want pending with an error", s)
		}
	})
}

// A source that does not even return at its deadline loses its worker all the same. The identity
// is asked for again only when it has returned: never two CSRs at once.
func TestDeafSourceLosesItsWorker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		deaf, fine := account(t, "deaf"), account(t, "fine")
		release := make(chan struct{})
		ca.AnswerFor(deaf, catest.Deaf(release, ca.Sign))
		f := start(t, ca, certfetch.Config{Workers: 1, IssueTimeout: 2 * time.Second, TTL: 24 * time.Hour})
		synctest.Wait() // the roots are known before the call is
		register(t, f, "pod-1", deaf)
		pass(2 * time.Second)
		began := time.Now()
		await(t, f, "pod-2", fine)
		if waited := time.Since(began); waited != 0 {
			t.Errorf("the worker was free %s after the deadline, want at once", waited)
		}
		pass(time.Hour)
		if s := status(t, f, deaf); s.State != certfetch.StatePending || !strings.Contains(s.LastError, "no answer within 2s") {
			t.Errorf("status %+v, want pending for lack of an answer", s)
		}
		if n := len(ca.Requests(deaf)); n != 1 {
			t.Errorf("%d CSRs while the first has not returned, want 1", n)
		}

		// The late answer counts for nothing: neither its certificate nor its roots.
		bundle := f.Bundle()
		ca.Rotate(t)
		ca.AnswerFor(deaf, catest.Unavailable)
		close(release)
		synctest.Wait()
		assertPending(t, f, deaf)
		if f.Bundle().Version != bundle.Version {
			t.Error("the late answer changed the roots")
		}
		ca.AnswerFor(deaf, ca.Sign)
		if err := wait(t, f, deaf); err != nil {
			t.Fatal(err)
		}
	})
}

// However many identities a source never returns from, the calls out are bounded.
func TestDeafSourceIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		release := make(chan struct{})
		ca.AnswerAll(catest.Deaf(release, ca.Sign))
		f := start(t, ca, certfetch.Config{Workers: 2, IssueTimeout: time.Second})
		for i := range 100 {
			register(t, f, fmt.Sprint("pod-", i), account(t, fmt.Sprint("a", i)))
		}
		pass(time.Hour)
		if n := ca.Total(); n != 8 {
			t.Errorf("%d calls are out, want 4 for each of 2 workers", n)
		}
		ca.AnswerAll(ca.Sign)
		close(release)
		pass(time.Minute)
		for _, s := range f.Identities() {
			if s.State != certfetch.StateReady {
				t.Errorf("%s is %s after the source returned: %s", s.ID, s.State, s.LastError)
			}
		}
	})
}

func TestShutdownReportsADeafSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		release := make(chan struct{})
		ca.AnswerAll(catest.Deaf(release, ca.Sign))
		f, err := certfetch.New(certfetch.Config{Source: ca})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- f.Run(ctx) }()
		register(t, f, "pod-1", account(t, "a"))
		synctest.Wait()
		cancel()
		began := time.Now()
		if err := <-done; err == nil || time.Since(began) > time.Second {
			t.Errorf("Run = %v after %s, want an error after a second at most", err, time.Since(began))
		}
		close(release) // and every goroutine ends, or the bubble would not
	})
}

// What is verified must also be what the CA was asked for.
func TestAnswerForAnotherIdentityIsNeverCrossed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := catest.New(t)
		a, b := account(t, "a"), account(t, "b")
		// A CA that certifies b's name for a's key.
		ca.AnswerFor(a, ca.SignChanged(func(c *x509.Certificate) { c.URIs = []*url.URL{b.URL()} }))
		f := start(t, ca, certfetch.Config{})
		await(t, f, "pod-b", b)
		register(t, f, "pod-a", a)
		pass(time.Minute)
		assertPending(t, f, a)
		held(t, f, b)
	})
}

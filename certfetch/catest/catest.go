// SPDX-License-Identifier: Apache-2.0

// Package catest is a CA for tests that really signs, and misbehaves as it is told: it denies for
// a while, certifies other names and keys, signs with a root that nobody knows, or does not answer.
// It counts what it was asked, so that a test can say what must not have been asked.
package catest

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"net/url"
	"sync"
	"time"

	"ambientd/certfetch"
	"ambientd/certfetch/spiffeid"
)

// Request is one call of Issue.
type Request struct {
	ID  spiffeid.ID
	CSR *x509.CertificateRequest
	TTL time.Duration
	// At is when it came in.
	At time.Time
}

// Answer is what the CA does with a request.
type Answer func(ctx context.Context, r Request) (certfetch.Issued, error)

// TB is what is used of a test.
type TB interface {
	Helper()
	Fatal(args ...any)
}

// CA is a [certfetch.Source]. It answers as the test says; at first it signs.
type CA struct {
	mu        sync.Mutex
	root      *issuer
	answer    Answer
	answers   map[spiffeid.ID]Answer
	requests  []Request
	inFlight  map[spiffeid.ID]int
	crowded   map[spiffeid.ID]int
	rootCalls int
	rootsErr  error
}

// issuer is a certificate with its key, that can sign others.
type issuer struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// New returns a CA with a root of its own.
func New(tb TB) *CA {
	tb.Helper()
	root, err := newIssuer("root", farAway(), nil)
	if err != nil {
		tb.Fatal(err)
	}
	ca := &CA{root: root, answers: make(map[spiffeid.ID]Answer), inFlight: make(map[spiffeid.ID]int), crowded: make(map[spiffeid.ID]int)}
	ca.answer = ca.Sign
	return ca
}

// Issue notes the request and answers as it was told. A request that is not a proper one for id is
// a plain error, which no test expects.
func (c *CA) Issue(ctx context.Context, id spiffeid.ID, csrDER []byte, ttl time.Duration) (certfetch.Issued, error) {
	csr, err := x509.ParseCertificateRequest(csrDER)
	if err != nil {
		return certfetch.Issued{}, fmt.Errorf("parsing the request: %w", err)
	}
	if err := csr.CheckSignature(); err != nil {
		return certfetch.Issued{}, fmt.Errorf("checking the request's signature: %w", err)
	}
	if len(csr.URIs) != 1 || csr.URIs[0].String() != id.String() {
		return certfetch.Issued{}, fmt.Errorf("the request names %v, not %s", csr.URIs, id)
	}
	r := Request{ID: id, CSR: csr, TTL: ttl, At: time.Now()}
	answer := c.begin(r)
	defer c.end(id)
	return answer(ctx, r)
}

// Roots returns today's root, or the error that FailRoots set.
func (c *CA) Roots(context.Context) ([]*x509.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rootCalls++
	if c.rootsErr != nil {
		return nil, c.rootsErr
	}
	return []*x509.Certificate{c.root.cert}, nil
}

func (c *CA) begin(r Request) Answer {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.requests = append(c.requests, r)
	c.inFlight[r.ID]++
	c.crowded[r.ID] = max(c.crowded[r.ID], c.inFlight[r.ID])
	if answer := c.answers[r.ID]; answer != nil {
		return answer
	}
	return c.answer
}

func (c *CA) end(id spiffeid.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inFlight[id]--
}

// AnswerAll is for all identities without an answer of their own.
func (c *CA) AnswerAll(answer Answer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.answer = answer
}

// AnswerFor is for one identity; nil gives it back to AnswerAll.
func (c *CA) AnswerFor(id spiffeid.ID, answer Answer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.answers[id] = answer
}

// FailRoots has Roots return err; nil ends that.
func (c *CA) FailRoots(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rootsErr = err
}

// Rotate replaces the root by another one, without any overlap.
func (c *CA) Rotate(tb TB) {
	tb.Helper()
	root, err := newIssuer("root", farAway(), nil)
	if err != nil {
		tb.Fatal(err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.root = root
}

// Root returns today's root.
func (c *CA) Root() *x509.Certificate { return c.today().cert }

func (c *CA) today() *issuer {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.root
}

// Requests returns what was asked for id, in order.
func (c *CA) Requests(id spiffeid.ID) []Request {
	c.mu.Lock()
	defer c.mu.Unlock()
	var of []Request
	for _, r := range c.requests {
		if r.ID == id {
			of = append(of, r)
		}
	}
	return of
}

// Total counts the requests for all identities.
func (c *CA) Total() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.requests)
}

// Order returns the identities in the order in which they were asked for.
func (c *CA) Order() []spiffeid.ID {
	c.mu.Lock()
	defer c.mu.Unlock()
	order := make([]spiffeid.ID, 0, len(c.requests))
	for _, r := range c.requests {
		order = append(order, r.ID)
	}
	return order
}

// RootCalls counts the calls of Roots.
func (c *CA) RootCalls() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rootCalls
}

// MostAtOnce is how many requests for id were in flight at the worst moment.
func (c *CA) MostAtOnce(id spiffeid.ID) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.crowded[id]
}

// Sign is what a good CA does.
func (c *CA) Sign(ctx context.Context, r Request) (certfetch.Issued, error) {
	return c.SignChanged(func(*x509.Certificate) {})(ctx, r)
}

// SignChanged signs a certificate that change has had its hands on.
func (c *CA) SignChanged(change func(*x509.Certificate)) Answer {
	return func(_ context.Context, r Request) (certfetch.Issued, error) {
		root := c.today()
		leaf, err := root.sign(leafFor(r, change), r.CSR.PublicKey)
		if err != nil {
			return certfetch.Issued{}, err
		}
		return certfetch.Issued{Chain: []*x509.Certificate{leaf}, Roots: []*x509.Certificate{root.cert}}, nil
	}
}

// SignBelow signs with an intermediate CA that ends when the leaf does, or earlier by shorter.
func (c *CA) SignBelow(shorter time.Duration) Answer {
	return func(_ context.Context, r Request) (certfetch.Issued, error) {
		root := c.today()
		template := leafFor(r, func(*x509.Certificate) {})
		middle, err := newIssuer("intermediate", template.NotAfter.Add(-shorter), root)
		if err != nil {
			return certfetch.Issued{}, err
		}
		leaf, err := middle.sign(template, r.CSR.PublicKey)
		if err != nil {
			return certfetch.Issued{}, err
		}
		return certfetch.Issued{Chain: []*x509.Certificate{leaf, middle.cert}, Roots: []*x509.Certificate{root.cert}}, nil
	}
}

// WrongName certifies the key for another identity.
func (c *CA) WrongName(name string) Answer {
	return c.SignChanged(func(leaf *x509.Certificate) {
		leaf.URIs = []*url.URL{{Scheme: "spiffe", Host: "cluster.local", Path: name}}
	})
}

// WrongKey certifies a key that nobody has asked for.
func (c *CA) WrongKey(_ context.Context, r Request) (certfetch.Issued, error) {
	root := c.today()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return certfetch.Issued{}, err
	}
	leaf, err := root.sign(leafFor(r, func(*x509.Certificate) {}), &key.PublicKey)
	if err != nil {
		return certfetch.Issued{}, err
	}
	return certfetch.Issued{Chain: []*x509.Certificate{leaf}, Roots: []*x509.Certificate{root.cert}}, nil
}

// UnknownRoot signs with a root that is not among those it returns.
func (c *CA) UnknownRoot(_ context.Context, r Request) (certfetch.Issued, error) {
	other, err := newIssuer("unknown", farAway(), nil)
	if err != nil {
		return certfetch.Issued{}, err
	}
	leaf, err := other.sign(leafFor(r, func(*x509.Certificate) {}), r.CSR.PublicKey)
	if err != nil {
		return certfetch.Issued{}, err
	}
	return certfetch.Issued{Chain: []*x509.Certificate{leaf}, Roots: []*x509.Certificate{c.Root()}}, nil
}

// Expired signs a certificate that ended a minute ago.
func (c *CA) Expired(ctx context.Context, r Request) (certfetch.Issued, error) {
	return c.SignChanged(func(leaf *x509.Certificate) {
		leaf.NotBefore, leaf.NotAfter = r.At.Add(-time.Hour), r.At.Add(-time.Minute)
	})(ctx, r)
}

// Deny says that the CA has decided against the identity.
func Deny(context.Context, Request) (certfetch.Issued, error) {
	return certfetch.Issued{}, fmt.Errorf("no pod with this service account: %w", certfetch.ErrDenied)
}

// Unavailable says that it may work later.
func Unavailable(context.Context, Request) (certfetch.Issued, error) {
	return certfetch.Issued{}, errors.New("connection refused")
}

// Until is first before the moment end, and then after that.
func Until(end time.Time, first, then Answer) Answer {
	return func(ctx context.Context, r Request) (certfetch.Issued, error) {
		if r.At.Before(end) {
			return first(ctx, r)
		}
		return then(ctx, r)
	}
}

// Hang answers nothing, but ends with its ctx, as a good client of a hanging CA does.
func Hang(ctx context.Context, _ Request) (certfetch.Issued, error) {
	<-ctx.Done()
	return certfetch.Issued{}, ctx.Err()
}

// Deaf answers nothing and ignores its ctx, until release is closed; then it is as then says.
func Deaf(release <-chan struct{}, then Answer) Answer {
	return func(ctx context.Context, r Request) (certfetch.Issued, error) {
		<-release
		return then(ctx, r)
	}
}

// leafFor is the certificate that a good CA would sign.
func leafFor(r Request, change func(*x509.Certificate)) *x509.Certificate {
	leaf := &x509.Certificate{
		URIs:                  []*url.URL{r.ID.URL()},
		NotBefore:             r.At.Add(-2 * time.Minute),
		NotAfter:              r.At.Add(r.TTL),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true,
	}
	change(leaf)
	return leaf
}

func farAway() time.Time { return time.Now().Add(20 * 365 * 24 * time.Hour) }

func caTemplate(name string, end time.Time) *x509.Certificate {
	return &x509.Certificate{
		Subject:               pkix.Name{CommonName: name},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              end,
		KeyUsage:              x509.KeyUsageCertSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
}

// newIssuer makes a CA that lasts until end, below parent, or a root without one.
func newIssuer(name string, end time.Time, parent *issuer) (*issuer, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := caTemplate(name, end)
	if parent == nil {
		parent = &issuer{cert: template, key: key}
	}
	cert, err := parent.sign(template, &key.PublicKey)
	if err != nil {
		return nil, err
	}
	return &issuer{cert: cert, key: key}, nil
}

func (i *issuer) sign(template *x509.Certificate, key crypto.PublicKey) (*x509.Certificate, error) {
	der, err := x509.CreateCertificate(rand.Reader, template, i.cert, key, i.key)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

// SPDX-License-Identifier: Apache-2.0

// Package certfetch holds the certificates of the identities that run on this node, and of no
// others.
//
// It owns the registry of identities, counted by pod UID; their keys, from the making to the
// dropping; the asking, renewing and retrying; the verification of whatever a CA returned; and
// telling subscribers what changed. A [Fetcher] does all of that over one [Source].
//
// It refuses to ask for an identity that no pod has registered, to serve a certificate past its
// end, to write anything to a disk, and to know what a pod, a proxy or a Kubernetes API is.
package certfetch

import (
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"ambientd/certfetch/spiffeid"
)

// Source is a CA, or the way to one. Both methods may be called by several goroutines at once, and
// should end when ctx does. One that does not costs a goroutine and the identity it was asked for,
// until it returns; see [Fetcher.Run] for the bound.
type Source interface {
	// Issue has csrDER (a PKCS #10 request with id as its only name) signed for about ttl. An error
	// that wraps ErrDenied says that the CA has decided; every other one, that it may work later.
	// Nothing it returns is trusted before it has been verified.
	Issue(ctx context.Context, id spiffeid.ID, csrDER []byte, ttl time.Duration) (Issued, error)
	// Roots returns what the CA's certificates are verified against today. It is asked at the start
	// and every few minutes, so that a new root is known before the first leaf below it.
	Roots(ctx context.Context) ([]*x509.Certificate, error)
}

// Issued is a CA's answer.
type Issued struct {
	// Chain is the leaf first, then each one's issuer, without a root.
	Chain []*x509.Certificate
	// Roots are all that the CA wants to be trusted from now on.
	Roots []*x509.Certificate
}

var (
	// ErrDenied is in the chain of an error by which the CA refuses an identity for good: asking
	// again at once is no use. A [Source] returns it, [Fetcher.Wait] passes it on.
	ErrDenied = errors.New("the CA denies the identity")
	// ErrNotRegistered is about an identity that no pod on this node has.
	ErrNotRegistered = errors.New("the identity is not registered")
	// ErrPending is about a registered identity without a valid certificate at this moment.
	ErrPending = errors.New("there is no valid certificate yet")
)

// SVID is one identity's certificate and key. It is never changed after it was published: the next
// one is another value with a higher version.
type SVID struct {
	ID spiffeid.ID
	// Chain is the leaf first, then each one's issuer, without the root. Read only.
	Chain []*x509.Certificate
	// Key is the leaf's private key, an *ecdsa.PrivateKey on P-256. Whoever takes it must let go of
	// it when the identity is no longer registered.
	Key crypto.Signer `json:"-"`
	// NotAfter is when the first certificate of the chain up to its root ends.
	NotAfter time.Time
	// Version grows with every certificate of this fetcher.
	Version uint64

	// anchor is the root that the chain was verified up to.
	anchor *x509.Certificate
}

// String names the certificate without showing the key, which the fmt verbs would otherwise print.
func (s SVID) String() string {
	return fmt.Sprintf("SVID %s, version %d, until %s", s.ID, s.Version, s.NotAfter.UTC().Format(time.RFC3339))
}

// GoString is String: no verb of package fmt shows the key.
func (s SVID) GoString() string { return s.String() }

// LogValue is String, for the handlers that would go through the fields.
func (s SVID) LogValue() slog.Value { return slog.StringValue(s.String()) }

// Bundle is what peers' certificates are verified against.
type Bundle struct {
	// Roots has no duplicates, in the CA's order. Read only. Empty before the CA has answered.
	Roots []*x509.Certificate
	// Version grows with every change; zero before the CA has answered.
	Version uint64
}

// State says in one word how an identity stands.
type State string

// The states of a registered identity.
const (
	StateReady   State = "ready"   // a valid certificate is held
	StatePending State = "pending" // none yet; the fetcher is at it
	StateDenied  State = "denied"  // none, and the CA's last answer was a denial
)

// IdentityStatus is what an operator sees of one registered identity.
type IdentityStatus struct {
	ID spiffeid.ID
	// Pods counts the pod UIDs that have it registered.
	Pods  int
	State State
	// NotAfter is the end of the certificate held; the zero time without one.
	NotAfter time.Time
	// LastError is what went wrong since the last certificate; empty if nothing did.
	LastError string
}

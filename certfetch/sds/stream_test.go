// SPDX-License-Identifier: Apache-2.0

package sds_test

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"ambientd/certfetch"
	"ambientd/certfetch/catest"
	"ambientd/certfetch/sds"
)

// That nothing is sent cannot be waited for. So these tests cause something to be sent after it,
// and see that this is what comes next.

func TestCertificateIsPushedWithKeyAndChain(t *testing.T) {
	w := newWorld(t)
	w.ca.AnswerAll(w.ca.SignBelow(time.Minute)) // a chain of two
	id := w.readyPod(t, "a")
	c := w.open(t, id.String())
	pair := certificate(t, c.receive(t, id.String())[id.String()])
	svid, err := w.fetcher.SVID(id)
	if err != nil {
		t.Fatal(err)
	}
	if len(pair.Certificate) != 2 || !slices.Equal(pair.Certificate[0], svid.Chain[0].Raw) || !slices.Equal(pair.Certificate[1], svid.Chain[1].Raw) {
		t.Errorf("%d certificates, want leaf and intermediate, in this order", len(pair.Certificate))
	}
	leaf, err := x509.ParseCertificate(pair.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	if leaf.URIs[0].String() != id.String() {
		t.Errorf("the leaf names %v", leaf.URIs)
	}
}

func TestRootsArePushedAndStandFirst(t *testing.T) {
	w := newWorld(t)
	id := w.readyPod(t, "a")
	alone := w.open(t, sds.Roots)
	roots := rootsOf(t, alone.receive(t, sds.Roots)[sds.Roots])
	if len(roots) != 1 || !roots[0].Equal(w.ca.Root()) {
		t.Errorf("received %d roots, want the CA's", len(roots))
	}
	both := w.open(t, id.String(), sds.Roots, id.String())
	both.receive(t, sds.Roots, id.String())
}

func TestVersionIsTheSameOnEveryStream(t *testing.T) {
	w := newWorld(t)
	a, b := w.readyPod(t, "a").String(), w.readyPod(t, "b").String()
	first, second := w.open(t, a, b, sds.Roots), w.open(t, sds.Roots, b, a)
	first.receive(t, sds.Roots, a, b)
	second.receive(t, sds.Roots, a, b)
	if first.last.GetVersionInfo() != second.last.GetVersionInfo() {
		t.Errorf("versions %q and %q of the same content", first.last.GetVersionInfo(), second.last.GetVersionInfo())
	}
	other := w.open(t, a)
	other.receive(t, a)
	if other.last.GetVersionInfo() == first.last.GetVersionInfo() {
		t.Error("the same version of other content")
	}
}

// Whether an identity is unknown, gone, lingering or of another world: the words are the same.
func TestRefusalDoesNotSayWhetherAnIdentityExists(t *testing.T) {
	w := newWorld(t)
	gone := w.readyPod(t, "gone")
	w.removePod(gone)
	present := w.readyPod(t, "present")
	words := make(map[string]bool)
	for _, names := range [][]string{
		{account(t, "never").String()},
		{gone.String()},
		{"spiffe://example.org/ns/test/sa/present"},
		{present.String(), account(t, "never").String()},
		{sds.Roots, gone.String()},
	} {
		err := w.open(t, names...).assertEnds(t, codes.PermissionDenied)
		words[grpcstatus.Convert(err).Message()] = true
	}
	if len(words) != 1 {
		t.Errorf("refused with %d different texts: %v", len(words), words)
	}
	for text := range words {
		if strings.Contains(text, "spiffe://") || strings.Contains(text, "regist") {
			t.Errorf("the refusal tells too much: %q", text)
		}
	}
}

func TestAddingARefusedNameEndsTheStream(t *testing.T) {
	w := newWorld(t)
	id := w.readyPod(t, "a").String()
	c := w.open(t, id)
	c.receive(t, id)
	c.ack(t, id, account(t, "never").String())
	c.assertEnds(t, codes.PermissionDenied)
}

func TestPendingCertificateIsPushedWhenItIsThere(t *testing.T) {
	w := newWorld(t)
	ready := w.readyPod(t, "ready").String()
	id, release := account(t, "pending"), make(chan struct{})
	w.ca.AnswerFor(id, catest.Deaf(release, w.ca.Sign))
	w.pod(t, id)
	alone := w.open(t, id.String())
	beside := w.open(t, id.String(), ready, sds.Roots)
	beside.receive(t, sds.Roots, ready) // what is there does not wait for what is not
	close(release)
	alone.receive(t, id.String())
	beside.receive(t, sds.Roots, id.String(), ready)
}

func TestPendingIdentityThatGoesEndsTheStream(t *testing.T) {
	w := newWorld(t)
	id := account(t, "pending")
	w.ca.AnswerFor(id, catest.Hang)
	w.pod(t, id)
	c := w.open(t, id.String(), sds.Roots)
	c.receive(t, sds.Roots) // the stream is subscribed
	w.removePod(id)
	c.assertEnds(t, codes.PermissionDenied)
}

// Removal: an empty response first, for clients that go by that, and then the end.
func TestRemovalOfTheOnlyIdentityIsPushedAndEndsTheStream(t *testing.T) {
	w := newWorld(t)
	id := w.readyPod(t, "a")
	c, withRoots := w.open(t, id.String()), w.open(t, id.String(), sds.Roots)
	c.receive(t, id.String())
	withRoots.receive(t, sds.Roots, id.String())
	w.removePod(id)
	c.receive(t)
	c.assertEnds(t, codes.PermissionDenied)
	withRoots.receive(t, sds.Roots)
	withRoots.assertEnds(t, codes.PermissionDenied)
}

func TestRemovalOfOneOfTwoLeavesTheStream(t *testing.T) {
	w := newWorld(t)
	a, b := w.readyPod(t, "a"), w.readyPod(t, "b")
	c := w.open(t, a.String(), b.String())
	first := certificate(t, c.receive(t, a.String(), b.String())[a.String()])
	c.ack(t, a.String(), b.String())
	w.removePod(a)
	c.receive(t, b.String())
	c.ack(t, a.String(), b.String()) // a client need not drop the name
	w.pod(t, a)
	second := certificate(t, c.receive(t, a.String(), b.String())[a.String()])
	if slices.Equal(first.Certificate[0], second.Certificate[0]) {
		t.Error("the identity came back with its old certificate, though nothing lingers")
	}
}

// Renewal and the end of a certificate, in the real time of a very short-lived one.
func TestRenewalAndExpiryArePushed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	id := account(t, "a")
	w.ca.AnswerAll(func(ctx context.Context, r catest.Request) (certfetch.Issued, error) {
		r.TTL = 3 * time.Second
		return w.ca.Sign(ctx, r)
	})
	w.pod(t, id)
	c := w.open(t, id.String())
	first := certificate(t, c.receive(t, id.String())[id.String()])
	c.ack(t, id.String())
	second := certificate(t, c.receive(t, id.String())[id.String()])
	if slices.Equal(first.Certificate[0], second.Certificate[0]) {
		t.Error("pushed the same certificate again")
	}
	w.ca.AnswerAll(catest.Unavailable)
	c.ack(t, id.String())
	c.receive(t) // it has ended, and the identity is still registered: no end of the stream
	w.ca.AnswerAll(w.ca.Sign)
	c.ack(t, id.String())
	c.receive(t, id.String())
}

func TestNewRootsArePushedBeforeTheFirstLeafUnderThem(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.readyPod(t, "old")
	roots := w.open(t, sds.Roots)
	roots.receive(t, sds.Roots)
	roots.ack(t, sds.Roots)
	w.ca.Rotate(t)
	id := account(t, "new")
	w.pod(t, id)
	leaf := w.open(t, id.String())
	pushed := make(chan struct{})
	go func() {
		defer close(pushed)
		if got := rootsOf(t, roots.receive(t, sds.Roots)[sds.Roots]); !got[0].Equal(w.ca.Root()) {
			t.Error("pushed other roots than the new ones")
		}
	}()
	leaf.receive(t, id.String())
	select {
	case <-pushed:
	default:
		t.Error("the leaf was there before its root")
		<-pushed
	}
}

func TestAcknowledgedContentIsNotSentAgain(t *testing.T) {
	w := newWorld(t)
	a, b := w.readyPod(t, "a").String(), w.readyPod(t, "b").String()
	c := w.open(t, a)
	c.receive(t, a)
	for range 3 {
		c.ack(t, a)
	}
	// Another pod of the same identity changes nothing either.
	if err := w.fetcher.Register("second", account(t, "a")); err != nil {
		t.Fatal(err)
	}
	w.fetcher.Unregister("second")
	c.ack(t, a, b)
	c.receive(t, a, b)
}

func TestRejectedContentIsLoggedAndNotSentAgain(t *testing.T) {
	w := newWorld(t)
	a, b := w.readyPod(t, "a").String(), w.readyPod(t, "b").String()
	c := w.open(t, a)
	c.receive(t, a)
	c.nack(t, "no such cipher "+strings.Repeat("x", 5000), a)
	c.ack(t, a, b) // with the nonce of what was rejected: there has been no other response
	c.receive(t, a, b)
	log := w.log.String()
	if n := strings.Count(log, "proxy rejected secrets"); n != 1 || !strings.Contains(log, "no such cipher") || !strings.Contains(log, a) {
		t.Errorf("logged %q, want one line that names identity and reason", log)
	}
	if len(log) > 2000 {
		t.Errorf("the log line has %d bytes: the proxy decides how long", len(log))
	}
}

// A request with another nonce than the last response's was written before it, whatever it says.
func TestStaleNonceIsIgnored(t *testing.T) {
	w := newWorld(t)
	a, b := w.readyPod(t, "a"), w.readyPod(t, "b")
	c := w.open(t, a.String(), b.String())
	c.receive(t, a.String(), b.String())
	old := c.last.GetNonce()
	w.removePod(a)
	c.receive(t, b.String())
	c.request(t, old)                // would unsubscribe from everything
	c.request(t, "made up")          // too
	c.request(t, old, sds.Roots)     // would subscribe to the roots
	c.ack(t, a.String(), b.String()) // and this is what counts
	w.pod(t, a)
	c.receive(t, a.String(), b.String())
}

// A name that was dropped and comes back is sent again, though its content is the same: the client
// has forgotten it.
func TestNameThatComesBackIsSentAgain(t *testing.T) {
	w := newWorld(t)
	a, b := w.readyPod(t, "a").String(), w.readyPod(t, "b").String()
	c := w.open(t, a, b)
	c.receive(t, a, b)
	c.ack(t, a)    // nothing to send: a is there already
	c.ack(t, a, b) // b is news again
	response, err := c.rpc.Recv()
	if err != nil {
		t.Fatal(err)
	}
	secretsOf(t, response, a, b)
}

func TestUnsubscribingFromEverythingIsNoEnd(t *testing.T) {
	w := newWorld(t)
	a, b := w.readyPod(t, "a"), w.readyPod(t, "b").String()
	c := w.open(t) // not even at first
	c.ack(t, a.String())
	c.receive(t, a.String())
	c.ack(t)
	c.ack(t, b)
	c.receive(t, b)
	w.removePod(a) // concerns this stream no longer
	c.ack(t, b, sds.Roots)
	c.receive(t, sds.Roots, b)
}

func TestClientEndsTheStream(t *testing.T) {
	w := newWorld(t)
	id := w.readyPod(t, "a").String()
	c := w.open(t, id)
	c.receive(t, id)
	if err := c.rpc.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if response, err := c.rpc.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("received %v, %v after closing; want EOF", response, err)
	}
}

// Case 11's end and the demo's: one stream for each identity, one for the roots; pods go while the
// streams are open, and each is told of its own.
func TestOneStreamForEachIdentity(t *testing.T) {
	w := newWorld(t)
	roots := w.open(t, sds.Roots)
	roots.receive(t, sds.Roots)
	var streams []*client
	for i := range 50 {
		id := w.readyPod(t, fmt.Sprint("a", i)).String()
		c := w.open(t, id)
		c.receive(t, id)
		c.ack(t, id)
		streams = append(streams, c)
	}
	for i, c := range streams {
		if i%2 == 0 {
			w.removePod(account(t, fmt.Sprint("a", i)))
			c.receive(t)
			c.assertEnds(t, codes.PermissionDenied)
		}
	}
	w.readyPod(t, "last")
	roots.ack(t, sds.Roots, account(t, "last").String())
	roots.receive(t, sds.Roots, account(t, "last").String()) // this stream has seen no end
	for i, c := range streams {
		if i%2 == 1 {
			id := account(t, fmt.Sprint("a", i)).String()
			c.ack(t, id, sds.Roots)
			c.receive(t, sds.Roots, id)
		}
	}
}

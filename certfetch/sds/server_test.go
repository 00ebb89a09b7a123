// SPDX-License-Identifier: Apache-2.0

package sds_test

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"ambientd/certfetch/catest"
	"ambientd/certfetch/sds"
)

func TestRequestsOutOfBoundsAreRefused(t *testing.T) {
	w := newWorld(t)
	id := w.readyPod(t, "a").String()
	many := make([]string, sds.MaxNames+1)
	for i := range many {
		many[i] = id
	}
	for name, test := range map[string]struct {
		request *discoveryv3.DiscoveryRequest
		want    codes.Code
	}{
		"another type":        {&discoveryv3.DiscoveryRequest{TypeUrl: "type.googleapis.com/envoy.config.cluster.v3.Cluster", ResourceNames: []string{id}}, codes.InvalidArgument},
		"no SPIFFE ID":        {&discoveryv3.DiscoveryRequest{ResourceNames: []string{"default"}}, codes.InvalidArgument},
		"only a trust domain": {&discoveryv3.DiscoveryRequest{ResourceNames: []string{"spiffe://cluster.local"}}, codes.InvalidArgument},
		"an empty name":       {&discoveryv3.DiscoveryRequest{ResourceNames: []string{id, ""}}, codes.InvalidArgument},
		"a percent sign":      {&discoveryv3.DiscoveryRequest{ResourceNames: []string{id + "%2fb"}}, codes.InvalidArgument},
		"5,000 characters":    {&discoveryv3.DiscoveryRequest{ResourceNames: []string{id + strings.Repeat("b", 5000)}}, codes.InvalidArgument},
		"roots in lower case": {&discoveryv3.DiscoveryRequest{ResourceNames: []string{"rootca"}}, codes.InvalidArgument},
		"too many names":      {&discoveryv3.DiscoveryRequest{ResourceNames: many}, codes.InvalidArgument},
		"too long a message":  {&discoveryv3.DiscoveryRequest{VersionInfo: strings.Repeat("x", 1<<20), ResourceNames: []string{id}}, codes.ResourceExhausted},
	} {
		t.Run(name, func(t *testing.T) {
			c := w.open(t)
			if err := c.rpc.Send(test.request); err != nil {
				t.Fatal(err)
			}
			err := c.assertEnds(t, test.want)
			if len(err.Error()) > 1000 {
				t.Errorf("the error has %d bytes", len(err.Error()))
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if response, err := w.client.FetchSecrets(ctx, test.request); grpcstatus.Code(err) != test.want {
				t.Errorf("FetchSecrets = %v, %v; want %s", response, err, test.want)
			}
		})
	}
	// As many as are allowed are fine.
	c := w.open(t)
	c.ack(t, many[1:]...)
	c.receive(t, id)
}

func TestFetchAnswersOnce(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	id := w.readyPod(t, "a").String()
	pending := account(t, "pending")
	w.ca.AnswerFor(pending, catest.Hang)
	w.pod(t, pending)

	response, err := w.client.FetchSecrets(ctx, &discoveryv3.DiscoveryRequest{ResourceNames: []string{id, sds.Roots}})
	if err != nil {
		t.Fatal(err)
	}
	secrets := secretsOf(t, response, sds.Roots, id)
	certificate(t, secrets[id])
	if roots := rootsOf(t, secrets[sds.Roots]); len(roots) != 1 {
		t.Errorf("%d roots", len(roots))
	}
	for want, names := range map[codes.Code][]string{
		codes.PermissionDenied: {id, account(t, "never").String()},
		codes.Unavailable:      {id, pending.String()},
		codes.InvalidArgument:  {},
	} {
		if response, err := w.client.FetchSecrets(ctx, &discoveryv3.DiscoveryRequest{ResourceNames: names}); grpcstatus.Code(err) != want {
			t.Errorf("FetchSecrets(%v) = %v, %v; want %s", names, response, err, want)
		}
	}
}

func TestDeltaIsUnimplemented(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	stream, err := w.client.DeltaSecrets(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if response, err := stream.Recv(); grpcstatus.Code(err) != codes.Unimplemented {
		t.Errorf("received %v, %v; want Unimplemented", response, err)
	}
}

func TestServerNeedsAFetcher(t *testing.T) {
	if _, err := sds.NewServer(sds.Config{}); err == nil {
		t.Error("no error without a fetcher")
	}
}

// When clients go, and when the server ends, no goroutine and no subscription of theirs stays.
func TestStreamsLeaveNothingBehind(t *testing.T) {
	w := newWorld(t)
	for i := range 20 {
		id := w.readyPod(t, fmt.Sprint("a", i)).String()
		c := w.open(t, id, sds.Roots)
		c.receive(t, sds.Roots, id)
		if i%2 == 0 {
			continue // left open
		}
		if err := c.rpc.CloseSend(); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.conn.Close(); err != nil {
		t.Fatal(err)
	}
	w.server.Stop() // waits for the handlers
	deadline := time.Now().Add(patience)
	for strings.Contains(goroutines(), "certfetch/sds.") {
		if time.Now().After(deadline) {
			t.Fatalf("still there:\n%s", goroutines())
		}
		runtime.Gosched()
	}
}

// goroutines is every stack but the tests' own.
func goroutines() string {
	buf := make([]byte, 4<<20)
	var others []string
	for stack := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
		if !strings.Contains(stack, "sds_test.") {
			others = append(others, stack)
		}
	}
	return strings.Join(others, "\n\n")
}

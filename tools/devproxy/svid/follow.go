// SPDX-License-Identifier: Apache-2.0

package svid

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"time"

	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	secretv3 "github.com/envoyproxy/go-control-plane/envoy/service/secret/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	secretType = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"

	minBackoff = 100 * time.Millisecond
	maxBackoff = 5 * time.Second
)

// follower keeps one SDS stream open for one resource.
type follower struct {
	client secretv3.SecretDiscoveryServiceClient
	name   string
	log    *slog.Logger
	apply  func(*tlsv3.Secret) error
	gone   func() // the agent has taken the resource back, or refuses it
}

func (f *follower) run(ctx context.Context) {
	backoff := minBackoff
	logged := ""
	for {
		answered, err := f.stream(ctx)
		if ctx.Err() != nil {
			return
		}
		// Unavailable is what gRPC makes of an agent that is away. Any other
		// end of the stream is the agent's own word.
		if status.Code(err) != codes.Unavailable {
			f.gone()
		}
		if answered {
			backoff = minBackoff
		}
		switch away := status.Code(err) == codes.Unavailable; {
		case away && !answered && logged == "":
			f.log.Info("waiting for secrets", "resource", f.name, "err", err)
			logged = err.Error()
		case away && !answered:
			// That the agent is away, or its stream's end before that, has been told.
		case answered || err.Error() != logged: // the same again says nothing new
			f.log.Warn("secret stream ended", "resource", f.name, "err", err)
			logged = err.Error()
		}
		select {
		case <-time.After(backoff/2 + rand.N(backoff)):
		case <-ctx.Done():
			return
		}
		backoff = min(2*backoff, maxBackoff)
	}
}

// stream follows the resource on one stream, to its end. answered says whether
// the agent sent anything.
func (f *follower) stream(ctx context.Context) (answered bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := f.client.StreamSecrets(ctx)
	if err != nil {
		return false, err
	}
	accepted := "" // the version that an ack or a NACK names as the one in use
	request := &discoveryv3.DiscoveryRequest{TypeUrl: secretType, ResourceNames: []string{f.name}}
	for {
		if err := stream.Send(request); err != nil && !errors.Is(err, io.EOF) {
			return answered, err // after io.EOF, Recv has the stream's status
		}
		response, err := stream.Recv()
		if err != nil {
			return answered, err
		}
		answered = true
		request = &discoveryv3.DiscoveryRequest{
			TypeUrl:       secretType,
			ResourceNames: []string{f.name},
			ResponseNonce: response.GetNonce(),
		}
		if err := f.take(response); err != nil {
			f.log.Warn("secret refused", "resource", f.name, "err", err)
			request.ErrorDetail = status.New(codes.InvalidArgument, err.Error()).Proto()
		} else {
			accepted = response.GetVersionInfo()
		}
		request.VersionInfo = accepted
	}
}

// take applies a response, which is the whole state: a resource that is not in
// it has been taken back.
func (f *follower) take(response *discoveryv3.DiscoveryResponse) error {
	for _, resource := range response.GetResources() {
		secret := new(tlsv3.Secret)
		if err := resource.UnmarshalTo(secret); err != nil {
			return fmt.Errorf("decoding a secret: %w", err)
		}
		if secret.GetName() == f.name {
			return f.apply(secret)
		}
	}
	f.gone()
	return nil
}

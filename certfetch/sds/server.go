// SPDX-License-Identifier: Apache-2.0

// Package sds serves the node's certificates over Envoy's Secret Discovery Service, version 3, in
// its state-of-the-world form.
//
// It owns the protocol: names, nonces, versions, what is pushed and when. It refuses every name
// that no pod here has registered, with the same words whatever the reason. It does not ask who is
// calling: the listener that it is given admits only those who may have every identity of the node.
package sds

import (
	"context"
	"errors"
	"io"
	"log/slog"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	secretv3 "github.com/envoyproxy/go-control-plane/envoy/service/secret/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"ambientd/certfetch"
	"ambientd/certfetch/spiffeid"
)

const (
	// TypeURL is the only resource type there is.
	TypeURL = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"

	// Roots is the resource name of the trusted roots. Every other name is a SPIFFE ID.
	Roots = "ROOTCA"

	// MaxNames is how many resources one request may name. A node has fewer pods.
	MaxNames = 1024

	// maxRequest is the size of the largest request in bytes: MaxNames of the longest names, and room
	// for what proxies say about themselves.
	maxRequest = 1 << 20

	// maxStreams is how many streams one connection may have: one for every name.
	maxStreams = 4 * MaxNames
)

// Fetcher is where certificates and roots come from: [certfetch.Fetcher].
type Fetcher interface {
	SVID(id spiffeid.ID) (*certfetch.SVID, error)
	Bundle() certfetch.Bundle
	Subscribe() *certfetch.Subscription
}

// Config says what a [Server] serves.
type Config struct {
	// Fetcher is required.
	Fetcher Fetcher
	// Logger gets what a proxy rejects. Default: discard.
	Logger *slog.Logger
}

// Server is the service. It has no state but its streams'.
type Server struct {
	// DeltaSecrets answers Unimplemented: proxies that speak it fall back when told to, and one
	// protocol is enough to get right.
	secretv3.UnimplementedSecretDiscoveryServiceServer

	fetcher Fetcher
	logger  *slog.Logger
}

// NewServer returns a server for what cfg.Fetcher holds.
func NewServer(cfg Config) (*Server, error) {
	if cfg.Fetcher == nil {
		return nil, errors.New("the SDS server needs a fetcher")
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return &Server{fetcher: cfg.Fetcher, logger: cfg.Logger}, nil
}

// Options are what the gRPC server that this one is registered with must be made with: they bound
// what one client can make it hold.
func Options() []grpc.ServerOption {
	return []grpc.ServerOption{grpc.MaxRecvMsgSize(maxRequest), grpc.MaxConcurrentStreams(maxStreams)}
}

// Register adds the service to a gRPC server.
func (s *Server) Register(registrar grpc.ServiceRegistrar) {
	secretv3.RegisterSecretDiscoveryServiceServer(registrar, s)
}

// StreamSecrets pushes what the stream names as soon as it is there, and again whenever it has
// changed, until the client ends the stream or nothing it names exists any more.
func (s *Server) StreamSecrets(rpc secretv3.SecretDiscoveryService_StreamSecretsServer) error {
	subscription := s.fetcher.Subscribe()
	defer subscription.Close()
	st := newStream(s, subscription, rpc.Send)
	requests := receive(rpc)
	for {
		var err error
		select {
		case r := <-requests:
			if r.err != nil {
				return endOfStream(r.err)
			}
			err = st.handle(rpc.Context(), r.request)
		case <-subscription.Changed():
			err = st.push()
		case <-rpc.Context().Done():
			return status.FromContextError(rpc.Context().Err()).Err()
		}
		if err != nil {
			return err
		}
	}
}

// FetchSecrets answers once, with all that is named or an error: Unavailable where a certificate is
// still to come.
func (s *Server) FetchSecrets(_ context.Context, request *discoveryv3.DiscoveryRequest) (*discoveryv3.DiscoveryResponse, error) {
	names, err := parseRequest(request)
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		return nil, status.Error(codes.InvalidArgument, "no resource names")
	}
	found, err := s.lookUp(names)
	if err != nil {
		return nil, err
	}
	if found.registered < found.identities {
		return nil, errNotPermitted()
	}
	if len(found.secrets) < len(names) {
		return nil, status.Error(codes.Unavailable, "a certificate is still to be issued, try again")
	}
	return found.response("")
}

// received is one request, or the end of a stream.
type received struct {
	request *discoveryv3.DiscoveryRequest
	err     error
}

// receive reads the stream's requests in a goroutine, which ends with the stream.
func receive(rpc secretv3.SecretDiscoveryService_StreamSecretsServer) <-chan received {
	requests := make(chan received)
	go func() {
		for {
			request, err := rpc.Recv()
			select {
			case requests <- received{request, err}:
			case <-rpc.Context().Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	return requests
}

// endOfStream is what a handler returns when the client has ended the stream.
func endOfStream(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// errNotPermitted is the one answer about every name that the caller cannot have: it does not say
// whether there is such an identity.
func errNotPermitted() error {
	return status.Error(codes.PermissionDenied, "a named resource is not available to this caller")
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"time"

	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	secretv3 "github.com/envoyproxy/go-control-plane/envoy/service/secret/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

const (
	secretType = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"
	// sdsTimeout bounds one request. What is registered but has no certificate yet is
	// answered by silence.
	sdsTimeout = 3 * time.Second
)

// fetchSVID asks for an identity's certificate as a node proxy does, on a stream of
// its own, and returns the leaf.
func fetchSVID(ctx context.Context, socket, identity string) (*x509.Certificate, error) {
	ctx, cancel := context.WithTimeout(ctx, sdsTimeout)
	defer cancel()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("opening SDS: %w", err)
	}
	defer conn.Close()
	stream, err := secretv3.NewSecretDiscoveryServiceClient(conn).StreamSecrets(ctx)
	if err != nil {
		return nil, fmt.Errorf("opening an SDS stream: %w", err)
	}
	err = stream.Send(&discoveryv3.DiscoveryRequest{TypeUrl: secretType, ResourceNames: []string{identity}})
	if err != nil {
		return nil, fmt.Errorf("asking SDS for %s: %w", identity, err)
	}
	response, err := stream.Recv()
	if err != nil {
		return nil, fmt.Errorf("asking SDS for %s: %w", identity, err)
	}
	return leafOf(response, identity)
}

// leafOf returns the leaf of the one secret that the response is to hold.
func leafOf(response *discoveryv3.DiscoveryResponse, identity string) (*x509.Certificate, error) {
	if n := len(response.GetResources()); n != 1 {
		return nil, fmt.Errorf("SDS answered %d secrets for %s, want 1", n, identity)
	}
	var secret tlsv3.Secret
	if err := response.GetResources()[0].UnmarshalTo(&secret); err != nil {
		return nil, fmt.Errorf("decoding the secret of %s: %w", identity, err)
	}
	if secret.GetName() != identity {
		return nil, fmt.Errorf("SDS answered the secret %q for %s", secret.GetName(), identity)
	}
	block, _ := pem.Decode(secret.GetTlsCertificate().GetCertificateChain().GetInlineBytes())
	if block == nil {
		return nil, fmt.Errorf("the secret of %s holds no certificate", identity)
	}
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("parsing the certificate of %s: %w", identity, err)
	}
	if len(leaf.URIs) != 1 || leaf.URIs[0].String() != identity {
		return nil, fmt.Errorf("the certificate for %s names %v", identity, leaf.URIs)
	}
	return leaf, nil
}

// expectRefusal returns an error unless SDS refuses the identity.
func expectRefusal(ctx context.Context, socket, identity string) error {
	leaf, err := fetchSVID(ctx, socket, identity)
	if err == nil {
		return fmt.Errorf("SDS gave a certificate for %s, serial %032x", identity, leaf.SerialNumber)
	}
	var grpcErr interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &grpcErr) || grpcErr.GRPCStatus().Code() != codes.PermissionDenied {
		return fmt.Errorf("want PermissionDenied: %w", err)
	}
	return nil
}

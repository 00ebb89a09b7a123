// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	secretv3 "github.com/envoyproxy/go-control-plane/envoy/service/secret/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"
)

// sdsPeer answers SDS requests from a table: a certificate for a name, or a status.
type sdsPeer struct {
	secretv3.UnimplementedSecretDiscoveryServiceServer
	chains   map[string][]byte // name asked for → PEM
	statuses map[string]codes.Code
}

func (p *sdsPeer) StreamSecrets(stream grpc.BidiStreamingServer[discoveryv3.DiscoveryRequest, discoveryv3.DiscoveryResponse]) error {
	request, err := stream.Recv()
	if err != nil {
		return err
	}
	name := request.GetResourceNames()[0]
	if code, ok := p.statuses[name]; ok {
		return status.Error(code, "said the peer")
	}
	secret, err := anypb.New(&tlsv3.Secret{Name: name, Type: &tlsv3.Secret_TlsCertificate{TlsCertificate: &tlsv3.TlsCertificate{
		CertificateChain: &corev3.DataSource{Specifier: &corev3.DataSource_InlineBytes{InlineBytes: p.chains[name]}},
	}}})
	if err != nil {
		return err
	}
	if err := stream.Send(&discoveryv3.DiscoveryResponse{TypeUrl: secretType, Resources: []*anypb.Any{secret}}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

// certificate makes a self-signed certificate with that URI.
func certificate(t *testing.T, uri string) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := url.Parse(uri)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(7), URIs: []*url.URL{parsed}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func TestSDS(t *testing.T) {
	const held, denied, broken, other, empty = "spiffe://td/ns/a/sa/held", "spiffe://td/ns/a/sa/denied",
		"spiffe://td/ns/a/sa/broken", "spiffe://td/ns/a/sa/other", "spiffe://td/ns/a/sa/empty"
	socket := filepath.Join(t.TempDir(), "sds.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	secretv3.RegisterSecretDiscoveryServiceServer(server, &sdsPeer{
		chains:   map[string][]byte{held: certificate(t, held), other: certificate(t, held), empty: nil},
		statuses: map[string]codes.Code{denied: codes.PermissionDenied, broken: codes.Unavailable},
	})
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})

	leaf, err := fetchSVID(deadline(t), socket, held)
	if err != nil || leaf.SerialNumber.Int64() != 7 {
		t.Errorf("got %v (%v), want the certificate", leaf, err)
	}
	for name, want := range map[string]string{other: "names [" + held, empty: "no certificate", denied: "PermissionDenied"} {
		if _, err := fetchSVID(deadline(t), socket, name); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s gives %v, want %q in it", name, err, want)
		}
	}

	if err := expectRefusal(deadline(t), socket, denied); err != nil {
		t.Errorf("a refusal is not taken for one: %v", err)
	}
	for _, name := range []string{held, broken} {
		if err := expectRefusal(deadline(t), socket, name); err == nil {
			t.Errorf("%s is taken for refused", name)
		}
	}
}

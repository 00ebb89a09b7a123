// SPDX-License-Identifier: Apache-2.0

package sds_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	secretv3 "github.com/envoyproxy/go-control-plane/envoy/service/secret/v3"
	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpcstatus "google.golang.org/grpc/status"

	"ambientd/certfetch"
	"ambientd/certfetch/catest"
	"ambientd/certfetch/sds"
	"ambientd/certfetch/spiffeid"
)

// patience is how long a test waits for what must come. Nothing waits for it to pass.
const patience = 30 * time.Second

// world is a CA, a fetcher over it, and SDS on a unix socket, with a client's connection.
type world struct {
	ca      *catest.CA
	fetcher *certfetch.Fetcher
	server  *grpc.Server
	client  secretv3.SecretDiscoveryServiceClient
	conn    *grpc.ClientConn
	log     *syncBuffer
}

// newWorld runs all of it to the end of the test. Keys do not linger, so that an identity that
// comes back has another certificate.
func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{ca: catest.New(t), log: new(syncBuffer)}
	var err error
	w.fetcher, err = certfetch.New(certfetch.Config{Source: w.ca, TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	service, err := sds.NewServer(sds.Config{Fetcher: w.fetcher, Logger: slog.New(slog.NewTextHandler(w.log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	w.server = grpc.NewServer(append(sds.Options(), grpc.WaitForHandlers(true))...)
	service.Register(w.server)
	socket := filepath.Join(t.TempDir(), "sds.sock")
	listener, err := new(net.ListenConfig).Listen(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var parts sync.WaitGroup
	parts.Go(func() {
		if err := w.fetcher.Run(ctx); err != nil {
			t.Errorf("fetcher: %v", err)
		}
	})
	parts.Go(func() {
		if err := w.server.Serve(listener); err != nil {
			t.Errorf("server: %v", err)
		}
	})
	w.conn, err = grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	w.client = secretv3.NewSecretDiscoveryServiceClient(w.conn)
	t.Cleanup(func() {
		_ = w.conn.Close() // a test may have closed it
		w.server.Stop()
		cancel()
		parts.Wait()
	})
	return w
}

// syncBuffer is a log that is read while it may be written.
type syncBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

func account(t testing.TB, name string) spiffeid.ID {
	t.Helper()
	id, err := spiffeid.Parse("spiffe://cluster.local/ns/test/sa/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// pod registers an identity under its own name as pod UID.
func (w *world) pod(t *testing.T, id spiffeid.ID) {
	t.Helper()
	if err := w.fetcher.Register(id.String(), id); err != nil {
		t.Fatal(err)
	}
}

// readyPod registers and waits for the certificate.
func (w *world) readyPod(t *testing.T, name string) spiffeid.ID {
	t.Helper()
	id := account(t, name)
	w.pod(t, id)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := w.fetcher.Wait(ctx, id); err != nil {
		t.Fatal(err)
	}
	return id
}

func (w *world) removePod(id spiffeid.ID) { w.fetcher.Unregister(id.String()) }

// client is the proxy's side of one stream.
type client struct {
	rpc secretv3.SecretDiscoveryService_StreamSecretsClient
	// last is the response received last.
	last *discoveryv3.DiscoveryResponse
}

// open begins a stream with a request for names.
func (w *world) open(t *testing.T, names ...string) *client {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	rpc, err := w.client.StreamSecrets(ctx)
	if err != nil {
		t.Fatal(err)
	}
	c := &client{rpc: rpc}
	c.request(t, "", names...)
	return c
}

// request sends a request that answers the response with this nonce.
func (c *client) request(t *testing.T, nonce string, names ...string) {
	t.Helper()
	request := &discoveryv3.DiscoveryRequest{TypeUrl: sds.TypeURL, ResourceNames: names, ResponseNonce: nonce, VersionInfo: c.last.GetVersionInfo()}
	if err := c.rpc.Send(request); err != nil {
		t.Fatal(err)
	}
}

// ack accepts the last response, with the names that are wanted from now on.
func (c *client) ack(t *testing.T, names ...string) {
	t.Helper()
	c.request(t, c.last.GetNonce(), names...)
}

// nack rejects the last response.
func (c *client) nack(t *testing.T, reason string, names ...string) {
	t.Helper()
	if err := c.rpc.Send(&discoveryv3.DiscoveryRequest{
		TypeUrl: sds.TypeURL, ResourceNames: names, ResponseNonce: c.last.GetNonce(),
		ErrorDetail: &status.Status{Code: int32(codes.InvalidArgument), Message: reason},
	}); err != nil {
		t.Fatal(err)
	}
}

// receive returns the next response's secrets by name, after checking that they are exactly those.
func (c *client) receive(t *testing.T, names ...string) map[string]*tlsv3.Secret {
	t.Helper()
	response, err := c.rpc.Recv()
	if err != nil {
		t.Fatalf("waiting for %v: %v", names, err)
	}
	if c.last != nil && (response.GetNonce() == c.last.GetNonce() || response.GetVersionInfo() == c.last.GetVersionInfo()) {
		t.Errorf("response %q, version %q, after %q, version %q", response.GetNonce(), response.GetVersionInfo(), c.last.GetNonce(), c.last.GetVersionInfo())
	}
	c.last = response
	return secretsOf(t, response, names...)
}

// secretsOf decodes a response that must have exactly these names, in this order.
func secretsOf(t *testing.T, response *discoveryv3.DiscoveryResponse, names ...string) map[string]*tlsv3.Secret {
	t.Helper()
	if response.GetTypeUrl() != sds.TypeURL || response.GetVersionInfo() == "" {
		t.Errorf("type %q, version %q", response.GetTypeUrl(), response.GetVersionInfo())
	}
	var got []string
	secrets := make(map[string]*tlsv3.Secret)
	for _, resource := range response.GetResources() {
		secret := new(tlsv3.Secret)
		if err := resource.UnmarshalTo(secret); err != nil {
			t.Fatal(err)
		}
		got = append(got, secret.GetName())
		secrets[secret.GetName()] = secret
	}
	if !slices.Equal(got, names) {
		t.Fatalf("received %v, want %v", got, names)
	}
	return secrets
}

// assertEnds is for a stream that must end with this code.
func (c *client) assertEnds(t *testing.T, want codes.Code) error {
	t.Helper()
	response, err := c.rpc.Recv()
	if err == nil {
		t.Fatalf("received %v, want the end with %s", response, want)
	}
	if got := grpcstatus.Code(err); got != want {
		t.Errorf("ended with %v, want %s", err, want)
	}
	return err
}

// certificate is what a TLS library makes of a secret: chain and key must belong together.
func certificate(t *testing.T, secret *tlsv3.Secret) tls.Certificate {
	t.Helper()
	chain := inlineBytes(t, secret.GetTlsCertificate().GetCertificateChain())
	key := inlineBytes(t, secret.GetTlsCertificate().GetPrivateKey())
	if block, rest := pem.Decode(key); block == nil || block.Type != "PRIVATE KEY" || len(rest) != 0 {
		t.Fatalf("the key is no single PKCS #8 block")
	}
	pair, err := tls.X509KeyPair(chain, key)
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := pair.PrivateKey.(*ecdsa.PrivateKey); !ok {
		t.Errorf("the key is a %T", pair.PrivateKey)
	}
	return pair
}

// rootsOf decodes a validation context.
func rootsOf(t *testing.T, secret *tlsv3.Secret) []*x509.Certificate {
	t.Helper()
	var roots []*x509.Certificate
	rest := inlineBytes(t, secret.GetValidationContext().GetTrustedCa())
	for len(rest) > 0 {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil || block.Type != "CERTIFICATE" {
			t.Fatal("the roots are not PEM")
		}
		root, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		roots = append(roots, root)
	}
	return roots
}

func inlineBytes(t *testing.T, source *corev3.DataSource) []byte {
	t.Helper()
	inline, ok := source.GetSpecifier().(*corev3.DataSource_InlineBytes)
	if !ok {
		t.Fatalf("the data is a %T, want inline bytes: no file", source.GetSpecifier())
	}
	return inline.InlineBytes
}

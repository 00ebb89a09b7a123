// SPDX-License-Identifier: Apache-2.0

package sds

import (
	"cmp"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"

	"ambientd/certfetch"
	"ambientd/certfetch/spiffeid"
)

type (
	// names are the resources that a client wants; the roots have the zero identity.
	names map[string]spiffeid.ID
	// versions are the fetcher's, by name.
	versions map[string]uint64
)

// parseNames takes a request's names apart, repetitions included.
func parseNames(list []string) (names, error) {
	if len(list) > MaxNames {
		return nil, status.Errorf(codes.InvalidArgument, "%d resource names, at most %d are possible", len(list), MaxNames)
	}
	parsed := make(names, len(list))
	for _, name := range list {
		if name == Roots {
			parsed[name] = spiffeid.ID{}
			continue
		}
		id, err := spiffeid.Parse(name)
		if err != nil {
			return nil, status.Errorf(codes.InvalidArgument, "resource name is neither %s nor a SPIFFE ID: %v", Roots, err)
		}
		parsed[name] = id
	}
	return parsed, nil
}

// String is for the log.
func (n names) String() string {
	return shorten(strings.Join(slices.Sorted(maps.Keys(n)), " "))
}

// secret is one resource with what it is made of: a certificate, or roots.
type secret struct {
	name  string
	svid  *certfetch.SVID
	roots certfetch.Bundle
}

// snapshot is what there is for some names at one moment.
type snapshot struct {
	// secrets has the roots first: a leaf must not be there before what it is verified by.
	secrets []secret
	// identities counts the names that are SPIFFE IDs, registered those of them that a pod has.
	identities, registered int
}

// lookUp returns what there is for the names given.
func (s *Server) lookUp(wanted names) (snapshot, error) {
	var f snapshot
	for name, id := range wanted {
		if id.IsZero() {
			continue
		}
		f.identities++
		svid, err := s.fetcher.SVID(id)
		switch {
		case err == nil:
			f.registered++
			f.secrets = append(f.secrets, secret{name: name, svid: svid})
		case errors.Is(err, certfetch.ErrPending):
			f.registered++
		case !errors.Is(err, certfetch.ErrNotRegistered):
			return snapshot{}, status.Errorf(codes.Internal, "looking up a certificate: %v", err)
		}
	}
	// After the leaves, so that the roots are never older than these.
	if _, ok := wanted[Roots]; ok {
		if bundle := s.fetcher.Bundle(); bundle.Version > 0 {
			f.secrets = append(f.secrets, secret{name: Roots, roots: bundle})
		}
	}
	slices.SortFunc(f.secrets, func(a, b secret) int {
		if a.name == Roots || b.name == Roots {
			return cmp.Compare(b.roots.Version, a.roots.Version)
		}
		return cmp.Compare(a.name, b.name)
	})
	return f, nil
}

// versions is what push compares.
func (f snapshot) versions() versions {
	v := make(versions, len(f.secrets))
	for _, s := range f.secrets {
		v[s.name] = s.version()
	}
	return v
}

func (s secret) version() uint64 {
	if s.svid != nil {
		return s.svid.Version
	}
	return s.roots.Version
}

// certificates are what the secret shows to peers: the chain, or the roots.
func (s secret) certificates() []*x509.Certificate {
	if s.svid != nil {
		return s.svid.Chain
	}
	return s.roots.Roots
}

// response makes a response of all secrets found. Its version is a digest of the names and
// certificates, so that it says the same after a restart, on every stream, and nothing of the keys.
func (f snapshot) response(nonce string) (*discoveryv3.DiscoveryResponse, error) {
	response := &discoveryv3.DiscoveryResponse{TypeUrl: TypeURL, Nonce: nonce}
	digest := sha256.New()
	for _, s := range f.secrets {
		message, err := s.message()
		if err != nil {
			return nil, status.Errorf(codes.Internal, "encoding the secret of %s: %v", s.name, err)
		}
		resource, err := anypb.New(message)
		if err != nil {
			return nil, status.Errorf(codes.Internal, "encoding the secret of %s: %v", s.name, err)
		}
		response.Resources = append(response.Resources, resource)
		fmt.Fprintf(digest, "%s\x00", s.name)
		for _, cert := range s.certificates() {
			digest.Write(cert.Raw)
		}
	}
	response.VersionInfo = hex.EncodeToString(digest.Sum(nil)[:16])
	return response, nil
}

// message is the secret as Envoy takes it: PEM, inline; keys in PKCS #8.
func (s secret) message() (*tlsv3.Secret, error) {
	certificates := inline(certificatesPEM(s.certificates()))
	if s.svid == nil {
		return &tlsv3.Secret{Name: s.name, Type: &tlsv3.Secret_ValidationContext{
			ValidationContext: &tlsv3.CertificateValidationContext{TrustedCa: certificates},
		}}, nil
	}
	key, err := x509.MarshalPKCS8PrivateKey(s.svid.Key)
	if err != nil {
		return nil, fmt.Errorf("encoding the key: %w", err)
	}
	return &tlsv3.Secret{Name: s.name, Type: &tlsv3.Secret_TlsCertificate{
		TlsCertificate: &tlsv3.TlsCertificate{
			CertificateChain: certificates,
			PrivateKey:       inline(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key})),
		},
	}}, nil
}

func certificatesPEM(certs []*x509.Certificate) []byte {
	var text []byte
	for _, cert := range certs {
		text = append(text, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw})...)
	}
	return text
}

func inline(data []byte) *corev3.DataSource {
	return &corev3.DataSource{Specifier: &corev3.DataSource_InlineBytes{InlineBytes: data}}
}

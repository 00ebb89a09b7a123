// SPDX-License-Identifier: Apache-2.0

// Package pki makes the keys and certificates of one cluster, and the kubeconfigs that
// hold them. They live as long as the cluster does, in files that only their owner reads.
// It refuses to renew or to revoke anything.
package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

const (
	// lifetime is longer than any cluster made for tests should live.
	lifetime = 365 * 24 * time.Hour
	// backdated is for clocks that are set back while the cluster runs.
	backdated = time.Hour
)

// CA signs the certificates of one cluster and writes them into its directory.
type CA struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// Subject says whose certificate is made, and what for.
type Subject struct {
	// File is the name of the files, without .crt and .key.
	File string
	// User and Groups are what Kubernetes reads from a client's certificate.
	User   string
	Groups []string
	// Hosts are the names and addresses of a server; a certificate without them is a client's.
	Hosts []string
}

// New makes a CA in dir: ca.crt and ca.key.
func New(dir string) (*CA, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the directory of keys: %w", err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making the CA's key: %w", err)
	}
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: "devcluster"},
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign | x509.KeyUsageDigitalSignature,
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	ca := &CA{dir: dir, cert: template, key: key}
	der, err := ca.sign(template, &key.PublicKey)
	if err != nil {
		return nil, err
	}
	if ca.cert, err = x509.ParseCertificate(der); err != nil {
		return nil, fmt.Errorf("reading the CA's certificate back: %w", err)
	}
	return ca, ca.write("ca", der, key)
}

// Issue makes a key and a certificate for s.
func (ca *CA) Issue(s Subject) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("making the key of %s: %w", s.File, err)
	}
	template := &x509.Certificate{
		Subject:     pkix.Name{CommonName: s.User, Organization: s.Groups},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	if len(s.Hosts) > 0 {
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	}
	for _, host := range s.Hosts {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	der, err := ca.sign(template, &key.PublicKey)
	if err != nil {
		return err
	}
	return ca.write(s.File, der, key)
}

// SigningKey makes a key pair for service account tokens: name.key and name.pub.
func (ca *CA) SigningKey(name string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("making the key %s: %w", name, err)
	}
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return fmt.Errorf("encoding the public key %s: %w", name, err)
	}
	if err := ca.writeKey(name, key); err != nil {
		return err
	}
	return ca.writePEM(name+".pub", "PUBLIC KEY", public)
}

func (ca *CA) sign(template *x509.Certificate, public *ecdsa.PublicKey) ([]byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("making a serial number: %w", err)
	}
	template.SerialNumber = serial
	template.NotBefore = time.Now().Add(-backdated)
	template.NotAfter = time.Now().Add(lifetime)
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, public, ca.key)
	if err != nil {
		return nil, fmt.Errorf("signing the certificate of %s: %w", template.Subject.CommonName, err)
	}
	return der, nil
}

func (ca *CA) write(name string, der []byte, key *ecdsa.PrivateKey) error {
	if err := ca.writeKey(name, key); err != nil {
		return err
	}
	return ca.writePEM(name+".crt", "CERTIFICATE", der)
}

func (ca *CA) writeKey(name string, key *ecdsa.PrivateKey) error {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return fmt.Errorf("encoding the key %s: %w", name, err)
	}
	return ca.writePEM(name+".key", "EC PRIVATE KEY", der)
}

func (ca *CA) writePEM(name, kind string, der []byte) error {
	data := pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
	if err := os.WriteFile(filepath.Join(ca.dir, name), data, 0o600); err != nil {
		return fmt.Errorf("writing %s: %w", name, err)
	}
	return nil
}

// named is an entry of a kubeconfig's lists: a name, and under one key what it names.
type named map[string]any

// Kubeconfig writes user.kubeconfig for the certificate user, to be used with the API server
// at the URL server. It is JSON, which is YAML too, and holds everything: nothing else is
// needed to use it.
func (ca *CA) Kubeconfig(user, server string) error {
	data := map[string][]byte{}
	for _, name := range []string{"ca.crt", user + ".crt", user + ".key"} {
		content, err := os.ReadFile(filepath.Join(ca.dir, name))
		if err != nil {
			return fmt.Errorf("making the kubeconfig of %s: %w", user, err)
		}
		data[name] = content
	}
	const name = "devcluster"
	config, err := json.MarshalIndent(map[string]any{
		"apiVersion":      "v1",
		"kind":            "Config",
		"current-context": name,
		"clusters":        []named{{"name": name, "cluster": named{"server": server, "certificate-authority-data": data["ca.crt"]}}},
		"users":           []named{{"name": user, "user": named{"client-certificate-data": data[user+".crt"], "client-key-data": data[user+".key"]}}},
		"contexts":        []named{{"name": name, "context": named{"cluster": name, "user": user}}},
	}, "", "  ")
	if err != nil {
		return fmt.Errorf("encoding the kubeconfig of %s: %w", user, err)
	}
	if err := os.WriteFile(filepath.Join(ca.dir, user+".kubeconfig"), append(config, '\n'), 0o600); err != nil {
		return fmt.Errorf("writing the kubeconfig of %s: %w", user, err)
	}
	return nil
}

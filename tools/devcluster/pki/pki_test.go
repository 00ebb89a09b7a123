// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// handshake lets a client and a server shake hands, and returns what each says.
func handshake(t *testing.T, client, server *tls.Config) (clientErr, serverErr error) {
	t.Helper()
	a, b := net.Pipe()
	deadline := time.Now().Add(10 * time.Second)
	for _, conn := range []net.Conn{a, b} {
		if err := conn.SetDeadline(deadline); err != nil {
			t.Fatal(err)
		}
	}
	done := make(chan error, 1)
	go func() {
		conn := tls.Server(b, server)
		err := conn.Handshake()
		b.Close()
		done <- err
	}()
	clientErr = tls.Client(a, client).Handshake()
	a.Close() // whatever the server still has to say, it must not wait for a reader
	return clientErr, <-done
}

func TestCertificates(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pki")
	ca, err := New(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []Subject{
		{File: "server", User: "kube-apiserver", Hosts: []string{"localhost", "10.99.0.1"}},
		{File: "client", User: "admin", Groups: []string{"system:masters"}},
	} {
		if err := ca.Issue(s); err != nil {
			t.Fatal(err)
		}
	}
	load := func(name string) tls.Certificate {
		cert, err := tls.LoadX509KeyPair(filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key"))
		if err != nil {
			t.Fatal(err)
		}
		return cert
	}
	content, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(content)
	server := &tls.Config{Certificates: []tls.Certificate{load("server")}, ClientCAs: roots, ClientAuth: tls.RequireAndVerifyClientCert, SessionTicketsDisabled: true}
	for _, test := range []struct {
		name, host, cert string
		ok               bool
	}{
		{"by name", "localhost", "client", true},
		{"by address", "10.99.0.1", "client", true},
		{"another host", "example.org", "client", false},
		{"a server's certificate as a client's", "localhost", "server", false},
	} {
		client := &tls.Config{RootCAs: roots, ServerName: test.host, Certificates: []tls.Certificate{load(test.cert)}}
		clientErr, serverErr := handshake(t, client, server)
		if ok := clientErr == nil && serverErr == nil; ok != test.ok {
			t.Errorf("%s: the client says %v, the server %v", test.name, clientErr, serverErr)
		}
	}
	if leaf := load("client").Leaf; leaf.Subject.CommonName != "admin" || strings.Join(leaf.Subject.Organization, ",") != "system:masters" {
		t.Errorf("Kubernetes reads user and groups from %s", leaf.Subject)
	}
}

// Nobody but their owner reads keys, nor the kubeconfigs, which hold some.
func TestModes(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pki")
	ca, err := New(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := ca.Issue(Subject{File: "admin", User: "admin"}); err != nil {
		t.Fatal(err)
	}
	if err := ca.SigningKey("service-account"); err != nil {
		t.Fatal(err)
	}
	if err := ca.Kubeconfig("admin", "https://10.99.0.1"); err != nil {
		t.Fatal(err)
	}
	files := 0
	err = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		if info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %v", path, info.Mode())
		}
		files++
		return nil
	})
	if err != nil || files != 8 { // the directory, and two, two, two and one in it
		t.Errorf("looked at %d files, %v, want 8", files, err)
	}
}

func TestSigningKey(t *testing.T) {
	dir := t.TempDir()
	ca, err := New(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := ca.SigningKey("sa"); err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(filepath.Join(dir, "sa.pub"))
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(content)
	if block == nil {
		t.Fatal("sa.pub is no PEM")
	}
	if _, err := x509.ParsePKIXPublicKey(block.Bytes); err != nil {
		t.Errorf("sa.pub: %v", err)
	}
}

func TestKubeconfig(t *testing.T) {
	dir := t.TempDir()
	ca, err := New(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := ca.Kubeconfig("nobody", "https://10.99.0.1"); err == nil {
		t.Error("a kubeconfig was made for somebody without a certificate")
	}
	if err := ca.Issue(Subject{File: "admin", User: "admin"}); err != nil {
		t.Fatal(err)
	}
	if err := ca.Kubeconfig("admin", "https://10.99.0.1"); err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(filepath.Join(dir, "admin.kubeconfig"))
	if err != nil {
		t.Fatal(err)
	}
	var config struct {
		CurrentContext string `json:"current-context"`
		Contexts       []struct {
			Name    string
			Context struct{ Cluster, User string }
		}
		Clusters []struct {
			Name    string
			Cluster struct{ Server string }
		}
		Users []struct {
			Name string
			User struct {
				Cert []byte `json:"client-certificate-data"`
				Key  []byte `json:"client-key-data"`
			}
		}
	}
	if err := json.Unmarshal(content, &config); err != nil {
		t.Fatal(err)
	}
	context := config.Contexts[0]
	if context.Name != config.CurrentContext || context.Context.Cluster != config.Clusters[0].Name || context.Context.User != config.Users[0].Name {
		t.Errorf("the names do not refer to each other: %s", content)
	}
	if got := config.Clusters[0].Cluster.Server; got != "https://10.99.0.1" {
		t.Errorf("server %q", got)
	}
	if _, err := tls.X509KeyPair(config.Users[0].User.Cert, config.Users[0].User.Key); err != nil {
		t.Errorf("certificate and key: %v", err)
	}
}

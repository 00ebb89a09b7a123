// SPDX-License-Identifier: Apache-2.0

package mtls_test

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	"ambientd/certfetch/spiffeid"
	"ambientd/tools/devproxy/mtls"
	"ambientd/tools/devproxy/mtls/mtlstest"
)

// handshake runs one over TCP, with a byte each way, since a TLS 1.3 client has
// done its part before the server judges its certificate.
func handshake(t *testing.T, client, server *tls.Config) (clientErr, serverErr error) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	result := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			defer c.Close()
			err = exchange(tls.Server(c, server))
		}
		result <- err
	}()
	c, err := net.Dial("tcp4", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	return exchange(tls.Client(c, client)), <-result
}

func exchange(c *tls.Conn) error {
	if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return err
	}
	if _, err := c.Write([]byte{1}); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 1))
	return err
}

func TestHandshake(t *testing.T) {
	const td, foreign = "mesh.test", "other.test"
	home, other := mtlstest.New(t, td), mtlstest.New(t, foreign)
	web, db, alien := mtlstest.ID(t, td, "web"), mtlstest.ID(t, td, "db"), mtlstest.ID(t, foreign, "web")
	home.Issue(t, web)
	home.Issue(t, db)
	other.Issue(t, alien)
	both := mtlstest.New(t, td) // trusts both CAs
	both.Trust(t, home, other)
	both.Issue(t, db)
	unknown := mtlstest.New(t, td) // another CA of the same name
	unknown.Issue(t, web)
	unknown.Trust(t, home)
	none := mtlstest.New(t, td)
	none.Trust(t, home)

	for _, tc := range []struct {
		name    string
		client  *mtlstest.Source
		as      spiffeid.ID
		expects spiffeid.ID
		server  *mtlstest.Source
		is      spiffeid.ID
		want    string // part of either side's error; empty for success
	}{
		{"both known", home, web, db, home, db, ""},
		{"server is somebody else", home, web, web, home, db, "server is spiffe://mesh.test/ns/test/sa/db, not"},
		{"client of another trust domain", other, alien, db, both, db, "is not of trust domain mesh.test"},
		{"client of an unknown CA", unknown, web, db, home, db, "verifying the other side's certificate"},
		{"server of an unknown CA", home, db, web, unknown, web, "verifying the other side's certificate"},
		{"server without a certificate", home, web, db, none, db, mtlstest.ErrNone.Error()},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.client == other {
				tc.client.Trust(t, both) // so that the server is the one to refuse
			}
			cert, err := tc.client.Certificate(tc.as)
			if err != nil {
				t.Fatal(err)
			}
			clientErr, serverErr := handshake(t, mtls.Client(tc.client, cert, tc.expects), mtls.Server(tc.server, tc.is, web.TrustDomain()))
			if tc.want == "" {
				if clientErr != nil || serverErr != nil {
					t.Errorf("handshake: client %v, server %v", clientErr, serverErr)
				}
				return
			}
			if !strings.Contains(errText(clientErr)+errText(serverErr), tc.want) {
				t.Errorf("handshake: client %v, server %v; want %q", clientErr, serverErr, tc.want)
			}
		})
	}
}

func TestServerRefuses(t *testing.T) {
	home := mtlstest.New(t, "mesh.test")
	web, db := mtlstest.ID(t, "mesh.test", "web"), mtlstest.ID(t, "mesh.test", "db")
	home.Issue(t, web)
	home.Issue(t, db)
	cert, err := home.Certificate(web)
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name   string
		change func(*tls.Config)
	}{
		{"no client certificate", func(c *tls.Config) { c.GetClientCertificate = nil }},
		{"TLS 1.2", func(c *tls.Config) { c.MinVersion, c.MaxVersion = tls.VersionTLS12, tls.VersionTLS12 }},
		{"another protocol", func(c *tls.Config) { c.NextProtos = []string{"smtp"} }},
	} {
		client := mtls.Client(home, cert, db)
		tc.change(client)
		if _, serverErr := handshake(t, client, mtls.Server(home, db, web.TrustDomain())); serverErr == nil {
			t.Errorf("%s: the server accepted", tc.name)
		}
	}
}

func TestIdentity(t *testing.T) {
	uri := func(s string) *url.URL {
		u, err := url.Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		return u
	}
	good := uri("spiffe://mesh.test/ns/test/sa/web")
	if id, err := mtls.Identity(&x509.Certificate{URIs: []*url.URL{good}}); err != nil || id.String() != good.String() {
		t.Errorf("Identity = %s, %v", id, err)
	}
	for name, uris := range map[string][]*url.URL{
		"none":         nil,
		"two":          {good, good},
		"no SPIFFE ID": {uri("https://mesh.test/ns/test/sa/web")},
	} {
		if id, err := mtls.Identity(&x509.Certificate{URIs: uris}); err == nil {
			t.Errorf("%s: Identity = %s", name, id)
		}
	}
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error() + "\n"
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"
)

// pollInterval is how often something is asked for that tells nobody when it is there.
const pollInterval = 100 * time.Millisecond

// api is the cluster's API as its administrator sees it, from inside of the first node's
// network namespace.
type api struct {
	state  *State
	client *http.Client
}

func newAPI(state *State) (*api, error) {
	cert, err := tls.LoadX509KeyPair(filepath.Join(state.pki(), "admin.crt"), filepath.Join(state.pki(), "admin.key"))
	if err != nil {
		return nil, fmt.Errorf("reading the administrator's certificate: %w", err)
	}
	ca, err := os.ReadFile(filepath.Join(state.pki(), "ca.crt"))
	if err != nil {
		return nil, fmt.Errorf("reading the CA's certificate: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return nil, errors.New("reading the CA's certificate: it holds none")
	}
	var dialer net.Dialer
	return &api{state: state, client: &http.Client{
		Timeout: 10 * time.Second,
		Transport: &http.Transport{
			TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, Certificates: []tls.Certificate{cert}},
			// A socket belongs to the network namespace in which it was opened.
			DialContext: func(ctx context.Context, network, address string) (conn net.Conn, err error) {
				err = state.Nodes[0].Process.InNetns(func() error {
					conn, err = dialer.DialContext(ctx, network, address)
					return err
				})
				return conn, err
			},
		},
	}}, nil
}

// get asks for path and decodes the answer into result, unless that is nil.
func (a *api) get(ctx context.Context, path string, result any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, apiURL+path, nil)
	if err != nil {
		return fmt.Errorf("asking the API server for %s: %w", path, err)
	}
	resp, err := a.client.Do(req)
	if err != nil {
		return fmt.Errorf("asking the API server: %w", err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return fmt.Errorf("asking the API server for %s: %w", path, err)
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("asking the API server for %s: %s: %.500s", path, resp.Status, body)
	}
	if result == nil {
		return nil
	}
	if err := json.Unmarshal(body, result); err != nil {
		return fmt.Errorf("reading the API server's answer for %s: %w", path, err)
	}
	return nil
}

// waitReady waits until the API server says that it is, and gives up as soon as it or etcd
// has ended.
func (a *api) waitReady(ctx context.Context) error {
	err := poll(ctx, func() (retry, fatal error) {
		for _, name := range []string{"etcd", "kube-apiserver"} {
			if err := a.state.Control(0).Running(ctx, name); err != nil {
				return nil, err
			}
		}
		return a.get(ctx, "/readyz", nil), nil
	})
	if err != nil {
		return fmt.Errorf("waiting for the API server (its log is %s): %w", a.state.log(0, "kube-apiserver"), err)
	}
	return nil
}

// poll calls f until it returns neither error, or a fatal one.
func poll(ctx context.Context, f func() (retry, fatal error)) error {
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for {
		retry, fatal := f()
		if fatal != nil {
			return fatal
		}
		if retry == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w; the last answer: %w", ctx.Err(), retry)
		case <-ticker.C:
		}
	}
}

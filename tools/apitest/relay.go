// SPDX-License-Identifier: Apache-2.0

package apitest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
)

// Relay passes connections on to the API server, and can be cut: then the API server is
// away for those who come by the relay, and for nobody else.
type Relay struct {
	network, address string // where it listens
	to               dialer
	answered         atomic.Int64 // bytes, encrypted as they are

	mu       sync.Mutex
	listener net.Listener // nil while it is cut
	conns    map[net.Conn]struct{}
	serving  sync.WaitGroup
}

type dialer func(ctx context.Context) (net.Conn, error)

func newRelay(network, address string, to dialer) (*Relay, error) {
	r := &Relay{network: network, address: address, to: to, conns: map[net.Conn]struct{}{}}
	if err := r.listen(); err != nil {
		return nil, err
	}
	r.address = r.listener.Addr().String()
	return r, nil
}

func dial(network, address string) dialer {
	return func(ctx context.Context) (net.Conn, error) { return new(net.Dialer).DialContext(ctx, network, address) }
}

// NewRelay returns a relay to the kubeconfig's API server, and a kubeconfig of the same
// user by it. It lives as long as the test.
func NewRelay(t *testing.T, kubeconfig string) (r *Relay, byRelay string) {
	t.Helper()
	r, byRelay, err := OpenRelay(kubeconfig, t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r, byRelay
}

// OpenRelay is NewRelay for programs that measure: whoever calls it closes it, and dir
// takes the kubeconfig, which is that of whoever has the token unless it is empty.
func OpenRelay(kubeconfig, dir, token string) (r *Relay, byRelay string, err error) {
	c, err := readConfig(kubeconfig)
	if err != nil {
		return nil, "", err
	}
	to := dial("tcp", c.server.Host)
	if socket := os.Getenv(socketEnv); socket != "" {
		to = dial("unix", socket)
	}
	if token != "" {
		c.setToken(token)
	}
	if r, err = newRelay("tcp", "127.0.0.1:0", to); err != nil {
		return nil, "", err
	}
	byRelay = filepath.Join(dir, "kubeconfig")
	if err := c.write(byRelay, r.address); err != nil {
		r.Close()
		return nil, "", err
	}
	return r, byRelay, nil
}

// KubeconfigOf returns a kubeconfig of whoever has the token. It lives as long as the test.
func KubeconfigOf(t *testing.T, token string) string {
	t.Helper()
	c, err := readConfig(Kubeconfig(t))
	if err != nil {
		t.Fatal(err)
	}
	c.setToken(token)
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := c.write(path, c.server.Host); err != nil {
		t.Fatal(err)
	}
	return path
}

// socketEnv names the socket of the relay that Reach serves.
const socketEnv = "AMBIENTD_APITEST_SOCKET"

// Reach is for a package whose tests run in a network namespace of their own, from where
// the API server cannot be reached: run starts them there, as netnstest.Main does, and
// relays of theirs pass on by a socket that belongs to no such namespace. It returns what
// run does.
func Reach(run func() int) int {
	kubeconfig := os.Getenv("KUBECONFIG")
	if kubeconfig == "" || os.Getenv(socketEnv) != "" {
		return run()
	}
	code, err := reach(kubeconfig, run)
	if err != nil {
		fmt.Fprintf(os.Stderr, "apitest: %v\n", err)
		return 1
	}
	return code
}

func reach(kubeconfig string, run func() int) (code int, err error) {
	c, err := readConfig(kubeconfig)
	if err != nil {
		return 0, err
	}
	dir, err := os.MkdirTemp("", "apitest")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	socket := filepath.Join(dir, "api.sock")
	r, err := newRelay("unix", socket, dial("tcp", c.server.Host))
	if err != nil {
		return 0, err
	}
	defer r.Close()
	if err := os.Setenv(socketEnv, socket); err != nil {
		return 0, err
	}
	return run(), nil
}

// Cut ends all connections and takes no more.
func (r *Relay) Cut() { r.Close() }

// Answered returns how many bytes have come from the API server so far.
func (r *Relay) Answered() int64 { return r.answered.Load() }

// Mend takes connections again.
func (r *Relay) Mend(t *testing.T) {
	t.Helper()
	if err := r.listen(); err != nil {
		t.Fatal(err)
	}
}

func (r *Relay) listen() error {
	listener, err := new(net.ListenConfig).Listen(context.Background(), r.network, r.address)
	if err != nil {
		return fmt.Errorf("listening for the API server: %w", err)
	}
	r.mu.Lock()
	r.listener = listener
	r.mu.Unlock()
	r.serving.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return // it is cut
			}
			r.serving.Go(func() { r.pass(conn) })
		}
	})
	return nil
}

func (r *Relay) pass(from net.Conn) {
	defer from.Close()
	to, err := r.to(context.Background())
	if err != nil {
		return
	}
	defer to.Close()
	if !r.keep(from, to) {
		return
	}
	var both sync.WaitGroup
	for _, way := range []struct {
		source, sink net.Conn
		into         io.Writer
	}{{from, to, to}, {to, from, io.MultiWriter(from, (*count)(&r.answered))}} {
		both.Go(func() {
			_, err := io.Copy(way.into, way.source)
			if err == nil || errors.Is(err, net.ErrClosed) {
				err = way.sink.Close() // the other way ends, too
			}
			_ = err // whoever is connected sees it
		})
	}
	both.Wait()
	r.mu.Lock()
	delete(r.conns, from)
	delete(r.conns, to)
	r.mu.Unlock()
}

// count counts what is written to it.
type count atomic.Int64

func (c *count) Write(p []byte) (int, error) {
	(*atomic.Int64)(c).Add(int64(len(p)))
	return len(p), nil
}

// keep notes connections to be cut, false if the relay is cut already.
func (r *Relay) keep(conns ...net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, conn := range conns {
		r.conns[conn] = struct{}{}
	}
	return r.listener != nil
}

// Close is Cut for good.
func (r *Relay) Close() {
	r.mu.Lock()
	if r.listener != nil {
		r.listener.Close()
		r.listener = nil
	}
	for conn := range r.conns {
		conn.Close()
	}
	r.mu.Unlock()
	r.serving.Wait()
}

// config is a kubeconfig of one cluster, in JSON, as devcluster writes it.
type config struct {
	content map[string]any
	cluster map[string]any
	server  *url.URL
}

func readConfig(path string) (config, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return config{}, err
	}
	var c config
	if err := json.Unmarshal(content, &c.content); err != nil {
		return config{}, fmt.Errorf("reading kubeconfig %s: %w", path, err)
	}
	clusters, _ := c.content["clusters"].([]any)
	if len(clusters) != 1 {
		return config{}, fmt.Errorf("kubeconfig %s has %d clusters, want one", path, len(clusters))
	}
	named, _ := clusters[0].(map[string]any)
	c.cluster, _ = named["cluster"].(map[string]any)
	server, _ := c.cluster["server"].(string)
	if c.server, err = url.Parse(server); err != nil || c.server.Host == "" {
		return config{}, fmt.Errorf("kubeconfig %s: server %q is no URL of an API server", path, server)
	}
	return c, nil
}

// setToken makes everybody in it whoever has the token.
func (c config) setToken(token string) {
	users, _ := c.content["users"].([]any)
	for _, user := range users {
		if named, ok := user.(map[string]any); ok {
			named["user"] = map[string]any{"token": token}
		}
	}
}

// write writes the kubeconfig with the API server at another address.
func (c config) write(path, address string) error {
	if _, ok := c.cluster["tls-server-name"]; !ok {
		c.cluster["tls-server-name"] = c.server.Hostname()
	}
	c.cluster["server"] = "https://" + address
	content, err := json.Marshal(c.content)
	if err != nil {
		return err
	}
	return os.WriteFile(path, content, 0o600)
}

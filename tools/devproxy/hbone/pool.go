// SPDX-License-Identifier: Apache-2.0

package hbone

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"sync"
	"time"

	"ambientd/certfetch/spiffeid"
	"ambientd/tools/devproxy/mtls"
)

// Destination is one end of a pooled connection. The other is the Pool's own
// pod and identity.
type Destination struct {
	Identity spiffeid.ID
	Addr     netip.Addr // of the pod, not of a service
}

// PoolConfig says whose connections a Pool makes.
type PoolConfig struct {
	Source       spiffeid.ID
	Certificates mtls.Source
	// Dial opens a plain connection from the source's pod.
	Dial func(ctx context.Context, to netip.AddrPort) (*net.TCPConn, error)
}

// Pool keeps the HBONE connections of one source pod. A connection is shared
// only by streams of the same source identity, destination identity and
// address, and only while its certificate is the newest.
type Pool struct {
	cfg PoolConfig

	mu     sync.Mutex
	conns  map[Destination][]*conn
	dials  map[Destination]chan struct{} // closed when the dial in progress ends
	closed bool
}

// conn is a pooled connection.
type conn struct {
	*http.ClientConn
	cert *tls.Certificate // that it was made with
	idle *time.Timer      // closes it after idleTimeout without streams
}

// NewPool returns an empty pool.
func NewPool(cfg PoolConfig) *Pool {
	return &Pool{
		cfg:   cfg,
		conns: make(map[Destination][]*conn),
		dials: make(map[Destination]chan struct{}),
	}
}

// Connect opens a stream to target by way of the pod to, whose address need not
// be target's. It fails without a certificate for the source, and when to turns
// out to be anybody else.
func (p *Pool) Connect(ctx context.Context, to Destination, target netip.AddrPort) (Upstream, error) {
	c, err := p.reserve(ctx, to)
	if err != nil {
		return nil, fmt.Errorf("connecting to %s at %s: %w", to.Identity, to.Addr, err)
	}
	s, err := open(ctx, c, target)
	if err != nil {
		return nil, fmt.Errorf("asking %s at %s for %s: %w", to.Identity, to.Addr, target, err)
	}
	return s, nil
}

// Close closes all connections, and with them their streams.
func (p *Pool) Close() {
	p.mu.Lock()
	p.closed = true
	var all []*conn
	for _, conns := range p.conns {
		all = append(all, conns...)
	}
	p.mu.Unlock()
	for _, c := range all {
		_ = c.Close() // an error says that it had broken already
	}
}

var errPoolClosed = errors.New("the pod is no longer in the mesh")

// reserve returns a connection with one stream reserved on it.
func (p *Pool) reserve(ctx context.Context, to Destination) (*conn, error) {
	for {
		cert, err := p.cfg.Certificates.Certificate(p.cfg.Source)
		if err != nil {
			return nil, err
		}
		c, wait, err := p.find(to, cert)
		if c != nil || err != nil {
			return c, err
		}
		if wait == nil {
			return p.dial(ctx, to, cert)
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// find returns a connection with a stream reserved; or a channel to wait for
// before trying again; or neither, when the caller is to dial.
func (p *Pool) find(to Destination, cert *tls.Certificate) (*conn, <-chan struct{}, error) {
	p.mu.Lock()
	conns := slices.Clone(p.conns[to])
	p.mu.Unlock()
	for _, c := range conns { // Reserve may call changed, which locks
		if c.cert == cert && c.Reserve() == nil {
			return c, nil, nil
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, nil, errPoolClosed
	}
	if wait, ok := p.dials[to]; ok {
		return nil, wait, nil
	}
	p.dials[to] = make(chan struct{})
	return nil, nil, nil
}

// dial makes the one new connection that others wait for.
func (p *Pool) dial(ctx context.Context, to Destination, cert *tls.Certificate) (*conn, error) {
	c, err := p.handshake(ctx, to, cert)
	if keepErr := p.keep(to, c); err == nil && keepErr != nil {
		return nil, errors.Join(keepErr, c.Close())
	}
	if err != nil {
		return nil, err
	}
	p.changed(to, c) // in case that it ended before it was kept
	return c, nil
}

// keep ends the dial in progress with c, or with nil if it failed.
func (p *Pool) keep(to Destination, c *conn) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.dials[to])
	delete(p.dials, to)
	if p.closed {
		return errPoolClosed
	}
	if c != nil {
		p.conns[to] = append(p.conns[to], c)
	}
	return nil
}

func (p *Pool) handshake(ctx context.Context, to Destination, cert *tls.Certificate) (*conn, error) {
	ctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	addr := netip.AddrPortFrom(to.Addr, Port)
	transport := &http.Transport{
		Protocols: http2Only(),
		HTTP2:     http2Config(),
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return p.cfg.Dial(ctx, addr)
		},
		TLSClientConfig:     mtls.Client(p.cfg.Certificates, cert, to.Identity),
		TLSHandshakeTimeout: handshakeTimeout,
	}
	cc, err := transport.NewClientConn(ctx, "https", addr.String())
	if err != nil {
		return nil, err
	}
	c := &conn{ClientConn: cc, cert: cert}
	if err := cc.Reserve(); err != nil {
		return nil, errors.Join(err, cc.Close())
	}
	c.idle = time.AfterFunc(idleTimeout, c.closeIfIdle)
	cc.SetStateHook(func(*http.ClientConn) { p.changed(to, c) })
	return c, nil
}

func (c *conn) closeIfIdle() {
	if c.InFlight() == 0 {
		_ = c.Close() // an error says that it had broken already
	}
}

// changed forgets a connection that has ended, and lets an idle one end: at
// once when it was made with a certificate that is no longer shown.
func (p *Pool) changed(to Destination, c *conn) {
	switch {
	case c.Err() != nil:
		c.idle.Stop()
		p.forget(to, c)
	case c.InFlight() > 0:
	default:
		c.idle.Reset(idleTimeout)
		if now, err := p.cfg.Certificates.Certificate(p.cfg.Source); err != nil || now != c.cert {
			c.closeIfIdle()
		}
	}
}

func (p *Pool) forget(to Destination, c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns[to] = slices.DeleteFunc(p.conns[to], func(o *conn) bool { return o == c })
	if len(p.conns[to]) == 0 {
		delete(p.conns, to)
	}
}

// open sends the CONNECT request on a reserved stream of c.
func open(ctx context.Context, c *conn, target netip.AddrPort) (*stream, error) {
	// The request outlives ctx, which bounds the wait for its answer only.
	reqCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	body, upload := io.Pipe()
	req := (&http.Request{
		Method:        http.MethodConnect,
		URL:           &url.URL{Scheme: "https", Host: target.String()},
		Host:          target.String(),
		Header:        make(http.Header),
		Body:          body,
		ContentLength: -1,
	}).WithContext(reqCtx)
	resp, err := c.RoundTrip(req)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = errors.Join(fmt.Errorf("answer is %s", resp.Status), resp.Body.Close())
	}
	if err == nil && !stop() {
		err = errors.Join(ctx.Err(), resp.Body.Close())
	}
	if err != nil {
		cancel()
		return nil, err
	}
	return &stream{body: resp.Body, upload: upload, cancel: cancel}, nil
}

// stream is the client's side of a request, as a relay.Stream.
type stream struct {
	body   io.ReadCloser
	upload *io.PipeWriter
	cancel context.CancelFunc
}

func (s *stream) Read(b []byte) (int, error)  { return s.body.Read(b) }
func (s *stream) Write(b []byte) (int, error) { return s.upload.Write(b) }

// CloseWrite ends the request's body.
func (s *stream) CloseWrite() error { return s.upload.Close() }

// Close ends the request, and resets it if it has not ended by itself.
func (s *stream) Close() error {
	s.Abort()
	return s.body.Close()
}

// Abort resets the stream; the connection and its other streams go on.
func (s *stream) Abort() {
	s.cancel()
	_ = s.upload.CloseWithError(context.Canceled)
}

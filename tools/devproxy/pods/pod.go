// SPDX-License-Identifier: Apache-2.0

package pods

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"ambientd/certfetch/spiffeid"
	"ambientd/tools/devproxy/dns"
	"ambientd/tools/devproxy/hbone"
	"ambientd/tools/devproxy/mtls"
	"ambientd/tools/devproxy/podnet"
	"ambientd/tools/devproxy/zdsclient"
)

// The ports that the redirection sends a pod's traffic to, and hbone.Port.
const (
	outboundPort  = 15001
	plaintextPort = 15006
	dnsPort       = 15053
)

const (
	// openTimeout bounds the way from an accepted connection to its upstream.
	openTimeout = 10 * time.Second
	// maxConnections is for each listener of a pod, and for HBONE streams.
	maxConnections = 1024
	// acceptPause follows an error of accept, such as too many open files.
	acceptPause = 100 * time.Millisecond
)

// pod serves one pod from start to end.
type pod struct {
	cfg     Config
	name    string // "namespace/name"
	id      spiffeid.ID
	netns   *podnet.Netns
	log     *slog.Logger
	pool    *hbone.Pool
	server  *http.Server
	streams slots  // of inbound HBONE
	release func() // of the certificate

	listeners []io.Closer
	cancel    context.CancelFunc // breaks off what is being served
	serving   sync.WaitGroup
}

// start opens all of a pod's listeners, or none.
func start(ctx context.Context, cfg Config, w zdsclient.Workload, netns *podnet.Netns, log *slog.Logger) (*pod, error) {
	id, err := spiffeid.New(cfg.TrustDomain, w.Namespace, w.ServiceAccount)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	p := &pod{
		cfg:     cfg,
		name:    w.Namespace + "/" + w.Name,
		id:      id,
		netns:   netns,
		log:     log,
		streams: make(slots, maxConnections),
		release: cfg.Certificates.Acquire(ctx, id),
		cancel:  cancel,
	}
	p.pool = hbone.NewPool(hbone.PoolConfig{
		Source:       id,
		Certificates: cfg.Certificates,
		Dial: func(ctx context.Context, to netip.AddrPort) (*net.TCPConn, error) {
			return netns.DialTCP(ctx, netip.Addr{}, to)
		},
	})
	p.server = hbone.NewServer(ctx, mtls.Server(cfg.Certificates, id, cfg.TrustDomain), inbound{p}, log)
	if err := p.listen(ctx); err != nil {
		p.release()
		p.stopListening()
		p.breakOff()
		return nil, err
	}
	return p, nil
}

// listen opens the listeners of both families; a pod may lack IPv6.
func (p *pod) listen(ctx context.Context) error {
	if err := p.listenOn(ctx, netip.IPv4Unspecified(), netip.AddrFrom4([4]byte{127, 0, 0, 1})); err != nil {
		return err
	}
	err := p.listenOn(ctx, netip.IPv6Unspecified(), netip.IPv6Loopback())
	if errors.Is(err, syscall.EAFNOSUPPORT) || errors.Is(err, syscall.EADDRNOTAVAIL) {
		p.log.Info("pod has no IPv6", "err", err)
		return nil
	}
	return err
}

func (p *pod) listenOn(ctx context.Context, wildcard, loopback netip.Addr) error {
	// The captured queries come to loopback, where redirection sends what the
	// pod itself sends. It goes first: a netns without IPv6 refuses it.
	if err := p.listenUDP(ctx, netip.AddrPortFrom(loopback, dnsPort)); err != nil {
		return err
	}
	for _, l := range []struct {
		addr  netip.AddrPort
		serve func(ctx context.Context, l *net.TCPListener)
	}{
		{netip.AddrPortFrom(loopback, dnsPort), p.accept(p.outbound)},
		{netip.AddrPortFrom(wildcard, outboundPort), p.accept(p.outbound)},
		{netip.AddrPortFrom(wildcard, plaintextPort), p.accept(p.plaintext)},
		{netip.AddrPortFrom(wildcard, hbone.Port), p.serveHBONE},
	} {
		listener, err := p.netns.ListenTCP(ctx, l.addr)
		if err != nil {
			return fmt.Errorf("listening in the pod: %w", err)
		}
		p.listeners = append(p.listeners, listener)
		p.serving.Go(func() { l.serve(ctx, listener) })
	}
	return nil
}

func (p *pod) listenUDP(ctx context.Context, addr netip.AddrPort) error {
	conn, err := p.netns.ListenUDP(ctx, addr)
	if err != nil {
		return fmt.Errorf("listening in the pod: %w", err)
	}
	p.listeners = append(p.listeners, conn)
	p.serving.Go(func() {
		if err := dns.Serve(conn); !errors.Is(err, net.ErrClosed) {
			p.log.Error("DNS listener failed", "err", err)
		}
	})
	return nil
}

// accept returns a function that handles the connections of a listener until
// that is closed, and returns when all have ended.
func (p *pod) accept(handle func(ctx context.Context, c *net.TCPConn)) func(context.Context, *net.TCPListener) {
	return func(ctx context.Context, l *net.TCPListener) {
		bounded := bounded{TCPListener: l, slots: make(slots, maxConnections)}
		var handling sync.WaitGroup
		defer handling.Wait()
		for {
			c, release, err := bounded.accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				p.log.Error("accepting a connection", "err", err)
				select {
				case <-time.After(acceptPause):
				case <-ctx.Done():
				}
				continue
			}
			handling.Go(func() {
				defer release()
				defer c.Close()
				handle(ctx, c)
			})
		}
	}
}

func (p *pod) serveHBONE(_ context.Context, l *net.TCPListener) {
	err := p.server.ServeTLS(bounded{TCPListener: l, slots: make(slots, maxConnections)}, "", "")
	if !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
		p.log.Error("HBONE listener failed", "err", err)
	}
}

// stopListening returns when nothing listens any more.
func (p *pod) stopListening() {
	for _, l := range slices.Backward(p.listeners) {
		if err := l.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			p.log.Error("closing a listener", "err", err)
		}
	}
}

// end gives the connections up, after a moment in which they may end.
func (p *pod) end() {
	p.release() // at once: no new connection is to have the certificate
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		p.serving.Wait()
	}()
	ctx, cancel := context.WithTimeout(context.Background(), drain)
	defer cancel()
	// Tells the peers that no more streams are taken, and waits for those there.
	if err := p.server.Shutdown(ctx); err != nil {
		p.log.Debug("HBONE streams outlived the drain", "err", err)
	}
	select {
	case <-ended:
	case <-ctx.Done():
	}
	p.breakOff()
	if err := p.netns.Close(); err != nil {
		p.log.Error("closing the pod's netns", "err", err)
	}
}

// breakOff ends all that is being served, and returns when it has ended. The
// listeners are closed already.
func (p *pod) breakOff() {
	p.cancel()
	p.pool.Close()
	if err := p.server.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		p.log.Error("closing HBONE connections", "err", err)
	}
	p.serving.Wait()
}

// SPDX-License-Identifier: Apache-2.0

// Package hbone carries TCP connections between pods: each is one HTTP/2
// CONNECT request, in mutual TLS, to port 15008 of the destination pod.
//
// It owns both sides of that request, and the pool of connections that the
// requests share. Certificates and sockets come from its callers.
//
// An end of either direction arrives at the other side as such. Two exceptions
// are net/http's, whose server sets them:
//   - It cannot end a response and read on. When the destination closes its side
//     first, the source is told, and what it goes on to send is refused, as if
//     the destination had closed both.
//   - It sends the credit for what the source may send in turn with the response.
//     A source that does not read what comes back is stopped in its own sending
//     too, once 4 MiB are waiting for it.
package hbone

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"time"

	"ambientd/certfetch/spiffeid"
	"ambientd/tools/devproxy/mtls"
	"ambientd/tools/devproxy/relay"
)

// Port is where a pod in the mesh takes HBONE.
const Port = 15008

const (
	handshakeTimeout = 10 * time.Second
	idleTimeout      = 90 * time.Second // of a connection without streams
	pingAfter        = 30 * time.Second // without a frame
	pingTimeout      = 15 * time.Second
	maxStreams       = 256 // on one connection
)

func http2Only() *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP2(true)
	return p
}

func http2Config() *http.HTTP2Config {
	return &http.HTTP2Config{
		MaxConcurrentStreams: maxStreams,
		SendPingTimeout:      pingAfter,
		PingTimeout:          pingTimeout,
	}
}

// Inbound is a CONNECT request that a server got, from a verified source.
type Inbound struct {
	Source spiffeid.ID
	Client netip.AddrPort // the source's end of the TCP connection
	Local  netip.Addr     // ours
	Target netip.AddrPort // what it asks for
}

// Upstream is what an inbound stream is relayed to. It is closed in the end.
type Upstream interface {
	relay.Stream
	io.Closer
}

// Handler says where an inbound stream goes.
type Handler interface {
	// Open returns the other end of a stream, or refuses it. ctx ends with the
	// request.
	Open(ctx context.Context, in Inbound) (Upstream, error)
	// Closed is told how a stream that Open let in has ended; nil is in order.
	Closed(in Inbound, err error)
}

// NewServer returns a server whose ServeTLS takes a plain listener. Requests
// end with base, at the latest.
func NewServer(base context.Context, cfg *tls.Config, h Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler:           serve(h),
		TLSConfig:         cfg,
		Protocols:         http2Only(),
		HTTP2:             http2Config(),
		ReadHeaderTimeout: handshakeTimeout, // net/http limits the handshake by it
		IdleTimeout:       idleTimeout * 2,  // the client's comes first
		BaseContext:       func(net.Listener) context.Context { return base },
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
}

func serve(h Handler) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		in, err := inbound(r)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		upstream, err := h.Open(r.Context(), in)
		if err != nil {
			http.Error(w, "the destination cannot be reached", http.StatusServiceUnavailable)
			return
		}
		defer upstream.Close()
		err = relayResponse(w, r, upstream)
		h.Closed(in, err)
		if err != nil {
			panic(http.ErrAbortHandler) // resets the stream: net/http has no other way
		}
	}
}

func inbound(r *http.Request) (Inbound, error) {
	if r.Method != http.MethodConnect {
		return Inbound{}, errors.New("only CONNECT is served here")
	}
	target, err := netip.ParseAddrPort(r.Host)
	if err != nil {
		return Inbound{}, errors.New("the authority is not an address and a port")
	}
	client, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return Inbound{}, fmt.Errorf("reading the client's address: %w", err)
	}
	source, err := mtls.Identity(r.TLS.PeerCertificates[0]) // verified in the handshake
	if err != nil {
		return Inbound{}, err
	}
	local, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	if !ok {
		return Inbound{}, errors.New("the connection is not TCP")
	}
	return Inbound{
		Source: source,
		Client: netip.AddrPortFrom(client.Addr().Unmap(), client.Port()),
		Local:  local.AddrPort().Addr().Unmap(),
		Target: netip.AddrPortFrom(target.Addr().Unmap(), target.Port()),
	}, nil
}

// relayResponse is relay.Join for a server's side of a request, which ends when
// its handler returns.
func relayResponse(w http.ResponseWriter, r *http.Request, upstream relay.Stream) error {
	defer context.AfterFunc(r.Context(), upstream.Abort)()
	rc := http.NewResponseController(w)
	w.WriteHeader(http.StatusOK)
	if err := rc.Flush(); err != nil {
		upstream.Abort()
		return fmt.Errorf("accepting the request: %w", err)
	}
	uploaded := make(chan error, 1)
	go func() {
		_, err := io.Copy(upstream, r.Body)
		if err == nil {
			err = upstream.CloseWrite()
		}
		if err != nil {
			upstream.Abort()
		}
		uploaded <- err
	}()
	_, err := io.Copy(flushing{w, rc}, upstream)
	if err != nil {
		upstream.Abort()
		return errors.Join(fmt.Errorf("from the destination: %w", err), r.Body.Close(), <-uploaded)
	}
	select {
	case err := <-uploaded:
		return err
	default:
	}
	// The destination has ended its side and the source has not. Returning now
	// tells the source so; its side ends with the handler.
	upstream.Abort()
	return nil
}

// flushing sends each write on at once: a relayed byte must not wait for more.
type flushing struct {
	w  io.Writer
	rc *http.ResponseController
}

func (f flushing) Write(b []byte) (int, error) {
	n, err := f.w.Write(b)
	if err == nil {
		err = f.rc.Flush()
	}
	return n, err
}

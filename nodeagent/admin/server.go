// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"time"
)

const statusPath = "/v1/status"

// Limits of both HTTP servers. Every answer is made from memory, so a client that
// takes longer is not reading.
const (
	headerTimeout   = 2 * time.Second
	readTimeout     = 5 * time.Second
	writeTimeout    = 10 * time.Second
	idleTimeout     = 30 * time.Second
	maxHeaderBytes  = 4 << 10
	shutdownTimeout = time.Second
)

// Server serves HTTP on a listener until it is told to stop.
type Server struct {
	listener net.Listener
	http     *http.Server
}

// NewStatusServer returns a server of GET /v1/status. The listener decides who
// may ask; status is called for each request, from any goroutine.
func NewStatusServer(listener net.Listener, status func() Status, logger *slog.Logger) *Server {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+statusPath, func(w http.ResponseWriter, _ *http.Request) {
		body, err := json.Marshal(status().withLists())
		if err != nil {
			logger.Error("status cannot be encoded", "err", err)
			http.Error(w, "status cannot be encoded", http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		answer(w, body, logger)
	})
	return newServer(listener, mux, logger)
}

// NewHealthServer returns a server of GET /healthz, which says that the process
// runs, and GET /readyz, which says with 503 and the reason that ready returned
// an error. Nothing else is served, so it may listen on the node's address, and
// however many connect, the agent keeps the latest few connections only.
func NewHealthServer(listener net.Listener, ready func() error, logger *slog.Logger) *Server {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, []byte("ok\n"), logger)
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		answer(w, []byte("ok\n"), logger)
	})
	return newServer(&crowd{Listener: listener, limit: maxHealthConns}, mux, logger)
}

func newServer(listener net.Listener, handler http.Handler, logger *slog.Logger) *Server {
	return &Server{listener: listener, http: &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       readTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(logger.Handler(), slog.LevelDebug), // clients' mistakes
	}}
}

// Addr is where the server listens.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// answer writes body. A client that is gone is not an event.
func answer(w io.Writer, body []byte, logger *slog.Logger) {
	if _, err := w.Write(body); err != nil {
		logger.Debug("an answer was not taken", "err", err)
	}
}

// Run serves until ctx ends, then lets answers in progress finish for a second,
// and closes the listener. It returns nil after that, an error otherwise.
func (s *Server) Run(ctx context.Context) error {
	served := make(chan error, 1)
	go func() { served <- s.http.Serve(s.listener) }()
	select {
	case err := <-served:
		return fmt.Errorf("serving HTTP on %s: %w", s.listener.Addr(), err)
	case <-ctx.Done():
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	err := s.http.Shutdown(last)
	if errors.Is(err, context.DeadlineExceeded) {
		err = s.http.Close()
	}
	if served := <-served; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	if err != nil {
		return fmt.Errorf("closing the HTTP server on %s: %w", s.listener.Addr(), err)
	}
	return nil
}

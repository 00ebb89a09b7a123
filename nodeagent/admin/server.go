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
	"sync"
	"time"
)

const statusPath = "/v1/status"

// Limits of both HTTP servers. Every answer but those of operations is made from
// memory, so a client that takes longer is not reading.
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
	requests requests
}

// NewStatusServer returns a server of GET /v1/status. The listener decides who
// may ask; status is called for each request, from any goroutine.
func NewStatusServer(listener net.Listener, status func() Status, logger *slog.Logger) *Server {
	mux := http.NewServeMux()
	handleStatus(mux, status, logger)
	return newServer(listener, mux, logger)
}

// NewOperationsServer returns a server of the status and, by POST to /v1/verify,
// /v1/withdraw and /v1/enrol, of operations.
func NewOperationsServer(listener net.Listener, status func() Status, ops Operations, logger *slog.Logger) *Server {
	mux := http.NewServeMux()
	handleStatus(mux, status, logger)
	handleOperations(mux, ops, logger)
	return newServer(listener, mux, logger)
}

func handleStatus(mux *http.ServeMux, status func() Status, logger *slog.Logger) {
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
}

// NewHealthServer returns a server of GET /healthz, which says that the process
// runs, GET /readyz, which says with 503 and the reason that ready returned an
// error, and GET /metrics. Nothing else is served, so it may listen on the node's
// address, and however many connect, the agent keeps the latest few connections only.
func NewHealthServer(listener net.Listener, ready func() error, metrics http.Handler, logger *slog.Logger) *Server {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metrics)
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
	s := &Server{listener: listener}
	s.http = &http.Server{
		Handler:           s.requests.counted(handler),
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       readTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(logger.Handler(), slog.LevelDebug), // clients' mistakes
	}
	return s
}

// requests knows whether any is being handled.
type requests struct {
	mu    sync.RWMutex // held for reading by each that is
	ended bool         // none is begun any more
}

func (r *requests) counted(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		r.mu.RLock()
		defer r.mu.RUnlock()
		if !r.ended {
			handler.ServeHTTP(w, req)
		}
	})
}

// end waits for those being handled.
func (r *requests) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = true
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
// ends the contexts of the others, and closes the listener. It returns nil after
// that, when nothing is being handled any more, an error otherwise.
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
	s.requests.end()
	if served := <-served; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	if err != nil {
		return fmt.Errorf("closing the HTTP server on %s: %w", s.listener.Addr(), err)
	}
	return nil
}

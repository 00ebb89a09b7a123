// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"ambientd/cni-plugin/podevent"
)

// Config is what a [Server] works with. Zero durations and numbers take the defaults named.
type Config struct {
	// Listener accepts *net.UnixConns from trusted peers only. The server closes it.
	Listener net.Listener
	// Handler does the work.
	Handler Handler
	// Logger gets one line per event.
	Logger *slog.Logger

	// MaxConcurrent bounds the handlers that run at once in each of two groups: withdrawals (DEL) and
	// everything else. Excess requests wait, within their deadline. Default 512, more than a node has
	// pods: while there is no node proxy every ADD of a pod of the mesh keeps its place for seconds, and
	// pods outside the mesh must not wait behind them.
	//
	// DEL is apart because its plugin gives up after 900 ms, while an ADD may wait many seconds for a
	// proxy: ADDs would otherwise keep out even the DEL that cancels them.
	MaxConcurrent int
	// MaxConnections bounds the connections, whether they have sent their request or not. Further ones
	// wait in the kernel's queue. Default 1024.
	MaxConnections int
	// ReadTimeout is how long a connection may take to send its request. Default 2 s.
	ReadTimeout time.Duration
	// WriteTimeout is how long a peer may take to accept its reply. Default 2 s.
	WriteTimeout time.Duration
	// AddTimeout bounds ADD; it is to be shorter than the plugin's own timeout. Default 15 s.
	AddTimeout time.Duration
	// DelTimeout bounds DEL. The plugin waits for 900 ms only, but the work goes on. It is to be longer
	// than an ADD takes with its undoing, which DEL may have to wait for: nobody says it again. Default 30 s.
	DelTimeout time.Duration
	// CheckTimeout bounds CHECK and GC. Default 15 s.
	CheckTimeout time.Duration
	// StatusTimeout bounds STATUS. Default 1 s.
	StatusTimeout time.Duration
	// StopTimeout is how long handlers may go on after the end of Run's context before theirs end,
	// and again how long Run then waits for them to return. Default 5 s.
	StopTimeout time.Duration
}

func (c Config) withDefaults() (Config, error) {
	if c.Listener == nil || c.Handler == nil || c.Logger == nil {
		return c, errors.New("watch: a listener, a handler and a logger are needed")
	}
	for _, d := range []struct {
		name  string
		value *time.Duration
		deflt time.Duration
	}{
		{"ReadTimeout", &c.ReadTimeout, 2 * time.Second},
		{"WriteTimeout", &c.WriteTimeout, 2 * time.Second},
		{"AddTimeout", &c.AddTimeout, 15 * time.Second},
		{"DelTimeout", &c.DelTimeout, 30 * time.Second},
		{"CheckTimeout", &c.CheckTimeout, 15 * time.Second},
		{"StatusTimeout", &c.StatusTimeout, time.Second},
		{"StopTimeout", &c.StopTimeout, 5 * time.Second},
	} {
		if *d.value < 0 {
			return c, fmt.Errorf("watch: %s is negative: %s", d.name, *d.value)
		}
		if *d.value == 0 {
			*d.value = d.deflt
		}
	}
	for _, n := range []struct {
		name  string
		value *int
		deflt int
	}{
		{"MaxConcurrent", &c.MaxConcurrent, 512},
		{"MaxConnections", &c.MaxConnections, 1024},
	} {
		if *n.value < 0 {
			return c, fmt.Errorf("watch: %s is negative: %d", n.name, *n.value)
		}
		if *n.value == 0 {
			*n.value = n.deflt
		}
	}
	return c, nil
}

// timeout is how long a request may take in all, waiting for its turn included.
func (c Config) timeout(command string) time.Duration {
	switch command {
	case podevent.CommandAdd:
		return c.AddTimeout
	case podevent.CommandDel:
		return c.DelTimeout
	case podevent.CommandStatus:
		return c.StatusTimeout
	default:
		return c.CheckTimeout
	}
}

// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"syscall"
)

// maxStatusBytes bounds what Fetch reads: some 100,000 pods.
const maxStatusBytes = 64 << 20

// Fetch asks the agent behind the unix socket for its status. Its errors say what
// to look at next, and wrap the cause.
func Fetch(ctx context.Context, socket string) (Status, error) {
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}
	// The host is never looked up; HTTP/1.1 wants one.
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://ambientd"+statusPath, http.NoBody)
	if err != nil {
		return Status{}, fmt.Errorf("asking for the status: %w", err)
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return Status{}, fmt.Errorf("asking the agent on %s for its status: %w%s", socket, err, advice(err))
	}
	status, err := read(resp)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		return Status{}, fmt.Errorf("reading the agent's status from %s: %w", socket, err)
	}
	return status, nil
}

func read(resp *http.Response) (Status, error) {
	if resp.StatusCode != http.StatusOK {
		return Status{}, fmt.Errorf("it answered %s", resp.Status)
	}
	var status Status
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxStatusBytes)).Decode(&status); err != nil {
		return Status{}, err
	}
	return status, nil
}

// advice says what an operator does about err.
func advice(err error) string {
	switch {
	case errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.ECONNREFUSED):
		return "; is ambientd running, and with this --admin-socket?"
	case errors.Is(err, syscall.EACCES), errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return "; only root may ask"
	}
	return ""
}

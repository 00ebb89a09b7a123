// SPDX-License-Identifier: Apache-2.0

// Package relay joins two byte streams. It owns what a proxy must not get
// wrong about their ends: an end of one direction ends that direction alone,
// and what broke off never looks like what ended in order.
package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
)

// Stream is one side of a relayed connection.
type Stream interface {
	io.ReadWriter
	// CloseWrite ends our direction in order; the other goes on.
	CloseWrite() error
	// Abort ends both directions so that the peer takes it for an error. It
	// unblocks Read and Write, and may come at any time.
	Abort()
}

// Join copies both directions until both have ended. An error of either, or the
// end of ctx, aborts both streams and is returned. Neither is usable afterwards.
func Join(ctx context.Context, client, server Stream) error {
	defer context.AfterFunc(ctx, func() {
		client.Abort()
		server.Abort()
	})()
	back := make(chan error, 1)
	go func() { back <- oneWay(client, server) }()
	there := oneWay(server, client)
	if there != nil {
		there = fmt.Errorf("from client to server: %w", there)
	}
	here := <-back
	if here != nil {
		here = fmt.Errorf("from server to client: %w", here)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return errors.Join(there, here)
}

func oneWay(to, from Stream) error {
	_, err := io.Copy(to, from)
	if err == nil {
		err = to.CloseWrite()
	}
	if err != nil {
		to.Abort()
		from.Abort()
	}
	return err
}

// TCP makes a connection a Stream. Its owner still closes it.
type TCP struct{ *net.TCPConn }

// Abort resets the connection.
func (c TCP) Abort() {
	// An error says that the connection is gone already, which is the purpose.
	_ = c.SetLinger(0)
	_ = c.Close()
}

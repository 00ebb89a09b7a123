// SPDX-License-Identifier: Apache-2.0

package podevent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"
)

// Call asks the agent that listens at socket, and waits for its reply until ctx ends. netns goes
// along as a descriptor; it may be nil, and stays the caller's.
//
// Ending ctx closes the connection, by which the agent undoes what it had begun. An error of the
// agent's is in the reply; the errors returned are one that wraps [ErrUnavailable] (no answer), a
// [*VersionError] or one that wraps [ErrMalformed] (an answer that cannot be used), or one about
// the request itself, which was not sent then.
func Call(ctx context.Context, socket string, req Request, netns *os.File) (Reply, error) {
	req.Version = Version
	if err := req.Validate(); err != nil {
		return Reply{}, fmt.Errorf("the request is not valid: %w", err)
	}
	buf, err := frame(req, MaxRequest)
	if err != nil {
		return Reply{}, fmt.Errorf("encoding the request: %w", err)
	}
	conn, err := dial(ctx, socket)
	if err != nil {
		return Reply{}, unavailable(ctx, err)
	}
	defer conn.Close()
	// A deadline in the past wakes the reads and writes that are under way.
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()

	sendErr := send(conn, buf, netns)
	switch {
	case errors.Is(sendErr, errUnusableFile):
		return Reply{}, sendErr
	case sendErr != nil && !errors.Is(sendErr, syscall.EPIPE) && !errors.Is(sendErr, syscall.ECONNRESET) && !errors.Is(sendErr, os.ErrDeadlineExceeded):
		return Reply{}, unavailable(ctx, sendErr)
	}
	// An agent that refuses early answers and closes while the request is still being written: the
	// write fails then, and the answer says why.
	reply, err := readReply(&lastLook{conn: conn})
	switch {
	case err == nil:
		return reply, nil
	case errors.Is(err, ErrMalformed), isVersionError(err):
		return Reply{}, fmt.Errorf("the agent's reply cannot be used: %w", err)
	case sendErr != nil, errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET):
		return Reply{}, unavailable(ctx, errors.New("it hung up before it had answered"))
	default:
		return Reply{}, unavailable(ctx, fmt.Errorf("reading its reply: %w", err))
	}
}

func isVersionError(err error) bool {
	var versionErr *VersionError
	return errors.As(err, &versionErr)
}

// lastLook reads what has come, also once the deadline is over. On a busy machine a process may not
// run between the reply's coming and the deadline; what the agent has answered is then so all the
// same, and package net does not even look.
type lastLook struct{ conn *net.UnixConn }

// Read waits until the deadline, and looks once more then.
func (l *lastLook) Read(buf []byte) (int, error) {
	n, err := l.conn.Read(buf)
	if !errors.Is(err, os.ErrDeadlineExceeded) || len(buf) == 0 {
		return n, err
	}
	raw, rawErr := l.conn.SyscallConn()
	if rawErr != nil {
		return n, err
	}
	var got int
	var recvErr error
	// Control, unlike RawConn.Read, does not ask for the deadline.
	if rawErr := raw.Control(func(fd uintptr) {
		got, _, recvErr = syscall.Recvfrom(int(fd), buf, syscall.MSG_DONTWAIT)
	}); rawErr != nil || recvErr != nil {
		return n, err // nothing has come
	}
	if got == 0 {
		return 0, io.EOF
	}
	return got, nil
}

// unavailable says why there is no answer: the end of ctx rather than the I/O error that it caused.
func unavailable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return fmt.Errorf("%w: %w", ErrUnavailable, err)
}

// backlogRetry is how long to wait when the agent's queue of new connections is full. The kernel
// reports that as EAGAIN at once, since Go's sockets do not block; such a queue is gone in
// milliseconds.
const backlogRetry = 20 * time.Millisecond

// dial uses DialUnix: a unix connect never waits, so that the [net.Dialer] with its resolver,
// which takes a context, would be dead weight in the plugin.
func dial(ctx context.Context, socket string) (*net.UnixConn, error) {
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
		if !errors.Is(err, syscall.EAGAIN) {
			return conn, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(backlogRetry):
		}
	}
}

// errUnusableFile is the caller's mistake, such as a file that is closed: nothing was sent.
var errUnusableFile = errors.New("passing the network namespace")

// send writes the message with the descriptor, if any, at its first byte.
func send(conn *net.UnixConn, buf []byte, netns *os.File) error {
	sent := 0
	if netns != nil {
		raw, err := netns.SyscallConn()
		if err != nil {
			return fmt.Errorf("%w: %w", errUnusableFile, err)
		}
		// Not netns.Fd(), which may change the mode of a description that others share.
		var sendErr error
		if err := raw.Control(func(fd uintptr) {
			sent, _, sendErr = conn.WriteMsgUnix(buf, syscall.UnixRights(int(fd)), nil)
		}); err != nil {
			return fmt.Errorf("%w: %w", errUnusableFile, err)
		}
		if sendErr != nil {
			return fmt.Errorf("sending the request: %w", sendErr)
		}
	}
	if sent == len(buf) {
		return nil
	}
	// A stream may take only a part of a large message at once.
	if _, err := conn.Write(buf[sent:]); err != nil {
		return fmt.Errorf("sending the request: %w", err)
	}
	return nil
}

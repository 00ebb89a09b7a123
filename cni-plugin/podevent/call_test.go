// SPDX-License-Identifier: Apache-2.0

package podevent

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// listen opens a socket as an agent does, and serves the first connection.
func listen(t *testing.T, serve func(*net.UnixConn) error) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "cni.sock")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() {
		conn, err := listener.AcceptUnix()
		if err != nil {
			served <- err
			return
		}
		served <- errors.Join(serve(conn), conn.Close())
	}()
	t.Cleanup(func() {
		if err := errors.Join(<-served, listener.Close()); err != nil {
			t.Error(err)
		}
	})
	return socket
}

// withinLimits is a context that no working call uses up.
func withinLimits(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func openNull(t *testing.T) *os.File {
	t.Helper()
	file, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = file.Close() })
	return file
}

func TestCall(t *testing.T) {
	want := Reply{Version: Version, Result: ResultSkipped, Reason: "namespace is not in the mesh"}
	var got Request
	socket := listen(t, func(conn *net.UnixConn) error {
		req, netns, err := ReadRequest(conn)
		if err != nil {
			return err
		}
		checkNull(t, netns)
		got = req
		if err := stillOpen(conn); err != nil {
			return err
		}
		return WriteReply(conn, want)
	})
	req := addRequest()
	req.Version = 99 // Call stamps it
	netns := openNull(t)
	reply, err := Call(withinLimits(t), socket, req, netns)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, reply); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(addRequest(), got, compareAddrs()); diff != "" {
		t.Error(diff)
	}
	if _, err := netns.Stat(); err != nil {
		t.Errorf("the caller's file: %v", err)
	}
}

// stillOpen says whether the peer's write side is open and silent, without waiting.
func stillOpen(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var n int
	var recvErr error
	if err := raw.Control(func(fd uintptr) {
		n, _, recvErr = syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
	}); err != nil {
		return err
	}
	if !errors.Is(recvErr, syscall.EAGAIN) {
		return fmt.Errorf("the client did not keep its write side open and silent: %d bytes, %w", n, recvErr)
	}
	return nil
}

// TestCallLarge: a request that no socket buffer takes at once arrives whole, with the descriptor
// only once; DEL may have one.
func TestCallLarge(t *testing.T) {
	req := Request{Command: CommandGC, Network: "n"}
	for i := range 8000 {
		req.ValidAttachments = append(req.ValidAttachments, Attachment{fmt.Sprintf("%064x", i), "eth0"})
	}
	var got Request
	socket := listen(t, func(conn *net.UnixConn) (err error) {
		if got, _, err = ReadRequest(conn); err != nil {
			return err
		}
		return WriteReply(conn, Reply{Result: ResultOK})
	})
	if _, err := Call(withinLimits(t), socket, req, nil); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(req.ValidAttachments, got.ValidAttachments); diff != "" {
		t.Error(diff)
	}
}

// TestCallSplitSend sends with a descriptor through a buffer that is too small.
func TestCallSplitSend(t *testing.T) {
	ours, theirs := pair(t)
	if err := theirs.SetWriteBuffer(4096); err != nil {
		t.Fatal(err)
	}
	req := addRequest()
	for i := range 20000 {
		req.IPs = append(req.IPs, addRequest().IPs[i%2])
	}
	sent := make(chan error, 1)
	go func() { sent <- send(theirs, requestFrame(t, req), openNull(t)) }()
	got, netns, err := ReadRequest(ours)
	if err := errors.Join(err, <-sent); err != nil {
		t.Fatal(err)
	}
	checkNull(t, netns)
	if len(got.IPs) != len(req.IPs) {
		t.Errorf("%d addresses arrived, %d were sent", len(got.IPs), len(req.IPs))
	}
}

func TestCallBadReply(t *testing.T) {
	raw := func(data []byte) func(*net.UnixConn) error {
		return func(conn *net.UnixConn) error {
			_, _, err := ReadRequest(conn)
			_, writeErr := conn.Write(data)
			return errors.Join(err, writeErr)
		}
	}
	for _, c := range []struct {
		name  string
		serve func(*net.UnixConn) error
		want  error
		text  string
	}{
		{"hang-up", raw(nil), ErrUnavailable, "it hung up before it had answered"},
		{"hang-up in the header", raw([]byte{0, 0}), ErrUnavailable, "hung up"},
		{"hang-up after the header", raw([]byte{0, 0, 0, 9}), ErrUnavailable, "hung up"},
		{"hang-up in the payload", raw([]byte{0, 0, 0, 9, '{'}), ErrUnavailable, "hung up"},
		{"too long", raw(binary.BigEndian.AppendUint32(nil, MaxReply+1)), ErrMalformed, "length 65537"},
		{"empty", raw(framed("")), ErrMalformed, "length 0"},
		{"no JSON", raw(framed("HTTP/1.1 400 Bad Request")), ErrMalformed, ""},
		{"no version", raw(framed("{}")), ErrMalformed, "no version"},
		{"says nothing", raw(framed(`{"version":1}`)), ErrMalformed, "neither result nor error"},
	} {
		t.Run(c.name, func(t *testing.T) {
			req := Request{Command: CommandStatus, Network: "n"}
			_, err := Call(withinLimits(t), listen(t, c.serve), req, nil)
			if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("error: %v, want %v with %q", err, c.want, c.text)
			}
			if errors.Is(err, ErrMalformed) && errors.Is(err, ErrUnavailable) {
				t.Errorf("an answer that came counts as none: %v", err)
			}
		})
	}
	t.Run("other version", func(t *testing.T) {
		_, err := Call(withinLimits(t), listen(t, raw(framed(`{"version":7,"result":{}}`))), Request{Command: CommandStatus, Network: "n"}, nil)
		var versionErr *VersionError
		if !errors.As(err, &versionErr) || versionErr.Got != 7 || versionErr.Want != Version {
			t.Errorf("error: %v", err)
		}
	})
}

// TestCallNotThere: nobody there is told apart from a bad answer, and the socket is named.
func TestCallNotThere(t *testing.T) {
	dir := t.TempDir()
	stale := filepath.Join(dir, "stale.sock")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	listener.SetUnlinkOnClose(false)
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		socket string
		want   error
	}{
		{filepath.Join(dir, "none.sock"), os.ErrNotExist},
		{stale, syscall.ECONNREFUSED},
		{file, syscall.ECONNREFUSED},
		{filepath.Join(dir, strings.Repeat("x", 200)), syscall.EINVAL},
	} {
		_, err := Call(withinLimits(t), c.socket, Request{Command: CommandStatus, Network: "n"}, nil)
		if !errors.Is(err, ErrUnavailable) || !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.socket) {
			t.Errorf("%s: error: %v, want %v", filepath.Base(c.socket), err, c.want)
		}
	}
}

// TestCallGivesUp: the end of the context ends the call wherever it is, and the agent sees it.
func TestCallGivesUp(t *testing.T) {
	why := errors.New("no reply within a moment")
	large := Request{Command: CommandGC, Network: "n"}
	for range 5000 {
		large.ValidAttachments = append(large.ValidAttachments, Attachment{strings.Repeat("c", 64), "eth0"})
	}
	for _, c := range []struct {
		name string
		req  Request
		read int64 // how much of the request the agent reads before the client gives up
	}{
		{"while waiting for the reply", Request{Command: CommandStatus, Network: "n"}, 4},
		{"while sending", large, 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			socket := listen(t, func(conn *net.UnixConn) error {
				if _, err := io.CopyN(io.Discard, conn, c.read); err != nil {
					return err
				}
				cancel(why)
				_, err := io.Copy(io.Discard, conn) // to the hang-up
				return err
			})
			_, err := Call(ctx, socket, c.req, nil)
			if !errors.Is(err, ErrUnavailable) || !errors.Is(err, why) {
				t.Errorf("error: %v", err)
			}
		})
	}
	t.Run("beforehand", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(why)
		_, err := Call(ctx, "/nonexistent.sock", Request{Command: CommandStatus, Network: "n"}, nil)
		if !errors.Is(err, ErrUnavailable) || !errors.Is(err, why) {
			t.Errorf("error: %v", err)
		}
	})
}

// TestCallEarlyRefusal: an agent that answers before it has read all, and closes, is understood.
func TestCallEarlyRefusal(t *testing.T) {
	req := Request{Command: CommandGC, Network: "n"}
	for range 8000 {
		req.ValidAttachments = append(req.ValidAttachments, Attachment{strings.Repeat("c", 64), "eth0"})
	}
	socket := listen(t, func(conn *net.UnixConn) error {
		if _, err := io.ReadFull(conn, make([]byte, 4)); err != nil {
			return err
		}
		return WriteReply(conn, Reply{Error: &Error{Code: CodeTryAgain, Msg: "busy"}})
	})
	reply, err := Call(withinLimits(t), socket, req, nil)
	if err != nil || reply.Error == nil || reply.Error.Msg != "busy" {
		t.Errorf("reply: %+v, error: %v", reply, err)
	}
}

// TestReplyWins: an answer that has come is taken, though the deadline passed, the agent closed, and
// it did so without having read all, by which the kernel resets the connection.
func TestReplyWins(t *testing.T) {
	for _, c := range []struct {
		name   string
		unread int // bytes of the request that the agent leaves
		parts  int // in which the reply comes
	}{
		{"in time but for the scheduler", 0, 1},
		{"after a reset", 10, 1},
		{"in parts", 10, 5},
	} {
		t.Run(c.name, func(t *testing.T) {
			agent, plugin := pair(t)
			if _, err := plugin.Write(make([]byte, c.unread)); err != nil {
				t.Fatal(err)
			}
			for part := range slices.Chunk(framed(`{"version":2,"result":[]}`), 29/c.parts) {
				if _, err := agent.Write(part); err != nil {
					t.Fatal(err)
				}
			}
			if err := errors.Join(agent.Close(), plugin.SetDeadline(time.Unix(1, 0))); err != nil {
				t.Fatal(err)
			}
			if _, err := readReply(plugin); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatalf("package net looks once more by itself (%v): lastLook is not needed any more", err)
			}
			_, err := readReply(&lastLook{conn: plugin})
			if !isVersionError(err) {
				t.Errorf("error: %v, want the reply's", err)
			}
		})
	}
	t.Run("none has come", func(t *testing.T) {
		_, plugin := pair(t)
		if err := plugin.SetDeadline(time.Unix(1, 0)); err != nil {
			t.Fatal(err)
		}
		if _, err := readReply(&lastLook{conn: plugin}); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("error: %v", err)
		}
	})
	t.Run("hung up", func(t *testing.T) {
		agent, plugin := pair(t)
		if err := errors.Join(agent.Close(), plugin.SetDeadline(time.Unix(1, 0))); err != nil {
			t.Fatal(err)
		}
		if _, err := readReply(&lastLook{conn: plugin}); !errors.Is(err, io.EOF) {
			t.Errorf("error: %v", err)
		}
	})
}

// TestCallBacklog: a full queue of connections is waited for.
func TestCallBacklog(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "cni.sock")
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "listener")
	defer file.Close()
	if err := errors.Join(syscall.Bind(fd, &syscall.SockaddrUnix{Name: socket}), syscall.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	first, err := net.Dial("unix", socket) // fills the queue
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	req := Request{Command: CommandStatus, Network: "n"}

	ctx, cancel := context.WithTimeout(t.Context(), 3*backlogRetry)
	defer cancel()
	if _, err := Call(ctx, socket, req, nil); !errors.Is(err, ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("with the queue full: %v", err)
	}

	called := make(chan error, 1)
	go func() {
		_, err := Call(withinLimits(t), socket, req, nil)
		called <- err
	}()
	listener, err := net.FileListener(file)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	for range 2 { // the one that filled the queue, then the call
		conn, err := listener.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		go func() {
			// The one that only fills the queue never sends a request.
			if _, _, err := ReadRequest(conn.(*net.UnixConn)); err == nil {
				_ = WriteReply(conn, Reply{Result: ResultOK})
			}
		}()
	}
	if err := <-called; err != nil {
		t.Error(err)
	}
}

// TestCallClosedFile does not wait for an answer to what was not asked.
func TestCallClosedFile(t *testing.T) {
	socket := listen(t, func(conn *net.UnixConn) error {
		_, err := io.Copy(io.Discard, conn)
		return err
	})
	netns := openNull(t)
	if err := netns.Close(); err != nil {
		t.Fatal(err)
	}
	_, err := Call(withinLimits(t), socket, addRequest(), netns)
	if !errors.Is(err, errUnusableFile) || errors.Is(err, ErrUnavailable) {
		t.Errorf("error: %v", err)
	}
}

// TestCallInvalid: what cannot be sent is no fault of the agent's.
func TestCallInvalid(t *testing.T) {
	huge := Request{Command: CommandGC, Network: "n"}
	for range 20000 {
		huge.ValidAttachments = append(huge.ValidAttachments, Attachment{strings.Repeat("c", 64), "eth0"})
	}
	for _, c := range []struct {
		name string
		req  Request
		text string
	}{
		{"invalid", Request{Command: "VERSION", Network: "n"}, "unknown command"},
		{"too large", huge, "at most 1048576 are allowed"},
	} {
		_, err := Call(withinLimits(t), "/nonexistent.sock", c.req, nil)
		if err == nil || errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: error: %v, want one with %q", c.name, err, c.text)
		}
	}
}

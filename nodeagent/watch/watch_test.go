// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"ambientd/cni-plugin/podevent"
)

// handlerFunc is a handler that a test writes in place.
type handlerFunc func(ctx context.Context, req podevent.Request, netns *os.File) podevent.Reply

func (f handlerFunc) Handle(ctx context.Context, req podevent.Request, netns *os.File) podevent.Reply {
	return f(ctx, req, netns)
}

// logBuffer keeps log lines while others write them.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

// lines returns the log so far, without times and durations.
func (b *logBuffer) lines(t *testing.T) []map[string]any {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	var lines []map[string]any
	decoder := json.NewDecoder(bytes.NewReader(b.buf.Bytes()))
	for decoder.More() {
		var line map[string]any
		if err := decoder.Decode(&line); err != nil {
			t.Fatal(err)
		}
		delete(line, "time")
		delete(line, "took")
		lines = append(lines, line)
	}
	return lines
}

// running is a server on a real socket.
type running struct {
	socket string
	log    *logBuffer
	stop   context.CancelFunc
	// done has Run's result, once.
	done chan error
}

// start runs a server until the test ends. config needs no listener and no logger.
func start(t *testing.T, config Config) running {
	t.Helper()
	r := running{socket: filepath.Join(t.TempDir(), "cni.sock"), log: &logBuffer{}, done: make(chan error, 1)}
	if config.Listener == nil {
		listener, err := net.Listen("unix", r.socket)
		if err != nil {
			t.Fatal(err)
		}
		config.Listener = listener
	}
	config.Logger = slog.New(slog.NewJSONHandler(r.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	server, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	r.stop = stop
	go func() {
		r.done <- server.Run(ctx)
		close(r.done)
	}()
	t.Cleanup(func() {
		stop()
		for err := range r.done {
			if err != nil {
				t.Errorf("Run: %v", err)
			}
		}
	})
	return r
}

// call sends a request with a descriptor where the command wants one, and expects an answer.
func (r running) call(t *testing.T, command string) podevent.Reply {
	t.Helper()
	reply, err := r.tryCall(t.Context(), command)
	if err != nil {
		t.Error(err)
	}
	return reply
}

func (r running) tryCall(ctx context.Context, command string) (podevent.Reply, error) {
	req := request(command)
	if command == podevent.CommandGC || command == podevent.CommandStatus {
		return podevent.Call(ctx, r.socket, req, nil)
	}
	netns, err := os.Open(os.DevNull)
	if err != nil {
		return podevent.Reply{}, err
	}
	reply, err := podevent.Call(ctx, r.socket, req, netns)
	return reply, errors.Join(err, netns.Close())
}

func request(command string) podevent.Request {
	req := podevent.Request{Version: podevent.Version, Command: command, Network: "testnet"}
	switch command {
	case podevent.CommandGC:
		req.ValidAttachments = []podevent.Attachment{{ContainerID: "c2", IfName: "eth0"}}
	case podevent.CommandStatus:
	default:
		req.ContainerID, req.IfName = "c1", "eth0"
		req.Pod = podevent.Pod{Namespace: "shop", Name: "cart-0", UID: "u1"}
	}
	return req
}

// dial connects without sending anything.
func (r running) dial(t *testing.T) *net.UnixConn {
	t.Helper()
	conn, err := net.Dial("unix", r.socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn.(*net.UnixConn)
}

// sendRaw writes a message with any payload.
func sendRaw(t *testing.T, conn net.Conn, payload string) {
	t.Helper()
	if _, err := conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(payload))), payload...)); err != nil {
		t.Fatal(err)
	}
}

// sendRequest writes a request without a descriptor.
func sendRequest(t *testing.T, conn net.Conn, command string) {
	t.Helper()
	payload, err := json.Marshal(request(command))
	if err != nil {
		t.Fatal(err)
	}
	sendRaw(t, conn, string(payload))
}

// readReply reads what the server sent on a raw connection.
func readReply(t *testing.T, conn net.Conn) podevent.Reply {
	t.Helper()
	data, err := io.ReadAll(conn)
	if err != nil || len(data) < 4 {
		t.Fatalf("%q, %v", data, err)
	}
	var reply podevent.Reply
	if err := json.Unmarshal(data[4:], &reply); err != nil {
		t.Fatal(err)
	}
	return reply
}

func TestEveryCommand(t *testing.T) {
	for _, command := range []string{
		podevent.CommandAdd, podevent.CommandDel, podevent.CommandCheck, podevent.CommandGC, podevent.CommandStatus,
	} {
		t.Run(command, func(t *testing.T) {
			var got podevent.Request
			var netns *os.File
			want := podevent.Reply{Version: podevent.Version, Result: podevent.ResultOK, Reason: "because"}
			r := start(t, Config{Handler: handlerFunc(func(_ context.Context, req podevent.Request, f *os.File) podevent.Reply {
				got, netns = req, f
				return want
			})})
			if diff := cmp.Diff(want, r.call(t, command)); diff != "" {
				t.Error(diff)
			}
			if diff := cmp.Diff(request(command), got); diff != "" {
				t.Error(diff)
			}
			if wantFile := command != podevent.CommandGC && command != podevent.CommandStatus; (netns != nil) != wantFile {
				t.Errorf("descriptor: %v", netns)
			}
			r.stop()
			<-r.done // the handler's file is closed by now
			if netns != nil {
				if _, err := netns.Stat(); !errors.Is(err, os.ErrClosed) {
					t.Errorf("the descriptor after Handle: %v", err)
				}
			}
		})
	}
}

// TestDeadlines: each command has its own, counted from when the request was read.
func TestDeadlines(t *testing.T) {
	deadlines := make(chan time.Duration, 1)
	r := start(t, Config{
		AddTimeout: 5 * time.Hour, DelTimeout: 4 * time.Hour, CheckTimeout: 3 * time.Hour, StatusTimeout: time.Hour,
		Handler: handlerFunc(func(ctx context.Context, _ podevent.Request, _ *os.File) podevent.Reply {
			deadline, _ := ctx.Deadline()
			deadlines <- time.Until(deadline)
			return podevent.Reply{Result: podevent.ResultOK}
		}),
	})
	for command, want := range map[string]time.Duration{
		podevent.CommandAdd: 5 * time.Hour, podevent.CommandDel: 4 * time.Hour, podevent.CommandCheck: 3 * time.Hour,
		podevent.CommandGC: 3 * time.Hour, podevent.CommandStatus: time.Hour,
	} {
		r.call(t, command)
		if got := <-deadlines; got > want || got < want-time.Minute {
			t.Errorf("%s has %s, want %s", command, got, want)
		}
	}
}

// TestDeadlineEndsHandler: when its time is over the handler learns that, and its answer still
// reaches the plugin.
func TestDeadlineEndsHandler(t *testing.T) {
	r := start(t, Config{
		AddTimeout: 20 * time.Millisecond,
		Handler: handlerFunc(func(ctx context.Context, _ podevent.Request, _ *os.File) podevent.Reply {
			<-ctx.Done()
			return podevent.Reply{Error: &podevent.Error{Code: podevent.CodeTryAgain, Msg: context.Cause(ctx).Error()}}
		}),
	})
	reply := r.call(t, podevent.CommandAdd)
	if reply.Error == nil || reply.Error.Msg != context.DeadlineExceeded.Error() {
		t.Errorf("reply: %+v", reply)
	}
}

// TestHangUp: the plugin's end ends the work for everything but DEL, which is never said again.
func TestHangUp(t *testing.T) {
	for _, command := range []string{podevent.CommandAdd, podevent.CommandCheck, podevent.CommandGC, podevent.CommandStatus} {
		t.Run(command, func(t *testing.T) {
			started, ended := make(chan struct{}), make(chan error, 1)
			r := start(t, Config{Handler: handlerFunc(func(ctx context.Context, _ podevent.Request, _ *os.File) podevent.Reply {
				close(started)
				<-ctx.Done()
				ended <- context.Cause(ctx)
				return podevent.Reply{Error: &podevent.Error{Code: podevent.CodeTryAgain, Msg: "undone"}}
			})})
			ctx, hangUp := context.WithCancel(t.Context())
			called := make(chan error, 1)
			go func() {
				_, err := r.tryCall(ctx, command)
				called <- err
			}()
			<-started
			hangUp()
			if err := <-called; !errors.Is(err, podevent.ErrUnavailable) {
				t.Errorf("the plugin's error: %v", err)
			}
			if err := <-ended; !errors.Is(err, ErrHangUp) {
				t.Errorf("the handler's context: %v", err)
			}
			r.stop()
			<-r.done
			lines := r.log.lines(t)
			if last := lines[len(lines)-1]; last["hung_up"] != true || last["err"] != "undone" {
				t.Errorf("log: %v", last)
			}
		})
	}
}

func TestHangUpDoesNotEndDel(t *testing.T) {
	hungUp, started, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	r := start(t, Config{Handler: handlerFunc(func(ctx context.Context, _ podevent.Request, _ *os.File) podevent.Reply {
		close(started)
		<-hungUp
		ended <- ctx.Err()
		return podevent.Reply{Result: podevent.ResultWithdrawn}
	})})
	conn := r.dial(t)
	sendRequest(t, conn, podevent.CommandDel)
	<-started
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	close(hungUp)
	if err := <-ended; err != nil {
		t.Errorf("the handler's context: %v", err)
	}
	r.stop()
	<-r.done
	lines := r.log.lines(t)
	if last := lines[len(lines)-1]; last["result"] != podevent.ResultWithdrawn || last["level"] != "INFO" {
		t.Errorf("log: %v", last)
	}
}

// TestTalkativePeer: bytes after the request are not the protocol, and end the work too.
func TestTalkativePeer(t *testing.T) {
	ended := make(chan error, 1)
	r := start(t, Config{Handler: handlerFunc(func(ctx context.Context, _ podevent.Request, _ *os.File) podevent.Reply {
		<-ctx.Done()
		ended <- context.Cause(ctx)
		return podevent.Reply{Result: podevent.ResultOK}
	})})
	conn := r.dial(t)
	sendRequest(t, conn, podevent.CommandStatus)
	if _, err := conn.Write([]byte("more")); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, ErrHangUp) {
		t.Errorf("the handler's context: %v", err)
	}
}

// TestSilentPeer: who connects and does not come to the point is dropped.
func TestSilentPeer(t *testing.T) {
	for _, c := range []struct {
		name string
		say  func(*testing.T, net.Conn)
	}{
		{"says nothing", func(*testing.T, net.Conn) {}},
		{"stops in the middle", func(t *testing.T, conn net.Conn) {
			t.Helper()
			if _, err := conn.Write([]byte{0, 0, 0, 9, '{'}); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := start(t, Config{Handler: nobody(t), ReadTimeout: 20 * time.Millisecond})
			conn := r.dial(t)
			c.say(t, conn)
			if n, err := conn.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("%d bytes, %v; want to be dropped", n, err)
			}
		})
	}
}

// nobody is the handler of tests in which no request gets that far.
func nobody(t *testing.T) Handler {
	return handlerFunc(func(_ context.Context, req podevent.Request, _ *os.File) podevent.Reply {
		t.Errorf("handled: %+v", req)
		return podevent.Reply{Result: podevent.ResultOK}
	})
}

func TestRefusals(t *testing.T) {
	for _, c := range []struct {
		name, payload string
		code          uint
		msg           []string
	}{
		{"another version", `{"version":7,"command":["?"]}`, podevent.CodeTryAgain, []string{"plugin speaks message version 7", "agent version 1"}},
		{"no JSON", "ADD", podevent.CodeInternal, []string{"cannot understand", "invalid character"}},
		{"no descriptor", `{"version":1,"command":"ADD","network":"n","containerID":"c","ifName":"i","pod":{"namespace":"a","name":"b"}}`,
			podevent.CodeInternal, []string{"without the network namespace's descriptor"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := start(t, Config{Handler: nobody(t)})
			conn := r.dial(t)
			sendRaw(t, conn, c.payload)
			reply := readReply(t, conn)
			if reply.Error == nil || reply.Error.Code != c.code || reply.Error.Details == "" {
				t.Fatalf("reply: %+v", reply)
			}
			for _, part := range c.msg {
				if !strings.Contains(reply.Error.Msg, part) {
					t.Errorf("message %q has no %q", reply.Error.Msg, part)
				}
			}
			r.stop()
			<-r.done
			if lines := r.log.lines(t); len(lines) != 1 || lines[0]["level"] != "WARN" {
				t.Errorf("log: %v", lines)
			}
		})
	}
}

// TestProbe: somebody who only looks whether the agent lives is no reason for a warning.
func TestProbe(t *testing.T) {
	r := start(t, Config{Handler: nobody(t)})
	conn := r.dial(t)
	if err := conn.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(conn); err != nil { // to the server's end
		t.Fatal(err)
	}
	r.stop()
	<-r.done
	for _, line := range r.log.lines(t) {
		if line["level"] != "DEBUG" {
			t.Errorf("log: %v", line)
		}
	}
}

func TestLog(t *testing.T) {
	reply := podevent.Reply{Result: podevent.ResultSkipped, Reason: "namespace is not labelled"}
	failure := podevent.Reply{Error: &podevent.Error{Code: podevent.CodeRedirection, Msg: "no", Details: "do"}}
	add := map[string]any{
		"msg": "cni event", "command": "ADD", "network": "testnet", "container": "c1", "pod": "shop/cart-0", "uid": "u1",
	}
	with := func(base map[string]any, more map[string]any) map[string]any {
		line := map[string]any{}
		for _, m := range []map[string]any{base, more} {
			for key, value := range m {
				line[key] = value
			}
		}
		return line
	}
	for _, c := range []struct {
		name, command string
		reply         podevent.Reply
		want          map[string]any
	}{
		{"skipped", "ADD", reply, with(add, map[string]any{"level": "INFO", "result": "skipped", "reason": "namespace is not labelled"})},
		{"failed", "ADD", failure, with(add, map[string]any{"level": "WARN", "code": 100.0, "err": "no; do"})},
		{"repeated", "DEL", podevent.Reply{Result: podevent.ResultWithdrawn, Reason: podevent.ReasonUnrecorded},
			with(add, map[string]any{"level": "DEBUG", "command": "DEL", "result": "withdrawn", "reason": podevent.ReasonUnrecorded})},
		{"asked", "STATUS", podevent.Reply{Result: podevent.ResultOK}, map[string]any{
			"msg": "cni event", "level": "DEBUG", "command": "STATUS", "network": "testnet", "result": "ok",
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := start(t, Config{Handler: handlerFunc(func(context.Context, podevent.Request, *os.File) podevent.Reply { return c.reply })})
			r.call(t, c.command)
			r.stop()
			<-r.done
			if diff := cmp.Diff([]map[string]any{c.want}, r.log.lines(t)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// What a request and its reply do not say has no attribute.
func TestLogLeavesOutWhatIsNotKnown(t *testing.T) {
	r := start(t, Config{Handler: handlerFunc(func(context.Context, podevent.Request, *os.File) podevent.Reply {
		return podevent.Reply{Result: podevent.ResultWithdrawn}
	})})
	req := request(podevent.CommandDel)
	req.Pod.UID = ""
	if _, err := podevent.Call(t.Context(), r.socket, req, nil); err != nil {
		t.Fatal(err)
	}
	r.stop()
	<-r.done
	want := []map[string]any{{
		"msg": "cni event", "level": "INFO", "command": "DEL", "network": "testnet", "container": "c1", "pod": "shop/cart-0", "result": "withdrawn",
	}}
	if diff := cmp.Diff(want, r.log.lines(t)); diff != "" {
		t.Error(diff)
	}
}

// SPDX-License-Identifier: Apache-2.0

package podevent

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// pair returns two connected unix stream sockets.
func pair(tb testing.TB) (a, b *net.UnixConn) {
	tb.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		tb.Fatal(err)
	}
	var conns [2]*net.UnixConn
	for i, fd := range fds {
		file := os.NewFile(uintptr(fd), "pair")
		conn, err := net.FileConn(file)
		if err := errors.Join(err, file.Close()); err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { _ = conn.Close() })
		conns[i] = conn.(*net.UnixConn)
	}
	return conns[0], conns[1]
}

// openFDs counts the process's descriptors.
func openFDs(tb testing.TB) int {
	tb.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		tb.Fatal(err)
	}
	return len(entries)
}

// framed is a message with any payload.
func framed(payload string) []byte {
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(payload))), payload...)
}

func requestFrame(tb testing.TB, req Request) []byte {
	tb.Helper()
	buf, err := frame(req, MaxRequest)
	if err != nil {
		tb.Fatal(err)
	}
	return buf
}

// devNulls opens a number of descriptors to be passed.
func devNulls(tb testing.TB, n int) []int {
	tb.Helper()
	fds := make([]int, n)
	for i := range fds {
		file, err := os.Open(os.DevNull)
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { _ = file.Close() })
		fds[i] = int(file.Fd())
	}
	return fds
}

// chunk is what one sendmsg of a peer carries.
type chunk struct {
	data []byte
	fds  int
}

func (c chunk) send(tb testing.TB, conn *net.UnixConn) {
	tb.Helper()
	var oob []byte
	if c.fds > 0 {
		oob = syscall.UnixRights(devNulls(tb, c.fds)...)
	}
	if _, _, err := conn.WriteMsgUnix(c.data, oob, nil); err != nil {
		tb.Fatal(err)
	}
}

func TestReadRequest(t *testing.T) {
	add := requestFrame(t, addRequest())
	status := requestFrame(t, Request{Version: Version, Command: CommandStatus, Network: "n"})
	half := len(add) / 2
	for _, c := range []struct {
		name   string
		chunks []chunk
		want   error  // nil: the ADD request with a descriptor
		text   string // a part of the error
	}{
		{name: "whole", chunks: []chunk{{add, 1}}},
		{name: "in pieces", chunks: []chunk{{add[:2], 1}, {add[2:5], 0}, {add[5:half], 0}, {add[half:], 0}}},
		{name: "descriptor in the middle", chunks: []chunk{{add[:half], 0}, {add[half:], 1}}},
		{name: "nothing", want: io.EOF},
		{name: "half a header", chunks: []chunk{{add[:3], 1}}, want: io.ErrUnexpectedEOF},
		{name: "a header", chunks: []chunk{{add[:4], 1}}, want: io.ErrUnexpectedEOF},
		{name: "half a payload", chunks: []chunk{{add[:half], 1}}, want: io.ErrUnexpectedEOF},
		{name: "empty", chunks: []chunk{{framed(""), 1}}, want: ErrMalformed, text: "length 0"},
		{name: "too long", chunks: []chunk{{binary.BigEndian.AppendUint32(nil, MaxRequest+1), 1}}, want: ErrMalformed, text: "length 1048577, expected 1 to 1048576"},
		{name: "negative as int32", chunks: []chunk{{[]byte{0xff, 0xff, 0xff, 0xff}, 1}}, want: ErrMalformed, text: "length 4294967295"},
		{name: "no JSON", chunks: []chunk{{framed("ADD"), 1}}, want: ErrMalformed},
		{name: "two values", chunks: []chunk{{framed(`{"version":1}{}`), 1}}, want: ErrMalformed},
		{name: "no object", chunks: []chunk{{framed(`[1]`), 1}}, want: ErrMalformed},
		{name: "null", chunks: []chunk{{framed(`null`), 1}}, want: ErrMalformed, text: "no version"},
		{name: "no version", chunks: []chunk{{framed(`{"command":"ADD"}`), 1}}, want: ErrMalformed, text: "no version"},
		{name: "a field of another type", chunks: []chunk{{framed(`{"version":1,"command":3}`), 1}}, want: ErrMalformed},
		{name: "a bad address", chunks: []chunk{{framed(`{"version":1,"ips":["10.0.0"]}`), 1}}, want: ErrMalformed},
		{name: "incomplete", chunks: []chunk{{framed(`{"version":1,"command":"ADD"}`), 1}}, want: ErrMalformed, text: "network is empty"},
		{name: "two descriptors", chunks: []chunk{{add, 2}}, want: ErrMalformed, text: "2 descriptors"},
		{name: "two descriptors one by one", chunks: []chunk{{add[:4], 1}, {add[4:], 1}}, want: ErrMalformed, text: "2 descriptors"},
		{name: "more descriptors than control data takes", chunks: []chunk{{add, 60}}, want: ErrMalformed, text: "truncated"},
		{name: "late excess of descriptors", chunks: []chunk{{add[:4], 1}, {add[4:], 60}}, want: ErrMalformed, text: "truncated"},
		{name: "ADD without descriptor", chunks: []chunk{{add, 0}}, want: ErrMalformed, text: "without the network namespace"},
		{name: "STATUS with descriptor", chunks: []chunk{{status, 1}}, want: ErrMalformed, text: "STATUS with a descriptor"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ours, theirs := pair(t)
			for _, chunk := range c.chunks {
				chunk.send(t, theirs)
			}
			if err := theirs.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			before := openFDs(t)
			req, netns, err := ReadRequest(ours)
			if c.want == nil {
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(addRequest(), req, compareAddrs()); diff != "" {
					t.Error(diff)
				}
				checkNull(t, netns)
			} else if !errors.Is(err, c.want) || !strings.Contains(fmt.Sprint(err), c.text) || netns != nil {
				t.Errorf("error: %v, descriptor: %v, want %v with %q", err, netns, c.want, c.text)
			}
			if after := openFDs(t); after != before {
				t.Errorf("%d descriptors are open afterwards, %d were before", after, before)
			}
		})
	}
}

func compareAddrs() cmp.Option { return cmpopts.EquateComparable(netip.Addr{}) }

// checkNull expects a descriptor of /dev/null that no child inherits, and closes it.
func checkNull(t *testing.T, file *os.File) {
	t.Helper()
	if file == nil {
		t.Fatal("no descriptor")
	}
	flags, _, errno := syscall.Syscall(syscall.SYS_FCNTL, file.Fd(), syscall.F_GETFD, 0)
	if errno != 0 || flags&syscall.FD_CLOEXEC == 0 {
		t.Errorf("flags %#x, errno %v: the descriptor is not close-on-exec", flags, errno)
	}
	got, err := file.Stat()
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.Stat(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	if !os.SameFile(got, want) {
		t.Error("the descriptor is of another file")
	}
	if err := file.Close(); err != nil {
		t.Error(err)
	}
}

// noDescriptors lets the process open nothing more until the function it returns is called.
func noDescriptors(t *testing.T) (restore func()) {
	t.Helper()
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Max: limit.Max}); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
			t.Error(err)
		}
	}
}

// TestOutOfDescriptors: a reader that can receive no descriptor says so, and does not lose a DEL.
func TestOutOfDescriptors(t *testing.T) {
	del := addRequest()
	del.Command, del.IPs = CommandDel, nil
	for _, c := range []struct {
		req  Request
		want error
	}{{addRequest(), ErrOutOfDescriptors}, {del, nil}} {
		ours, theirs := pair(t)
		chunk{requestFrame(t, c.req), 1}.send(t, theirs)
		restore := noDescriptors(t)
		req, netns, err := ReadRequest(ours)
		restore()
		if !errors.Is(err, c.want) || netns != nil {
			t.Errorf("%s: error: %v, descriptor: %v, want %v and none", c.req.Command, err, netns, c.want)
		}
		if c.want == nil && req.ContainerID != del.ContainerID {
			t.Errorf("%s was read as %+v", c.req.Command, req)
		}
	}
}

// TestReadRequestOtherVersion: nothing but the version is looked at, since another version may have
// everything else different.
func TestReadRequestOtherVersion(t *testing.T) {
	ours, theirs := pair(t)
	chunk{framed(`{"version":2,"command":["anything"],"network":{}}`), 3}.send(t, theirs)
	before := openFDs(t)
	_, _, err := ReadRequest(ours)
	var versionErr *VersionError
	if !errors.As(err, &versionErr) || *versionErr != (VersionError{Got: 2, Want: Version}) {
		t.Errorf("error: %v", err)
	}
	if after := openFDs(t); after != before {
		t.Errorf("%d descriptors are open afterwards, %d were before", after, before)
	}
}

// TestReadRequestDeadline: a peer that stops in the middle does not hold the reader, and what it
// had sent is closed.
func TestReadRequestDeadline(t *testing.T) {
	ours, theirs := pair(t)
	chunk{requestFrame(t, addRequest())[:10], 1}.send(t, theirs)
	if err := ours.SetReadDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	before := openFDs(t)
	if _, _, err := ReadRequest(ours); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("error: %v", err)
	}
	if after := openFDs(t); after != before {
		t.Errorf("%d descriptors are open afterwards, %d were before", after, before)
	}
}

// TestReadRequestLeavesTheRest: what follows the request stays for the caller to see.
func TestReadRequestLeavesTheRest(t *testing.T) {
	ours, theirs := pair(t)
	chunk{append(requestFrame(t, Request{Version: 1, Command: CommandGC, Network: "n"}), "rest"...), 0}.send(t, theirs)
	if _, _, err := ReadRequest(ours); err != nil {
		t.Fatal(err)
	}
	rest := make([]byte, 10)
	n, err := ours.Read(rest)
	if err != nil || string(rest[:n]) != "rest" {
		t.Errorf("%q, %v", rest[:n], err)
	}
}

func TestReply(t *testing.T) {
	long := strings.Repeat("\x00", 1<<20) // six bytes each in JSON
	for _, c := range []struct {
		name        string
		reply, want Reply
	}{
		{"enrolled", Reply{Result: ResultEnrolled}, Reply{Version: 1, Result: ResultEnrolled}},
		{"skipped", Reply{Result: ResultSkipped, Reason: "hostNetwork"}, Reply{Version: 1, Result: ResultSkipped, Reason: "hostNetwork"}},
		{"error", Reply{Error: &Error{11, "m", "d"}}, Reply{Version: 1, Error: &Error{11, "m", "d"}}},
		{"endless texts", Reply{Reason: long, Error: &Error{11, long, long}}, Reply{
			Version: 1, Reason: long[:maxText] + "…", Error: &Error{11, long[:maxText] + "…", long[:maxText] + "…"},
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			ours, theirs := pair(t)
			if err := WriteReply(ours, c.reply); err != nil {
				t.Fatal(err)
			}
			got, err := readReply(theirs)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestWriteReplyToNobody(t *testing.T) {
	ours, theirs := pair(t)
	if err := theirs.Close(); err != nil {
		t.Fatal(err)
	}
	if err := WriteReply(ours, Reply{Result: ResultOK}); !errors.Is(err, syscall.EPIPE) {
		t.Errorf("error: %v", err)
	}
}

// FuzzReadRequest: whatever comes, in bytes and in descriptors, the reader neither panics nor keeps
// a descriptor, and what it accepts is valid and means the same when it is sent again.
func FuzzReadRequest(f *testing.F) {
	f.Add(requestFrame(f, addRequest()), uint8(1))
	f.Add(requestFrame(f, Request{Version: 1, Command: CommandDel, Network: "n", ContainerID: "c", IfName: "i"}), uint8(0))
	f.Add(requestFrame(f, Request{Version: 1, Command: CommandGC, Network: "n", ValidAttachments: []Attachment{{"c", "i"}}}), uint8(0))
	f.Add(framed(`{"version":2}`), uint8(2))
	f.Add([]byte{0, 0x10, 0, 1}, uint8(9))
	f.Fuzz(func(t *testing.T, data []byte, fds uint8) {
		if len(data) == 0 || len(data) > 64<<10 {
			t.Skip() // SCM_RIGHTS needs a byte to ride on, and a socket's buffer is finite
		}
		ours, theirs := pair(t)
		chunk{data, int(fds % 12)}.send(t, theirs)
		if err := theirs.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		before := openFDs(t)
		req, netns, err := ReadRequest(ours)
		if netns != nil {
			if err := netns.Close(); err != nil {
				t.Error(err)
			}
		}
		if after := openFDs(t); after != before {
			t.Errorf("%d descriptors are open afterwards, %d were before", after, before)
		}
		if err != nil {
			return
		}
		var again Request
		if err := decode(requestFrame(t, req)[headerLen:], &again); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(req, again, cmpopts.EquateEmpty(), compareAddrs()); diff != "" {
			t.Error(diff)
		}
	})
}

// FuzzReadReply is the same for what a plugin gets.
func FuzzReadReply(f *testing.F) {
	for _, reply := range []Reply{{Version: 1, Result: ResultEnrolled}, {Version: 1, Error: &Error{11, "m", "d"}}} {
		payload, err := json.Marshal(reply)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(framed(string(payload)))
	}
	f.Add(framed(`{"version":1}`))
	f.Add([]byte{0, 1, 0, 1, '{'})
	f.Fuzz(func(t *testing.T, data []byte) {
		reply, err := readReply(bytes.NewReader(data))
		if err == nil && (reply.Version != Version || reply.Result == "" && reply.Error == nil) {
			t.Errorf("accepted %+v", reply)
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package packet_test

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"ambientd/nodeagent/zds/packet"
	"ambientd/nodeagent/zds/zdspb"
)

// pair returns two ends of a connected SOCK_SEQPACKET socket.
func pair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Net: "unixpacket", Name: path})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, err = net.DialUnix("unixpacket", nil, &net.UnixAddr{Net: "unixpacket", Name: path})
	if err != nil {
		t.Fatal(err)
	}
	b, err = l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func TestWriteRead(t *testing.T) {
	a, b := pair(t)
	f, err := os.Open("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, tc := range []struct {
		name string
		data string
		file *os.File
	}{
		{"without a descriptor", "x", nil},
		{"with one", "y", f},
		{"of the largest size", strings.Repeat("z", packet.MaxSize), f},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if err := packet.Write(a, []byte(tc.data), tc.file); err != nil {
				t.Fatal(err)
			}
			data, got, err := packet.Read(b)
			if err != nil || string(data) != tc.data {
				t.Fatalf("Read = %d bytes, %v; want %d", len(data), err, len(tc.data))
			}
			if packet.Beside(got) != packet.Beside(tc.file) {
				t.Fatalf("descriptor is %s, want %s", packet.Beside(got), packet.Beside(tc.file))
			}
			if got == nil {
				return
			}
			defer got.Close()
			want, _ := f.Stat()
			if have, err := got.Stat(); err != nil || !os.SameFile(want, have) {
				t.Errorf("another file arrived (%v)", err)
			}
			flags, err := unix.FcntlInt(got.Fd(), unix.F_GETFD, 0)
			if err != nil || flags&unix.FD_CLOEXEC == 0 {
				t.Errorf("the descriptor would leak into child processes: flags %#x, %v", flags, err)
			}
		})
	}
}

func TestWriteOfAClosedFile(t *testing.T) {
	a, _ := pair(t)
	f, err := os.Open("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	if err := packet.Write(a, []byte("x"), f); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Write = %v, want os.ErrClosed", err)
	}
}

func TestReadRefuses(t *testing.T) {
	for _, tc := range []struct {
		name string
		data []byte
		fds  int
		want error // nil: any error
	}{
		{"one byte too many", make([]byte, packet.MaxSize+1), 0, packet.ErrTruncated},
		{"one byte too many, with a descriptor", make([]byte, packet.MaxSize+1), 1, packet.ErrTruncated},
		{"two descriptors", []byte("x"), 2, nil},
		{"more descriptors than there is room for", []byte("x"), 5, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, b := pair(t)
			f, err := os.Open("/proc/self/ns/net")
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			var fds []int
			for range tc.fds {
				fds = append(fds, int(f.Fd()))
			}
			if _, _, err := a.WriteMsgUnix(tc.data, unix.UnixRights(fds...), nil); err != nil {
				t.Fatal(err)
			}
			before := openFiles(t)
			data, got, err := packet.Read(b)
			if err == nil || tc.want != nil && !errors.Is(err, tc.want) {
				t.Errorf("Read = %q, %v, %v; want error %v", data, got, err, tc.want)
			}
			if after := openFiles(t); after != before {
				t.Errorf("%d descriptors leaked", after-before)
			}
		})
	}
}

func TestReadAfterClose(t *testing.T) {
	a, b := pair(t)
	a.Close()
	if _, _, err := packet.Read(b); !errors.Is(err, io.EOF) {
		t.Errorf("Read = %v, want io.EOF", err)
	}
}

func TestEncodeTooLong(t *testing.T) {
	_, err := packet.Encode(add(strings.Repeat("n", packet.MaxSize)))
	if !errors.Is(err, packet.ErrTooLong) {
		t.Errorf("Encode = %v, want ErrTooLong", err)
	}
}

func add(name string) *zdspb.WorkloadRequest {
	return &zdspb.WorkloadRequest{Payload: &zdspb.WorkloadRequest_Add{Add: &zdspb.AddWorkload{
		Uid:          "uid-1",
		WorkloadInfo: &zdspb.WorkloadInfo{Name: name, Namespace: "shop", ServiceAccount: "web"},
	}}}
}

// The bytes below were written out by hand from the field numbers that ztunnel
// uses, so that a slip in the .proto file cannot agree with itself.
func TestWireFormat(t *testing.T) {
	for _, tc := range []struct {
		name string
		msg  proto.Message
		want string
	}{
		{"hello", &zdspb.ZdsHello{Version: zdspb.Version_V1}, "\x08\x01"},
		{"add", add("p"), "\x0a\x17\x0a\x05uid-1\x12\x0e\x0a\x01p\x12\x04shop\x1a\x03web"},
		{"del", &zdspb.WorkloadRequest{Payload: &zdspb.WorkloadRequest_Del{Del: &zdspb.DelWorkload{Uid: "u"}}}, "\x12\x03\x12\x01u"},
		{"snapshot sent", &zdspb.WorkloadRequest{Payload: &zdspb.WorkloadRequest_SnapshotSent{SnapshotSent: &zdspb.SnapshotSent{}}}, "\x1a\x00"},
		{"keep", &zdspb.WorkloadRequest{Payload: &zdspb.WorkloadRequest_Keep{Keep: &zdspb.KeepWorkload{Uid: "u"}}}, "\x2a\x03\x0a\x01u"},
		{"ack", &zdspb.WorkloadResponse{Payload: &zdspb.WorkloadResponse_Ack{Ack: &zdspb.Ack{}}}, "\x0a\x00"},
		{"nack", &zdspb.WorkloadResponse{Payload: &zdspb.WorkloadResponse_Ack{Ack: &zdspb.Ack{Error: "no"}}}, "\x0a\x04\x0a\x02no"},
	} {
		got, err := packet.Encode(tc.msg)
		if err != nil || string(got) != tc.want {
			t.Errorf("%s: %q, %v; want %q", tc.name, got, err, tc.want)
		}
	}
}

func TestDecode(t *testing.T) {
	request := func(f packet.Descriptor) func(b []byte) error {
		return func(b []byte) error { _, err := packet.DecodeRequest(b, f); return err }
	}
	response := func(b []byte) error { _, err := packet.DecodeResponse(b); return err }
	for _, tc := range []struct {
		name   string
		decode func([]byte) error
		data   string
		ok     bool
	}{
		{"hello", packet.DecodeHello, "\x08\x01", true},
		{"hello with a field of the future", packet.DecodeHello, "\x08\x01\x10\x05", true},
		{"hello without a version", packet.DecodeHello, "", false},
		{"hello of version 2", packet.DecodeHello, "\x08\x02", false},
		{"hello cut short", packet.DecodeHello, "\x08", false},
		{"a request instead of a hello", packet.DecodeHello, "\x1a\x00", false},
		{"ack", response, "\x0a\x00", true},
		{"response without an ack", response, "", false},
		{"response of another kind", response, "\x12\x00", false},
		{"error that is not UTF-8", response, "\x0a\x03\x0a\x01\xff", false},
		{"add", request(packet.Present), "\x0a\x07\x0a\x01u\x12\x02\x0a\x00", true},
		{"add without a descriptor", request(packet.Absent), "\x0a\x07\x0a\x01u\x12\x02\x0a\x00", false},
		{"add without a uid", request(packet.Present), "\x0a\x04\x12\x02\x0a\x00", false},
		{"add without workload_info", request(packet.Present), "\x0a\x03\x0a\x01u", false},
		{"del", request(packet.Absent), "\x12\x03\x12\x01u", true},
		{"del with a descriptor", request(packet.Present), "\x12\x03\x12\x01u", false},
		{"del with the uid in field 1", request(packet.Absent), "\x12\x03\x0a\x01u", false},
		{"keep", request(packet.Absent), "\x2a\x03\x0a\x01u", true},
		{"keep without a uid", request(packet.Absent), "\x2a\x00", false},
		{"snapshot sent", request(packet.Absent), "\x1a\x00", true},
		{"the payload that ZDS gave up", request(packet.Absent), "\x22\x00", false},
	} {
		if err := tc.decode([]byte(tc.data)); (err == nil) != tc.ok {
			t.Errorf("%s: error %v, want accepted=%t", tc.name, err, tc.ok)
		}
	}
}

// FuzzDecode feeds every decoder of both directions: whatever one accepts must
// survive being sent on.
func FuzzDecode(f *testing.F) {
	for _, seed := range []string{
		"", "\x08\x01", "\x08\x02", // hello
		"\x0a\x00", "\x0a\x04\x0a\x02no", // proxy to agent
		"\x0a\x17\x0a\x05uid-1\x12\x0e\x0a\x01p\x12\x04shop\x1a\x03web", // agent to proxy
		"\x12\x03\x12\x01u", "\x1a\x00", "\x2a\x03\x0a\x01u", "\x22\x00",
		"\x0a\x03\x0a\x01\xff", "\x0a\xff\xff\xff\xff\x0f",
		strings.Repeat("\x1a\x00", packet.MaxSize/2),
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > packet.MaxSize {
			return
		}
		if err := packet.DecodeHello(b); err == nil && len(b) == 0 {
			t.Error("an empty hello was accepted")
		}
		if nack, err := packet.DecodeResponse(b); err == nil && len(nack) >= len(b) {
			t.Errorf("an error of %d bytes out of a packet of %d", len(nack), len(b))
		}
		for _, file := range []packet.Descriptor{packet.Absent, packet.Present} {
			request, err := packet.DecodeRequest(b, file)
			if err != nil {
				continue
			}
			again, err := packet.Encode(request)
			if err != nil {
				// Unmarshalling merges repeated messages and keeps unknown
				// fields, so it never makes a message longer.
				t.Fatalf("an accepted request does not encode: %v", err)
			}
			if _, err := packet.DecodeRequest(again, file); err != nil {
				t.Errorf("an accepted request is refused when sent on: %v", err)
			}
		}
	})
}

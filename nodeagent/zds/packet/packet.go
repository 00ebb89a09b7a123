// SPDX-License-Identifier: Apache-2.0

// Package packet carries ZDS messages over a SOCK_SEQPACKET unix socket, for
// the agent's side and the proxy's alike: one protobuf message a packet, no
// length prefix, at most MaxSize bytes, at most one descriptor beside it.
//
// It owns what makes a single packet well formed. It refuses, rather than
// repairs: a truncated packet, a descriptor too many, a payload that ZDS does
// not have. In what order messages may come is not its business.
package packet

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"ambientd/nodeagent/zds/zdspb"
)

// MaxSize is the largest packet in bytes. ztunnel and istio-cni both read into
// buffers of this size, and what does not fit is cut off by the kernel.
const MaxSize = 1024

var (
	// ErrTooLong is returned for a message whose encoding exceeds MaxSize.
	ErrTooLong = fmt.Errorf("message exceeds %d bytes", MaxSize)
	// ErrTruncated is returned for a packet that the kernel had to cut, in its
	// bytes or in its descriptors. What arrived of it has been discarded.
	ErrTruncated = errors.New("packet is truncated")
)

// Encode returns the packet of m, or ErrTooLong.
func Encode(m proto.Message) ([]byte, error) {
	b, err := proto.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encoding %s: %w", m.ProtoReflect().Descriptor().Name(), err)
	}
	if len(b) > MaxSize {
		return nil, fmt.Errorf("encoding %s of %d bytes: %w", m.ProtoReflect().Descriptor().Name(), len(b), ErrTooLong)
	}
	return b, nil
}

// Write sends b as one packet, with file as its descriptor unless that is nil.
// The file may be closed by others meanwhile: it then fails with os.ErrClosed,
// and never sends a descriptor number that has been given to another file.
func Write(c *net.UnixConn, b []byte, file *os.File) error {
	if file == nil {
		return write(c, b, nil)
	}
	raw, err := file.SyscallConn()
	if err != nil {
		return fmt.Errorf("borrowing the descriptor: %w", err)
	}
	var sendErr error
	if err := raw.Control(func(fd uintptr) { sendErr = write(c, b, unix.UnixRights(int(fd))) }); err != nil {
		// Control fails for closed files only, with an internal error value.
		return fmt.Errorf("borrowing the descriptor: %w (%w)", os.ErrClosed, err)
	}
	return sendErr
}

func write(c *net.UnixConn, b, oob []byte) error {
	n, _, err := c.WriteMsgUnix(b, oob, nil)
	if err != nil {
		return err
	}
	if n != len(b) {
		return fmt.Errorf("%d of %d bytes sent: %w", n, len(b), io.ErrShortWrite)
	}
	return nil
}

// Reader reads the packets of a connection, all into the same buffers.
type Reader struct {
	conn *net.UnixConn
	b    []byte
	oob  []byte
}

// NewReader returns a Reader of c's packets.
func NewReader(c *net.UnixConn) *Reader {
	// Room for two descriptors: the kernel's alignment leaves it anyway, and a
	// second one must be received in order to be closed.
	return &Reader{conn: c, b: make([]byte, MaxSize), oob: make([]byte, unix.CmsgSpace(2*4))}
}

// Next returns the next packet, valid until the next call, and the descriptor that came
// with it, which is the caller's to close, or nil. It returns io.EOF when the peer has
// closed. An empty packet cannot be told from that and no ZDS message is empty.
func (r *Reader) Next() ([]byte, *os.File, error) {
	n, oobn, flags, _, err := r.conn.ReadMsgUnix(r.b, r.oob)
	if err != nil {
		return nil, nil, err
	}
	file, err := descriptor(r.oob[:oobn])
	if err != nil {
		return nil, nil, err
	}
	if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		return nil, nil, errors.Join(ErrTruncated, closeFile(file))
	}
	if n == 0 {
		return nil, nil, errors.Join(io.EOF, closeFile(file))
	}
	return r.b[:n], file, nil
}

// Read is Next for a single packet.
func Read(c *net.UnixConn) ([]byte, *os.File, error) { return NewReader(c).Next() }

// descriptor takes the single descriptor out of a packet's control messages,
// or nil; of several it closes all, since an error leaves nobody to do so.
func descriptor(oob []byte) (*os.File, error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("parsing control messages: %w", err)
	}
	var fds []int
	for _, m := range messages {
		if m.Header.Level != unix.SOL_SOCKET || m.Header.Type != unix.SCM_RIGHTS {
			continue
		}
		rights, err := unix.ParseUnixRights(&m)
		if err != nil {
			return nil, fmt.Errorf("parsing descriptors: %w", err)
		}
		fds = append(fds, rights...)
	}
	switch len(fds) {
	case 0:
		return nil, nil
	case 1:
		return os.NewFile(uintptr(fds[0]), "netns"), nil
	}
	errs := []error{fmt.Errorf("packet carries %d descriptors, at most one is allowed", len(fds))}
	for _, fd := range fds {
		if err := unix.Close(fd); err != nil {
			errs = append(errs, fmt.Errorf("closing a descriptor too many: %w", err))
		}
	}
	return nil, errors.Join(errs...)
}

func closeFile(f *os.File) error {
	if f == nil {
		return nil
	}
	return f.Close()
}

// DecodeHello checks a proxy's first packet: a ZdsHello of version 1.
func DecodeHello(b []byte) error {
	var hello zdspb.ZdsHello
	if err := proto.Unmarshal(b, &hello); err != nil {
		return fmt.Errorf("decoding hello: %w", err)
	}
	if hello.GetVersion() != zdspb.Version_V1 {
		return fmt.Errorf("hello names version %d, this agent speaks %d", hello.GetVersion(), zdspb.Version_V1)
	}
	return nil
}

// DecodeResponse returns what a proxy answered: the text of its Ack's error,
// empty when it accepted.
func DecodeResponse(b []byte) (nack string, err error) {
	var response zdspb.WorkloadResponse
	if err := proto.Unmarshal(b, &response); err != nil {
		return "", fmt.Errorf("decoding response: %w", err)
	}
	if response.GetAck() == nil {
		return "", errors.New("response holds no ack")
	}
	return response.GetAck().GetError(), nil
}

// DecodeRequest returns what an agent asked. hasFile says whether a descriptor
// came with the packet: an add needs one, every other request must have none.
func DecodeRequest(b []byte, hasFile Descriptor) (*zdspb.WorkloadRequest, error) {
	request := new(zdspb.WorkloadRequest)
	if err := proto.Unmarshal(b, request); err != nil {
		return nil, fmt.Errorf("decoding request: %w", err)
	}
	want := Absent
	switch p := request.GetPayload().(type) {
	case *zdspb.WorkloadRequest_Add:
		if p.Add.GetUid() == "" || p.Add.GetWorkloadInfo() == nil {
			return nil, errors.New("add lacks its uid or its workload_info")
		}
		want = Present
	case *zdspb.WorkloadRequest_Keep:
		if p.Keep.GetUid() == "" {
			return nil, errors.New("keep lacks its uid")
		}
	case *zdspb.WorkloadRequest_Del:
		if p.Del.GetUid() == "" {
			return nil, errors.New("del lacks its uid")
		}
	case *zdspb.WorkloadRequest_SnapshotSent:
	default:
		return nil, errors.New("request holds no payload known here")
	}
	if hasFile != want {
		return nil, fmt.Errorf("descriptor is %s, the request needs it %s", hasFile, want)
	}
	return request, nil
}

// Descriptor says whether a packet came with a descriptor.
type Descriptor string

// The two cases of Descriptor.
const (
	Absent  Descriptor = "absent"
	Present Descriptor = "present"
)

// Beside returns the Descriptor of a packet that Read returned file with.
func Beside(file *os.File) Descriptor {
	if file == nil {
		return Absent
	}
	return Present
}

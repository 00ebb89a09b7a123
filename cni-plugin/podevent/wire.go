// SPDX-License-Identifier: Apache-2.0

package podevent

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
)

// Limits of a message's JSON, in bytes, so that neither side can be made to hold more. A GC of
// 1,000 attachments with 64-digit container IDs is about 110 KiB.
const (
	MaxRequest = 1 << 20
	MaxReply   = 64 << 10
)

const headerLen = 4

// frame is the JSON of v behind its length.
func frame(v any, limit int) ([]byte, error) {
	payload, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	if len(payload) > limit {
		return nil, fmt.Errorf("message of %d bytes, at most %d are allowed", len(payload), limit)
	}
	buf := make([]byte, headerLen, headerLen+len(payload))
	binary.BigEndian.PutUint32(buf, uint32(len(payload)))
	return append(buf, payload...), nil
}

// decode fills v from a message's JSON after looking at nothing but its version, so that another
// version's message is reported as such, whatever else it has.
func decode(payload []byte, v any) error { return decodeVersion(payload, Version, v) }

func decodeVersion(payload []byte, want int, v any) error {
	var head struct {
		Version *int `json:"version"`
	}
	if err := json.Unmarshal(payload, &head); err != nil {
		return fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if head.Version == nil {
		return fmt.Errorf("%w: no version", ErrMalformed)
	}
	if *head.Version != want {
		return &VersionError{Got: *head.Version, Want: want}
	}
	if err := json.Unmarshal(payload, v); err != nil {
		return fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return nil
}

// payloadLen reads a header and holds it against the limit.
func payloadLen(header []byte, limit int) (int, error) {
	n := binary.BigEndian.Uint32(header)
	if n == 0 || n > uint32(limit) {
		return 0, fmt.Errorf("%w: length %d, expected 1 to %d", ErrMalformed, n, limit)
	}
	return int(n), nil
}

// ReadRequest reads the one request of a connection, and the network namespace that came with it,
// nil if none did. The caller sets the read deadline beforehand and closes the file.
//
// Nothing beyond the request is read, so that the caller can watch for the end of file. However
// many descriptors the peer sends, none stays open when there is an error, and all are
// close-on-exec. A DEL whose descriptor cannot be received, for want of a free one, is read without.
// The errors are a [*VersionError], one that wraps [ErrMalformed] or [ErrOutOfDescriptors],
// [io.EOF] if the peer closed without a word, or the connection's.
func ReadRequest(conn *net.UnixConn) (Request, *os.File, error) {
	r := &msgReader{conn: conn}
	req, err := r.request()
	if err == nil {
		err = r.checkDescriptors(req)
	}
	if err != nil {
		return Request{}, nil, errors.Join(err, closeAll(r.fds))
	}
	if len(r.fds) == 0 {
		return req, nil, nil
	}
	return req, os.NewFile(uintptr(r.fds[0]), "netns"), nil
}

// request reads the message. What descriptors came is in r, also with an error.
func (r *msgReader) request() (req Request, err error) {
	header := make([]byte, headerLen)
	if err := r.readFull(header); err != nil {
		return req, err
	}
	n, err := payloadLen(header, MaxRequest)
	if err != nil {
		return req, err
	}
	payload := make([]byte, n)
	if err := r.readFull(payload); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return req, err
	}
	if err := decode(payload, &req); err != nil {
		return req, err
	}
	if err := req.Validate(); err != nil {
		return req, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return req, nil
}

func (r *msgReader) checkDescriptors(req Request) error {
	fds := r.fds
	switch {
	case r.lost && req.needsNetns():
		return ErrOutOfDescriptors
	case r.lost && req.mayHaveNetns():
		return nil // nobody would say it again, and the attachment says enough
	case len(fds) > 1:
		return fmt.Errorf("%w: %d descriptors, at most 1 is allowed", ErrMalformed, len(fds))
	case len(fds) == 0 && req.needsNetns():
		return fmt.Errorf("%w: %s without the network namespace's descriptor", ErrMalformed, req.Command)
	case len(fds) == 1 && !req.mayHaveNetns():
		return fmt.Errorf("%w: %s with a descriptor", ErrMalformed, req.Command)
	}
	return nil
}

func closeAll(fds []int) error {
	var errs []error
	for _, fd := range fds {
		if err := syscall.Close(fd); err != nil {
			errs = append(errs, fmt.Errorf("closing descriptor %d: %w", fd, err))
		}
	}
	return errors.Join(errs...)
}

// msgReader reads bytes and gathers the descriptors that come along.
type msgReader struct {
	conn *net.UnixConn
	fds  []int
	lost bool // descriptors came, and the kernel could not give us a single one
}

// readFull fills buf exactly. [io.EOF] means that not a single byte came.
func (r *msgReader) readFull(buf []byte) error {
	// Room for the one descriptor that is allowed, and some more. What does not fit the kernel closes
	// by itself and sets MSG_CTRUNC.
	oob := make([]byte, syscall.CmsgSpace(4*4))
	for got := 0; got < len(buf); {
		// ReadMsgUnix passes MSG_CMSG_CLOEXEC: no child of the agent inherits the descriptors.
		n, oobn, flags, _, err := r.conn.ReadMsgUnix(buf[got:], oob)
		// Descriptors are gathered first: they are ours to close, whatever else is wrong.
		if gatherErr := r.gather(oob[:oobn]); gatherErr != nil {
			return gatherErr
		}
		switch truncated := flags&syscall.MSG_CTRUNC != 0; {
		case truncated && len(r.fds) == 0:
			r.lost = true
		case truncated:
			return fmt.Errorf("%w: control data was truncated: too many descriptors", ErrMalformed)
		}
		switch {
		case errors.Is(err, io.EOF) && got > 0:
			return io.ErrUnexpectedEOF
		case errors.Is(err, io.EOF):
			return io.EOF
		case err != nil:
			return fmt.Errorf("reading: %w", err)
		}
		got += n
	}
	return nil
}

func (r *msgReader) gather(oob []byte) error {
	if len(oob) == 0 {
		return nil
	}
	msgs, err := syscall.ParseSocketControlMessage(oob)
	if err != nil {
		return fmt.Errorf("%w: control data: %w", ErrMalformed, err)
	}
	for i := range msgs {
		if msgs[i].Header.Level != syscall.SOL_SOCKET || msgs[i].Header.Type != syscall.SCM_RIGHTS {
			continue
		}
		fds, err := syscall.ParseUnixRights(&msgs[i])
		if err != nil {
			return fmt.Errorf("%w: control data: %w", ErrMalformed, err)
		}
		r.fds = append(r.fds, fds...)
	}
	return nil
}

// WriteReply sends the one reply of a connection, stamped with [Version]. The caller sets the write
// deadline beforehand. What people read is cut to fit into [MaxReply].
func WriteReply(conn net.Conn, reply Reply) error {
	reply.Version = Version
	reply.Reason = cut(reply.Reason)
	if reply.Error != nil {
		reply.Error = &Error{Code: reply.Error.Code, Msg: cut(reply.Error.Msg), Details: cut(reply.Error.Details)}
	}
	buf, err := frame(reply, MaxReply)
	if err != nil {
		return fmt.Errorf("encoding the reply: %w", err)
	}
	if _, err := conn.Write(buf); err != nil {
		return fmt.Errorf("sending the reply: %w", err)
	}
	return nil
}

// maxText bounds each text of a reply, in bytes: JSON writes a byte as six at worst, and three
// texts have to fit into MaxReply. A reply that is cut is better than none.
const maxText = 3 << 10

func cut(text string) string {
	if len(text) <= maxText {
		return text
	}
	return text[:maxText] + "…"
}

// readReply reads the one reply of a connection.
func readReply(conn io.Reader) (Reply, error) {
	header := make([]byte, headerLen)
	if _, err := io.ReadFull(conn, header); err != nil {
		return Reply{}, err
	}
	n, err := payloadLen(header, MaxReply)
	if err != nil {
		return Reply{}, err
	}
	payload := make([]byte, n)
	if _, err := io.ReadFull(conn, payload); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return Reply{}, err
	}
	var reply Reply
	if err := decode(payload, &reply); err != nil {
		return Reply{}, err
	}
	if reply.Error == nil && reply.Result == "" {
		return Reply{}, fmt.Errorf("%w: neither result nor error", ErrMalformed)
	}
	return reply, nil
}

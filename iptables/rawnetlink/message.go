// SPDX-License-Identifier: Apache-2.0

package rawnetlink

import (
	"encoding/binary"
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// Message is one netlink message as it lies in a datagram (struct nlmsghdr of linux/netlink.h, then the payload).
type Message struct {
	Type, Flags uint16
	Sequence    uint32
	Payload     []byte // aliases the datagram
}

// Attribute is one attribute (struct nlattr) of a message's payload or of another attribute.
type Attribute struct {
	Type uint16 // without the bits for nesting and byte order
	Data []byte // aliases the datagram
}

// Error is what the kernel answered to the message with that sequence number.
type Error struct {
	Sequence uint32
	Errno    syscall.Errno
}

// Error returns the text of the errno.
func (e Error) Error() string { return e.Errno.Error() }

// Unwrap returns the errno, for errors.Is.
func (e Error) Unwrap() error { return e.Errno }

// Lengths in bytes of the two headers.
const (
	messageHeader   = unix.NLMSG_HDRLEN
	attributeHeader = unix.NLA_HDRLEN
)

// align rounds up to the 4 bytes that messages and attributes are padded to.
func align(n int) int { return (n + 3) &^ 3 }

// Next returns the first message of b and what follows it. It fails on a length that does not fit, which a complete
// datagram from the kernel never has.
func Next(b []byte) (Message, []byte, error) {
	if len(b) < messageHeader {
		return Message{}, nil, fmt.Errorf("netlink message of %d bytes is shorter than its header", len(b))
	}
	length := int(binary.NativeEndian.Uint32(b))
	if length < messageHeader || length > len(b) {
		return Message{}, nil, fmt.Errorf("netlink message claims %d bytes, %d are there", length, len(b))
	}
	m := Message{
		Type:     binary.NativeEndian.Uint16(b[4:]),
		Flags:    binary.NativeEndian.Uint16(b[6:]),
		Sequence: binary.NativeEndian.Uint32(b[8:]),
		Payload:  b[messageHeader:length],
	}
	return m, b[min(align(length), len(b)):], nil
}

// NextAttribute returns the first attribute of b and what follows it.
func NextAttribute(b []byte) (Attribute, []byte, error) {
	if len(b) < attributeHeader {
		return Attribute{}, nil, fmt.Errorf("netlink attribute of %d bytes is shorter than its header", len(b))
	}
	length := int(binary.NativeEndian.Uint16(b))
	if length < attributeHeader || length > len(b) {
		return Attribute{}, nil, fmt.Errorf("netlink attribute claims %d bytes, %d are there", length, len(b))
	}
	a := Attribute{
		Type: binary.NativeEndian.Uint16(b[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER),
		Data: b[attributeHeader:length],
	}
	return a, b[min(align(length), len(b)):], nil
}

// AppendMessage appends a message to b. The payload's length must be a multiple of 4.
func AppendMessage(b []byte, m Message) []byte {
	b = binary.NativeEndian.AppendUint32(b, uint32(messageHeader+len(m.Payload)))
	b = binary.NativeEndian.AppendUint16(b, m.Type)
	b = binary.NativeEndian.AppendUint16(b, m.Flags)
	b = binary.NativeEndian.AppendUint32(b, m.Sequence)
	b = binary.NativeEndian.AppendUint32(b, 0) // port: the kernel
	return append(b, m.Payload...)
}

// AppendAttribute appends an attribute with its padding to b.
func AppendAttribute(b []byte, a Attribute) []byte {
	length := attributeHeader + len(a.Data)
	b = binary.NativeEndian.AppendUint16(b, uint16(length))
	b = binary.NativeEndian.AppendUint16(b, a.Type)
	b = append(b, a.Data...)
	return append(b, make([]byte, align(length)-length)...)
}

// Failure returns the error that the kernel reports with an NLMSG_ERROR or at the end of a dump, as an [Error]; nil for
// an acknowledgement, a dump that ended well, and every other message.
func (m Message) Failure() error {
	if m.Type != unix.NLMSG_ERROR && m.Type != unix.NLMSG_DONE {
		return nil
	}
	// Both begin with a negated error number (struct nlmsgerr; netlink_dump_done in the kernel).
	if len(m.Payload) < 4 {
		return fmt.Errorf("netlink message of type %d holds no error number", m.Type)
	}
	errno := syscall.Errno(-int32(binary.NativeEndian.Uint32(m.Payload)))
	if errno == 0 {
		return nil
	}
	return Error{Sequence: m.Sequence, Errno: errno}
}

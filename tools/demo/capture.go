// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

const (
	// captureBuffer holds all frames of one exchange until they are read, in bytes.
	captureBuffer = 4 << 20
	// maxFrame is more than any MTU here, offloads included, in bytes.
	maxFrame = 1 << 17
)

// capture takes every frame that passes an interface, in both directions.
type capture struct {
	fd int
}

// startCapture starts a capture. On a bridge it sees what is forwarded between the
// ports too, since the interface is made promiscuous.
func startCapture(name string) (*capture, error) {
	link, err := net.InterfaceByName(name)
	if err != nil {
		return nil, fmt.Errorf("finding %s: %w", name, err)
	}
	// Protocol 0: nothing is captured before the socket is bound to the interface.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("opening a packet socket: %w", err)
	}
	c := &capture{fd: fd}
	if err := c.attach(link.Index); err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return c, nil
}

func (c *capture) attach(index int) error {
	// Beyond net.core.rmem_max if we may; else as far as that allows, and drops are seen.
	if err := unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, captureBuffer); err != nil {
		if err := unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, captureBuffer); err != nil {
			return fmt.Errorf("setting the buffer's size: %w", err)
		}
	}
	all := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ALL))
	if err := unix.Bind(c.fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: index}); err != nil {
		return fmt.Errorf("binding to interface %d: %w", index, err)
	}
	promiscuous := unix.PacketMreq{Ifindex: int32(index), Type: unix.PACKET_MR_PROMISC}
	if err := unix.SetsockoptPacketMreq(c.fd, unix.SOL_PACKET, unix.PACKET_ADD_MEMBERSHIP, &promiscuous); err != nil {
		return fmt.Errorf("making interface %d promiscuous: %w", index, err)
	}
	return nil
}

// stop ends the capture and returns the frames. Those of an exchange that has ended
// are all there: the kernel queues a frame here before it delivers it.
func (c *capture) stop() (all frames, err error) {
	defer func() { err = errors.Join(err, unix.Close(c.fd)) }()
	buffer := make([]byte, maxFrame)
	for {
		n, _, err := unix.Recvfrom(c.fd, buffer, 0)
		if errors.Is(err, unix.EAGAIN) {
			break
		}
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("reading a captured frame: %w", err)
		}
		all = append(all, bytes.Clone(buffer[:n]))
	}
	stats, err := unix.GetsockoptTpacketStats(c.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
	if err != nil {
		return nil, fmt.Errorf("reading the capture's statistics: %w", err)
	}
	if stats.Drops > 0 {
		return nil, fmt.Errorf("the capture is incomplete: %d frames were dropped", stats.Drops)
	}
	return all, nil
}

// frames are captured Ethernet frames.
type frames [][]byte

// containing returns how many frames hold the text.
func (f frames) containing(text string) int {
	n := 0
	for _, frame := range f {
		if bytes.Contains(frame, []byte(text)) {
			n++
		}
	}
	return n
}

// toPort returns how many frames are TCP segments to the port, IPv4 or IPv6.
func (f frames) toPort(port uint16) int {
	n := 0
	for _, frame := range f {
		if got, ok := tcpDestination(frame); ok && got == port {
			n++
		}
	}
	return n
}

// tcpDestination returns the destination port of a TCP segment in an Ethernet frame.
// IPv6 extension headers do not occur in what is captured here.
func tcpDestination(frame []byte) (port uint16, ok bool) {
	const ethernet = 14
	if len(frame) < ethernet {
		return 0, false
	}
	packet := frame[ethernet:]
	var header int
	switch binary.BigEndian.Uint16(frame[ethernet-2:]) {
	case unix.ETH_P_IP:
		if len(packet) < 20 || packet[9] != unix.IPPROTO_TCP {
			return 0, false
		}
		header = int(packet[0]&0x0f) * 4
	case unix.ETH_P_IPV6:
		if len(packet) < 40 || packet[6] != unix.IPPROTO_TCP {
			return 0, false
		}
		header = 40
	default:
		return 0, false
	}
	if len(packet) < header+4 {
		return 0, false
	}
	return binary.BigEndian.Uint16(packet[header+2:]), true
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"golang.org/x/sys/unix"

	"ambientd/nodeagent/zds/packet"
	"ambientd/nodeagent/zds/zdspb"
)

// ackingProxy is a node proxy that acks at once. It shares the machine's CPUs with the
// agent that is measured, so it does no more than that: zdstest's looks into each netns
// and keeps what it was told, which takes longer than the agent's part of an exchange.
type ackingProxy struct {
	fd    int
	ack   []byte
	ended chan struct{} // closed with the connection

	mu    sync.Mutex
	pods  map[string]struct{} // added and not deleted, by UID
	ready bool                // the snapshot is complete
	err   error               // why the connection ended
	until func() bool         // what is waited for
	met   chan struct{}       // closed when that holds
}

// dialProxy connects to an agent's ZDS socket and says hello.
func dialProxy(socket string) (*ackingProxy, error) {
	ack, err := packet.Encode(&zdspb.WorkloadResponse{Payload: &zdspb.WorkloadResponse_Ack{Ack: &zdspb.Ack{}}})
	if err != nil {
		return nil, err
	}
	hello, err := packet.Encode(&zdspb.ZdsHello{Version: zdspb.Version_V1})
	if err != nil {
		return nil, err
	}
	// A blocking socket: the kernel wakes whoever reads, without the way through a poller.
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("opening a socket for the node proxy: %w", err)
	}
	err = unix.Connect(fd, &unix.SockaddrUnix{Name: socket})
	if err == nil {
		_, err = unix.Write(fd, hello)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("connecting to the ZDS socket: %w", err), unix.Close(fd))
	}
	p := &ackingProxy{fd: fd, ack: ack, ended: make(chan struct{}), pods: map[string]struct{}{}}
	go p.run()
	return p, nil
}

func (p *ackingProxy) run() {
	defer close(p.ended)
	b, oob := make([]byte, packet.MaxSize), make([]byte, unix.CmsgSpace(4))
	for {
		err := p.exchange(b, oob)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			p.change(func() { p.err = err })
			return
		}
	}
}

// exchange takes one message and acks it.
func (p *ackingProxy) exchange(b, oob []byte) error {
	n, oobn, _, _, err := unix.Recvmsg(p.fd, b, oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return err
	}
	if n == 0 {
		return io.EOF
	}
	came, err := closeDescriptor(oob[:oobn])
	if err != nil {
		return err
	}
	request, err := packet.DecodeRequest(b[:n], came)
	if err != nil {
		return err
	}
	// Before the ack: whoever sees the agent act on it sees it here too.
	p.change(func() { p.accept(request) })
	_, err = unix.Write(p.fd, p.ack)
	return err
}

// closeDescriptor closes the netns that came with a message, if there is one.
func closeDescriptor(oob []byte) (packet.Descriptor, error) {
	if len(oob) == 0 {
		return packet.Absent, nil
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return packet.Absent, err
	}
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			return packet.Absent, err
		}
		for _, fd := range fds {
			if err := unix.Close(fd); err != nil {
				return packet.Absent, err
			}
		}
	}
	return packet.Present, nil
}

func (p *ackingProxy) accept(request *zdspb.WorkloadRequest) {
	switch m := request.GetPayload().(type) {
	case *zdspb.WorkloadRequest_Add:
		p.pods[m.Add.GetUid()] = struct{}{}
	case *zdspb.WorkloadRequest_Del:
		delete(p.pods, m.Del.GetUid())
	case *zdspb.WorkloadRequest_SnapshotSent:
		p.ready = true
	}
}

// change carries out fn, and wakes who waits once what that waits for holds.
func (p *ackingProxy) change(fn func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fn()
	if p.met != nil && (p.err != nil || p.until()) {
		close(p.met)
		p.met = nil
	}
}

// await returns once until holds, which is called with the lock held. One waits at a time.
func (p *ackingProxy) await(ctx context.Context, until func() bool) error {
	met := make(chan struct{})
	p.mu.Lock()
	p.until, p.met = until, met
	p.mu.Unlock()
	p.change(func() {}) // it may hold already
	select {
	case <-met:
	case <-ctx.Done():
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.met = nil
	if until() {
		return nil
	}
	return fmt.Errorf("the node proxy has %d pods, ready=%t: %w", len(p.pods), p.ready, errors.Join(p.err, ctx.Err()))
}

// awaitReady returns once the snapshot is complete.
func (p *ackingProxy) awaitReady(ctx context.Context) error {
	return p.await(ctx, func() bool { return p.ready })
}

// awaitPods returns once the proxy has so many pods.
func (p *ackingProxy) awaitPods(ctx context.Context, want int) error {
	return p.await(ctx, func() bool { return len(p.pods) == want })
}

// held returns how many pods the proxy has.
func (p *ackingProxy) held() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.pods)
}

// close ends the connection.
func (p *ackingProxy) close() error {
	err := unix.Shutdown(p.fd, unix.SHUT_RDWR)
	if errors.Is(err, unix.ENOTCONN) {
		err = nil // the agent was first
	}
	<-p.ended
	return errors.Join(err, unix.Close(p.fd))
}

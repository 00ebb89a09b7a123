// SPDX-License-Identifier: Apache-2.0

// Package zdsclient is the node proxy's side of ZDS: it connects to the agent,
// takes in the snapshot and what follows, and connects again, with backoff,
// whenever the stream ends.
//
// It owns the stream and the order of its messages. What a workload is to the
// proxy is its Handler's business; workloads outlive a stream, and are dropped
// when a later snapshot lacks them.
package zdsclient

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"time"

	"ambientd/nodeagent/zds/packet"
	"ambientd/nodeagent/zds/zdspb"
)

const (
	minBackoff = 50 * time.Millisecond
	maxBackoff = 5 * time.Second

	// writeTimeout bounds a hello or an answer; the agent reads at once.
	writeTimeout = 5 * time.Second
)

// Workload is what the agent tells about a pod.
type Workload struct {
	UID            string
	Name           string
	Namespace      string
	ServiceAccount string
}

// Handler takes workloads in. Its methods are called one at a time, and the
// agent waits meanwhile. ctx is that of Run.
type Handler interface {
	// Add owns netns from here on. An error refuses the workload.
	Add(ctx context.Context, w Workload, netns *os.File) error
	// Del drops a workload, known or not.
	Del(uid string)
	// Retain drops all workloads but those.
	Retain(uids map[string]struct{})
}

// Config says whom a Client talks to.
type Config struct {
	Socket  string // path of the agent's ZDS socket
	Handler Handler
	Logger  *slog.Logger
}

// Client is a node proxy's connection to its agent.
type Client struct {
	cfg Config
}

// New returns a Client that Run connects.
func New(cfg Config) *Client { return &Client{cfg: cfg} }

// errAway wraps what connecting failed with: no stream has begun.
var errAway = errors.New("connecting to the agent")

// Run keeps a stream open until ctx ends, and then returns nil. It logs what
// changes: an attempt that ends as the one before did says nothing new.
func (c *Client) Run(ctx context.Context) error {
	backoff := minBackoff
	logged := ""
	for ctx.Err() == nil {
		ready, end := c.stream(ctx)
		if ready {
			backoff = minBackoff
		}
		if text := end.Error(); ctx.Err() == nil && (ready || text != logged) {
			c.logEnd(end)
			logged = text
		}
		select {
		case <-time.After(backoff/2 + rand.N(backoff)):
		case <-ctx.Done():
		}
		backoff = min(2*backoff, maxBackoff)
	}
	return nil
}

// logEnd logs why there is no stream.
func (c *Client) logEnd(err error) {
	if errors.Is(err, fs.ErrPermission) {
		c.cfg.Logger.Warn("only root may connect to the agent's socket; trying again", "socket", c.cfg.Socket, "err", err)
		return
	}
	if errors.Is(err, errAway) {
		c.cfg.Logger.Info("waiting for the agent", "socket", c.cfg.Socket, "err", err)
		return
	}
	c.cfg.Logger.Warn("ZDS stream ended", "err", err)
}

// stream serves one connection to its end, which is always an error. ready says
// whether the snapshot was completed.
func (c *Client) stream(ctx context.Context) (ready bool, err error) {
	dialed, err := new(net.Dialer).DialContext(ctx, "unixpacket", c.cfg.Socket)
	if err != nil {
		return false, fmt.Errorf("%w: %w", errAway, err)
	}
	conn := dialed.(*net.UnixConn)
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()

	hello, err := packet.Encode(&zdspb.ZdsHello{Version: zdspb.Version_V1})
	if err != nil {
		return false, err
	}
	if err := send(conn, hello); err != nil {
		return false, fmt.Errorf("sending hello: %w", err)
	}
	s := session{conn: conn, handler: c.cfg.Handler, snapshot: make(map[string]struct{})}
	for {
		if err := s.next(ctx); err != nil {
			return s.snapshot == nil, err
		}
		if s.completed {
			s.completed = false
			c.cfg.Logger.Info("ZDS snapshot complete")
		}
	}
}

// session is what one connection remembers.
type session struct {
	conn      *net.UnixConn
	handler   Handler
	snapshot  map[string]struct{} // the pods named so far; nil after its end
	completed bool                // it has just ended
}

// next takes one message in and answers it.
func (s *session) next(ctx context.Context) error {
	b, netns, err := packet.Read(s.conn)
	if err != nil {
		return fmt.Errorf("reading from the agent: %w", err)
	}
	request, err := packet.DecodeRequest(b, packet.Beside(netns))
	if err != nil {
		if netns != nil {
			err = errors.Join(err, netns.Close())
		}
		return err
	}
	refusal := ""
	switch m := request.GetPayload().(type) {
	case *zdspb.WorkloadRequest_Add:
		refusal = s.add(ctx, m.Add, netns)
	case *zdspb.WorkloadRequest_Keep:
		if s.snapshot == nil {
			return errors.New("protocol error: keep after the snapshot")
		}
		s.snapshot[m.Keep.GetUid()] = struct{}{}
	case *zdspb.WorkloadRequest_Del:
		if s.snapshot != nil {
			return errors.New("protocol error: del within the snapshot")
		}
		s.handler.Del(m.Del.GetUid())
	case *zdspb.WorkloadRequest_SnapshotSent:
		if s.snapshot == nil {
			return errors.New("protocol error: a second end of the snapshot")
		}
		s.handler.Retain(s.snapshot)
		s.snapshot, s.completed = nil, true
	}
	return s.answer(refusal)
}

// add returns the reason of a refusal, or "".
func (s *session) add(ctx context.Context, m *zdspb.AddWorkload, netns *os.File) string {
	if s.snapshot != nil {
		s.snapshot[m.GetUid()] = struct{}{}
	}
	info := m.GetWorkloadInfo()
	err := s.handler.Add(ctx, Workload{
		UID:            m.GetUid(),
		Name:           info.GetName(),
		Namespace:      info.GetNamespace(),
		ServiceAccount: info.GetServiceAccount(),
	}, netns)
	if err != nil {
		return err.Error()
	}
	return ""
}

func (s *session) answer(refusal string) error {
	// The packet has room for a reason, but not for any, nor for any bytes.
	const longest = packet.MaxSize / 2
	refusal = strings.ToValidUTF8(refusal[:min(len(refusal), longest)], "")
	b, err := packet.Encode(&zdspb.WorkloadResponse{Payload: &zdspb.WorkloadResponse_Ack{Ack: &zdspb.Ack{Error: refusal}}})
	if err != nil {
		return fmt.Errorf("encoding an answer: %w", err)
	}
	if err := send(s.conn, b); err != nil {
		return fmt.Errorf("sending an answer: %w", err)
	}
	return nil
}

func send(conn *net.UnixConn, b []byte) error {
	if err := conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	return packet.Write(conn, b, nil)
}

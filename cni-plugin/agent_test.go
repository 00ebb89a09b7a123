// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"errors"
	"net"
	"sync"
	"testing"

	"ambientd/cni-plugin/podevent"
)

// fakeAgent is an agent on a real socket: it reads requests as the real one does, notes them, and
// then does what the test says, which may be anything.
type fakeAgent struct {
	listener net.Listener
	behave   behaviour
	conns    sync.WaitGroup

	mu  sync.Mutex
	got []received
}

// received is a request as the agent saw it.
type received struct {
	podevent.Request
	// NetnsFile identifies the namespace that came along, as fileID does; empty if none did.
	NetnsFile string `json:"netns"`
}

// behaviour answers, or not, a request that has been read. The connection is closed after it.
type behaviour func(conn net.Conn) error

// startAgent listens at socket until the test ends.
func startAgent(tb testing.TB, socket string, behave behaviour) *fakeAgent {
	tb.Helper()
	agent, err := newAgent(socket, behave)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := agent.close(); err != nil {
			tb.Error(err)
		}
	})
	return agent
}

func newAgent(socket string, behave behaviour) (*fakeAgent, error) {
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return nil, err
	}
	agent := &fakeAgent{listener: listener, behave: behave}
	agent.conns.Go(agent.accept)
	return agent, nil
}

func (a *fakeAgent) close() error {
	err := a.listener.Close()
	a.conns.Wait()
	return err
}

func (a *fakeAgent) accept() {
	for {
		conn, err := a.listener.Accept()
		if err != nil {
			return // closed by the test
		}
		a.conns.Go(func() {
			defer conn.Close()
			a.serve(conn.(*net.UnixConn))
		})
	}
}

func (a *fakeAgent) serve(conn *net.UnixConn) {
	req, netns, err := podevent.ReadRequest(conn)
	if err != nil {
		return // a plugin that was killed; what it should have sent the test misses
	}
	got := received{Request: req}
	if netns != nil {
		got.NetnsFile = fileID(netns)
		defer netns.Close()
	}
	a.mu.Lock()
	a.got = append(a.got, got)
	a.mu.Unlock()
	// A plugin that has given up is what some tests want: it shows in the plugin's own error.
	_ = a.behave(conn)
}

// take returns the requests that came since it was last called.
func (a *fakeAgent) take() []received {
	a.mu.Lock()
	defer a.mu.Unlock()
	got := a.got
	a.got = nil
	return got
}

// answers sends a reply.
func answers(reply podevent.Reply) behaviour {
	return func(conn net.Conn) error { return podevent.WriteReply(conn, reply) }
}

// sendsRaw sends a frame with any payload.
func sendsRaw(payload []byte) behaviour {
	return func(conn net.Conn) error {
		_, err := conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(payload))), payload...))
		return err
	}
}

// staysSilent waits until the plugin gives up.
func staysSilent(conn net.Conn) error {
	if n, err := conn.Read(make([]byte, 1)); n > 0 || err == nil {
		return errors.New("the plugin sent more than its request")
	}
	return nil
}

// hangsUp closes without an answer.
func hangsUp(net.Conn) error { return nil }

// hangsUpInReply closes after the first half of an answer.
func hangsUpInReply(conn net.Conn) error {
	_, err := conn.Write([]byte{0, 0, 0, 30, '{', '"'})
	return err
}

// announcesTooMuch begins an answer that is longer than allowed.
func announcesTooMuch(conn net.Conn) error {
	_, err := conn.Write(binary.BigEndian.AppendUint32(nil, podevent.MaxReply+1))
	return err
}

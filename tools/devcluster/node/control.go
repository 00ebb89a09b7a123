// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"time"
)

// Program is one that a node runs.
type Program struct {
	Name string   `json:"name"`
	Args []string `json:"args"`
	Env  []string `json:"env,omitempty"`
	// Log is the file that gets what it prints.
	Log string `json:"log"`
}

// Status is what became of a program.
type Status struct {
	Name string `json:"name"`
	// PID is the process' in the node's process namespace.
	PID int `json:"pid"`
	// Ended is empty while it runs.
	Ended string `json:"ended,omitempty"`
	Log   string `json:"log"`
}

// The orders of the control socket: one request and one reply a connection, as JSON.
const (
	opStart   = "start"
	opRestart = "restart"
	opStop    = "stop"
	opList    = "list"
)

type request struct {
	Op      string   `json:"op"`
	Program *Program `json:"program,omitempty"`
	Name    string   `json:"name,omitempty"`
}

type reply struct {
	Error    string   `json:"error,omitempty"`
	Programs []Status `json:"programs,omitempty"`
}

// Control gives orders to a node's init process.
type Control struct{ Socket string }

// Start starts a program on the node.
func (c Control) Start(ctx context.Context, p Program) error {
	_, err := c.ask(ctx, request{Op: opStart, Program: &p})
	return err
}

// Restart starts a program again as it was started first; it must have ended.
func (c Control) Restart(ctx context.Context, name string) error {
	_, err := c.ask(ctx, request{Op: opRestart, Name: name})
	return err
}

// Stop ends a program, with SIGKILL if it does not obey SIGTERM for long.
func (c Control) Stop(ctx context.Context, name string) error {
	_, err := c.ask(ctx, request{Op: opStop, Name: name})
	return err
}

// List says which programs were started, and which of them have ended.
func (c Control) List(ctx context.Context) ([]Status, error) {
	r, err := c.ask(ctx, request{Op: opList})
	return r.Programs, err
}

// Running returns an error, with the end of the log, if the program has ended.
func (c Control) Running(ctx context.Context, name string) error {
	programs, err := c.List(ctx)
	if err != nil {
		return err
	}
	for _, p := range programs {
		if p.Name == name && p.Ended != "" {
			return fmt.Errorf("%s has ended (%s); its log %s ends with:\n%s", name, p.Ended, p.Log, tail(p.Log, 15))
		}
	}
	return nil
}

func (c Control) ask(ctx context.Context, r request) (reply, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*stopDeadline)
	defer cancel()
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", c.Socket)
	if err != nil {
		return reply{}, fmt.Errorf("reaching the node's init process: %w", err)
	}
	defer conn.Close()
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			return reply{}, fmt.Errorf("reaching the node's init process: %w", err)
		}
	}
	var answer reply
	if err := json.NewEncoder(conn).Encode(r); err != nil {
		return reply{}, fmt.Errorf("asking the node's init process to %s: %w", r.Op, err)
	}
	if err := json.NewDecoder(conn).Decode(&answer); err != nil {
		return reply{}, fmt.Errorf("asking the node's init process to %s: %w", r.Op, err)
	}
	if answer.Error != "" {
		return answer, errors.New(answer.Error)
	}
	return answer, nil
}

// serve answers one connection of the control socket.
func (s *supervisor) serve(conn net.Conn) {
	defer conn.Close()
	var r request
	if err := conn.SetDeadline(time.Now().Add(2 * stopDeadline)); err != nil {
		return
	}
	if err := json.NewDecoder(conn).Decode(&r); err != nil {
		return // whoever hung up has nobody to tell
	}
	var answer reply
	var err error
	switch {
	case r.Op == opStart && r.Program != nil:
		err = s.start(*r.Program)
	case r.Op == opRestart:
		err = s.restart(r.Name)
	case r.Op == opStop:
		err = s.stop(r.Name)
	case r.Op == opList:
		answer.Programs = s.list()
	default:
		err = fmt.Errorf("unknown order %q", r.Op)
	}
	if err != nil {
		answer.Error = err.Error()
	}
	if err := json.NewEncoder(conn).Encode(answer); err != nil {
		fmt.Fprintf(os.Stderr, "answering %s: %v\n", r.Op, err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// podCommand is the first argument of this program where it is what runs in a pod.
const podCommand = "in-pod"

const (
	serverPort = 8080
	// exchangeTimeout bounds one exchange between client and server. It covers what the
	// proxies do for the first connection: TLS, and certificates.
	exchangeTimeout = 10 * time.Second
	// maxRequest bounds a request line, in bytes.
	maxRequest = 4096
)

// reply is what the server answers, in one line of JSON.
type reply struct {
	// Word is the server's own, by which its answer is known in captured packets.
	Word string `json:"word"`
	// Heard is what the client said.
	Heard string `json:"heard"`
	// Peer is the address that the server saw the client at.
	Peer string `json:"peer"`
}

// exchange is what the client prints, in one line of JSON.
type exchange struct {
	// Local is the client's own address of the connection.
	Local string `json:"local"`
	Reply reply  `json:"reply"`
}

// runInPod is the program in a pod: a server or a client of plain TCP, which knows
// nothing of any mesh.
func runInPod(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("demo "+podCommand, flag.ContinueOnError)
	word := flags.String("word", "", "what to say")
	to := flags.String("to", "", "client: the server's ADDRESS:PORT")
	if len(args) == 0 {
		return errors.New("which program: server or client?")
	}
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	switch args[0] {
	case "server":
		return serve(ctx, *word, out)
	case "client":
		got, err := ask(ctx, *to, *word)
		if err != nil {
			return err
		}
		return json.NewEncoder(out).Encode(got)
	}
	return fmt.Errorf("unknown program %q", args[0])
}

// serve answers every connection, until ctx ends. It says in one line of JSON that it
// listens.
func serve(ctx context.Context, word string, out io.Writer) error {
	var listen net.ListenConfig
	listener, err := listen.Listen(ctx, "tcp", fmt.Sprintf("[::]:%d", serverPort))
	if err != nil {
		return fmt.Errorf("listening: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { listener.Close() })
	defer stop()
	if err := json.NewEncoder(out).Encode(map[string]string{"msg": "listening", "address": listener.Addr().String()}); err != nil {
		return fmt.Errorf("saying that it listens: %w", err)
	}
	return serveListener(ctx, listener, word)
}

func serveListener(ctx context.Context, listener net.Listener, word string) error {
	var connections sync.WaitGroup
	defer connections.Wait()
	for {
		conn, err := listener.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("accepting: %w", err)
		}
		connections.Go(func() {
			defer conn.Close()
			// A client that does not get its answer complains itself.
			_ = answer(conn, word)
		})
	}
}

func answer(conn net.Conn, word string) error {
	if err := conn.SetDeadline(time.Now().Add(exchangeTimeout)); err != nil {
		return fmt.Errorf("setting a deadline: %w", err)
	}
	request := bufio.NewScanner(conn)
	request.Buffer(nil, maxRequest)
	if !request.Scan() {
		return fmt.Errorf("reading the request: %w", errors.Join(request.Err(), io.ErrUnexpectedEOF))
	}
	return json.NewEncoder(conn).Encode(reply{Word: word, Heard: request.Text(), Peer: conn.RemoteAddr().String()})
}

// ask says word to the server at address and returns its answer.
func ask(ctx context.Context, address, word string) (exchange, error) {
	ctx, cancel := context.WithTimeout(ctx, exchangeTimeout)
	defer cancel()
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return exchange{}, err // names the address
	}
	defer conn.Close()
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			return exchange{}, fmt.Errorf("setting a deadline: %w", err)
		}
	}
	if _, err := fmt.Fprintln(conn, word); err != nil {
		return exchange{}, fmt.Errorf("asking %s: %w", address, err)
	}
	got := exchange{Local: conn.LocalAddr().String()}
	if err := json.NewDecoder(conn).Decode(&got.Reply); err != nil {
		return exchange{}, fmt.Errorf("reading the answer of %s: %w", address, err)
	}
	return got, nil
}

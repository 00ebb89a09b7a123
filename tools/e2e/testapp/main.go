// SPDX-License-Identifier: Apache-2.0

// Testapp is what runs in the pods of the end-to-end tests: a server of plain HTTP that
// says who answers and whom it saw, and a client of it. It knows nothing of any mesh.
//
//	testapp serve [--listen :8080]
//	testapp get [--attempts 1] [--every 1s] http://ADDRESS:8080/
//
// A client with --attempts 0 goes on until it is ended. Its exit code is 0 if the last
// attempt had an answer, so that it serves as a Job and in `kubectl exec`.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"
)

const (
	// exchangeTimeout bounds one request. It covers what the proxies do for the first
	// connection: TLS, and certificates.
	exchangeTimeout = 5 * time.Second
	maxAnswer       = 64 << 10 // bytes
)

// answer is what the server says, in one line of JSON.
type answer struct {
	Pod  string `json:"pod"`  // host name of the server, which is its pod's name
	Peer string `json:"peer"` // the address that the server saw the client at
	Host string `json:"host"` // whom the client asked
}

// attempt is what the client prints, in one line of JSON.
type attempt struct {
	Time   time.Time `json:"time"`
	Answer *answer   `json:"answer,omitempty"`
	Err    string    `json:"err,omitempty"`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "testapp:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	if len(args) == 0 {
		return errors.New("which command: serve or get?")
	}
	switch args[0] {
	case "serve":
		return serve(ctx, args[1:], out)
	case "get":
		return get(ctx, args[1:], out)
	}
	return fmt.Errorf("unknown command %q, only serve and get", args[0])
}

// serve answers until ctx ends. It says in one line of JSON that it listens.
func serve(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("testapp serve", flag.ContinueOnError)
	address := flags.String("listen", ":8080", "`address` to serve at")
	if err := flags.Parse(args); err != nil {
		return err
	}
	pod, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("asking for the host name: %w", err)
	}
	var listen net.ListenConfig
	listener, err := listen.Listen(ctx, "tcp", *address)
	if err != nil {
		return fmt.Errorf("listening: %w", err)
	}
	if err := json.NewEncoder(out).Encode(map[string]string{"msg": "listening", "address": listener.Addr().String()}); err != nil {
		return errors.Join(fmt.Errorf("saying that it listens: %w", err), listener.Close())
	}
	server := &http.Server{
		ReadHeaderTimeout: exchangeTimeout,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			// Who does not get the answer complains itself.
			_ = json.NewEncoder(w).Encode(answer{Pod: pod, Peer: r.RemoteAddr, Host: r.Host})
		}),
	}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving: %w", err)
	}
	return nil
}

// get asks, each time on a new connection, and prints what came of it.
func get(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("testapp get", flag.ContinueOnError)
	attempts := flags.Int("attempts", 1, "how `often` to ask until there is an answer; 0: for ever, answered or not")
	every := flags.Duration("every", time.Second, "the `time` from one attempt to the next")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() != 1 || *attempts < 0 || *every <= 0 {
		return errors.New("usage: testapp get [--attempts N] [--every TIME] URL")
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: exchangeTimeout}
	ticker := time.NewTicker(*every)
	defer ticker.Stop()
	for n := 1; ; n++ {
		got, err := ask(ctx, client, flags.Arg(0))
		line := attempt{Time: time.Now(), Answer: got}
		if err != nil {
			line.Err = err.Error()
		}
		if err := json.NewEncoder(out).Encode(line); err != nil {
			return fmt.Errorf("printing the answer: %w", err)
		}
		if *attempts > 0 && (err == nil || n == *attempts) {
			return err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return err
		}
	}
}

func ask(ctx context.Context, client *http.Client, url string) (*answer, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	response, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("the server answered %s", response.Status)
	}
	var got answer
	if err := json.NewDecoder(io.LimitReader(response.Body, maxAnswer)).Decode(&got); err != nil {
		return nil, fmt.Errorf("reading the answer: %w", err)
	}
	return &got, nil
}

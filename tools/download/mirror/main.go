// SPDX-License-Identifier: Apache-2.0

// Mirror is the HTTPS server that the tests of tools/download-*.sh fetch from. It serves
// the files of a directory, well or badly: the first segment of a path says how, the
// second is the test's own, and the rest names the file.
//
//	/ok/t1/ztunnel-0-amd64
//	/status=503,times=2,retry-after=7/t2/ztunnel-0-amd64
//
// It owns no assertions: what it was asked goes to a log, as JSON, for the tests to read.
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: mirror DIRECTORY")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "mirror:", err)
		os.Exit(1)
	}
}

// run serves the directory's "files" until the context ends. It writes ca.pem and log
// there, and prints the ports "NAMED OTHER PLAIN", where PLAIN speaks no TLS.
func run(ctx context.Context, dir string) error {
	certificate, err := newCertificate(filepath.Join(dir, "ca.pem"))
	if err != nil {
		return fmt.Errorf("making the certificate: %w", err)
	}
	log, err := os.OpenFile(filepath.Join(dir, "log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("opening the log: %w", err)
	}
	defer log.Close()

	var ports []string
	ended := make(chan error, 3)
	m := &mirror{files: filepath.Join(dir, "files"), log: log, asked: map[string]int{}}
	for _, name := range []string{named, other, plain} {
		listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp4", "127.0.0.1:0")
		if err != nil {
			return fmt.Errorf("listening: %w", err)
		}
		_, port, err := net.SplitHostPort(listener.Addr().String())
		if err != nil {
			return fmt.Errorf("reading the address: %w", err)
		}
		ports = append(ports, port)
		server := &http.Server{
			Handler:           m.handler(name),
			ReadHeaderTimeout: 10 * time.Second,
			TLSConfig:         certificate,
			Protocols:         new(http.Protocols),
		}
		server.Protocols.SetHTTP1(true)
		// A connection that breaks looks different there.
		server.Protocols.SetHTTP2(name == other)
		defer server.Close() //nolint:errcheck // the process ends
		go func() {
			if name == plain {
				ended <- server.Serve(listener)
				return
			}
			ended <- server.ServeTLS(listener, "", "")
		}()
	}
	m.setPorts(ports)
	if _, err := fmt.Println(ports[0], ports[1], ports[2]); err != nil {
		return fmt.Errorf("saying where it listens: %w", err)
	}
	select {
	case <-ctx.Done():
		return nil
	case err := <-ended:
		return errors.Join(errors.New("a server ended"), err)
	}
}

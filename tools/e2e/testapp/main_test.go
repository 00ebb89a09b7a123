// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
)

// server starts a server and returns its URL.
func server(t *testing.T) string {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	said, say := io.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- run(ctx, []string{"serve", "--listen=127.0.0.1:0"}, say) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("the server ended with %v", err)
		}
	})
	line, err := bufio.NewReader(said).ReadBytes('\n')
	if err != nil {
		t.Fatal(err)
	}
	var listening struct{ Address string }
	if err := json.Unmarshal(line, &listening); err != nil {
		t.Fatal(err)
	}
	return "http://" + listening.Address + "/"
}

func lines(t *testing.T, out *bytes.Buffer) []attempt {
	t.Helper()
	var all []attempt
	for decoder := json.NewDecoder(out); decoder.More(); {
		var a attempt
		if err := decoder.Decode(&a); err != nil {
			t.Fatal(err)
		}
		all = append(all, a)
	}
	return all
}

func TestGet(t *testing.T) {
	url := server(t)
	var out bytes.Buffer
	if err := run(t.Context(), []string{"get", url}, &out); err != nil {
		t.Fatal(err)
	}
	got := lines(t, &out)
	if len(got) != 1 || got[0].Answer == nil {
		t.Fatalf("printed %+v", got)
	}
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	host, _, err := net.SplitHostPort(got[0].Answer.Peer)
	if err != nil || host != "127.0.0.1" || got[0].Answer.Pod != name || "http://"+got[0].Answer.Host+"/" != url {
		t.Errorf("answer %+v (%v)", *got[0].Answer, err)
	}
}

// A Job that comes before its server goes on asking, and ends with the first answer.
func TestGetUntilAnswered(t *testing.T) {
	asked := 0
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	late := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if asked++; asked < 3 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		_, _ = io.WriteString(w, `{"pod":"late"}`)
	})}
	defer late.Close()
	go func() { _ = late.Serve(listener) }()
	var out bytes.Buffer
	if err := run(t.Context(), []string{"get", "--attempts=10", "--every=1ms", "http://" + listener.Addr().String()}, &out); err != nil {
		t.Fatal(err)
	}
	if got := lines(t, &out); len(got) != 3 || got[1].Err != "the server answered 503 Service Unavailable" || got[2].Answer.Pod != "late" {
		t.Errorf("printed %+v", got)
	}
}

func TestGetUnanswered(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	listener.Close()
	var out bytes.Buffer
	err = run(t.Context(), []string{"get", "--attempts=2", "--every=1ms", "http://" + address}, &out)
	if err == nil || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("ended with %v", err)
	}
	if got := lines(t, &out); len(got) != 2 || got[0].Err == "" || got[1].Err == "" {
		t.Errorf("printed %+v", got)
	}
}

func TestUsage(t *testing.T) {
	for _, args := range [][]string{nil, {"put"}, {"get"}, {"get", "--every=0s", "http://x"}, {"serve", "--listen=nowhere"}} {
		if err := run(t.Context(), args, io.Discard); err == nil {
			t.Errorf("%q was accepted", args)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package spool_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"ambientd/cni-plugin/podevent"
	"ambientd/nodeagent/spool"
)

// patience bounds what a test awaits; nothing takes this long.
const patience = 30 * time.Second

// events is a handler that notes the containers of the events.
type events struct {
	got chan string
	err *podevent.Error
	in  func(ctx context.Context)
}

func (e *events) Handle(ctx context.Context, req podevent.Request, netns *os.File) podevent.Reply {
	if e.in != nil {
		e.in(ctx)
	}
	if req.Command != podevent.CommandDel || netns != nil {
		req.ContainerID = fmt.Sprintf("no DEL: %+v", req)
	}
	e.got <- req.ContainerID
	return podevent.Reply{Result: podevent.ResultWithdrawn, Error: e.err}
}

// taken are the containers of the events that came.
func (e *events) taken() (got []string) {
	for {
		select {
		case container := <-e.got:
			got = append(got, container)
		default:
			return got
		}
	}
}

// log is a writer for a logger that tests read while it is written to.
type log struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

func open(t *testing.T, handler spool.Handler) (s *spool.Spool, dir string, lines *log) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "spool")
	lines = &log{}
	s, err := spool.Open(spool.Config{Dir: dir, Handler: handler, Logger: slog.New(slog.NewTextHandler(lines, nil)), Poll: 5 * time.Millisecond})
	must(t, err)
	return s, dir, lines
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func leave(t *testing.T, dir, container string) {
	t.Helper()
	must(t, podevent.Spool(dir, podevent.Request{
		Command: podevent.CommandDel, Network: "n", ContainerID: container, IfName: "eth0", Pod: podevent.Pod{Namespace: "shop", Name: "p-" + container},
	}))
}

func empty(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	for _, entry := range entries {
		t.Errorf("the spool still holds %s", entry.Name())
	}
}

func TestDrainTakesAllOldestFirst(t *testing.T) {
	handler := &events{got: make(chan string, 100)}
	s, dir, lines := open(t, handler)
	var want []string
	for i := range 20 {
		want = append(want, fmt.Sprint("c", i))
		leave(t, dir, want[i])
	}
	must(t, s.Drain(t.Context()))
	if got := handler.taken(); !slices.Equal(got, want) {
		t.Errorf("taken: %q", got)
	}
	empty(t, dir)
	if text := lines.String(); strings.Count(text, "event of the spool taken up") != 20 || !strings.Contains(text, "pod=shop/p-c0") {
		t.Errorf("log: %s", text)
	}
	must(t, s.Drain(t.Context()))
	if got := handler.taken(); len(got) > 0 {
		t.Errorf("taken again: %q", got)
	}
}

// What is no event is removed with one line each, and keeps nothing back.
func TestDrainRemovesWhatIsNoEvent(t *testing.T) {
	handler := &events{got: make(chan string, 100)}
	s, dir, lines := open(t, handler)
	outside := filepath.Join(t.TempDir(), "outside")
	must(t, os.WriteFile(outside, []byte("keep"), 0o600))
	for name, content := range map[string]string{
		"0-torn.json": `{"version":1,"command":"DEL","net`, "0-empty": "", "0-add.json": `{"version":1,"command":"ADD","network":"n"}`,
		"0-newer.json": `{"version":2}`, "0-long.json": strings.Repeat(" ", podevent.MaxSpooledBytes+1),
	} {
		must(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	must(t, os.Symlink(outside, filepath.Join(dir, "0-link.json")))
	must(t, syscall.Mkfifo(filepath.Join(dir, "0-fifo.json"), 0o600))
	must(t, syscall.Mknod(filepath.Join(dir, "0-socket.json"), syscall.S_IFSOCK|0o600, 0))
	must(t, os.Mkdir(filepath.Join(dir, "0-dir"), 0o700))
	leave(t, dir, "c1")
	must(t, s.Drain(t.Context()))
	if got := handler.taken(); !slices.Equal(got, []string{"c1"}) {
		t.Errorf("taken: %q", got)
	}
	empty(t, dir)
	if n := strings.Count(lines.String(), "is no event of the plugin's"); n != 9 {
		t.Errorf("%d lines, want 9:\n%s", n, lines)
	}
	if content, err := os.ReadFile(outside); err != nil || string(content) != "keep" {
		t.Errorf("what the link led to: %q, %v", content, err)
	}
}

// A file that cannot be removed is taken once and told of once.
func TestStuck(t *testing.T) {
	handler := &events{got: make(chan string, 100)}
	s, dir, lines := open(t, handler)
	stuck := filepath.Join(dir, "0-dir")
	must(t, os.MkdirAll(filepath.Join(stuck, "full"), 0o700))
	for range 3 {
		must(t, s.Drain(t.Context()))
	}
	if text := lines.String(); strings.Count(text, "\n") != 2 || !strings.Contains(text, "cannot be removed") {
		t.Errorf("log:\n%s", text)
	}
	must(t, os.RemoveAll(stuck))
	must(t, s.Drain(t.Context()))
	empty(t, dir)
}

// An unfinished file is its plugin's, until that has certainly ended.
func TestUnfinished(t *testing.T) {
	s, dir, lines := open(t, &events{got: make(chan string, 1)})
	fresh, old := filepath.Join(dir, podevent.SpoolTempPrefix+"1"), filepath.Join(dir, podevent.SpoolTempPrefix+"2")
	must(t, os.WriteFile(fresh, nil, 0o600))
	must(t, os.WriteFile(old, nil, 0o600))
	must(t, os.Chtimes(old, time.Now(), time.Now().Add(-2*time.Minute)))
	must(t, s.Drain(t.Context()))
	if _, err := os.Lstat(fresh); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(old); !os.IsNotExist(err) {
		t.Errorf("the old one: %v", err)
	}
	if lines.String() != "" {
		t.Errorf("log: %s", lines)
	}
}

// TestRun is a part of case 27: what comes after the spool was drained is taken up, by the
// kernel's notification or, without that, by polling.
func TestRun(t *testing.T) {
	handler := &events{got: make(chan string, 100)}
	s, dir, _ := open(t, handler)
	leave(t, dir, "before")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	for i, container := range []string{"before", "c1", "c2", "after"} {
		if i == 3 { // the watch is of the directory that was
			must(t, os.Rename(dir, dir+".old"))
			must(t, os.Mkdir(dir, 0o700))
		}
		if i > 0 {
			leave(t, dir, container)
		}
		select {
		case got := <-handler.got:
			if got != container {
				t.Errorf("taken: %s, want %s", got, container)
			}
		case <-time.After(patience):
			t.Fatalf("%s was not taken up", container)
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// An event that the agent's end cuts short is left for the next agent.
func TestEndLeavesTheEvent(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	s, dir, _ := open(t, &events{got: make(chan string, 1), in: func(context.Context) { cancel() }})
	leave(t, dir, "c1")
	must(t, s.Run(ctx))
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("the spool holds %v, %v", entries, err)
	}
}

// An event that fails is not kept: DELs are not repeated for ever.
func TestFailureIsTold(t *testing.T) {
	handler := &events{got: make(chan string, 1), err: &podevent.Error{Code: 11, Msg: "not now"}}
	s, dir, lines := open(t, handler)
	leave(t, dir, "c1")
	must(t, s.Drain(t.Context()))
	empty(t, dir)
	if !strings.Contains(lines.String(), "not now") {
		t.Errorf("log: %s", lines)
	}
}

func TestOpenRefuses(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(file, nil, 0o600))
	link := filepath.Join(t.TempDir(), "link")
	must(t, os.Symlink(t.TempDir(), link))
	for _, test := range []struct{ dir, want string }{
		{"", "are needed"}, {file, "no directory"}, {link, "no directory"}, {filepath.Join(file, "spool"), "making the spool"},
	} {
		_, err := spool.Open(spool.Config{Dir: test.dir, Handler: &events{}, Logger: slog.New(slog.DiscardHandler)})
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%q: %v", test.dir, err)
		}
	}
}

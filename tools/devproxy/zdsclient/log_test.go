// SPDX-License-Identifier: Apache-2.0

package zdsclient_test

import (
	"context"
	"log/slog"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"ambientd/tools/devproxy/zdsclient"
)

// lines is a slog.Handler that passes records on.
type lines chan slog.Record

func (lines) Enabled(context.Context, slog.Level) bool { return true }

func (l lines) Handle(_ context.Context, r slog.Record) error {
	l <- r
	return nil
}

func (l lines) WithAttrs([]slog.Attr) slog.Handler { return l }

func (l lines) WithGroup(string) slog.Handler { return l }

// next returns the next record, which must have that message.
func (l lines) next(t *testing.T, ctx context.Context, want string) slog.Record {
	t.Helper()
	select {
	case r := <-l:
		if r.Message != want {
			t.Fatalf("logged %q, want %q", r.Message, want)
		}
		return r
	case <-ctx.Done():
		t.Fatalf("%q is not logged", want)
		return slog.Record{}
	}
}

// attr returns an attribute of a record as text; "" if it has none of that key.
func attr(r slog.Record, key string) string {
	var found string
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == key {
			found = a.Value.String()
		}
		return true
	})
	return found
}

// However often the client tries, it says once that there is no agent, and where it
// looks for one.
func TestWaitingForTheAgentIsLoggedOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "zds.sock")
	synctest.Test(t, func(t *testing.T) {
		log := make(lines, 1000)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		c := zdsclient.New(zdsclient.Config{Socket: path, Handler: newRecorder(), Logger: slog.New(log)})
		go func() { done <- c.Run(ctx) }()
		time.Sleep(10 * time.Minute)
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run = %v", err)
		}
		close(log)
		r := <-log
		if r.Message != "waiting for the agent" || r.Level != slog.LevelInfo || attr(r, "socket") != path {
			t.Errorf("logged %s %q, socket %q; want the wait for %s", r.Level, r.Message, attr(r, "socket"), path)
		}
		for r := range log {
			t.Errorf("logged again: %q %s", r.Message, attr(r, "err"))
		}
	})
}

func TestChangesAreLogged(t *testing.T) {
	ctx := deadline(t)
	path := socket(t)
	log := make(lines, 1000)
	runLogged(t, path, newRecorder(), slog.New(log))
	log.next(t, ctx, "waiting for the agent")
	for range 2 {
		_, stop := agent(t, path)
		log.next(t, ctx, "ZDS snapshot complete")
		stop()
		log.next(t, ctx, "ZDS stream ended")
		log.next(t, ctx, "waiting for the agent")
	}
}

// An agent that takes the connection and ends it, each time, is told of once.
func TestAStreamThatNeverGetsReadyIsLoggedOnce(t *testing.T) {
	ctx := deadline(t)
	path := socket(t)
	l := listen(t, path)
	log := make(lines, 1000)
	runLogged(t, path, newRecorder(), slog.New(log))
	for range 3 {
		accept(t, l).conn.Close()
	}
	log.next(t, ctx, "ZDS stream ended")
	a := accept(t, l)
	a.send(snapshotSent())
	log.next(t, ctx, "ZDS snapshot complete")
}

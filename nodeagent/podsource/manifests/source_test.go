// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ambientd/nodeagent/podsource"
)

// What is a pipe by the time it is opened, with a writer who says nothing, stands
// for every file that can be waited for, such as a link to /proc/kmsg.
func TestReadingNeverWaits(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe.yaml")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	writer, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer writer.Close()
	read := make(chan error, 1)
	go func() {
		_, err := readBounded(path)
		read <- err
	}()
	select {
	case err := <-read:
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("error %v, want that it took too long", err)
		}
	case <-time.After(20 * readTimeout):
		t.Error("still reading")
	}
}

// A file that could not be opened, because the process had too many open, is read
// again when that has passed, though it has not changed.
func TestPassingErrorsPass(t *testing.T) {
	dir := t.TempDir()
	// A file that was there long before, so that its stamp is believed.
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, "a.yaml")); err != nil {
		t.Fatal(err)
	}
	if f := loadFile(dir, "a.yaml", nil); f.err == nil || errors.Is(f.err, unix.EMFILE) {
		t.Fatalf("error %v, want one about the content", f.err)
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Max: limit.Max}); err != nil {
		t.Fatal(err)
	}
	f := loadFile(dir, "a.yaml", nil)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(f.err, unix.EMFILE) {
		t.Fatalf("error %v, want EMFILE", f.err)
	}
	if again := loadFile(dir, "a.yaml", f); errors.Is(again.err, unix.EMFILE) {
		t.Errorf("the error stays: %v", again.err)
	}
}

// While the directory cannot be read, because its file system hangs, a Lookup ends
// with its context.
func TestLookupEndsWithItsContext(t *testing.T) {
	s, err := New(Config{Dir: t.TempDir(), Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	s.reading.Lock()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	looked := make(chan error, 1)
	go func() {
		_, err := s.Lookup(ctx, "shop", "web", "")
		looked <- err
	}()
	select {
	case err = <-looked:
	case <-time.After(10 * time.Second):
		t.Error("still looking")
	}
	s.reading.Unlock()
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v, want the context's", err)
	}
	if _, err := s.Lookup(t.Context(), "shop", "web", ""); !errors.Is(err, podsource.ErrNotFound) {
		t.Errorf("error %v, want podsource.ErrNotFound once the directory can be read", err)
	}
}

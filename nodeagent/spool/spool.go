// SPDX-License-Identifier: Apache-2.0

// Package spool takes up the events that the CNI plugin has left on disk because no
// agent answered it: DELs of pods, one file each, as [podevent.Spool] writes them.
//
// It owns the directory, the order (oldest first), and that each event is handed over
// once at least and then removed. It refuses to know what an event means, and to trust a
// file: what cannot be read as an event is removed, with a line in the log.
package spool

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"

	"ambientd/cni-plugin/podevent"
)

const (
	// defaultPoll is how often the directory is read though the kernel tells of nothing.
	defaultPoll = 10 * time.Second

	// defaultTimeout bounds the work on one event, as for a DEL that comes by the socket.
	defaultTimeout = 30 * time.Second

	// staleTemp is the age at which an unfinished file's plugin has certainly ended: it
	// gives itself a second.
	staleTemp = time.Minute
)

// Handler serves an event as if the plugin had just sent it.
type Handler interface {
	Handle(ctx context.Context, req podevent.Request, netns *os.File) podevent.Reply
}

// Config is what a [Spool] works with.
type Config struct {
	Dir     string        // required; its parent must exist when Open is called
	Handler Handler       // required
	Logger  *slog.Logger  // required; gets a line for each event and for what is no event
	Poll    time.Duration // zero means 10 s
	Timeout time.Duration // of one event; zero means 30 s
}

// Spool is the directory. Its methods are for one goroutine at a time.
type Spool struct {
	cfg Config
	// stuck are the names of what has been dealt with and cannot be removed.
	stuck map[string]struct{}
}

// Open makes the directory, or takes it over.
func Open(cfg Config) (*Spool, error) {
	if cfg.Dir == "" || cfg.Handler == nil || cfg.Logger == nil {
		return nil, errors.New("spool: a directory, a handler and a logger are needed")
	}
	if cfg.Poll == 0 {
		cfg.Poll = defaultPoll
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = defaultTimeout
	}
	if err := os.Mkdir(cfg.Dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("making the spool: %w", err)
	}
	info, err := os.Lstat(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("looking at the spool: %w", err)
	}
	if !info.IsDir() {
		return nil, fmt.Errorf("%s, where the spool is to be, exists and is no directory; remove it", cfg.Dir)
	}
	if err := os.Chmod(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("setting the mode of the spool: %w", err)
	}
	return &Spool{cfg: cfg, stuck: map[string]struct{}{}}, nil
}

// Drain hands over what the spool holds, oldest first, until it has read it empty or ctx
// ends. What goes wrong with one file is logged; the error is about the directory.
func (s *Spool) Drain(ctx context.Context) error {
	entries, err := os.ReadDir(s.cfg.Dir) // sorted by name, which begins with the time
	if err != nil {
		return fmt.Errorf("reading the spool: %w", err)
	}
	for _, entry := range entries {
		if ended(ctx) {
			return nil // what is left the next agent takes
		}
		if strings.HasPrefix(entry.Name(), podevent.SpoolTempPrefix) {
			s.dropStale(entry)
			continue
		}
		s.take(ctx, entry.Name())
	}
	return nil
}

// Run takes up what comes, until ctx ends, and then returns nil: a plugin may find no
// agent, and write its event when the next one has drained the spool already.
func (s *Spool) Run(ctx context.Context) error {
	watcher, err := fsnotify.NewWatcher()
	if err == nil {
		defer func() { _ = watcher.Close() }() // nobody listens any more
		err = watcher.Add(s.cfg.Dir)
	} else {
		watcher = &fsnotify.Watcher{} // its nil channels never deliver
	}
	if err != nil {
		s.cfg.Logger.Warn("events in the spool are noticed late, by polling", "dir", s.cfg.Dir, "poll", s.cfg.Poll, "err", err)
	}
	poll := time.NewTicker(s.cfg.Poll)
	defer poll.Stop()
	told := "" // of what is wrong with the directory
	for {
		// First what came between the last look and the watch.
		switch err := s.Drain(ctx); {
		case err == nil:
			told = ""
		case err.Error() != told:
			told = err.Error()
			s.cfg.Logger.Error("the spool cannot be read, it is tried again", "dir", s.cfg.Dir, "err", err)
		}
		if !s.await(ctx, watcher, poll.C) {
			return nil
		}
	}
}

// await waits for a reason to look again, false at the end of ctx.
func (s *Spool) await(ctx context.Context, watcher *fsnotify.Watcher, poll <-chan time.Time) bool {
	for {
		select {
		case <-ctx.Done():
			return false
		case event := <-watcher.Events:
			// What this package removes, and what is not finished, is no reason.
			if event.Has(fsnotify.Create) && !strings.HasPrefix(filepath.Base(event.Name), podevent.SpoolTempPrefix) {
				return true
			}
		case err := <-watcher.Errors: // events were lost, as a rule
			s.cfg.Logger.Debug("watching the spool", "dir", s.cfg.Dir, "err", err)
			return true
		case <-poll:
			return true
		}
	}
}

func ended(ctx context.Context) bool { return ctx.Err() != nil }

// take deals with one file and removes it.
func (s *Spool) take(ctx context.Context, name string) {
	path := filepath.Join(s.cfg.Dir, name)
	if _, again := s.stuck[name]; !again {
		req, written, err := read(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return
		case err != nil && !isNoEvent(err):
			s.cfg.Logger.Warn("a file in the spool cannot be read, it is tried again", "file", path, "err", err)
			return
		case err != nil:
			s.cfg.Logger.Warn("a file in the spool is no event of the plugin's, it is removed", "file", path, "err", err)
		default:
			s.handle(ctx, req, written)
			if ended(ctx) {
				return // it may have been cut short: the next agent takes it again
			}
		}
	}
	err := os.Remove(path)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		delete(s.stuck, name)
		return
	}
	if _, told := s.stuck[name]; !told {
		s.cfg.Logger.Error("a file in the spool cannot be removed; it is not taken again", "file", path, "err", err)
	}
	s.stuck[name] = struct{}{}
}

func (s *Spool) handle(ctx context.Context, req podevent.Request, written time.Time) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	reply := s.cfg.Handler.Handle(ctx, req, nil)
	log := s.cfg.Logger.With("command", req.Command, "pod", req.Pod.String(), "uid", req.Pod.UID, "container", req.ContainerID,
		"age", time.Since(written).Round(time.Millisecond))
	if reply.Error != nil {
		log.Warn("event of the spool failed", "err", reply.Error)
		return
	}
	level := slog.LevelInfo
	if reply.Reason == podevent.ReasonUnrecorded {
		level = slog.LevelDebug // of a pod that was not in the mesh yet: each of its attempts to start leaves one
	}
	log.Log(ctx, level, "event of the spool taken up", "result", reply.Result, "reason", reply.Reason)
}

// isNoEvent tells what a file holds, or is, from a failure to read it.
func isNoEvent(err error) bool {
	_, otherVersion := errors.AsType[*podevent.VersionError](err)
	// The last two are a symbolic link's and a socket's.
	return otherVersion || errors.Is(err, podevent.ErrMalformed) || errors.Is(err, syscall.ELOOP) || errors.Is(err, syscall.ENXIO)
}

// dropStale removes what a plugin left that was killed while it wrote.
func (s *Spool) dropStale(entry fs.DirEntry) {
	info, err := entry.Info()
	if err != nil || time.Since(info.ModTime()) < staleTemp {
		return
	}
	if err := os.Remove(filepath.Join(s.cfg.Dir, entry.Name())); err != nil {
		s.cfg.Logger.Debug("removing an unfinished file from the spool", "file", entry.Name(), "err", err)
	}
}

// read returns the event and the time at which it was written.
func read(path string) (req podevent.Request, written time.Time, err error) {
	// Without O_NONBLOCK, opening a named pipe waits for a writer.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return req, written, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return req, written, err
	}
	if !info.Mode().IsRegular() {
		return req, written, fmt.Errorf("%w: not a regular file", podevent.ErrMalformed)
	}
	content, err := io.ReadAll(io.LimitReader(f, podevent.MaxSpooledBytes+1))
	if err != nil {
		return req, written, err
	}
	req, err = podevent.DecodeSpooled(content)
	return req, info.ModTime(), err
}

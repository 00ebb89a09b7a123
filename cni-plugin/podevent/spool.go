// SPDX-License-Identifier: Apache-2.0

package podevent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// SpoolInRunDir is where in the run directory the plugin leaves DELs for an agent that is away.
const SpoolInRunDir = "/private/spool"

// Limits of the spool, which is in memory (tmpfs): events of one, and bytes of one event. A node
// has a few hundred pods, and an event 300 bytes.
const (
	MaxSpooled      = 2048
	MaxSpooledBytes = 8 << 10
)

// SpoolTempPrefix begins the name of a file that is still being written.
const SpoolTempPrefix = ".new-"

// Spool leaves a DEL in dir for the next agent: one file for each event, whose names are in the
// order of time. The file is there whole or not at all.
//
// dir is made if need be, but nothing above it is: no agent has run since boot where that is
// missing, so that there is nothing to withdraw. A symbolic link in place of dir or of the directory
// above, or one that another user can write to, is refused.
func Spool(dir string, req Request) error {
	content, err := encodeSpooled(req)
	if err != nil {
		return err
	}
	spool, err := openSpool(dir)
	if err != nil {
		return fmt.Errorf("opening the spool: %w", err)
	}
	defer func() { _ = spool.Close() }() // nothing was written by it
	names, err := spool.Open(".")
	if err != nil {
		return fmt.Errorf("opening the spool: %w", err)
	}
	defer names.Close()
	switch held, err := names.Readdirnames(MaxSpooled); {
	case len(held) == MaxSpooled:
		return fmt.Errorf("the spool %s is full: it holds %d events", dir, MaxSpooled)
	case err != nil && len(held) > 0:
		return fmt.Errorf("reading the spool: %w", err)
	}
	name := fmt.Sprintf("%020d-%d.json", time.Now().UnixNano(), os.Getpid())
	if err := writeSpooled(spool, name, content); err != nil {
		return fmt.Errorf("writing to the spool: %w", err)
	}
	if err := names.Sync(); err != nil {
		return fmt.Errorf("writing to the spool: %w", err)
	}
	return nil
}

func encodeSpooled(req Request) ([]byte, error) {
	req.Version = Version
	if err := checkSpooled(req); err != nil {
		return nil, err
	}
	content, err := json.Marshal(req)
	if err != nil {
		return nil, fmt.Errorf("encoding an event for the spool: %w", err)
	}
	if len(content) > MaxSpooledBytes {
		return nil, fmt.Errorf("the event has %d bytes, the spool takes %d", len(content), MaxSpooledBytes)
	}
	return content, nil
}

func checkSpooled(req Request) error {
	if req.Command != CommandDel {
		return fmt.Errorf("the spool holds %s only, not %.32q", CommandDel, req.Command)
	}
	return req.Validate()
}

// DecodeSpooled reads an event of the spool. The errors are a [*VersionError] or one that wraps
// [ErrMalformed].
func DecodeSpooled(content []byte) (Request, error) {
	var req Request
	if len(content) > MaxSpooledBytes {
		return Request{}, fmt.Errorf("%w: more than %d bytes", ErrMalformed, MaxSpooledBytes)
	}
	if err := decode(content, &req); err != nil {
		return Request{}, err
	}
	if err := checkSpooled(req); err != nil {
		return Request{}, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return req, nil
}

// openSpool opens dir, which it makes if only that is missing.
func openSpool(dir string) (*os.Root, error) {
	above, err := openOwn(filepath.Dir(dir))
	if err != nil {
		return nil, err
	}
	defer func() { _ = above.Close() }() // nothing was written by it
	if err := above.Mkdir(filepath.Base(dir), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	return openOwn(dir)
}

// openOwn opens a directory that nobody else can have put there.
func openOwn(dir string) (*os.Root, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	if err := checkOwn(root, dir); err != nil {
		return nil, errors.Join(err, root.Close())
	}
	return root, nil
}

func checkOwn(root *os.Root, dir string) error {
	opened, err := root.Stat(".")
	if err != nil {
		return err
	}
	// Lstat does not follow a link at the path, which opening it has.
	if at, err := os.Lstat(dir); err != nil || !os.SameFile(at, opened) {
		return fmt.Errorf("%s is a symbolic link, or is being replaced", dir)
	}
	return checkOwner(opened, dir)
}

// checkOwner refuses what another user owns or may write to.
func checkOwner(info fs.FileInfo, path string) error {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok || int(stat.Uid) != os.Geteuid() || info.Mode().Perm()&0o022 != 0 {
		return fmt.Errorf("%s belongs to another user, or others may write to it", path)
	}
	return nil
}

// writeSpooled makes the file whole, or leaves nothing.
func writeSpooled(spool *os.Root, name string, content []byte) (err error) {
	temp := SpoolTempPrefix + name
	file, err := spool.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(content)
	if err == nil {
		err = file.Sync()
	}
	err = errors.Join(err, file.Close())
	if err == nil {
		err = spool.Rename(temp, name)
	}
	if err != nil {
		return errors.Join(err, spool.Remove(temp))
	}
	return nil
}

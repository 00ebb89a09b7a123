// SPDX-License-Identifier: Apache-2.0

package records

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// Modes of the directory and of each file: nobody but root has a use for them.
const (
	dirMode  fs.FileMode = 0o700
	fileMode fs.FileMode = 0o600
)

const (
	suffix     = ".json"
	tempPrefix = ".new-" // of a file that is not yet renamed
	hashPrefix = "~"     // of the name of a UID that is no file name itself
	maxName    = 128     // of a UID that is its own file name, in bytes
)

// Store keeps records in a directory. It is safe for concurrent use; of two Puts for
// one UID the later rename wins, so the caller lets only one work on a pod at a time.
type Store struct {
	dir      string
	volatile bool // see isVolatile
	temps    atomic.Uint64
	known    known
}

// FileError says why a file is no usable record.
type FileError struct {
	Path string
	Err  error
}

// Error names the file and the cause.
func (e *FileError) Error() string { return fmt.Sprintf("record file %s: %v", e.Path, e.Err) }

// Unwrap returns the cause.
func (e *FileError) Unwrap() error { return e.Err }

// Open makes dir, whose parent must exist, or takes it over if it exists, sets its mode,
// and removes what an agent that was killed in a Put has left. It is for one agent at a
// time.
func Open(dir string) (*Store, error) {
	if err := os.Mkdir(dir, dirMode); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("making the directory of records: %w", err)
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return nil, fmt.Errorf("looking at the directory of records: %w", err)
	}
	if !info.IsDir() {
		return nil, fmt.Errorf("%s, where records are to be, exists and is no directory", dir)
	}
	if err := os.Chmod(dir, dirMode); err != nil {
		return nil, fmt.Errorf("setting the mode of the directory of records: %w", err)
	}
	s := &Store{dir: dir, known: known{files: map[string]*knownFile{}}}
	if s.volatile, err = isVolatile(dir); err != nil {
		return nil, fmt.Errorf("asking for the file system of the directory of records: %w", err)
	}
	return s, s.removeTemps()
}

func (s *Store) removeTemps() error {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return fmt.Errorf("reading the directory of records: %w", err)
	}
	for _, entry := range entries {
		if !strings.HasPrefix(entry.Name(), tempPrefix) || !entry.Type().IsRegular() {
			continue
		}
		if err := os.Remove(filepath.Join(s.dir, entry.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("removing an unfinished record: %w", err)
		}
	}
	return nil
}

// Put writes the pod's record, in place of an older one, unless that is the same. When it
// returns nil the record is on disk, and on an error the older one is as it was. A full
// disk is an error that wraps syscall.ENOSPC.
func (s *Store) Put(r Record) error {
	content, err := encode(r)
	if err == nil {
		err = s.put(fileName(r.UID), content)
	}
	if err == nil {
		return nil
	}
	pod := fmt.Sprintf("%s/%s (UID %s)", r.Namespace, r.Name, r.UID)
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return fmt.Errorf("writing the record of pod %s: no room in %s, make some: %w", pod, s.dir, err)
	}
	return fmt.Errorf("writing the record of pod %s: %w", pod, err)
}

func (s *Store) put(name string, content []byte) error {
	if s.holds(name, content) {
		return nil
	}
	s.known.begin(name)
	err := s.replace(name, content)
	if err != nil {
		s.known.end(name, "")
		return err
	}
	s.known.end(name, string(content))
	return nil
}

// Delete removes the pod's record; without one it does nothing.
func (s *Store) Delete(uid string) error {
	name := fileName(uid)
	s.known.begin(name)
	err := retrying(func() error { return unix.Unlink(filepath.Join(s.dir, name)) })
	s.known.end(name, "")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = s.flush()
	}
	if err != nil {
		return fmt.Errorf("removing the record of the pod with UID %s: %w", uid, err)
	}
	return nil
}

// All returns every usable record, in no order that means anything, and says of each
// other file why it is none. A record that vanishes meanwhile is neither. The error is
// about the directory.
func (s *Store) All() ([]Record, []*FileError, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, nil, fmt.Errorf("reading the directory of records: %w", err)
	}
	var records []Record
	var bad []*FileError
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), tempPrefix) {
			continue // a Put is under way
		}
		r, err := s.read(entry.Name())
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			bad = append(bad, &FileError{Path: filepath.Join(s.dir, entry.Name()), Err: err})
		default:
			records = append(records, r)
		}
	}
	return records, bad, nil
}

func (s *Store) read(name string) (r Record, err error) {
	content, err := readFile(filepath.Join(s.dir, name))
	if err != nil {
		return Record{}, err
	}
	if len(content) > maxBytes {
		return Record{}, fmt.Errorf("larger than %d bytes", maxBytes)
	}
	if r, err = decode(content); err != nil {
		return Record{}, err
	}
	want := fileName(r.UID)
	if name != want {
		return Record{}, fmt.Errorf("holds the record of the pod with UID %s, which belongs into %s", r.UID, want)
	}
	s.known.saw(name, string(content))
	return r, nil
}

// fileName returns the name of the pod's file, another one for each UID. A UID that the
// API server made is its own name; one from a manifest may be anything, a path too.
func fileName(uid string) string {
	plain := uid != "" && len(uid) <= maxName
	for _, c := range []byte(uid) {
		switch {
		case c == '-', '0' <= c && c <= '9', 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z':
		default:
			plain = false
		}
	}
	if plain {
		return uid + suffix
	}
	sum := sha256.Sum256([]byte(uid))
	return hashPrefix + hex.EncodeToString(sum[:]) + suffix
}

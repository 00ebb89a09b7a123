// SPDX-License-Identifier: Apache-2.0

package records

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// replace makes the named file hold content, or leaves it as it is. Every enrolment
// waits for this, so it makes no system call more than that takes: package os would
// offer the file to the poller, and try several temporary names.
func (s *Store) replace(name string, content []byte) error {
	temp := filepath.Join(s.dir, tempPrefix+strconv.FormatUint(s.temps.Add(1), 10))
	err := s.write(temp, content)
	if err == nil {
		if err = retrying(func() error { return unix.Rename(temp, filepath.Join(s.dir, name)) }); err != nil {
			err = &os.LinkError{Op: "rename", Old: temp, New: filepath.Join(s.dir, name), Err: err}
		}
	}
	if err != nil {
		if left := unix.Unlink(temp); left != nil && !errors.Is(left, unix.ENOENT) {
			err = errors.Join(err, &fs.PathError{Op: "unlink", Path: temp, Err: left})
		}
		return err
	}
	return s.flush()
}

// write makes a new file and has it on disk when it returns.
func (s *Store) write(path string, content []byte) error {
	var fd int
	err := retrying(func() (err error) {
		fd, err = unix.Open(path, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, uint32(fileMode))
		return err
	})
	if err != nil {
		return &fs.PathError{Op: "open", Path: path, Err: err}
	}
	for err == nil && len(content) > 0 {
		var n int
		err = retrying(func() (err error) { n, err = unix.Write(fd, content); return err })
		content = content[max(n, 0):]
	}
	if err == nil && !s.volatile {
		err = retrying(func() error { return unix.Fsync(fd) })
	}
	if closeErr := unix.Close(fd); err == nil {
		err = closeErr
	}
	if err != nil {
		return &fs.PathError{Op: "write", Path: path, Err: err}
	}
	return nil
}

// usualBytes is what a record has at most as a rule.
const usualBytes = 2 << 10

// readFile returns what a regular file holds, of one that is too large a little more than
// a record may have. The error says neither operation nor path.
func readFile(path string) (content []byte, err error) {
	var fd int
	// Without O_NONBLOCK, opening a named pipe waits for a writer.
	err = retrying(func() (err error) {
		fd, err = unix.Open(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, errors.New("not a regular file")
	}
	for content = make([]byte, 0, usualBytes); len(content) <= maxBytes; {
		content = slices.Grow(content, usualBytes/2)
		n := 0
		err := retrying(func() (err error) { n, err = unix.Read(fd, content[len(content):cap(content)]); return err })
		if err != nil || n == 0 {
			return content, err
		}
		content = content[:len(content)+n]
	}
	return content, nil
}

// flush makes the directory's entries last.
func (s *Store) flush() error {
	if s.volatile {
		return nil
	}
	dir, err := os.Open(s.dir)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// isVolatile tells whether a directory is in memory: then nothing in it survives what a
// flush is for, and what a process has written others see without.
func isVolatile(dir string) (bool, error) {
	var fs unix.Statfs_t
	if err := retrying(func() error { return unix.Statfs(dir, &fs) }); err != nil {
		return false, err
	}
	return fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC, nil
}

// retrying repeats a system call that a signal interrupted.
func retrying(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

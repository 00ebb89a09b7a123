// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// tempPattern has no ending that a runtime takes for a network configuration's.
const tempPattern = ".ambientd-new-*"

// staleTemp is the age at which an unfinished file's installer has certainly ended.
const staleTemp = 10 * time.Minute

// sweep removes what installers left in a directory that were killed while they wrote.
func sweep(dir string) error {
	names, err := filepath.Glob(filepath.Join(dir, tempPattern))
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		info, err := os.Lstat(name)
		if err != nil || time.Since(info.ModTime()) < staleTemp {
			continue
		}
		if err := os.Remove(name); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// write makes the file at path hold content, whole or not at all, with the mode and owner
// of like.
func write(path string, content []byte, like fs.FileInfo) error {
	temp, err := stage(path, content, like)
	if err != nil {
		return err
	}
	return commit(temp, path)
}

// stage writes what is to become the file at path beside it, and returns where.
func stage(path string, content []byte, like fs.FileInfo) (name string, err error) {
	temp, err := os.CreateTemp(filepath.Dir(path), tempPattern)
	if err != nil {
		return "", err
	}
	_, err = temp.Write(content)
	if err == nil {
		err = temp.Chmod(like.Mode().Perm())
	}
	if owner, ok := like.Sys().(*syscall.Stat_t); err == nil && ok && (int(owner.Uid) != os.Geteuid() || int(owner.Gid) != os.Getegid()) {
		// Without CAP_CHOWN it is ours: then the mode decides who reads it, as before.
		if chownErr := temp.Chown(int(owner.Uid), int(owner.Gid)); !errors.Is(chownErr, fs.ErrPermission) {
			err = chownErr
		}
	}
	if err == nil {
		err = temp.Sync()
	}
	if err = errors.Join(err, temp.Close()); err != nil {
		return "", errors.Join(err, os.Remove(temp.Name()))
	}
	return temp.Name(), nil
}

// commit makes a staged file the one at path.
func commit(temp, path string) error {
	if err := os.Rename(temp, path); err != nil {
		return errors.Join(err, os.Remove(temp))
	}
	return flush(filepath.Dir(path))
}

// flush makes a directory's entries last.
func flush(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// copyBinary puts the plugin in place by rename: one that runs goes on with the old file,
// and is never "text file busy". What is the same already is not written.
func copyBinary(from, to string) (written bool, err error) {
	content, err := os.ReadFile(from)
	if err != nil {
		return false, err
	}
	if len(content) == 0 {
		return false, fmt.Errorf("%s is empty", from)
	}
	current, err := os.Lstat(to)
	if err == nil && current.Mode().IsRegular() && current.Mode().Perm() == 0o755 {
		if there, err := os.ReadFile(to); err == nil && bytes.Equal(there, content) {
			return false, nil
		}
	}
	if _, err := os.Stat(filepath.Dir(to)); errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("%w; it is where the runtime looks for plugins: name the right directory, or create it", err)
	}
	if err := write(to, content, executable{}); err != nil {
		return false, err
	}
	return true, nil
}

// executable is what [write] needs to know of the plugin's file.
type executable struct{ fs.FileInfo }

// Mode is what a runtime can run.
func (executable) Mode() fs.FileMode { return 0o755 }

// Sys names no owner: whoever installs it is.
func (executable) Sys() any { return nil }

// remove removes a file, which may be missing.
func remove(path string) (removed bool, err error) {
	if err := os.Remove(path); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return false, nil
		}
		return false, err
	}
	return true, flush(filepath.Dir(path))
}

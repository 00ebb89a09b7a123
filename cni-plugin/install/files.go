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
)

// tempPattern has no ending that a runtime takes for a network configuration's.
const tempPattern = ".ambientd-new-*"

// write makes the file at path hold content, whole or not at all, with the mode and owner
// of like.
func write(path string, content []byte, like fs.FileInfo) (err error) {
	temp, err := os.CreateTemp(filepath.Dir(path), tempPattern)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(temp.Name()))
		}
	}()
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
		return err
	}
	if err := os.Rename(temp.Name(), path); err != nil {
		return err
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
	return true, write(to, content, executable{})
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

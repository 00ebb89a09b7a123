// SPDX-License-Identifier: Apache-2.0

package enclave

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// NetnsDir is where container runtimes bind the network namespaces of pods.
const NetnsDir = "/var/run/netns"

// Netns is a network namespace that lives as a bind mount, as container runtimes
// make them, until it is removed.
type Netns struct {
	path string
	id   FileID
}

// FileID tells files, and so namespaces, apart for as long as they exist.
type FileID struct {
	Device, Inode uint64
}

// MakeNetns makes a network namespace at NetnsDir/name. All in it is as the kernel
// makes it; lo is down.
func MakeNetns(name string) (*Netns, error) {
	path := filepath.Join(NetnsDir, name)
	if err := os.MkdirAll(NetnsDir, 0o755); err != nil {
		return nil, fmt.Errorf("making the directory of network namespaces: %w", err)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
	if err != nil {
		return nil, fmt.Errorf("making a mount point: %w", err)
	}
	f.Close()
	bind := func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("making a network namespace: %w", err)
		}
		if err := unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("binding a network namespace to %s: %w", path, err)
		}
		return nil
	}
	if err := onDyingThread(bind); err != nil {
		return nil, errors.Join(err, os.Remove(path))
	}
	id, err := fileID(path)
	if err != nil {
		return nil, err
	}
	return &Netns{path: path, id: id}, nil
}

// onDyingThread runs fn on a thread that ends with it, whatever fn did to the thread.
func onDyingThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the runtime ends the thread
		done <- fn()
	}()
	return <-done
}

func fileID(path string) (FileID, error) {
	info, err := os.Stat(path)
	if err != nil {
		return FileID{}, fmt.Errorf("identifying a file: %w", err)
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return FileID{}, fmt.Errorf("identifying %s: no inode number", path)
	}
	return FileID{Device: stat.Dev, Inode: stat.Ino}, nil
}

// Path returns the bind mount's path, what CNI_NETNS holds.
func (n *Netns) Path() string { return n.path }

// Do runs fn inside the namespace and returns its error. Goroutines that fn starts
// are outside.
func (n *Netns) Do(fn func() error) error {
	f, err := os.Open(n.path)
	if err != nil {
		return fmt.Errorf("opening a network namespace: %w", err)
	}
	defer f.Close()
	return onDyingThread(func() error {
		if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("entering %s: %w", n.path, err)
		}
		return fn()
	})
}

// HeldBy returns how many of the descriptors of process pid refer to the
// namespace: while there is one, the namespace goes on after its removal.
func (n *Netns) HeldBy(pid int) (int, error) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, fmt.Errorf("listing descriptors: %w", err)
	}
	held := 0
	for _, entry := range entries {
		id, err := fileID(filepath.Join(dir, entry.Name()))
		if errors.Is(err, os.ErrNotExist) {
			continue // closed since
		}
		if err != nil {
			return 0, err
		}
		if id == n.id {
			held++
		}
	}
	return held, nil
}

// Remove takes the bind mount away. The namespace is gone then, unless a process
// or a descriptor is still in it.
func (n *Netns) Remove() error {
	if err := unix.Unmount(n.path, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmounting %s: %w", n.path, err)
	}
	if err := os.Remove(n.path); err != nil {
		return fmt.Errorf("removing a mount point: %w", err)
	}
	return nil
}

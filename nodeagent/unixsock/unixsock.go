// SPDX-License-Identifier: Apache-2.0

// Package unixsock opens the agent's unix sockets that only root may use: the CNI plugin's, the
// administrator's, the node proxy's. It owns the file's mode, the replacing of a socket that a dead
// agent left behind, and the check of who connects. It refuses to take a socket from a process
// that still listens, to remove anything that is no socket, and to create directories, whose mode
// is a decision of its own.
//
// The socket that pods mount is not opened here: its peers are anybody.
package unixsock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ErrInUse is wrapped by the error of [Listen] when a living process listens at the path.
var ErrInUse = errors.New("another process listens there")

const inUseAdvice = "end it if it is an agent that runs already, or give this one another path"

// lockWait bounds how long Listen waits for another process that is opening a socket in the same
// directory, which takes microseconds.
const lockWait = time.Second

// probeTimeout bounds the connect that tells a living socket from a stale one.
const probeTimeout = time.Second

// maxPath is what fits into sockaddr_un, in bytes (unix(7)); beyond it the kernel's error is a bare
// "invalid argument".
const maxPath = 107

// Listen opens a socket of network "unix" (a stream) or "unixpacket" (SOCK_SEQPACKET) at path with
// exactly the permission bits of mode, whatever the umask. There is no moment at which it is open
// to more than that. A stale socket at path is replaced.
//
// Accept returns [*net.UnixConn]s of peers with the uid 0 of the agent's own user namespace, and
// closes and logs others. Close removes the file first.
func Listen(network, path string, mode fs.FileMode, logger *slog.Logger) (net.Listener, error) {
	logger = logger.With("socket", path)
	listener, err := listen(network, path, mode.Perm(), logger)
	if err != nil {
		return nil, fmt.Errorf("listening at %s: %w", path, err)
	}
	return listener, nil
}

func listen(network, path string, mode fs.FileMode, logger *slog.Logger) (*rootOnly, error) {
	if network != "unix" && network != "unixpacket" {
		return nil, fmt.Errorf("network %q is neither unix nor unixpacket", network)
	}
	if !filepath.IsAbs(path) || len(path) > maxPath {
		return nil, fmt.Errorf("a socket's path is absolute and at most %d bytes long, this one has %d", maxPath, len(path))
	}
	// Two agents that start at the same moment could both find the same stale socket, and the slower
	// one then remove what the faster one has just bound.
	unlock, err := lockDir(filepath.Dir(path))
	switch {
	case err == nil:
		defer unlock()
	case errors.Is(err, unix.EWOULDBLOCK):
		// No agent takes that long, but everybody who may read the directory can keep the lock.
		logger.Warn("another process keeps the directory locked; going on without the lock", "err", err)
	default:
		return nil, err
	}
	if err := removeStale(path); err != nil {
		return nil, err
	}
	listener, err := bind(network, path, mode)
	if err != nil {
		return nil, err
	}
	// The umask may have taken bits that were asked for. Adding them only now errs on the safe side.
	if err := os.Chmod(path, mode); err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	file, err := os.Lstat(path)
	if err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	return &rootOnly{listener: listener, file: file, logger: logger}, nil
}

// bind sets the mode on the socket before it has a name: the kernel creates the file with the mode
// of the socket's own inode less the umask (unix_bind_bsd in net/unix/af_unix.c). A chmod after
// bind alone would come when net has already called listen.
func bind(network, path string, mode fs.FileMode) (*net.UnixListener, error) {
	config := net.ListenConfig{Control: func(_, _ string, conn syscall.RawConn) error {
		var chmodErr error
		if err := conn.Control(func(fd uintptr) { chmodErr = unix.Fchmod(int(fd), uint32(mode)) }); err != nil {
			return err
		}
		return chmodErr
	}}
	listener, err := config.Listen(context.Background(), network, path)
	if err != nil {
		return nil, err
	}
	return listener.(*net.UnixListener), nil //nolint:forcetypeassert // what net returns for a unix network
}

// lockDir takes the lock on a directory itself, so that no lock file is left lying about.
func lockDir(dir string) (unlock func(), err error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	deadline := time.Now().Add(lockWait)
	for {
		err := unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			// Closing the only descriptor of the description gives the lock back.
			return func() { _ = d.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) || time.Now().After(deadline) {
			return nil, errors.Join(fmt.Errorf("locking %s against another agent that starts: %w", dir, err), d.Close())
		}
		time.Sleep(lockWait / 200)
	}
}

// removeStale makes room at path, or says why it must not.
func removeStale(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("there is something that is no socket (%s); remove it, or configure another path", info.Mode())
	}
	// The type of the probing socket need not match: the kernel looks for a listener first and answers
	// EPROTOTYPE for one of another type, which is living all the same.
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	switch {
	case err == nil:
		return errors.Join(fmt.Errorf("%w; %s", ErrInUse, inUseAdvice), conn.Close())
	case errors.Is(err, unix.EPROTOTYPE):
		return fmt.Errorf("%w; %s", ErrInUse, inUseAdvice)
	case errors.Is(err, unix.ECONNREFUSED):
		return os.Remove(path)
	case errors.Is(err, fs.ErrNotExist):
		return nil
	default:
		return fmt.Errorf("%w, or so it seems: %w; %s", ErrInUse, err, inUseAdvice)
	}
}

// rootOnly accepts root's connections. The listener is not embedded: its other Accept methods would
// go around the check.
type rootOnly struct {
	listener *net.UnixListener
	file     fs.FileInfo // the socket's, as it was made
	logger   *slog.Logger
	closing  sync.Once
}

// Accept waits for the next connection of a peer that may use the socket.
func (l *rootOnly) Accept() (net.Conn, error) {
	for {
		conn, err := l.listener.AcceptUnix()
		if err != nil {
			return nil, err
		}
		err = checkPeer(conn)
		if err == nil {
			return conn, nil
		}
		l.logger.Warn("connection refused", "err", errors.Join(err, conn.Close()))
	}
}

// Close removes the file and then stops listening, in this order: as long as we listen no other
// agent takes the path. If the file was removed by others another agent may be there by now: its
// file stays.
func (l *rootOnly) Close() error {
	l.closing.Do(func() {
		now, err := os.Lstat(l.Addr().String())
		l.listener.SetUnlinkOnClose(err == nil && os.SameFile(now, l.file))
	})
	return l.listener.Close()
}

// Addr is the socket's path.
func (l *rootOnly) Addr() net.Addr { return l.listener.Addr() }

// checkPeer looks at the credentials that the kernel noted when the peer connected. It translates
// them to the reader's user namespace (an unmapped user is the overflow uid, 65534), so that 0 is
// the root of our own one: not the root that a container's user namespace has.
func checkPeer(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return fmt.Errorf("reading the peer's credentials: %w", err)
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return fmt.Errorf("reading the peer's credentials: %w", err)
	}
	if credErr != nil {
		return fmt.Errorf("reading the peer's credentials: %w", credErr)
	}
	if cred.Uid != 0 {
		return fmt.Errorf("peer pid %d has uid %d, only root may use this socket", cred.Pid, cred.Uid)
	}
	return nil
}

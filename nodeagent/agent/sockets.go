// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"syscall"

	"ambientd/nodeagent/unixsock"
)

// Modes of what the agent makes. A directory that an operator names and that
// exists is left as it is.
const (
	runDirMode     fs.FileMode = 0o711 // nobody lists it, everybody may pass
	rootOnlyMode   fs.FileMode = 0o700
	foreignDirMode fs.FileMode = 0o755 // what holds a socket elsewhere, such as /var/run/ztunnel
	socketMode     fs.FileMode = 0o600
)

// sockets are the agent's listeners, open.
type sockets struct {
	cni, admin, sds, zds net.Listener
	http                 net.Listener // nil unless asked for
}

// openSockets makes the directories and listens everywhere, or nowhere.
func openSockets(ctx context.Context, cfg Config) (_ *sockets, err error) {
	if err := makeDirs(cfg); err != nil {
		return nil, err
	}
	s := &sockets{}
	defer func() {
		if err != nil {
			s.close(cfg.Logger)
		}
	}()
	for _, socket := range []struct {
		listener      *net.Listener
		network, path string
	}{
		{&s.cni, "unix", cfg.CNISocketPath()},
		{&s.admin, "unix", cfg.AdminSocketPath()},
		{&s.sds, "unix", cfg.SDSSocketPath()},
		{&s.zds, "unixpacket", cfg.ZDSSocket},
	} {
		*socket.listener, err = unixsock.Listen(socket.network, socket.path, socketMode, cfg.Logger) //nolint:contextcheck // waits for nobody
		if err != nil {
			return nil, err
		}
	}
	if cfg.HTTPAddr != "" {
		if s.http, err = new(net.ListenConfig).Listen(ctx, "tcp", cfg.HTTPAddr); err != nil {
			return nil, fmt.Errorf("listening for --http-addr: %w", err)
		}
	}
	return s, nil
}

// close closes what is still open: a part that ran has closed its own.
func (s *sockets) close(logger *slog.Logger) {
	for _, l := range []net.Listener{s.cni, s.admin, s.sds, s.zds, s.http} {
		if l == nil {
			continue
		}
		if err := l.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			logger.Warn("a socket cannot be closed", "socket", l.Addr().String(), "err", err)
		}
	}
}

// makeDirs makes the run directory with its folders, and what the other sockets
// are in.
func makeDirs(cfg Config) error {
	if err := os.MkdirAll(filepath.Dir(cfg.RunDir), foreignDirMode); err != nil {
		return fmt.Errorf("making the directory above the run directory: %w", err)
	}
	own := []struct {
		path string
		mode fs.FileMode
	}{
		{cfg.RunDir, runDirMode},
		{filepath.Join(cfg.RunDir, privateDir), rootOnlyMode},
		{filepath.Join(cfg.RunDir, sdsDir), rootOnlyMode},
	}
	for _, dir := range own {
		if err := makeDir(dir.path, dir.mode); err != nil {
			return fmt.Errorf("making a directory for sockets: %w", err)
		}
	}
	for _, socket := range []string{cfg.CNISocketPath(), cfg.AdminSocketPath(), cfg.SDSSocketPath(), cfg.ZDSSocket} {
		if err := os.MkdirAll(filepath.Dir(socket), foreignDirMode); err != nil {
			return fmt.Errorf("making the directory of socket %s: %w", socket, err)
		}
	}
	return nil
}

// makeDir makes a directory of the agent's own with exactly this mode, whatever
// the umask, also if it exists from another time. It refuses another user's, who
// could put other sockets in the place of ours.
func makeDir(path string, mode fs.FileMode) error {
	if err := os.Mkdir(path, mode); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return fmt.Errorf("%s exists and is no directory", path)
	}
	if owner, ok := info.Sys().(*syscall.Stat_t); !ok || int(owner.Uid) != os.Geteuid() {
		return fmt.Errorf("%s exists and belongs to another user; remove it, or name another directory", path)
	}
	return os.Chmod(path, mode)
}

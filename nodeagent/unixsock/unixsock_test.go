// SPDX-License-Identifier: Apache-2.0

package unixsock

import (
	"bufio"
	"bytes"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// connectEnv makes the test binary a client that connects to the socket named, and prints what came
// of it: see otherUser.
const connectEnv = "AMBIENTD_TEST_CONNECT"

func TestMain(m *testing.M) {
	if socket := os.Getenv(connectEnv); socket != "" {
		os.Exit(connect(socket))
	}
	os.Exit(m.Run())
}

// connect writes "connected", and "served" or "closed" after what the server did.
func connect(socket string) int {
	out := bufio.NewWriter(os.Stdout)
	defer out.Flush()
	conn, err := net.Dial("unix", socket)
	if err != nil {
		_, _ = out.WriteString(err.Error())
		return 0
	}
	_, _ = out.WriteString("connected ")
	if _, err := conn.Read(make([]byte, 1)); err != nil {
		_, _ = out.WriteString("closed")
		return 0
	}
	_, _ = out.WriteString("served")
	return 0
}

// withUmask sets the process's umask for the rest of the test; these tests are not parallel.
func withUmask(t *testing.T, mask int) {
	old := syscall.Umask(mask)
	t.Cleanup(func() { syscall.Umask(old) })
}

func modeOf(t *testing.T, path string) fs.FileMode {
	t.Helper()
	info, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Type() != fs.ModeSocket {
		t.Errorf("%s is a %s", path, info.Mode())
	}
	return info.Mode().Perm()
}

func TestMode(t *testing.T) {
	for _, network := range []string{"unix", "unixpacket"} {
		for _, umask := range []int{0, 0o022, 0o777} {
			for _, mode := range []fs.FileMode{0o600, 0o660, 0o666} {
				t.Run(network+" "+mode.String()+" umask "+strconv.FormatInt(int64(umask), 8), func(t *testing.T) {
					path := filepath.Join(t.TempDir(), "s")
					withUmask(t, umask)
					listener, err := Listen(network, path, mode, slog.New(slog.DiscardHandler))
					if err != nil {
						t.Fatal(err)
					}
					if got := modeOf(t, path); got != mode {
						t.Errorf("mode %s, want %s", got, mode)
					}
					if err := listener.Close(); err != nil {
						t.Error(err)
					}
					if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
						t.Errorf("after Close: %v", err)
					}
				})
			}
		}
	}
}

// TestModeBeforeName: with a umask that takes nothing away, the file has the mode as soon as it is
// there, before anything is done to it by its name. This is what leaves no window.
func TestModeBeforeName(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	withUmask(t, 0)
	listener, err := bind("unix", path, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	if got := modeOf(t, path); got != 0o600 {
		t.Errorf("bind alone made it %s; the kernel does not take the mode of the socket's inode any more", got)
	}
}

// leaveStale leaves the socket of a listener that is gone.
func leaveStale(t *testing.T, network, path string) {
	t.Helper()
	listener, err := net.ListenUnix(network, &net.UnixAddr{Name: path, Net: network})
	if err != nil {
		t.Fatal(err)
	}
	listener.SetUnlinkOnClose(false)
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestStaleIsReplaced(t *testing.T) {
	for _, was := range []string{"unix", "unixpacket"} {
		for _, network := range []string{"unix", "unixpacket"} {
			t.Run(was+" by "+network, func(t *testing.T) {
				path := filepath.Join(t.TempDir(), "s")
				leaveStale(t, was, path)
				listener, err := Listen(network, path, 0o600, slog.New(slog.DiscardHandler))
				if err != nil {
					t.Fatal(err)
				}
				defer listener.Close()
				client, err := net.Dial(network, path)
				if err != nil {
					t.Fatal(err)
				}
				defer client.Close()
			})
		}
	}
}

func TestLiveIsNot(t *testing.T) {
	for _, is := range []string{"unix", "unixpacket"} {
		for _, network := range []string{"unix", "unixpacket"} {
			t.Run(network+" over "+is, func(t *testing.T) {
				path := filepath.Join(t.TempDir(), "s")
				live, err := net.Listen(is, path)
				if err != nil {
					t.Fatal(err)
				}
				defer live.Close()
				if _, err := Listen(network, path, 0o600, slog.New(slog.DiscardHandler)); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "another path") || strings.Contains(err.Error(), "seems") {
					t.Errorf("error: %v", err)
				}
				client, err := net.Dial(is, path)
				if err != nil {
					t.Fatalf("the other's socket does not work any more: %v", err)
				}
				defer client.Close()
			})
		}
	}
}

// TestOnlyOneOfMany: of agents that find the same stale socket at the same time one gets it, and
// keeps it.
func TestOnlyOneOfMany(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	leaveStale(t, "unix", path)
	listeners := make([]net.Listener, 16)
	var wg sync.WaitGroup
	for i := range listeners {
		wg.Go(func() {
			listener, err := Listen("unix", path, 0o600, slog.New(slog.DiscardHandler))
			if err != nil && !errors.Is(err, ErrInUse) {
				t.Error(err)
			}
			listeners[i] = listener
		})
	}
	wg.Wait()
	won := 0
	for _, listener := range listeners {
		if listener == nil {
			continue
		}
		won++
		defer listener.Close()
	}
	if won != 1 {
		t.Errorf("%d listeners, want 1", won)
	}
}

// TestLockKeptByOthers: whoever may read the directory can lock it, and must not be able to keep the
// agent from starting.
func TestLockKeptByOthers(t *testing.T) {
	dir := t.TempDir()
	other, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := unix.Flock(int(other.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	var log lockedBuffer
	listener, err := Listen("unix", filepath.Join(dir, "s"), 0o600, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	if !strings.Contains(log.String(), "keeps the directory locked") {
		t.Errorf("log: %s", log.String())
	}
}

// TestCloseLeavesAnothersSocket: the file was removed, another agent has taken the path.
func TestCloseLeavesAnothersSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	listen := func() net.Listener {
		listener, err := Listen("unix", path, 0o600, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		return listener
	}
	first := listen()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	second := listen()
	defer second.Close()
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	client, err := net.Dial("unix", path)
	if err != nil {
		t.Fatalf("the second one cannot be reached any more: %v", err)
	}
	defer client.Close()
}

func TestRefusals(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(filepath.Join(dir, "elsewhere"), link); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ network, path, want string }{
		{"unix", file, "no socket"},
		{"unix", link, "no socket"},
		{"unix", filepath.Join(dir, "none", "s"), "no such file or directory"},
		{"unix", "relative", "absolute"},
		{"unix", filepath.Join(dir, strings.Repeat("x", maxPath)), "at most 107 bytes"},
		{"tcp", filepath.Join(dir, "s"), "neither"},
		{"unixgram", filepath.Join(dir, "s"), "neither"},
	} {
		listener, err := Listen(c.network, c.path, 0o600, slog.New(slog.DiscardHandler))
		if err == nil {
			_ = listener.Close()
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s %s: error: %v, want one with %q", c.network, c.path, err, c.want)
		}
	}
	if data, err := os.ReadFile(file); err != nil || string(data) != "precious" {
		t.Errorf("the file has %q, %v", data, err)
	}
}

// lockedBuffer is a log that is read while it is written.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// serveAll answers every accepted connection with one byte until the listener is closed.
func serveAll(t *testing.T, listener net.Listener) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			if _, ok := conn.(*net.UnixConn); !ok {
				t.Errorf("Accept returned a %T", conn)
			}
			_, err = conn.Write([]byte{'!'})
			if err := errors.Join(err, conn.Close()); err != nil {
				t.Error(err)
			}
		}
	}()
	t.Cleanup(func() {
		if err := listener.Close(); err != nil {
			t.Error(err)
		}
		<-done
	})
}

// TestPeers: only the root of our own user namespace is served, even where the mode lets others
// connect.
func TestPeers(t *testing.T) {
	const nobody = 65534
	if os.Geteuid() != 0 {
		t.Skip("needs root, to be served and to start processes of other users")
	}
	var log lockedBuffer
	dir, err := os.MkdirTemp("", "unixsock")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "s")
	listener, err := Listen("unix", path, 0o666, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	if listener.Addr().String() != path {
		t.Errorf("address %s", listener.Addr())
	}
	serveAll(t, listener)

	for _, c := range []struct {
		name string
		attr syscall.SysProcAttr
		want string
		uid  int
	}{
		{"root", syscall.SysProcAttr{}, "connected served", 0},
		{"another user", syscall.SysProcAttr{
			Credential: &syscall.Credential{Uid: nobody, Gid: nobody, NoSetGroups: true},
		}, "connected closed", nobody},
		{"root of another user namespace", syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER,
			Credential:  &syscall.Credential{Uid: 0, Gid: 0, NoSetGroups: true},
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: nobody, Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: nobody, Size: 1}},
		}, "connected closed", nobody},
	} {
		t.Run(c.name, func(t *testing.T) {
			// Through the link: others have no way into the directory where the binary is.
			cmd := exec.Command("/proc/self/exe")
			// The race detector lingers for a second at the end of a process unless told not to.
			cmd.Env = append(os.Environ(), connectEnv+"="+path, "GORACE=atexit_sleep_ms=0")
			cmd.SysProcAttr = &c.attr
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, os.Stderr
			if err := cmd.Run(); errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSPC) {
				t.Skipf("needs a second user: %v", err)
			} else if err != nil {
				t.Fatal(err)
			}
			if out.String() != c.want {
				t.Errorf("got %q, want %q", out.String(), c.want)
			}
			refusal := "uid " + strconv.Itoa(c.uid) + ", only root may use this socket"
			if got := strings.Contains(log.String(), refusal); got != (c.uid != 0) {
				t.Errorf("the log has:\n%s", log.String())
			}
		})
	}
}

// TestAcceptAfterClose ends with the error that servers know.
func TestAcceptAfterClose(t *testing.T) {
	listener, err := Listen("unixpacket", filepath.Join(t.TempDir(), "s"), 0o600, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	accepted := make(chan error, 1)
	go func() {
		_, err := listener.Accept()
		accepted <- err
	}()
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-accepted; !errors.Is(err, net.ErrClosed) {
		t.Errorf("error: %v", err)
	}
}

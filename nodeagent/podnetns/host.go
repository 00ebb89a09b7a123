// SPDX-License-Identifier: Apache-2.0

package podnetns

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

var (
	// ErrNotNetns says that a descriptor is something else than a network
	// namespace.
	ErrNotNetns = errors.New("not a network namespace")

	// ErrHostNetns says that a descriptor is the netns in which the agent
	// itself runs. Rules meant for a pod would cut the node off there.
	ErrHostNetns = errors.New("the host's own network namespace")
)

// Key names a network namespace. Inode numbers (what `ls -l /proc/PID/ns/net`
// shows) are given again after a netns is gone; the cookie counts up for as
// long as the kernel runs, and the boot ID tells one kernel's run from the next.
// The zero Key names nothing.
type Key struct {
	BootID string // /proc/sys/kernel/random/boot_id
	Cookie uint64 // SO_NETNS_COOKIE of any socket opened in the netns; since Linux 5.14
}

// String returns the cookie in decimal, as `ambientd status` shows it.
func (k Key) String() string { return strconv.FormatUint(k.Cookie, 10) }

// Host is the network namespace that the agent runs in: the one that threads
// return to, and that is never adopted. Its methods are safe for concurrent use.
type Host struct {
	file *os.File
	id   nsID
	key  Key
}

// nsID is what a namespace shows in its file's stat. A number is given again when
// the namespace is gone.
type nsID struct{ dev, ino uint64 }

// OpenHost opens the netns in which the process runs. It is called once, at the
// start of the process, before any thread has entered another netns: "the host's
// netns" is where the agent was started, never /proc/1/ns/net, which is another
// one wherever the agent's PID namespace is not the host's.
func OpenHost() (*Host, error) {
	bootID, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("reading the boot ID: %w", err)
	}
	// Descriptor and cookie have to be of one thread, or they could differ.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	file, err := openCurrent()
	if err != nil {
		return nil, err
	}
	cookie, err := currentCookie()
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	var id nsID
	if err := control(file, func(fd int) (err error) { id, err = idOf(fd); return err }); err != nil {
		return nil, errors.Join(fmt.Errorf("looking at the host's netns: %w", err), file.Close())
	}
	return &Host{file: file, id: id, key: Key{BootID: string(bytes.TrimSpace(bootID)), Cookie: cookie}}, nil
}

// Key names the host's netns.
func (h *Host) Key() Key { return h.key }

// Close gives the host's descriptor back. No Netns of this Host may be used
// afterwards: its threads could not return.
func (h *Host) Close() error { return h.file.Close() }

// Adopt takes a duplicate of f, which must be a network namespace and not the
// host's own; otherwise the error wraps [ErrNotNetns] or [ErrHostNetns]. The
// caller keeps f, and closes the Netns when done with it.
func (h *Host) Adopt(f *os.File) (*Netns, error) {
	if f == nil {
		return nil, fmt.Errorf("no descriptor was passed: %w", ErrNotNetns)
	}
	dup, err := duplicate(f)
	if err != nil {
		return nil, fmt.Errorf("duplicating the netns descriptor: %w", err)
	}
	n, err := h.verify(dup)
	if err != nil {
		return nil, errors.Join(err, dup.Close())
	}
	return n, nil
}

// verify makes a Netns of file if it is one that the agent may touch.
func (h *Host) verify(file *os.File) (*Netns, error) {
	if err := checkNetns(file); err != nil {
		return nil, err
	}
	n := &Netns{file: file, home: h.file, key: Key{BootID: h.key.BootID}}
	err := n.Do(func() (err error) {
		n.key.Cookie, err = currentCookie()
		return err
	})
	if err != nil {
		return nil, err
	}
	if n.key == h.key {
		return nil, fmt.Errorf("netns %s: %w", n.key, ErrHostNetns)
	}
	return n, nil
}

// Scratch makes a fresh netns that holds nothing but a loopback interface,
// which is up, as it is in a pod. It exists until it is closed.
func (h *Host) Scratch() (*Netns, error) {
	var file *os.File
	unshare := func() error { return unix.Unshare(unix.CLONE_NEWNET) }
	err := visit(h.file, unshare, func() (err error) {
		if err = loopbackUp(); err != nil {
			return err
		}
		file, err = openCurrent()
		return err
	})
	if err != nil {
		err = fmt.Errorf("making a scratch netns: %w", err)
		if file != nil {
			err = errors.Join(err, file.Close())
		}
		return nil, err
	}
	n, err := h.verify(file)
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return n, nil
}

// checkNetns asks the kernel what file is. The file system comes first: the
// ioctl's number may mean something else to another kind of file.
func checkNetns(file *os.File) error {
	return control(file, func(fd int) error {
		var fs unix.Statfs_t
		if err := unix.Fstatfs(fd, &fs); err != nil {
			return fmt.Errorf("asking for the file system of the netns descriptor: %w", err)
		}
		if fs.Type != unix.NSFS_MAGIC {
			return fmt.Errorf("descriptor of file system type %#x: %w", fs.Type, ErrNotNetns)
		}
		kind, err := unix.IoctlRetInt(fd, unix.NS_GET_NSTYPE) // ioctl_nsfs(2)
		if err != nil {
			return fmt.Errorf("descriptor without a namespace type (%w): %w", err, ErrNotNetns)
		}
		if kind != unix.CLONE_NEWNET {
			return fmt.Errorf("namespace of type %#x: %w", kind, ErrNotNetns)
		}
		return nil
	})
}

// openNetns opens a namespace by its path below dir. Should something else be there, such
// as a named pipe, opening does not wait, and the error wraps [ErrNotNetns]. That it is a
// network namespace is left to setns, which asks for no more than this costs here:
// all namespaces are files of one file system, and of no other is a file taken for one.
func (h *Host) openNetns(dir int, path string) (*os.File, nsID, error) {
	fd, err := openat(dir, path, unix.O_RDONLY|unix.O_NONBLOCK)
	if err != nil {
		return nil, nsID{}, err
	}
	id, err := idOf(fd)
	if err == nil && id.dev != h.id.dev {
		err = ErrNotNetns
	}
	if err == nil {
		// Left as it is, the file would be offered to the runtime's poller, which takes no namespaces.
		_, err = unix.FcntlInt(uintptr(fd), unix.F_SETFL, 0)
	}
	if err != nil {
		return nil, nsID{}, errors.Join(err, unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), path), id, nil
}

func openat(dir int, path string, flags int) (int, error) {
	for {
		fd, err := unix.Openat(dir, path, flags|unix.O_CLOEXEC, 0)
		if !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}

func idOf(fd int) (nsID, error) {
	var st unix.Stat_t
	err := unix.Fstat(fd, &st)
	return nsID{dev: st.Dev, ino: st.Ino}, err
}

// openCurrent opens the calling thread's netns. The thread must be locked.
func openCurrent() (*os.File, error) {
	file, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("opening the thread's netns: %w", err)
	}
	return file, nil
}

// currentCookie reads the cookie of the calling thread's netns. The thread must
// be locked.
func currentCookie() (uint64, error) {
	// A unix socket is the cheapest kind that belongs to a netns.
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("opening a socket for the netns cookie: %w", err)
	}
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		err = fmt.Errorf("reading the netns cookie (needs Linux 5.14 or newer): %w", err)
	}
	return cookie, errors.Join(err, unix.Close(fd))
}

// loopbackUp sets the loopback interface of the calling thread's netns up.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("opening a socket to set lo up: %w", err)
	}
	lo, err := unix.NewIfreq("lo")
	if err == nil {
		lo.SetUint16(unix.IFF_UP)
		err = unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo) // netdevice(7)
	}
	if err != nil {
		err = fmt.Errorf("setting lo up: %w", err)
	}
	return errors.Join(err, unix.Close(fd))
}

// duplicate returns a descriptor of its own for what f refers to.
func duplicate(f *os.File) (*os.File, error) {
	var dup int
	err := control(f, func(fd int) (err error) {
		dup, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(dup), f.Name()), nil
}

// control runs fn with f's descriptor, which stays open meanwhile even if
// another goroutine closes f. Unlike (*os.File).Fd it leaves f's mode alone.
func control(f *os.File, fn func(fd int) error) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := raw.Control(func(fd uintptr) { inner = fn(int(fd)) }); err != nil {
		// Its one cause has no exported name.
		return os.ErrClosed
	}
	return inner
}

// SPDX-License-Identifier: Apache-2.0

// Package podnet opens sockets inside a pod's network namespace, as a node
// proxy has to: marked, so that the pod's redirection lets them through, and
// with another host's source address where the pod is to see that.
//
// It owns the threads that go into namespaces. A socket belongs to the netns
// that its thread was in when it was made and stays there, so a thread is away
// for that moment only, and never while a connection is being established.
package podnet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Mark is the packet mark of every socket that a node proxy opens in a pod: by
// it the redirection rules tell the proxy's packets from the application's.
const Mark = 0x539

// keepAliveInterval finds the dead peers of connections that say nothing: with
// the kernel's nine probes, within three minutes.
const keepAliveInterval = 15 * time.Second

// Netns is a pod's network namespace.
type Netns struct {
	file *os.File
}

// New takes over a descriptor, and refuses what is not a network namespace.
// On an error the file stays the caller's.
func New(file *os.File) (*Netns, error) {
	kind, err := unix.IoctlRetInt(int(file.Fd()), unix.NS_GET_NSTYPE)
	if err != nil {
		return nil, fmt.Errorf("asking for the kind of namespace: %w", err)
	}
	if kind != unix.CLONE_NEWNET {
		return nil, fmt.Errorf("descriptor is a namespace of kind %#x, not a network namespace", kind)
	}
	return &Netns{file: file}, nil
}

// Close gives the namespace up. Sockets that were opened in it live on.
func (n *Netns) Close() error { return n.file.Close() }

// Same says whether both are the same namespace.
func (n *Netns) Same(o *Netns) (bool, error) {
	a, err := n.file.Stat()
	if err != nil {
		return false, err
	}
	b, err := o.file.Stat()
	if err != nil {
		return false, err
	}
	return os.SameFile(a, b), nil
}

// ListenTCP listens inside the namespace, on one family: that of addr.
func (n *Netns) ListenTCP(ctx context.Context, addr netip.AddrPort) (*net.TCPListener, error) {
	var l net.Listener
	err := n.open(func(home control) (err error) {
		lc := net.ListenConfig{Control: home, KeepAlive: keepAliveInterval}
		// An MPTCP socket does not tell where a redirected connection was going.
		lc.SetMultipathTCP(false)
		l, err = lc.Listen(ctx, network("tcp", addr.Addr()), addr.String())
		return err
	})
	if err != nil {
		return nil, err
	}
	return l.(*net.TCPListener), nil
}

// ListenUDP binds a UDP socket inside the namespace.
func (n *Netns) ListenUDP(ctx context.Context, addr netip.AddrPort) (*net.UDPConn, error) {
	var c net.PacketConn
	err := n.open(func(home control) (err error) {
		lc := net.ListenConfig{Control: home}
		c, err = lc.ListenPacket(ctx, network("udp", addr.Addr()), addr.String())
		return err
	})
	if err != nil {
		return nil, err
	}
	return c.(*net.UDPConn), nil
}

// DialTCP connects from inside the namespace. A valid source is the address
// that the peer is to see, and need not be the pod's own; the replies come back
// by the redirection's policy route.
func (n *Netns) DialTCP(ctx context.Context, source netip.Addr, to netip.AddrPort) (*net.TCPConn, error) {
	var c net.Conn
	err := n.open(func(home control) (err error) {
		d := net.Dialer{Control: home, KeepAlive: keepAliveInterval}
		d.SetMultipathTCP(false)
		if source.IsValid() {
			d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(source, 0))
			d.Control = func(network, address string, raw syscall.RawConn) error {
				return errors.Join(onFD(raw, transparent(network)), home(network, address, raw))
			}
		}
		c, err = d.DialContext(ctx, network("tcp", to.Addr()), to.String())
		return err
	})
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

func network(proto string, addr netip.Addr) string {
	if addr.Unmap().Is4() {
		return proto + "4"
	}
	return proto + "6"
}

// control prepares a socket that was just made and sends its thread home.
type control func(network, address string, raw syscall.RawConn) error

// open calls fn on a thread inside the namespace. fn must pass home on, as the
// last thing that is done to a new socket before it is bound or connected.
func (n *Netns) open(fn func(home control) error) error {
	result := make(chan error)
	// A goroutine of its own: one that cannot get home keeps its thread locked,
	// and the thread dies with it instead of being used again.
	go func() {
		t, err := enter(n.file)
		if err == nil {
			err = fn(func(_, _ string, raw syscall.RawConn) error {
				return errors.Join(onFD(raw, mark), t.leave())
			})
			err = errors.Join(err, t.leave()) // fn may have failed before it made a socket
		}
		result <- err
	}()
	return <-result
}

// thread is the calling goroutine's thread, locked, in another netns.
type thread struct {
	home *os.File // nil once it is back
}

func enter(netns *os.File) (*thread, error) {
	runtime.LockOSThread()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return nil, fmt.Errorf("opening the thread's own netns: %w", err)
	}
	if err := unix.Setns(int(netns.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return nil, errors.Join(fmt.Errorf("entering the pod's netns: %w", err), home.Close())
	}
	return &thread{home: home}, nil
}

// leave goes home and unlocks. Again it does nothing.
func (t *thread) leave() error {
	if t.home == nil {
		return nil
	}
	home := t.home
	t.home = nil
	if err := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); err != nil {
		return errors.Join(fmt.Errorf("leaving the pod's netns: %w", err), home.Close())
	}
	runtime.UnlockOSThread()
	return home.Close()
}

// SPDX-License-Identifier: Apache-2.0

package rawnetlink_test

import (
	"errors"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

// keeper is a network namespace that keeps sockets, and counts how often it is entered.
type keeper struct {
	redirection.Runner
	kept    rawnetlink.Kept
	entered int
}

func newKeeper(t *testing.T) *keeper {
	t.Helper()
	k := &keeper{}
	run := netnstest.New(t).Runner()
	k.Runner = func(fn func() error) error { k.entered++; return run(fn) }
	return k
}

func (k *keeper) Kept() *rawnetlink.Kept { return &k.kept }

// openIn opens sockets, and fails the test if that takes another number of entries than wanted.
func openIn(t *testing.T, s *rawnetlink.Sockets, k *keeper, entries int, protocols ...int) []*rawnetlink.Socket {
	t.Helper()
	before := k.entered
	opened, err := s.Open(k, protocols...)
	if err != nil {
		t.Fatal(err)
	}
	if got := k.entered - before; got != entries {
		t.Errorf("the namespace was entered %d times, want %d", got, entries)
	}
	return opened
}

func closed(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Errorf("closing: %v", err)
	}
}

// askLoopback asks for loopback on a NETLINK_ROUTE socket: it answers if it is in its namespace, and nothing is left in it.
func askLoopback(t *testing.T, socket *rawnetlink.Socket) {
	t.Helper()
	request := rawnetlink.Message{Type: unix.RTM_GETLINK, Flags: unix.NLM_F_REQUEST, Sequence: 7, Payload: make([]byte, 16)}
	request.Payload[4] = 1 // the interface's index
	answer, err := socket.Query(rawnetlink.AppendMessage(nil, request), 1)
	if err != nil {
		t.Fatal(err)
	}
	m, _, err := rawnetlink.Next(answer)
	if err != nil || m.Type != unix.RTM_NEWLINK || m.Sequence != 7 {
		t.Errorf("asked for loopback, got message %d, number %d, %v", m.Type, m.Sequence, err)
	}
}

func TestKeptSocketsAreUsedAgain(t *testing.T) {
	netnstest.Require(t)
	s, k := rawnetlink.New(), newKeeper(t)
	both := openIn(t, s, k, 1, unix.NETLINK_NETFILTER, unix.NETLINK_ROUTE)
	cookie, err := both[1].NetnsCookie()
	if err != nil || cookie == 0 {
		t.Errorf("cookie %d, %v", cookie, err)
	}
	askLoopback(t, both[1])
	closed(t, s.Close(both...))
	before := descriptors(t)
	for range 10 {
		again := openIn(t, s, k, 0, unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER)
		askLoopback(t, again[0])
		if got, err := again[0].NetnsCookie(); err != nil || got != cookie {
			t.Errorf("cookie %d, %v, want %d", got, err, cookie)
		}
		closed(t, s.CloseNow(again...))
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
	// While one is in use the next opens its own, of which one is kept.
	first := openIn(t, s, k, 0, unix.NETLINK_ROUTE)
	second := openIn(t, s, k, 1, unix.NETLINK_ROUTE)
	askLoopback(t, second[0])
	askLoopback(t, first[0])
	closed(t, s.CloseNow(second...))
	closed(t, s.CloseNow(first...))
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors before, %d after two at once", before, after)
	}
}

// TestKeep has sockets opened by somebody else.
func TestKeep(t *testing.T) {
	netnstest.Require(t)
	s, k := rawnetlink.New(), newKeeper(t)
	before := descriptors(t)
	for range 2 { // the second is one too many
		var fd int
		err := k.Do(func() (err error) {
			fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
			return errors.Join(err, unix.Connect(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}))
		})
		if err != nil {
			t.Fatal(err)
		}
		closed(t, s.Keep(k, rawnetlink.Opened{FD: fd, Protocol: unix.NETLINK_ROUTE, Cookie: 17}))
		if after := descriptors(t); after != before+1 {
			t.Errorf("%d descriptors before, %d after, want one more", before, after)
		}
	}
	opened := openIn(t, s, k, 0, unix.NETLINK_ROUTE)
	askLoopback(t, opened[0])
	if cookie, err := opened[0].NetnsCookie(); err != nil || cookie != 17 {
		t.Errorf("cookie %d, %v, want the one that was known", cookie, err)
	}
	closed(t, s.CloseNow(opened...))
	closed(t, k.kept.Close())
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors before, %d after the end", before, after)
	}
}

// TestFailedSocketsAreNotKept leaves an answer unread: whoever comes next must not take it for its own.
func TestFailedSocketsAreNotKept(t *testing.T) {
	netnstest.Require(t)
	s, k := rawnetlink.New(), newKeeper(t)
	request := rawnetlink.AppendMessage(nil, rawnetlink.Message{Type: unix.RTM_GETLINK, Flags: unix.NLM_F_REQUEST | unix.NLM_F_DUMP, Payload: make([]byte, 16)})
	for name, fail := range map[string]func(*rawnetlink.Socket) error{
		"answers that do not come": func(socket *rawnetlink.Socket) error {
			_, err := socket.Query(request, 50)
			return err
		},
		"no acknowledgement": func(socket *rawnetlink.Socket) error {
			_, err := socket.Execute(request, 5)
			return err
		},
		"somebody who has had enough": func(socket *rawnetlink.Socket) error {
			enough := errors.New("enough")
			return socket.Scan(t.Context(), request, func(rawnetlink.Message) (bool, error) { return false, enough })
		},
	} {
		t.Run(name, func(t *testing.T) {
			opened, err := s.Open(k, unix.NETLINK_ROUTE)
			if err != nil {
				t.Fatal(err)
			}
			if err := fail(opened[0]); err == nil {
				t.Fatal("it did not fail")
			}
			closed(t, s.CloseNow(opened...))
			next := openIn(t, s, k, 1, unix.NETLINK_ROUTE)
			askLoopback(t, next[0])
			closed(t, s.CloseNow(next...))
		})
	}
}

func TestKeptEnds(t *testing.T) {
	netnstest.Require(t)
	s, k := rawnetlink.New(), newKeeper(t)
	before := descriptors(t)
	closed(t, s.Close(openIn(t, s, k, 1, unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER)...))
	inUse := openIn(t, s, k, 0, unix.NETLINK_ROUTE)
	closed(t, k.kept.Close())
	closed(t, k.kept.Close())
	askLoopback(t, inUse[0])
	closed(t, s.Close(inUse...))
	for deadline := time.Now().Add(10 * time.Second); descriptors(t) > before; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) { // closing ends in the background
			t.Fatalf("%d descriptors before, %d after the end", before, descriptors(t))
		}
	}
}

// TestForgedAnswers has somebody else in the namespace send to every netlink socket there, as a pod may that has
// CAP_NET_ADMIN.
func TestForgedAnswers(t *testing.T) {
	netnstest.Require(t)
	s, k := rawnetlink.New(), newKeeper(t)
	opened := openIn(t, s, k, 1, unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER)
	defer func() { closed(t, s.CloseNow(opened...)) }()
	askLoopback(t, opened[0]) // at the latest that gives it an address
	forged := rawnetlink.AppendMessage(nil, rawnetlink.Message{Type: unix.RTM_NEWLINK, Sequence: 8, Payload: make([]byte, 16)})
	err := k.Do(func() error {
		listed, err := os.ReadFile("/proc/thread-self/net/netlink")
		if err != nil {
			return err
		}
		addresses := 0
		for line := range strings.Lines(string(listed)) {
			fields := strings.Fields(line) // sk, protocol, address, ...
			address, err := strconv.ParseUint(fields[2], 10, 32)
			if err != nil || address == 0 {
				continue // the header, the kernel
			}
			addresses++
			protocol, err := strconv.Atoi(fields[1])
			if err != nil {
				return err
			}
			fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
			if err != nil {
				return err
			}
			err = unix.Sendto(fd, forged, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Pid: uint32(address)})
			if !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("sending to a socket of protocol %d: %v, want it refused", protocol, err)
			}
			if err := unix.Close(fd); err != nil {
				return err
			}
		}
		if addresses == 0 {
			t.Errorf("none of our sockets was found:\n%s", listed)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	askLoopback(t, opened[0])
}

// TestKeptLeaveRoom has more namespaces than the process may have files open.
func TestKeptLeaveRoom(t *testing.T) {
	netnstest.Require(t)
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	few := before
	few.Cur = 256
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	defer func() { closed(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &before)) }()
	s, ns := rawnetlink.New(), netnstest.New(t)
	keepers := make([]keeper, 300)
	for i := range keepers {
		k := &keepers[i]
		k.Runner = ns.Runner()
		defer func() { closed(t, k.kept.Close()) }()
		opened, err := s.Open(k, unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER)
		if err != nil {
			t.Fatalf("namespace %d: %v", i, err)
		}
		askLoopback(t, opened[0])
		closed(t, s.CloseNow(opened...))
	}
	if n := descriptors(t); n < 100 || n > 150 {
		t.Errorf("%d descriptors are open, want about half of %d", n, few.Cur)
	}
}

func TestKeptByMany(t *testing.T) {
	netnstest.Require(t)
	s, run := rawnetlink.New(), netnstest.New(t).Runner()
	k := &keeper{Runner: run}
	var work sync.WaitGroup
	for range 8 {
		work.Go(func() {
			for range 100 {
				opened, err := s.Open(k, unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER)
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := opened[0].NetnsCookie(); err != nil {
					t.Error(err)
				}
				if err := s.CloseNow(opened...); err != nil {
					t.Error(err)
				}
			}
		})
	}
	work.Wait()
	closed(t, k.kept.Close())
}

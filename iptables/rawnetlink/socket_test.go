// SPDX-License-Identifier: Apache-2.0

package rawnetlink_test

import (
	"errors"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }

// open returns one rtnetlink socket in a fresh namespace.
func open(t *testing.T) (*netnstest.NS, *rawnetlink.Socket) {
	t.Helper()
	ns := netnstest.New(t)
	sockets, err := rawnetlink.New().Open(ns.Runner(), unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := sockets[0].Close(); err != nil {
			t.Error(err)
		}
	})
	return ns, sockets[0]
}

func TestSocketsBelongToTheNamespace(t *testing.T) {
	ns, socket := open(t)
	got, err := socket.NetnsCookie()
	if err != nil {
		t.Fatal(err)
	}
	var want, home uint64
	cookie := func(into *uint64) error {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		*into, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
		return errors.Join(err, unix.Close(fd))
	}
	ns.Do(t, func() error { return cookie(&want) })
	if err := cookie(&home); err != nil {
		t.Fatal(err)
	}
	if got != want || got == home {
		t.Errorf("cookie %d, want %d; the test's own is %d", got, want, home)
	}
}

func TestQueryAnswersEachRequest(t *testing.T) {
	_, socket := open(t)
	request := func(index uint32, sequence uint32) []byte {
		payload := make([]byte, unix.SizeofIfInfomsg)
		payload[4] = byte(index)
		return rawnetlink.AppendMessage(nil, rawnetlink.Message{
			Type: unix.RTM_GETLINK, Flags: unix.NLM_F_REQUEST, Sequence: sequence, Payload: payload,
		})
	}
	answers, err := socket.Query(append(request(1, 1), request(200, 2)...), 2)
	if err != nil {
		t.Fatal(err)
	}
	link, rest, err := rawnetlink.Next(answers)
	if err != nil || link.Type != unix.RTM_NEWLINK || link.Sequence != 1 {
		t.Errorf("first answer: %+v, %v", link, err)
	}
	refusal, _, err := rawnetlink.Next(rest)
	if err != nil || !errors.Is(refusal.Failure(), unix.ENODEV) || refusal.Sequence != 2 {
		t.Errorf("second answer: %+v, %v", refusal, err)
	}
}

// TestMissingAnswerIsAnErrorAtOnce stands for a kernel that does not behave: a request for which nothing comes back.
func TestMissingAnswerIsAnErrorAtOnce(t *testing.T) {
	_, socket := open(t)
	silent := rawnetlink.AppendMessage(nil, rawnetlink.Message{Type: unix.NLMSG_NOOP, Flags: unix.NLM_F_REQUEST})
	if _, err := socket.Query(silent, 1); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("got %v, want EAGAIN", err)
	}
}

func TestExecuteReportsWhatWasRefused(t *testing.T) {
	_, socket := open(t)
	// No message types of that kind: the kernel refuses the first, and the second that also asks for an acknowledgement.
	requests := rawnetlink.AppendMessage(nil, rawnetlink.Message{Type: 999, Flags: unix.NLM_F_REQUEST, Sequence: 1})
	requests = rawnetlink.AppendMessage(requests, rawnetlink.Message{
		Type: 998, Flags: unix.NLM_F_REQUEST | unix.NLM_F_ACK, Sequence: 2,
	})
	refused, err := socket.Execute(requests, 2)
	if err != nil {
		t.Fatal(err)
	}
	if len(refused) != 2 || refused[0].Sequence != 1 || refused[1].Sequence != 2 || !errors.Is(refused[0], unix.EOPNOTSUPP) {
		t.Errorf("refused: %v", refused)
	}
}

// TestDumpIsBounded reads as much as is wanted of a dump, after which the socket is as good as new.
func TestDumpIsBounded(t *testing.T) {
	ns := netnstest.New(t)
	for i := range 1000 {
		rule := netlink.NewRule()
		rule.Family, rule.Priority, rule.Table = unix.AF_INET, 100+i, 7
		ns.Do(t, func() error { return netlink.RuleAdd(rule) })
	}
	sockets := rawnetlink.New()
	opened, err := sockets.Open(ns.Runner(), unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := sockets.CloseNow(opened...); err != nil {
			t.Error(err)
		}
	}()
	request := rawnetlink.AppendMessage(nil, rawnetlink.Message{
		Type: unix.RTM_GETRULE, Flags: unix.NLM_F_REQUEST | unix.NLM_F_DUMP, Payload: make([]byte, 12),
	})
	const limit = 10 << 10
	some, err := opened[0].Dump(request, limit)
	if !errors.Is(err, rawnetlink.ErrTooLong) || len(some) < limit || len(some) > limit+32<<10 {
		t.Errorf("%d bytes, %v", len(some), err)
	}
	all, err := opened[0].Dump(request, 1<<20)
	if err != nil || len(all) < len(some) {
		t.Errorf("all: %d bytes, %v", len(all), err)
	}
}

func TestOpenFailureLeavesNothingOpen(t *testing.T) {
	netnstest.Require(t)
	sockets := rawnetlink.New()
	before := descriptors(t)
	boom := errors.New("boom")
	for name, run := range map[string]redirection.Runner{
		"before": func(func() error) error { return boom },
		"after": func(fn func() error) error {
			if err := fn(); err != nil {
				return err
			}
			return boom
		},
	} {
		if _, err := sockets.Open(run, unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER); !errors.Is(err, boom) {
			t.Errorf("%s: %v", name, err)
		}
	}
	const noProtocol = 31
	here := redirection.Runner(func(fn func() error) error { return fn() })
	if _, err := sockets.Open(here, unix.NETLINK_ROUTE, noProtocol); !errors.Is(err, unix.EPROTONOSUPPORT) {
		t.Errorf("unknown protocol: %v", err)
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

// TestCloseIsBounded opens and closes far more sockets than may be closed in the background at a time.
func TestCloseIsBounded(t *testing.T) {
	netnstest.Require(t)
	sockets := rawnetlink.New()
	before := descriptors(t)
	here := redirection.Runner(func(fn func() error) error { return fn() })
	for range 500 {
		opened, err := sockets.Open(here, unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER)
		if err != nil {
			t.Fatal(err)
		}
		if err := sockets.Close(opened...); err != nil {
			t.Fatal(err)
		}
		if now := descriptors(t); now > before+100 {
			t.Fatalf("%d descriptors, %d before", now, before)
		}
	}
	for deadline := time.Now().Add(10 * time.Second); descriptors(t) > before; runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("%d descriptors before, %d after", before, descriptors(t))
		}
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

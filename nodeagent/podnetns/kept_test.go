// SPDX-License-Identifier: Apache-2.0

package podnetns_test

import (
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/nodeagent/podnetns"
)

// entries counts how often a netns is entered.
type entries struct {
	*podnetns.Netns

	count int
}

func (e *entries) Do(fn func() error) error {
	e.count++
	return e.Netns.Do(fn)
}

// askLink asks for the interface with that index, which must be the only answer there is.
func askLink(t *testing.T, socket *rawnetlink.Socket, index byte) {
	t.Helper()
	request := rawnetlink.Message{Type: unix.RTM_GETLINK, Flags: unix.NLM_F_REQUEST, Sequence: 7, Payload: make([]byte, unix.SizeofIfInfomsg)}
	request.Payload[4] = index
	answer, err := socket.Query(rawnetlink.AppendMessage(nil, request), 1)
	if err != nil {
		t.Error(err)
		return
	}
	if m, rest, err := rawnetlink.Next(answer); err != nil || m.Type != unix.RTM_NEWLINK || m.Sequence != 7 || len(rest) > 0 {
		t.Errorf("asked for an interface, got message %d, number %d, %v", m.Type, m.Sequence, err)
	}
}

// Who has found a netns may go on asking on the socket that the finder asked on, whichever
// way it was found.
func TestFoundWithSocket(t *testing.T) {
	n := newNode(t)
	var wanted []podnetns.Wanted
	for i := range 20 { // enough for both that look
		addr := fmt.Sprint("10.0.0.", 1+i)
		own, uid := n.netns(), fmt.Sprintf("%08d-0000-4000-8000-000000000000", i)
		for extra := range 1 + i*10 { // in the end more than one datagram
			n.address(own, fmt.Sprintf("10.1.%d.1", extra))
		}
		n.address(own, addr)
		switch w := wantedPod(uid, addr); i % 3 {
		case 0:
			wanted = append(wanted, n.recorded(uid, n.file(own, fmt.Sprint("cni-", i)), own))
		case 1:
			n.process(own, podCgroup(uid))
			wanted = append(wanted, w)
		case 2:
			n.file(own, fmt.Sprint("cni-", i))
			wanted = append(wanted, w)
		}
	}
	before := descriptors(t)
	found, missing := n.finder().Find(t.Context(), wanted)
	if len(found) != len(wanted) {
		t.Fatalf("missing %v", missing)
	}
	if after := descriptors(t); after != before+2*len(wanted) {
		t.Errorf("%d descriptors before, %d after, want two more for each of %d", before, after, len(wanted))
	}
	sockets := rawnetlink.New()
	for uid, netns := range found {
		e := &entries{Netns: netns}
		opened, err := sockets.Open(e, unix.NETLINK_ROUTE)
		n.must(err)
		askLink(t, opened[0], 1)
		if cookie, err := opened[0].NetnsCookie(); err != nil || cookie != netns.Key().Cookie {
			t.Errorf("%s: the socket is of netns %d, %v, want %v", uid, cookie, err, netns.Key())
		}
		n.must(sockets.CloseNow(opened...))
		if e.count > 0 {
			t.Errorf("%s: entered %d times", uid, e.count)
		}
		n.must(netns.Close())
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

// Where descriptors are few a netns is found all the same, without its socket.
func TestFoundWithoutSocket(t *testing.T) {
	n := newNode(t)
	own := n.netns("10.0.0.1")
	n.process(own, podCgroup(uid1))
	var old unix.Rlimit
	n.must(unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	limit := old
	limit.Cur = uint64(highestDescriptor(t) + 50)
	for lowest := uint64(0); lowest < limit.Cur/2; { // all that are lower are taken
		f, err := os.Open("/dev/null")
		n.must(err)
		defer f.Close()
		lowest = uint64(f.Fd())
	}
	n.must(unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	defer func() { n.must(unix.Setrlimit(unix.RLIMIT_NOFILE, &old)) }()
	before := descriptors(t)
	found, missing := n.finder().Find(t.Context(), []podnetns.Wanted{wantedPod(uid1, "10.0.0.1")})
	if found[uid1] == nil {
		t.Fatal(missing)
	}
	if after := descriptors(t); after != before+1 {
		t.Errorf("%d descriptors before, %d after, want one more", before, after)
	}
	n.must(found[uid1].Close())
}

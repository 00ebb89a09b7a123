// SPDX-License-Identifier: Apache-2.0

// Package conntrack counts the TCP connections that a pod has kept from before its redirection. It owns the question to
// the kernel's connection tracking. It refuses to change anything there, and to guess: of a connection that has sent
// nothing since, and of one in a namespace that was tracked before, the kernel does not tell.
//
// # How they are known
//
// Tracking begins with the first rules of a namespace. Of a connection that is older, it meets a packet in the middle of a
// stream first, and notes that it knows nothing of the connection's windows: it lets pass what it would refuse else
// (IP_CT_TCP_FLAG_BE_LIBERAL for both directions, tcp_new in net/netfilter/nf_conntrack_proto_tcp.c). A connection whose
// SYN it has seen never gets that. This tells kept connections from those that are not redirected for other reasons: to
// the proxy's own port, from probes, to addresses that are excluded.
package conntrack

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
)

// MaxEntries bounds how many connections are looked at in one namespace.
const MaxEntries = 1 << 16

// ErrTooMany says that a namespace has more connections than are looked at.
var ErrTooMany = errors.New("too many connections to count")

// Messages and attributes of linux/netfilter/nfnetlink_conntrack.h.
const (
	messageNew = unix.NFNL_SUBSYS_CTNETLINK << 8     // IPCTNL_MSG_CT_NEW
	messageGet = unix.NFNL_SUBSYS_CTNETLINK<<8 | 0x1 // IPCTNL_MSG_CT_GET

	attributeProtocol      = 4 // CTA_PROTOINFO
	attributeTCP           = 1 // CTA_PROTOINFO_TCP
	attributeState         = 1 // CTA_PROTOINFO_TCP_STATE
	attributeFlagsOriginal = 4 // CTA_PROTOINFO_TCP_FLAGS_ORIGINAL
	attributeFlagsReply    = 5 // CTA_PROTOINFO_TCP_FLAGS_REPLY

	nfgenHeader = 4 // length of struct nfgenmsg

	stateEstablished = 3   // TCP_CONNTRACK_ESTABLISHED
	flagLiberal      = 0x8 // IP_CT_TCP_FLAG_BE_LIBERAL
)

// Reader reads. It may be used concurrently.
type Reader struct {
	sockets *rawnetlink.Sockets
}

// New returns a Reader.
func New() *Reader { return &Reader{sockets: rawnetlink.New()} }

// Kept returns how many connections that are older than the rules, and established, the namespace has.
func (r *Reader) Kept(ctx context.Context, ns redirection.Netns) (kept int, err error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	opened, err := r.sockets.Open(ns, unix.NETLINK_NETFILTER)
	if err != nil {
		return 0, fmt.Errorf("counting kept connections: %w", err)
	}
	defer func() { err = errors.Join(err, r.sockets.CloseNow(opened...)) }()
	request := rawnetlink.AppendMessage(nil, rawnetlink.Message{
		Type: messageGet, Flags: unix.NLM_F_REQUEST | unix.NLM_F_DUMP, Payload: make([]byte, nfgenHeader), // of any family
	})
	entries := 0
	err = opened[0].Scan(ctx, request, func(m rawnetlink.Message) (more bool, err error) {
		if m.Type != messageNew || len(m.Payload) < nfgenHeader {
			return true, nil
		}
		if entries++; entries > MaxEntries {
			return false, ErrTooMany
		}
		is, err := isKept(m.Payload[nfgenHeader:])
		if is {
			kept++
		}
		return err == nil, err
	})
	// A table that changes meanwhile is a count that is a little old.
	if err != nil && !errors.Is(err, rawnetlink.ErrInterrupted) {
		return 0, fmt.Errorf("counting kept connections: %w", err)
	}
	return kept, nil
}

// isKept tells whether an entry is an established connection that tracking has met midway.
func isKept(entry []byte) (bool, error) {
	protocol, err := attribute(entry, attributeProtocol)
	if err != nil {
		return false, err
	}
	tcp, err := attribute(protocol, attributeTCP)
	if err != nil || tcp == nil {
		return false, err
	}
	for kind, want := range map[uint16]func(byte) bool{
		attributeState:         func(b byte) bool { return b == stateEstablished },
		attributeFlagsOriginal: func(b byte) bool { return b&flagLiberal != 0 },
		attributeFlagsReply:    func(b byte) bool { return b&flagLiberal != 0 },
	} {
		value, err := attribute(tcp, kind)
		if err != nil || len(value) == 0 || !want(value[0]) {
			return false, err
		}
	}
	return true, nil
}

// attribute returns what the attribute of that kind holds, nil if there is none.
func attribute(list []byte, kind uint16) ([]byte, error) {
	for len(list) > 0 {
		a, rest, err := rawnetlink.NextAttribute(list)
		if err != nil {
			return nil, err
		}
		if a.Type == kind {
			return a.Data, nil
		}
		list = rest
	}
	return nil, nil
}

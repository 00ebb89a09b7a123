// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
	"ambientd/tools/enclave"
)

// proxyLogTimeout bounds the wait for the proxy's line about a connection that has
// been used.
const proxyLogTimeout = 5 * time.Second

// exchange lets one pod ask another's server, and returns the client's side of it.
func (st *stage) exchange(ctx context.Context, from, to *pod, ip netip.Addr, word string) (exchange, error) {
	failed := func(err error) (exchange, error) {
		return exchange{}, fmt.Errorf("%s to %s at %s: %w", from, to, to.endpoint(ip), err)
	}
	client, err := from.start(st.starter, "client", "--to="+to.endpoint(ip), "--word="+word)
	if err != nil {
		return failed(err)
	}
	if err := client.Wait(ctx); err != nil {
		return failed(fmt.Errorf("%w: %s", err, strings.TrimSpace(client.Log().Tail(3))))
	}
	var got exchange
	if err := json.Unmarshal([]byte(client.Log().Tail(1)), &got); err != nil {
		return failed(fmt.Errorf("reading what the client says: %w", err))
	}
	if got.Reply.Heard != word || got.Reply.Word != to.word {
		return failed(fmt.Errorf("the answer is %+v, want %s to %s", got.Reply, to.word, word))
	}
	return got, nil
}

// captured is exchange with everything that passes the bridge meanwhile.
func (st *stage) captured(ctx context.Context, from, to *pod, ip netip.Addr, word string) (exchange, frames, error) {
	c, err := startCapture(bridge)
	if err != nil {
		return exchange{}, nil, err
	}
	got, err := st.exchange(ctx, from, to, ip, word)
	seen, stopErr := c.stop()
	return got, seen, errors.Join(err, stopErr)
}

// awaitConnection waits for the proxy's line about a connection to a pod's server.
func (st *stage) awaitConnection(ctx context.Context, from int, direction string, to *pod, ip netip.Addr) (enclave.Line, error) {
	ctx, cancel := context.WithTimeout(ctx, proxyLogTimeout)
	defer cancel()
	line, err := st.proxy.Log().Await(ctx, from, func(l enclave.Line) bool {
		return l.Field("msg") == "connection" && l.Field("direction") == direction &&
			l.Field("pod") == to.String() && l.Field("dst") == to.endpoint(ip)
	})
	if err != nil {
		return line, fmt.Errorf("no %s connection to %s in the proxy's log (%w), which ends with:\n%s",
			direction, to.endpoint(ip), err, st.proxy.Log().Tail(5))
	}
	if problem := line.Field("err"); problem != "" {
		return line, fmt.Errorf("the proxy's %s connection to %s: %s", direction, to.endpoint(ip), problem)
	}
	return line, nil
}

// meshExchange is an exchange through the mesh: the server's side must name the
// client, and the bridge must see neither question nor answer.
func (st *stage) meshExchange(ctx context.Context, from, to *pod, ip netip.Addr) error {
	position := st.proxy.Log().Len()
	question := newWord("question")
	_, seen, err := st.captured(ctx, from, to, ip, question)
	if err != nil {
		return err
	}
	line, err := st.awaitConnection(ctx, position, "inbound", to, ip)
	if err != nil {
		return err
	}
	if got := line.Field("source_identity"); got != from.identity() {
		return fmt.Errorf("at %s the client is %q, want %s", to.endpoint(ip), got, from.identity())
	}
	if q, a := seen.containing(question), seen.containing(to.word); q+a > 0 {
		return fmt.Errorf("on the bridge the question is in %d frames and the answer in %d, of %d to %s", q, a, len(seen), to.endpoint(ip))
	}
	if seen.toPort(redirection.HBONEPort) == 0 || seen.toPort(serverPort) > 0 {
		return fmt.Errorf("on the bridge %d frames go to port %d and %d to port %d, want some and none",
			seen.toPort(redirection.HBONEPort), redirection.HBONEPort, seen.toPort(serverPort), serverPort)
	}
	return nil
}

// clientToServer: enrolled pods reach each other in mutual TLS.
func clientToServer(ctx context.Context, st *stage) (string, error) {
	var reached []string
	for _, ip := range st.server.ips {
		if err := st.meshExchange(ctx, st.client, st.server, ip); err != nil {
			return "", err
		}
		reached = append(reached, st.server.endpoint(ip))
	}
	return fmt.Sprintf("%s reached; the server's side names %s; the bridge saw mTLS only",
		strings.Join(reached, " and "), st.client.identity()), nil
}

// outsideToServer: plaintext from outside of the mesh arrives through the proxy's
// plaintext port. It is also the control of what the capture can see.
func outsideToServer(ctx context.Context, st *stage) (string, error) {
	var reached []string
	for _, ip := range st.server.ips {
		position := st.proxy.Log().Len()
		question := newWord("question")
		got, seen, err := st.captured(ctx, st.outside, st.server, ip, question)
		if err != nil {
			return "", err
		}
		if seen.containing(question) == 0 || seen.containing(st.server.word) == 0 {
			return "", fmt.Errorf("the control fails: plaintext to %s is not in the %d frames captured on the bridge", st.server.endpoint(ip), len(seen))
		}
		line, err := st.awaitConnection(ctx, position, "inbound-plaintext", st.server, ip)
		if err != nil {
			return "", err
		}
		if source := line.Field("source_identity"); source != "" {
			return "", fmt.Errorf("plaintext from %s is said to come from %s", st.outside, source)
		}
		if err := st.expectRedirected(got.Local, st.server, ip); err != nil {
			return "", err
		}
		reached = append(reached, st.server.endpoint(ip))
	}
	return fmt.Sprintf("%s reached in plaintext, redirected to port %d; the bridge saw the payload",
		strings.Join(reached, " and "), redirection.InboundPort), nil
}

// expectRedirected returns an error unless the kernel has redirected the connection
// from that client to the proxy's plaintext port.
func (st *stage) expectRedirected(client string, to *pod, ip netip.Addr) error {
	source, err := netip.ParseAddrPort(client)
	if err != nil {
		return fmt.Errorf("reading the client's address: %w", err)
	}
	family := netlink.InetFamily(unix.AF_INET)
	if ip.Is6() {
		family = unix.AF_INET6
	}
	port, err := conntrackReplyPort(to.netns, family, func(t netlink.IPTuple) bool {
		from, ok := netip.AddrFromSlice(t.SrcIP)
		return ok && from.Unmap() == source.Addr().Unmap() && t.SrcPort == source.Port() && t.DstPort == serverPort
	})
	if err != nil {
		return fmt.Errorf("looking for the connection from %s in pod %s: %w", client, to, err)
	}
	if port != redirection.InboundPort {
		return fmt.Errorf("the kernel delivered the connection from %s to port %d, want %d", client, port, redirection.InboundPort)
	}
	return nil
}

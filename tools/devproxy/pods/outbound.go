// SPDX-License-Identifier: Apache-2.0

package pods

import (
	"context"
	"fmt"
	"net"
	"net/netip"

	"ambientd/certfetch/spiffeid"
	"ambientd/tools/devproxy/hbone"
	"ambientd/tools/devproxy/podnet"
	"ambientd/tools/devproxy/relay"
)

// outbound takes a connection that the pod's application has opened.
func (p *pod) outbound(ctx context.Context, c *net.TCPConn) {
	client := relay.TCP{TCPConn: c}
	conn := connection{Direction: outboundDirection, Source: remote(c), SourceIdentity: p.id, Protocol: hboneProtocol}
	upstream, err := p.openOutbound(ctx, c, &conn)
	p.logOpened(conn, err)
	if err != nil {
		client.Abort()
		return
	}
	defer upstream.Close()
	p.logBroken(conn, relay.Join(ctx, client, upstream))
}

// openOutbound fills in what it learns about conn.
func (p *pod) openOutbound(ctx context.Context, c *net.TCPConn, conn *connection) (hbone.Upstream, error) {
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	dst, err := podnet.OriginalDst(c)
	if err != nil {
		return nil, err
	}
	conn.Destination = dst
	peer, inMesh, err := p.cfg.Peers.Identity(ctx, dst.Addr())
	if err != nil {
		return nil, fmt.Errorf("asking whether %s is in the mesh: %w", dst.Addr(), err)
	}
	if !inMesh {
		conn.Direction, conn.Protocol = passthroughDirection, tcpProtocol
		return p.dial(ctx, netip.Addr{}, dst)
	}
	conn.DestinationIdentity = peer
	s, err := p.pool.Connect(ctx, hbone.Destination{Identity: peer, Addr: dst.Addr()}, dst)
	if err != nil {
		return nil, err
	}
	return s, nil
}

func (p *pod) dial(ctx context.Context, source netip.Addr, to netip.AddrPort) (hbone.Upstream, error) {
	c, err := p.netns.DialTCP(ctx, source, to)
	if err != nil {
		return nil, err
	}
	return relay.TCP{TCPConn: c}, nil
}

// connection is what the log says about one.
type connection struct {
	Direction           direction
	Source              netip.AddrPort
	Destination         netip.AddrPort // zero when it is not known, like the next two
	SourceIdentity      spiffeid.ID
	DestinationIdentity spiffeid.ID
	Protocol            protocol
}

type direction string

const (
	outboundDirection    direction = "outbound"
	inboundDirection     direction = "inbound"
	plaintextDirection   direction = "inbound-plaintext"
	passthroughDirection direction = "passthrough"
)

type protocol string

const (
	hboneProtocol protocol = "hbone"
	tcpProtocol   protocol = "tcp"
)

func (p *pod) attrs(c connection) []any {
	attrs := []any{
		"direction", string(c.Direction),
		"src", c.Source.String(),
		"protocol", string(c.Protocol),
	}
	if c.Destination.IsValid() {
		attrs = append(attrs, "dst", c.Destination.String())
	}
	if !c.SourceIdentity.IsZero() {
		attrs = append(attrs, "source_identity", c.SourceIdentity.String())
	}
	if !c.DestinationIdentity.IsZero() {
		attrs = append(attrs, "destination_identity", c.DestinationIdentity.String())
	}
	return attrs
}

// logOpened writes the one line of a connection, once it is open or refused.
func (p *pod) logOpened(c connection, err error) {
	if err != nil {
		p.log.Warn("connection", append(p.attrs(c), "err", err)...)
		return
	}
	p.log.Info("connection", p.attrs(c)...)
}

// logBroken adds one for a connection that did not end in order.
func (p *pod) logBroken(c connection, err error) {
	if err != nil {
		p.log.Info("connection broken", append(p.attrs(c), "err", err)...)
	}
}

func remote(c *net.TCPConn) netip.AddrPort {
	ap := c.RemoteAddr().(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

// SPDX-License-Identifier: Apache-2.0

package pods

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"ambientd/tools/devproxy/hbone"
	"ambientd/tools/devproxy/podnet"
	"ambientd/tools/devproxy/relay"
)

// inbound takes the HBONE streams that come to a pod.
type inbound struct{ p *pod }

// Open connects to the pod's application.
func (i inbound) Open(ctx context.Context, in hbone.Inbound) (hbone.Upstream, error) {
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	upstream, err := i.open(ctx, in)
	i.p.logOpened(i.connection(in), err)
	if err != nil {
		return nil, err
	}
	return slotted{Upstream: upstream, free: i.p.streams.free}, nil
}

func (i inbound) open(ctx context.Context, in hbone.Inbound) (hbone.Upstream, error) {
	if in.Target.Addr() != in.Local {
		return nil, fmt.Errorf("%s is not this pod's address, which is %s", in.Target.Addr(), in.Local)
	}
	if !i.p.streams.try() {
		return nil, fmt.Errorf("the pod has %d streams open already", maxConnections)
	}
	upstream, err := i.p.dialApplication(ctx, in.Client.Addr(), in.Target)
	if err != nil {
		i.p.streams.free()
		return nil, err
	}
	return upstream, nil
}

// Closed is told how a stream ended.
func (i inbound) Closed(in hbone.Inbound, err error) { i.p.logBroken(i.connection(in), err) }

func (i inbound) connection(in hbone.Inbound) connection {
	return connection{
		Direction:           inboundDirection,
		Source:              in.Client,
		Destination:         in.Target,
		SourceIdentity:      in.Source,
		DestinationIdentity: i.p.id,
		Protocol:            hboneProtocol,
	}
}

// slotted frees a slot when it is closed, which happens once.
type slotted struct {
	hbone.Upstream
	free func()
}

// Close closes the stream and frees its slot.
func (s slotted) Close() error {
	defer s.free()
	return s.Upstream.Close()
}

// plaintext takes a connection from outside the mesh.
func (p *pod) plaintext(ctx context.Context, c *net.TCPConn) {
	client := relay.TCP{TCPConn: c}
	conn := connection{Direction: plaintextDirection, Source: remote(c), DestinationIdentity: p.id, Protocol: tcpProtocol}
	upstream, err := p.openPlaintext(ctx, c, &conn)
	p.logOpened(conn, err)
	if err != nil {
		client.Abort()
		return
	}
	defer upstream.Close()
	p.logBroken(conn, relay.Join(ctx, client, upstream))
}

func (p *pod) openPlaintext(ctx context.Context, c *net.TCPConn, conn *connection) (hbone.Upstream, error) {
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	dst, err := podnet.OriginalDst(c)
	if err != nil {
		return nil, err
	}
	conn.Destination = dst
	return p.dialApplication(ctx, conn.Source.Addr(), dst)
}

// dialApplication connects to the pod's own application, in the client's name
// if so configured.
func (p *pod) dialApplication(ctx context.Context, client netip.Addr, to netip.AddrPort) (hbone.Upstream, error) {
	if pattern, denied := matching(p.cfg.Deny, p.name); denied {
		return nil, fmt.Errorf("all traffic to this pod is denied, as pattern %s says", pattern)
	}
	switch to.Port() {
	case outboundPort, plaintextPort, hbone.Port, dnsPort:
		return nil, errors.New("the destination is the proxy itself")
	}
	if p.cfg.Source == PodSource {
		client = netip.Addr{}
	}
	return p.dial(ctx, client, to)
}

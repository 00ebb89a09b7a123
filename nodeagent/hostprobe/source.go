// SPDX-License-Identifier: Apache-2.0

package hostprobe

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"ambientd/iptables/redirection"
)

// checkTimeout bounds one check. Everything in it happens on this node, within
// milliseconds; a SYN that is lost once is sent again after a second (RFC 6298, 2.1).
const checkTimeout = 3 * time.Second

// maxStrangers bounds how many connections of others a check's listener looks at.
const maxStrangers = 16

// Arrival is whose a connection from the host seemed to be when it arrived in the pod.
type Arrival struct {
	Family redirection.Families
	Addr   netip.Addr // of the pod, that was connected to
	Want   netip.Addr // the probe source
	Got    netip.Addr // whom the listener in the pod saw; zero if the connection did not arrive
	Err    error      // why it did not arrive, or what else went wrong with the check
}

// OK says whether the connection arrived, and with the probe source.
func (a Arrival) OK() bool { return a.Err == nil && a.Got == a.Want }

// String says for an operator what was seen.
func (a Arrival) String() string {
	switch {
	case a.Err != nil:
		return fmt.Sprintf("%s: checking a connection from the host: %v", a.Addr, a.Err)
	case a.Got != a.Want:
		return fmt.Sprintf("%s: a connection from the host arrives from %s, want %s", a.Addr, a.Got, a.Want)
	default:
		return fmt.Sprintf("%s: a connection from the host arrives from %s", a.Addr, a.Got)
	}
}

// CheckSource connects from the host to an enrolled pod, to the first of its addresses
// in each family that there is a rule for, and says for each what arrived: IPv4 first,
// nothing for a family in which the pod has no address. In the pod's netns, which inPod
// enters, it listens on a port that the kernel chooses, for as long as it takes. That
// the right connection was seen is certain, since it brings a secret.
//
// With the scope "pod" it shows that the pod's own entry does what it should. With the
// scope "declared" the ports that have entries have listeners already, who do not say
// whom they see; so the check adds an entry of its own for its port and removes it
// afterwards. That shows that rule, sets and pod treat an entry as they should; that
// the pod's own entries are there shows [Set.Verify]. A pod that was not added gets no
// entry, so that a check never makes the host's rule.
func (s *Set) CheckSource(ctx context.Context, uid string, addrs []netip.Addr, inPod redirection.Runner) []Arrival {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	var arrivals []Arrival
	for _, rule := range redirection.HostRules(s.cfg.Options) {
		for _, addr := range addrs {
			if addr = addr.Unmap(); redirection.FamilyOf(addr) == rule.Family {
				arrivals = append(arrivals, Arrival{Family: rule.Family, Addr: addr, Want: rule.Source})
				break
			}
		}
	}
	var checks sync.WaitGroup
	for i := range arrivals {
		checks.Go(func() { arrivals[i].Got, arrivals[i].Err = s.arrival(ctx, uid, arrivals[i].Addr, inPod) })
	}
	checks.Wait()
	return arrivals
}

// arrival returns from where a connection of the host's to addr seems to come.
func (s *Set) arrival(ctx context.Context, uid string, addr netip.Addr, inPod redirection.Runner) (got netip.Addr, err error) {
	listener, err := listen(ctx, inPod, addr)
	if err != nil {
		return got, err
	}
	defer listener.Close()
	to, err := netip.ParseAddrPort(listener.Addr().String())
	if err != nil {
		return got, err
	}
	if s.cfg.Options.Scope == redirection.ProbeScopeDeclared {
		giveBack, err := s.lend(ctx, uid, to)
		if err != nil {
			return got, fmt.Errorf("adding an entry for the check: %w", err)
		}
		defer func() { err = errors.Join(err, giveBack()) }()
	}
	return s.connect(ctx, listener, to)
}

// lend adds an entry that lives for a check of the pod, until giveBack is called.
func (s *Set) lend(ctx context.Context, uid string, to netip.AddrPort) (giveBack func() error, err error) {
	release, err := s.take(ctx)
	if err != nil {
		return nil, err
	}
	_, known := s.pods[uid]
	release()
	if !known {
		return nil, errors.New("the pod itself has none")
	}
	// No pod's UID has a space in it. Another family's check is another owner.
	owner := fmt.Sprintf("check of %s at %s", uid, to)
	if err := s.Add(ctx, owner, []netip.Addr{to.Addr()}, []uint16{to.Port()}); err != nil {
		return nil, err
	}
	return func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		return s.Remove(ctx, owner)
	}, nil
}

// listen opens a listener in the pod on a free port of its address. MPTCP is off: a
// connection of the mesh has to be plain TCP, as a probe is.
func listen(ctx context.Context, inPod redirection.Runner, addr netip.Addr) (listener net.Listener, err error) {
	var config net.ListenConfig
	config.SetMultipathTCP(false)
	err = inPod(func() (err error) {
		listener, err = config.Listen(ctx, network(addr), netip.AddrPortFrom(addr, 0).String())
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listening in the pod: %w", err)
	}
	return listener, nil
}

// connect connects from the host to the listener, which it closes, and returns from
// where that seems to come there.
func (s *Set) connect(ctx context.Context, listener net.Listener, to netip.AddrPort) (netip.Addr, error) {
	ctx, cancel := context.WithCancel(ctx)
	secret := rand.Text()
	seen := make(chan netip.Addr, maxStrangers) // a proxy may bring the secret twice
	var receivers sync.WaitGroup
	defer receivers.Wait()
	defer cancel()
	receivers.Go(func() { closeAfter(ctx, listener) })
	receivers.Go(func() { receive(ctx, listener, secret, seen) })

	var conn net.Conn
	var dialer net.Dialer
	// Package net opens the socket of a literal address on the calling goroutine.
	err := s.cfg.Run(func() (err error) {
		conn, err = dialer.DialContext(ctx, network(to.Addr()), to.String())
		return err
	})
	if err != nil {
		return netip.Addr{}, err
	}
	defer conn.Close()
	if _, err := conn.Write([]byte(secret)); err != nil {
		return netip.Addr{}, fmt.Errorf("sending on the connection: %w", err)
	}
	select {
	case from := <-seen:
		return from, nil
	case <-ctx.Done():
		return netip.Addr{}, fmt.Errorf("something else than the check's listener took it, the node proxy as a rule: %w", ctx.Err())
	}
}

// receive accepts connections until ctx ends, and reports who brings the secret to
// seen, which has to have room for [maxStrangers]. Each is read by itself, so that a
// stranger who says nothing keeps nobody waiting.
func receive(ctx context.Context, listener net.Listener, secret string, seen chan<- netip.Addr) {
	var readers sync.WaitGroup
	defer readers.Wait()
	for range maxStrangers {
		conn, err := listener.Accept()
		if err != nil {
			return // the listener is closed; whoever waits is told by ctx
		}
		readers.Go(func() { closeAfter(ctx, conn) })
		readers.Go(func() {
			said := make([]byte, len(secret))
			if _, err := io.ReadFull(conn, said); err != nil || string(said) != secret {
				return
			}
			if from, err := netip.ParseAddrPort(conn.RemoteAddr().String()); err == nil {
				seen <- from.Addr().Unmap()
			}
		})
	}
}

// closeAfter closes c when ctx ends, which ends what others do with it. It returns when
// that is done: with [context.AfterFunc] a descriptor might outlive the check.
func closeAfter(ctx context.Context, c io.Closer) {
	<-ctx.Done()
	c.Close()
}

func network(addr netip.Addr) string {
	if addr.Is4() {
		return "tcp4"
	}
	return "tcp6"
}

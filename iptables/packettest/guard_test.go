// SPDX-License-Identifier: Apache-2.0

package packettest_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ambientd/iptables/iptables"
	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

// TestGuardrail stops each replacement after each of its transactions and begins
// connections and queries there. What the rules capture is captured, whatever is
// being replaced. What they should capture and cannot yet, since they were damaged,
// is dropped, and captured when it is sent again; or with the other choice it is
// let by, which shows that it would have been.
func TestGuardrail(t *testing.T) {
	netnstest.Require(t)
	var pumps []*pump
	for _, c := range []struct {
		name          string
		before, after redirection.Options
		damage        string // a script over the rules from before
		leaks         bool   // without a guardrail
	}{
		{name: "rules of NAT lost", before: with(), after: with(), damage: "*nat\n-F\nCOMMIT\n"}, // one transaction
		{name: "rules of two tables lost", before: with(), after: with(), damage: "*nat\n-F\nCOMMIT\n*raw\n-F\nCOMMIT\n", leaks: true},
		{name: "all rules lost", before: with(), after: with(), damage: "*nat\n-F\n-X\nCOMMIT\n*mangle\n-F\n-X\nCOMMIT\n*raw\n-F\n-X\nCOMMIT\n", leaks: true},
		{name: "other options", before: with(reroute), after: with(exclude53)},
		{name: "IPv6 no longer shut", before: with(ipv6Off), after: with(), leaks: true},
	} {
		for _, name := range []string{onNFT, onLegacy} {
			for _, onRepair := range []iptables.OnRepair{iptables.RepairDrop, iptables.RepairAllow} {
				p := &pump{name: strings.Join([]string{c.name, name, string(onRepair)}, "/"), n: newNetwork(t, nil),
					mayLeak: c.leaks && onRepair == iptables.RepairAllow}
				t.Run(p.name, func(t *testing.T) {
					healthy := newBackend(t, name)
					apply(t, healthy, p.n, c.before, c.before.Allowed())
					for _, f := range redirection.DualStack.Each() {
						restoreIn(t, p.n.pod, name, f, c.damage)
					}
					stepper := newStepper(t, iptables.Config{Variant: variantOf(name), OnRepair: onRepair})
					stepper.apply(t, p.n, c.after, func(f redirection.Families) { p.begin(t, f) })
					apply(t, healthy, p.n, c.after, redirection.DualStack)
					pumps = append(pumps, p)
				})
			}
		}
	}
	// What was dropped is sent again after a second: all wait for that together.
	for _, p := range pumps {
		t.Run(p.name+"/leaks", func(t *testing.T) {
			t.Parallel()
			if leaks := p.leaks(t); leaks > 0 != p.mayLeak {
				t.Errorf("%d of %d connections and queries leaked; some are expected: %t", leaks, p.begun, p.mayLeak)
			}
		})
	}
}

// exclude53 changes much, and nothing that a pump sends is excluded.
func exclude53(o *redirection.Options) {
	o.ExcludeOutboundPorts = []redirection.PortRange{redirection.SinglePort(redirection.DNSPort)}
	o.ExcludeInterfaces = []string{"vm0"}
}

// stepper is a backend whose restores wait after each transaction.
type stepper struct {
	backend *iptables.Backend
	reached chan redirection.Families // a restore for one family waits
	resume  *os.File
}

// newStepper puts scripts before the real programs, which makes the test one that
// cannot run in parallel with others: programs are found by an environment
// variable.
func newStepper(t *testing.T, config iptables.Config) *stepper {
	t.Helper()
	dir := t.TempDir()
	for _, fifo := range []string{"reached", "resume"} {
		if err := unix.Mkfifo(filepath.Join(dir, fifo), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for family, prefix := range map[redirection.Families]string{redirection.IPv4: "iptables-", redirection.IPv6: "ip6tables-"} {
		name := prefix + string(config.Variant) + "-restore"
		path, err := exec.LookPath("/usr/sbin/" + name)
		if err != nil {
			t.Skip(err)
		}
		script := fmt.Sprintf(`#!/bin/sh
cat >$0.all
rest=$(grep -c ^COMMIT $0.all)
done=0
while [ $done -lt $rest ]; do
	done=$((done+1))
	awk -v n=$done '{ part = part $0 "\n" } /^COMMIT/ { if (++at == n) printf "%%s", part; part = "" }' $0.all >$0.part
	%s "$@" <$0.part || exit
	echo %d >%s/reached
	read -r go <%s/resume
done
`, path, family, dir, dir)
		if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir+string(os.PathListSeparator)+os.Getenv("PATH"))
	backend, err := iptables.New(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	s := &stepper{backend: backend, reached: make(chan redirection.Families)}
	s.resume = openFIFO(t, filepath.Join(dir, "resume"))
	reached := openFIFO(t, filepath.Join(dir, "reached"))
	go func() {
		for lines := bufio.NewScanner(reached); lines.Scan(); {
			var f redirection.Families
			if _, err := fmt.Sscan(lines.Text(), &f); err != nil {
				return
			}
			s.reached <- f
		}
	}()
	return s
}

// openFIFO opens it so that neither end waits for the other.
func openFIFO(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// apply applies, and calls at with the family after each transaction.
func (s *stepper) apply(t *testing.T, n *network, opts redirection.Options, at func(redirection.Families)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := s.backend.Apply(ctx, n.pod.Runner(), opts)
		done <- err
	}()
	for {
		select {
		case f := <-s.reached:
			at(f)
			if _, err := s.resume.WriteString("go\n"); err != nil {
				t.Fatal(err)
			}
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			return
		}
	}
}

// pump begins connections and queries and looks where they ended.
type pump struct {
	name    string
	n       *network
	mayLeak bool // some are to end elsewhere than at the proxy
	begun   int
	waiting []*os.File // connections that have not been looked at
	leaked  int
}

// begin begins what rules of one family are for: an outbound and an inbound
// connection, and a query.
func (p *pump) begin(t *testing.T, f redirection.Families) {
	t.Helper()
	n := p.n
	p.waiting = append(p.waiting,
		attempt{ns: n.pod, to: netip.AddrPortFrom(n.addr(peer, f), tcpPort)}.start(t),
		attempt{ns: n.peer, to: netip.AddrPortFrom(n.addr(pod, f), tcpPort)}.start(t))
	p.begun += 3
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	l, _, err := sendUDP(ctx, n.pod, netip.AddrPortFrom(n.addr(pod, f), 0), netip.AddrPortFrom(n.addr(peer, f), redirection.DNSPort))
	if err != nil && !errors.Is(err, unix.EPERM) {
		t.Errorf("%s: a query: %v", f, err)
	}
	p.count(l)
	// Answered directly, always: what the peer sent before is in the pod then.
	if _, err := sendTCP(ctx, n.peer, netip.AddrPort{}, netip.AddrPortFrom(n.addr(pod, redirection.IPv4), redirection.HBONEPort)); err != nil {
		t.Error(err)
	}
}

func (p *pump) count(l landing) {
	if l.At != "" && !strings.HasPrefix(l.At, "proxy") {
		p.leaked++
	}
}

// leaks waits for all connections, those that were dropped and are tried again by
// the kernel among them, and returns how many did not go to the proxy.
func (p *pump) leaks(t *testing.T) int {
	t.Helper()
	for _, socket := range p.waiting {
		defer socket.Close()
		if err := socket.SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		var l landing
		if err := json.NewDecoder(socket).Decode(&l); err != nil {
			t.Errorf("a connection never came about: %v", err)
		}
		p.count(l)
	}
	return p.leaked
}

// SPDX-License-Identifier: Apache-2.0

package nftables_test

import (
	"errors"
	"testing"

	google "github.com/google/nftables"
	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
)

// cookie returns the number that the kernel names the namespace by.
func (p *pod) cookie() uint64 {
	p.t.Helper()
	sockets, err := rawnetlink.New().Open(p.run, unix.NETLINK_NETFILTER)
	if err != nil {
		p.t.Fatal(err)
	}
	cookie, err := sockets[0].NetnsCookie()
	if err = errors.Join(err, sockets[0].Close()); err != nil {
		p.t.Fatal(err)
	}
	return cookie
}

// seen returns what the backend knows of the namespace.
func (p *pod) seen() redirection.Sighting {
	p.t.Helper()
	seen, known := p.backend.Seen(p.cookie())
	if !known {
		p.t.Fatal("the backend knows nothing of the namespace")
	}
	return seen
}

// restarted returns the pod with a backend that knows nothing but what is recalled.
func (p *pod) restarted(seen redirection.Sighting) *pod {
	p.t.Helper()
	next := &pod{NS: p.NS, t: p.t, backend: newBackend(p.t), run: p.run}
	next.backend.Recall(p.cookie(), seen)
	return next
}

func (p *pod) flushOutput() {
	p.t.Helper()
	p.nft(func(conn *google.Conn) error {
		_, chain := ours("mangle_output")
		conn.FlushChain(chain)
		return nil
	})
}

const missingRow6 = "rule of chain mangle_output: missing, want row 6, ipv4,ipv6: connmark 0x111/0xfff -> restore mark from connmark"

// TestRecall has a process know from the one before it which rules a namespace holds: it finds all damage that was done
// meanwhile, and after a change of options only what they do not want.
func TestRecall(t *testing.T) {
	opts := redirection.DefaultOptions()
	p := newPod(t, newBackend(t))
	p.apply(opts)
	p.verify(opts)
	seen := p.seen()
	if !seen.Numbered || uint64(seen.Generation) != p.generation() {
		t.Fatalf("seen was %+v at generation %d", seen, p.generation())
	}
	next := p.restarted(seen)
	next.verify(opts)
	if again := next.seen(); again != seen {
		t.Errorf("after a restart %+v is known, before it was %+v", again, seen)
	}
	// The rules' own numbers are known, too.
	other := opts
	other.ExcludeOutboundPorts = []redirection.PortRange{redirection.SinglePort(5432)}
	before := next.handles("mangle_output")
	next.apply(other)
	if after := next.handles("mangle_output"); len(after) != len(before) || after[0] != before[0] {
		t.Errorf("rules that stay were replaced: %v, then %v", before, after)
	}
	next.exact(other)

	fresh := p.restarted(next.seen())
	fresh.flushOutput()
	fresh.verify(other, missingRow6)
}

// TestRecallIsForThatMomentAndThoseRules tells a backend of a namespace that is damaged. It believes that for the same
// generation and the same rules alone.
func TestRecallIsForThatMomentAndThoseRules(t *testing.T) {
	opts := redirection.DefaultOptions()
	p := newPod(t, newBackend(t))
	p.apply(opts)
	p.verify(opts)
	told := p.seen()
	p.flushOutput()
	p.restarted(told).verify(opts, missingRow6)

	told.Generation = uint32(p.generation())
	p.restarted(told).verify(opts) // what stands for the rules is all that it goes by
	others := told
	others.Rules = "of another program"
	p.restarted(others).verify(opts, missingRow6)
	changed := opts
	changed.DNSCapture = !changed.DNSCapture
	if _, found, err := p.restarted(told).backend.Verify(t.Context(), p.run, changed); err != nil || len(found) < 2 {
		t.Errorf("other options: %v, %v", found, err)
	}

	removed := p.restarted(told)
	removed.remove()
	removed.verify(opts, "table ambientd: missing, want 6 chains", "policy rule (ipv4): missing, want fwmark 0x111/0xfff lookup 100 priority 32764",
		"route (ipv4): missing, want local default dev lo table 100", "policy rule (ipv6): missing, want fwmark 0x111/0xfff lookup 100 priority 32764",
		"route (ipv6): missing, want local default dev lo table 100")
}

// TestRecallSaysNothingOfRouting: policy rules and routes are looked at each time.
func TestRecallSaysNothingOfRouting(t *testing.T) {
	opts := redirection.DefaultOptions()
	p := newPod(t, newBackend(t))
	p.apply(opts)
	p.verify(opts)
	next := p.restarted(p.seen())
	p.command("", "ip", "rule", "del", "priority", "32764")
	next.verify(opts, "policy rule (ipv4): missing, want fwmark 0x111/0xfff lookup 100 priority 32764")
}

// SPDX-License-Identifier: Apache-2.0

package nftables_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strings"
	"testing"

	google "github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
)

// peerIPTables is what another ambient agent makes of a pod with iptables-restore, in one family; %[1]s is its probe
// source, %[2]s the loopback prefix.
const peerIPTables = `*raw
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:ISTIO_PRERT - [0:0]
:ISTIO_OUTPUT - [0:0]
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_OUTPUT -p udp -m mark --mark 0x539/0xfff -m udp --dport 53 -j CT --zone 1
-A ISTIO_PRERT -p udp -m mark ! --mark 0x539/0xfff -m udp --sport 53 -j CT --zone 1
COMMIT
*mangle
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:ISTIO_PRERT - [0:0]
:ISTIO_OUTPUT - [0:0]
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_PRERT -m mark --mark 0x539/0xfff -j CONNMARK --set-xmark 0x111/0xfff
-A ISTIO_OUTPUT -m connmark --mark 0x111/0xfff -j CONNMARK --restore-mark
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:ISTIO_PRERT - [0:0]
:ISTIO_OUTPUT - [0:0]
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_PRERT -s %[1]s -p tcp -m tcp -j ACCEPT
-A ISTIO_PRERT ! -d %[2]s -p tcp -m tcp ! --dport 15008 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15006
-A ISTIO_OUTPUT -d %[1]s -p tcp -m tcp -j ACCEPT
-A ISTIO_OUTPUT ! -o lo -p udp -m mark ! --mark 0x539/0xfff -m udp --dport 53 -j REDIRECT --to-ports 15053
-A ISTIO_OUTPUT ! -d %[2]s -p tcp -m tcp --dport 53 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15053
-A ISTIO_OUTPUT -p tcp -m mark --mark 0x111/0xfff -j ACCEPT
-A ISTIO_OUTPUT ! -d %[2]s -o lo -j ACCEPT
-A ISTIO_OUTPUT ! -d %[2]s -p tcp -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15001
COMMIT
`

// peerNative is the same by native nftables.
const peerNative = `
table inet istio-ambient-nat {
	chain prerouting { type nat hook prerouting priority dstnat; jump istio-prerouting; }
	chain output { type nat hook output priority -100; jump istio-output; }
	chain istio-prerouting {
		meta l4proto tcp ip saddr 169.254.7.127 counter accept
		ip daddr != 127.0.0.1 tcp dport != 15008 meta mark & 0xfff != 0x539 counter redirect to :15006
		ip6 daddr != ::1 tcp dport != 15008 meta mark & 0xfff != 0x539 counter redirect to :15006
	}
	chain istio-output {
		meta l4proto tcp meta mark & 0xfff == 0x111 counter accept
		oifname "lo" ip daddr != 127.0.0.1 counter accept
		oifname "lo" ip6 daddr != ::1 counter accept
		meta l4proto tcp ip daddr != 127.0.0.1 meta mark & 0xfff != 0x539 counter redirect to :15001
		meta l4proto tcp ip6 daddr != ::1 meta mark & 0xfff != 0x539 counter redirect to :15001
	}
}
table inet istio-ambient-mangle {
	chain prerouting { type filter hook prerouting priority mangle; jump istio-prerouting; }
	chain output { type route hook output priority mangle; jump istio-output; }
	chain istio-prerouting { meta mark & 0xfff == 0x539 counter ct mark set ct mark & 0xfffff000 | 0x111; }
	chain istio-output { ct mark & 0xfff == 0x111 counter meta mark set ct mark; }
}
table inet istio-ambient-raw {
	chain prerouting { type filter hook prerouting priority raw; jump istio-prerouting; }
	chain output { type filter hook output priority raw; jump istio-output; }
	chain istio-prerouting { udp sport 53 meta mark & 0xfff != 0x539 counter ct zone set 1; }
	chain istio-output { udp dport 53 meta mark & 0xfff == 0x539 counter ct zone set 1; }
}
`

// command runs a program in the pod's namespace with a script on its standard input.
func (p *pod) command(script, name string, args ...string) string {
	p.t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		p.t.Skipf("needs %s: %v", name, err)
	}
	var out []byte
	p.Do(p.t, func() (err error) {
		cmd := exec.CommandContext(p.t.Context(), name, args...)
		cmd.Stdin = strings.NewReader(script)
		if out, err = cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", name, err, out)
		}
		return nil
	})
	return string(out)
}

// setUpByPeer makes a pod that another agent has set up, in one of its ways.
func (p *pod) setUpByPeer(way string) {
	p.t.Helper()
	switch way {
	case "iptables-nft":
		p.command(fmt.Sprintf(peerIPTables, "169.254.7.127/32", "127.0.0.1/32"), "iptables-nft-restore")
		p.command(fmt.Sprintf(peerIPTables, "fd16:9254:7127:1337:ffff:ffff:ffff:ffff/128", "::1/128"), "ip6tables-nft-restore")
	case "native":
		p.command(peerNative, "nft", "-f", "-")
	}
	p.Do(p.t, func() error {
		mask := redirection.MarkMask
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			rule := netlink.NewRule()
			rule.Family, rule.Priority, rule.Table, rule.Mark, rule.Mask = family, 32764, 100, 0x111, &mask
			route := &netlink.Route{LinkIndex: 1, Table: 100, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST, Family: family}
			_, route.Dst, _ = net.ParseCIDR(map[int]string{netlink.FAMILY_V4: "0.0.0.0/0", netlink.FAMILY_V6: "::/0"}[family])
			if err := errors.Join(netlink.RuleAdd(rule), netlink.RouteAdd(route)); err != nil {
				return err
			}
		}
		return nil
	})
}

func (p *pod) hasForeign(want bool) {
	p.t.Helper()
	got, err := p.backend.HasForeign(p.t.Context(), p.run)
	if err != nil || got != want {
		p.t.Errorf("another agent's rules: %t, want %t; %v", got, want, err)
	}
}

func (p *pod) removeForeign(want bool) {
	p.t.Helper()
	found, err := p.backend.RemoveForeign(p.t.Context(), p.run)
	if err != nil || found != want {
		p.t.Errorf("removed another agent's rules: %t, want %t; %v", found, want, err)
	}
}

// tables lists "family/name" of every table in the namespace.
func (p *pod) tables() []string {
	p.t.Helper()
	var names []string
	p.nft(func(conn *google.Conn) error {
		tables, err := conn.ListTables()
		for _, table := range tables {
			names = append(names, fmt.Sprintf("%d/%s", table.Family, table.Name))
		}
		return err
	})
	slices.Sort(names)
	return names
}

func (p *pod) generation() uint64 {
	p.t.Helper()
	generation, err := p.backend.Generation(p.t.Context(), p.run)
	if err != nil {
		p.t.Fatal(err)
	}
	return generation
}

// TestTakeover has nothing left of the other agent afterwards, and everything of ours.
func TestTakeover(t *testing.T) {
	for _, way := range []string{"iptables-nft", "native"} {
		t.Run(way, func(t *testing.T) {
			p := newPod(t, newBackend(t))
			opts := redirection.DefaultOptions()
			p.hasForeign(false)
			if got := p.generation(); got != 1 {
				t.Errorf("looking made %d transactions", got-1)
			}
			p.setUpByPeer(way)
			before := p.generation()
			p.hasForeign(true)
			if got := p.generation(); got != before {
				t.Errorf("looking made %d transactions", got-before)
			}
			p.apply(opts)
			p.verify(opts)
			p.hasForeign(true)
			before = p.generation()
			p.removeForeign(true)
			if got := p.generation(); got != before+1 {
				t.Errorf("removing took %d transactions", got-before)
			}
			p.removeForeign(false)
			p.hasForeign(false)
			p.verify(opts)
			if got, want := p.tables(), []string{"1/ambientd"}; !slices.Equal(got, want) {
				t.Errorf("tables %v, want %v", got, want)
			}
			p.remove()
			p.empty()
		})
	}
}

// TestTakeoverLeavesOthersAlone has rules of the pod's own making in the tables that the other agent used.
func TestTakeoverLeavesOthersAlone(t *testing.T) {
	p := newPod(t, newBackend(t))
	p.setUpByPeer("iptables-nft")
	const own = `*nat
:MINE - [0:0]
-A OUTPUT -p tcp -m tcp --dport 81 -j MINE
-A MINE -p tcp -m tcp --dport 81 -j REDIRECT --to-ports 82
-A OUTPUT -p tcp -j ISTIO_OUTPUT
-A MINE -j ISTIO_OUTPUT
COMMIT
*filter
-A INPUT -p tcp -m tcp --dport 9999 -j DROP
COMMIT
`
	p.command(own, "iptables-nft-restore", "--noflush")
	p.command("table ip ISTIO_OUTPUT { chain ISTIO_OUTPUT { counter; }; }; table inet istio-proxy-nat { chain x { counter; }; }\n"+
		"table inet other { chain ISTIO_PRERT { counter; }; }", "nft", "-f", "-")
	p.removeForeign(true)
	want := "*nat -A OUTPUT -p tcp -m tcp --dport 81 -j MINE -A MINE -p tcp -m tcp --dport 81 -j REDIRECT --to-ports 82 " +
		"*filter -A INPUT -p tcp -m tcp --dport 9999 -j DROP"
	if got := p.saved("iptables-nft-save"); !sameRules(got, want) {
		t.Errorf("iptables-save says %s, want %s", got, want)
	}
	if got := p.saved("ip6tables-nft-save"); got != "" {
		t.Errorf("ip6tables-save says %s", got)
	}
	if got, wanted := p.tables(), []string{"1/istio-proxy-nat", "1/other", "2/ISTIO_OUTPUT", "2/filter", "2/nat"}; !slices.Equal(got, wanted) {
		t.Errorf("tables %v, want %v", got, wanted)
	}
}

// saved returns the rules, and the tables that have any, without counters, comments and chains.
func (p *pod) saved(program string) string {
	p.t.Helper()
	var lines []string
	table := ""
	for line := range strings.Lines(p.command("", program)) {
		switch line[0] {
		case '*':
			table = strings.TrimSpace(line)
		case '-':
			if table != "" {
				lines = append(lines, table)
				table = ""
			}
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return strings.Join(lines, " ")
}

// sameRules compares without regard for the order of tables.
func sameRules(a, b string) bool {
	split := func(s string) []string { return slices.Sorted(slices.Values(strings.Split(s, "*"))) }
	trim := func(list []string) (trimmed []string) {
		for _, s := range list {
			trimmed = append(trimmed, strings.TrimSpace(s))
		}
		return trimmed
	}
	return slices.Equal(trim(split(a)), trim(split(b)))
}

// TestSidecarIsNoAmbientAgent has a pod whose sidecar uses the name ISTIO_OUTPUT too.
func TestSidecarIsNoAmbientAgent(t *testing.T) {
	p := newPod(t, newBackend(t))
	p.command(`*nat
:ISTIO_INBOUND - [0:0]
:ISTIO_IN_REDIRECT - [0:0]
:ISTIO_OUTPUT - [0:0]
:ISTIO_REDIRECT - [0:0]
-A PREROUTING -p tcp -j ISTIO_INBOUND
-A OUTPUT -p tcp -j ISTIO_OUTPUT
-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT
-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006
-A ISTIO_OUTPUT -j ISTIO_REDIRECT
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001
COMMIT
`, "iptables-nft-restore")
	before := p.saved("iptables-nft-save")
	p.hasForeign(false)
	p.removeForeign(false)
	if after := p.saved("iptables-nft-save"); after != before {
		t.Errorf("before %s\nafter %s", before, after)
	}
}

// TestOtherBackend migrates a pod from rules that our iptables backend made, and back.
func TestOtherBackend(t *testing.T) {
	p := newPod(t, newBackend(t))
	opts := redirection.DefaultOptions()
	for _, program := range []string{"iptables-nft-restore", "ip6tables-nft-restore"} {
		p.command(`*mangle
:AMBIENTD_PRERT - [0:0]
-A PREROUTING -j AMBIENTD_PRERT
-A AMBIENTD_PRERT -m mark --mark 0x539/0xfff -j CONNMARK --set-xmark 0x111/0xfff
COMMIT
*nat
:AMBIENTD_OUTPUT - [0:0]
-A OUTPUT -j AMBIENTD_OUTPUT
-A AMBIENTD_OUTPUT -p tcp -j REDIRECT --to-ports 15001
COMMIT
`, program)
	}
	has := func(want bool) {
		t.Helper()
		if got, err := p.backend.HasOther(t.Context(), p.run); err != nil || got != want {
			t.Errorf("rules of the other backend: %t, want %t; %v", got, want, err)
		}
	}
	has(true)
	p.hasForeign(false)
	p.apply(opts)
	for _, want := range []bool{true, false} {
		if found, err := p.backend.RemoveOther(t.Context(), p.run); err != nil || found != want {
			t.Errorf("removed rules of the other backend: %t, want %t; %v", found, want, err)
		}
		has(false)
		p.verify(opts)
	}
	if got, want := p.tables(), []string{"1/ambientd"}; !slices.Equal(got, want) {
		t.Errorf("tables %v, want %v", got, want)
	}
	for _, want := range []bool{true, false} {
		if got, err := p.backend.HasOwn(t.Context(), p.run); err != nil || got != want {
			t.Errorf("our table: %t, want %t; %v", got, want, err)
		}
		if found, err := p.backend.RemoveTable(t.Context(), p.run); err != nil || found != want {
			t.Errorf("removed our table: %t, want %t; %v", found, want, err)
		}
	}
	p.verify(opts, noTable)
}

func TestRemoveEmptyTables(t *testing.T) {
	p := newPod(t, newBackend(t))
	for _, program := range []string{"iptables-nft-restore", "ip6tables-nft-restore"} {
		p.command("*nat\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n*raw\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n"+
			"*mangle\n:OUTPUT ACCEPT [0:0]\n-A OUTPUT -p tcp -j ACCEPT\nCOMMIT\n*filter\n:FORWARD DROP [0:0]\nCOMMIT\n", program)
	}
	p.command("table inet mine { }; table ip mine { chain PREROUTING { type nat hook prerouting priority 0; }; };"+
		"table ip security { set s { type inet_service; }; }", "nft", "-f", "-")
	for _, want := range []bool{true, false} {
		if found, err := p.backend.RemoveEmptyTables(t.Context(), p.run); err != nil || found != want {
			t.Errorf("removed empty tables: %t, want %t; %v", found, want, err)
		}
		want := []string{"1/mine", "10/filter", "10/mangle", "2/filter", "2/mangle", "2/mine", "2/security"}
		if got := p.tables(); !slices.Equal(got, want) {
			t.Errorf("tables %v, want %v", got, want)
		}
	}
}

// TestTakeoverOfTheHost deletes the chain of the other agent's probe rule.
func TestTakeoverOfTheHost(t *testing.T) {
	p := newPod(t, newBackend(t))
	p.command("*nat\n:ISTIO_POSTRT - [0:0]\n-A POSTROUTING -j ISTIO_POSTRT\n"+
		"-A ISTIO_POSTRT -p tcp -m owner --socket-exists -j SNAT --to-source 169.254.7.127\nCOMMIT\n", "iptables-nft-restore")
	p.hasForeign(true)
	p.removeForeign(true)
	p.empty()
}

func TestTakeoverBadInput(t *testing.T) {
	p := newPod(t, newBackend(t))
	gone := errors.New("no way in")
	broken := func(func() error) error { return gone }
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for name, call := range map[string]func(context.Context, redirection.Runner) (bool, error){
		"has foreign": p.backend.HasForeign, "remove foreign": p.backend.RemoveForeign,
		"has other": p.backend.HasOther, "remove other": p.backend.RemoveOther,
		"has own": p.backend.HasOwn, "remove table": p.backend.RemoveTable, "remove empty": p.backend.RemoveEmptyTables,
	} {
		if found, err := call(t.Context(), broken); found || !errors.Is(err, gone) {
			t.Errorf("%s where the namespace cannot be entered: %t, %v", name, found, err)
		}
		if found, err := call(ended, p.run); found || !errors.Is(err, context.Canceled) {
			t.Errorf("%s after the end: %t, %v", name, found, err)
		}
		if found, err := call(t.Context(), p.run); found || err != nil {
			t.Errorf("%s where there is nothing: %t, %v", name, found, err)
		}
	}
	if _, err := p.backend.Generation(ended, p.run); !errors.Is(err, context.Canceled) {
		t.Errorf("generation after the end: %v", err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package packettest_test

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
	"ambientd/iptables/xtables"
	"ambientd/tools/netnstest"
)

// This file stands for the other ambient agent that pods are taken over from. The
// rules are the thirteen rows of the contract as that agent lays them out, with
// rules of the pod's own among them, which have to stay.

// agents names the means that the other agent writes its rules by.
func agents() []string { return []string{onNFTables, onNFT, onLegacy} }

// theirScript is for iptables-restore. LOOPBACK and PROBE stand for addresses of
// the family.
const theirScript = `*raw
-N ISTIO_PRERT
-N ISTIO_OUTPUT
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_PRERT -p udp -m udp --sport 53 -m mark ! --mark 0x539/0xfff -j CT --zone 1
-A ISTIO_OUTPUT -p udp -m udp --dport 53 -m mark --mark 0x539/0xfff -j CT --zone 1
COMMIT
*mangle
-N ISTIO_PRERT
-N ISTIO_OUTPUT
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A PREROUTING -p udp -m udp --dport 7777 -j ACCEPT
-A ISTIO_PRERT -m mark --mark 0x539/0xfff -j CONNMARK --set-xmark 0x111/0xfff
-A ISTIO_OUTPUT -m connmark --mark 0x111/0xfff -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff
COMMIT
*nat
-N ISTIO_PRERT
-N ISTIO_OUTPUT
-N PODS_OWN
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A OUTPUT -j PODS_OWN
-A PODS_OWN -p tcp -m tcp --dport 7777 -j RETURN
-A ISTIO_PRERT -s PROBE -p tcp -j ACCEPT
-A ISTIO_PRERT ! -d LOOPBACK -p tcp -m tcp ! --dport 15008 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15006
-A ISTIO_OUTPUT -d PROBE -p tcp -j ACCEPT
-A ISTIO_OUTPUT ! -o lo -p udp -m udp --dport 53 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15053
-A ISTIO_OUTPUT ! -d LOOPBACK -p tcp -m tcp --dport 53 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15053
-A ISTIO_OUTPUT -p tcp -m mark --mark 0x111/0xfff -j ACCEPT
-A ISTIO_OUTPUT ! -d LOOPBACK -o lo -j ACCEPT
-A ISTIO_OUTPUT ! -d LOOPBACK -p tcp -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15001
COMMIT
`

// podsOwn are the rules of theirScript that stay.
func podsOwn() []string {
	return []string{"-p tcp -m tcp --dport 7777 -j RETURN", "-j PODS_OWN", "-p udp -m udp --dport 7777 -j ACCEPT"}
}

// theirTables is for nft: base chains that jump to regular ones.
const theirTables = `
table inet istio-ambient-raw {
	chain prerouting {
		type filter hook prerouting priority raw
		jump istio-prerouting
	}
	chain output {
		type filter hook output priority raw
		jump istio-output
	}
	chain istio-prerouting {
		meta l4proto udp udp sport 53 meta mark and 0xfff != 0x539 ct zone set 1
	}
	chain istio-output {
		meta l4proto udp udp dport 53 meta mark and 0xfff == 0x539 ct zone set 1
	}
}
table inet istio-ambient-mangle {
	chain prerouting {
		type filter hook prerouting priority mangle
		jump istio-prerouting
	}
	chain output {
		type route hook output priority mangle
		jump istio-output
	}
	chain istio-prerouting {
		meta mark and 0xfff == 0x539 ct mark set ct mark and 0xfffff000 or 0x111
	}
	chain istio-output {
		ct mark and 0xfff == 0x111 meta mark set ct mark
	}
}
table inet istio-ambient-nat {
	chain prerouting {
		type nat hook prerouting priority dstnat
		jump istio-prerouting
	}
	chain output {
		type nat hook output priority -100
		jump istio-output
	}
	chain istio-prerouting {
		meta l4proto tcp ip saddr 169.254.7.127 accept
		meta l4proto tcp ip6 saddr fd16:9254:7127:1337:ffff:ffff:ffff:ffff accept
		meta l4proto tcp ip daddr != 127.0.0.0/8 tcp dport != 15008 meta mark and 0xfff != 0x539 redirect to :15006
		meta l4proto tcp ip6 daddr != ::1 tcp dport != 15008 meta mark and 0xfff != 0x539 redirect to :15006
	}
	chain istio-output {
		meta l4proto tcp ip daddr 169.254.7.127 accept
		meta l4proto tcp ip6 daddr fd16:9254:7127:1337:ffff:ffff:ffff:ffff accept
		oifname != "lo" meta l4proto udp udp dport 53 meta mark and 0xfff != 0x539 redirect to :15053
		ip daddr != 127.0.0.0/8 tcp dport 53 meta mark and 0xfff != 0x539 redirect to :15053
		ip6 daddr != ::1 tcp dport 53 meta mark and 0xfff != 0x539 redirect to :15053
		meta l4proto tcp meta mark and 0xfff == 0x111 accept
		oifname "lo" ip daddr != 127.0.0.0/8 accept
		oifname "lo" ip6 daddr != ::1 accept
		meta l4proto tcp ip daddr != 127.0.0.0/8 meta mark and 0xfff != 0x539 redirect to :15001
		meta l4proto tcp ip6 daddr != ::1 meta mark and 0xfff != 0x539 redirect to :15001
	}
}
table inet pods-own {
	chain input {
		type filter hook input priority filter
		tcp dport 7777 accept
	}
}
`

// enrolByAgent makes the other agent's rules, policy rule and route in the netns.
func enrolByAgent(t *testing.T, ns *netnstest.NS, means string) {
	t.Helper()
	if means == onNFTables {
		runIn(t, ns, theirTables, "nft", "-f", "-")
	} else {
		for _, f := range redirection.DualStack.Each() {
			restoreIn(t, ns, means, f, theirScript)
		}
	}
	ns.Do(t, func() error {
		for family, everywhere := range map[int]string{unix.AF_INET: "0.0.0.0/0", unix.AF_INET6: "::/0"} {
			rule := netlink.NewRule()
			rule.Family, rule.Priority, rule.Table, rule.Mark = family, int(redirection.RulePriority), int(redirection.RouteTable), redirection.ConnMark
			mask := redirection.MarkMask
			rule.Mask = &mask
			_, dst, err := net.ParseCIDR(everywhere)
			if err != nil {
				return err
			}
			route := &netlink.Route{LinkIndex: 1, Dst: dst, Type: unix.RTN_LOCAL, Table: int(redirection.RouteTable), Family: family, Scope: netlink.SCOPE_HOST}
			if err := netlink.RuleAdd(rule); err != nil {
				return fmt.Errorf("adding their policy rule: %w", err)
			}
			if err := netlink.RouteAdd(route); err != nil {
				return fmt.Errorf("adding their route: %w", err)
			}
		}
		return nil
	})
}

// restoreIn runs a script in one family, or skips the test where the programs are
// missing.
func restoreIn(t *testing.T, ns *netnstest.NS, means string, f redirection.Families, script string) {
	t.Helper()
	addresses := strings.NewReplacer("LOOPBACK", "127.0.0.0/8", "PROBE", "169.254.7.127/32")
	if f == redirection.IPv6 {
		addresses = strings.NewReplacer("LOOPBACK", "::1/128", "PROBE", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff/128")
	}
	programs, err := xtables.Find(t.Context(), variantOf(means), f)
	if err != nil {
		t.Skip(err)
	}
	if err := programs.Restore(t.Context(), ns.Runner(), addresses.Replace(script)); err != nil {
		t.Fatal(err)
	}
}

// runIn runs a program in the netns and returns what it prints, or skips the test
// where it is missing.
func runIn(t *testing.T, ns *netnstest.NS, stdin string, name string, args ...string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		if path, err = exec.LookPath("/usr/sbin/" + name); err != nil {
			t.Skip(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	var out, complaint bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &complaint
	if err := ns.Runner()(cmd.Run); err != nil {
		t.Fatalf("running %s %s: %v: %s", name, strings.Join(args, " "), err, &complaint)
	}
	return out.String()
}

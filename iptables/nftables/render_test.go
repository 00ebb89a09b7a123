// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"encoding/binary"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
)

var update = flag.Bool("update", false, "write the golden files")

// variant is an option set and the families of a namespace.
type variant struct {
	options  redirection.Options
	families redirection.Families
}

// variants are those whose rules are kept as golden files.
func variants() map[string]variant {
	build := func(families redirection.Families, change func(*redirection.Options)) variant {
		o := redirection.DefaultOptions()
		change(&o)
		return variant{options: o, families: families}
	}
	return map[string]variant{
		"default":        build(redirection.DualStack, func(*redirection.Options) {}),
		"ipv4":           build(redirection.IPv4, func(*redirection.Options) {}),
		"no-dns":         build(redirection.DualStack, func(o *redirection.Options) { o.DNSCapture = false }),
		"inbound-bypass": build(redirection.DualStack, func(o *redirection.Options) { o.InboundBypass = true }),
		"reroute": build(redirection.DualStack, func(o *redirection.Options) {
			o.RerouteInterfaces, o.InboundBypass = []string{"tap0", "k6t-net0"}, true
		}),
		"ipv4-open":       build(redirection.IPv4, func(o *redirection.Options) { o.IPv6Uncaptured = redirection.UncapturedAllow }),
		"everything":      build(redirection.DualStack, everything),
		"everything-ipv4": build(redirection.IPv4, everything),
	}
}

// everything makes every row of the model, and of rows for lists more than one.
func everything(o *redirection.Options) {
	o.KeepEstablished = true
	o.RerouteInterfaces = []string{"tap0", "k6t-net0"}
	o.ExcludeInterfaces = []string{"net1", "net2"}
	o.ExcludeInboundPorts = []redirection.PortRange{{First: 22, Last: 22}, {First: 8000, Last: 8010}}
	o.ExcludeOutboundPorts = []redirection.PortRange{{First: 53, Last: 53}, {First: 8005, Last: 8100}}
	o.ExcludeOutboundCIDRs = []netip.Prefix{
		netip.MustParsePrefix("8.8.0.0/15"), netip.MustParsePrefix("10.0.0.0/24"), netip.MustParsePrefix("2001:db8::/33"),
	}
}

// newSet encodes a variant.
func newSet(t testing.TB, v variant) *ruleSet {
	t.Helper()
	set, err := newRuleSet(redirection.Rules(v.options, v.families))
	if err != nil {
		t.Fatal(err)
	}
	return set
}

// TestRenderGolden keeps what is sent, in the notation of nft --debug=netlink.
func TestRenderGolden(t *testing.T) {
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		t.Skip("needs a little-endian machine: marks and zones are in the machine's byte order")
	}
	for name, v := range variants() {
		t.Run(name, func(t *testing.T) {
			var b strings.Builder
			for _, c := range newSet(t, v).want.chains {
				fmt.Fprintf(&b, "chain %s: %s\n", c.name, c.base)
				for _, r := range c.rules {
					fmt.Fprintf(&b, "  %s\n    %s\n", r.comment, strings.ReplaceAll(r.expressions, "] [", "]\n    ["))
				}
			}
			golden(t, name+".golden", b.String())
		})
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s changed (run with -update if that is meant; -golden +rules):\n%s", path, diff)
	}
}

// TestBatchesCanBeSentAsTheyAre holds what the kernel's answer to a batch is read by.
func TestBatchesCanBeSentAsTheyAre(t *testing.T) {
	set := newSet(t, variants()["default"])
	removal := encodeRemoval(redirection.NFTablesTable)
	for name, b := range map[string]*batch{"creation": set.creation, "replacement": set.replacement, "removal": removal} {
		t.Run(name, func(t *testing.T) {
			var kinds []uint16
			for rest := b.bytes; len(rest) > 0; {
				m, after, err := rawnetlink.Next(rest)
				if err != nil {
					t.Fatal(err)
				}
				if m.Sequence != uint32(len(kinds)) {
					t.Errorf("message %d has sequence number %d", len(kinds), m.Sequence)
				}
				// Of the others, it is known which generation they make, and what. The echo of a removal is all that was removed.
				if m.Flags&unix.NLM_F_ECHO != 0 != (m.Sequence == 1 && name == "replacement") {
					t.Errorf("%s: flags %#x", b.describe(m.Sequence), m.Flags)
				}
				if acks := m.Flags&unix.NLM_F_ACK != 0; acks != (m.Sequence == b.last) {
					t.Errorf("%s: asks for an acknowledgement: %t", b.describe(m.Sequence), acks)
				}
				kinds, rest = append(kinds, m.Type), after
			}
			if kinds[0] != unix.NFNL_MSG_BATCH_BEGIN || kinds[len(kinds)-1] != unix.NFNL_MSG_BATCH_END {
				t.Errorf("no transaction: %v", kinds)
			}
			if int(b.last) != len(kinds)-2 {
				t.Errorf("message %d acknowledges, of %d", b.last, len(kinds))
			}
		})
	}
	if got := set.replacement.steps[1:5]; !cmp.Equal(got, []string{
		"adding table inet ambientd", "deleting table inet ambientd", "adding table inet ambientd", "adding chain raw_prerouting",
	}) {
		t.Errorf("replacement begins with %q", got)
	}
	if got, want := set.creation.describe(set.creation.last), "adding row 13 to chain nat_output"; got != want {
		t.Errorf("last step %q, want %q", got, want)
	}
	if got := set.creation.describe(1 << 20); got != "message 1048576" {
		t.Errorf("unknown step %q", got)
	}
}

func TestUnknownPartsOfTheModelAreErrors(t *testing.T) {
	nothing := redirection.Rule{Chain: redirection.Chain{Table: redirection.Mangle, Hook: redirection.Output}}
	if _, err := newRuleSet([]redirection.Rule{nothing}); err == nil {
		t.Error("unknown verdict: no error")
	}
	if _, err := hookOf(redirection.Chain{Table: "filter", Hook: redirection.Output}); err == nil {
		t.Error("unknown table: no error")
	}
	if _, err := hookOf(redirection.Chain{Table: redirection.NAT, Hook: "forward"}); err == nil {
		t.Error("unknown hook: no error")
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
	"ambientd/tools/enclave"
)

// trace is what redirection and proxy leave in a network namespace, read from the
// kernel.
type trace struct {
	// Tables of nf_tables, which iptables-nft uses too, as "family name".
	Tables []string
	// Legacy tables of x_tables.
	Legacy []string
	// Chains that carry our names; the tables of iptables may stay without them.
	Chains []string
	// PacketRules counts the packet rules in all tables of both kinds.
	PacketRules int
	// PolicyRules are those beyond the kernel's own.
	PolicyRules []string
	// Routes in the routing table that redirection uses.
	Routes []string
	// Listeners are the ports that are listened on, with TCP.
	Listeners []uint16
}

// redirected says what of a redirection is there; "" if nothing is. Empty tables of
// iptables count as nothing: no packet is changed by them.
func (t trace) redirected() string {
	var found []string
	if t.PacketRules > 0 {
		found = append(found, fmt.Sprintf("%d packet rules in %v%v", t.PacketRules, t.Tables, t.Legacy))
	}
	if len(t.Chains) > 0 {
		found = append(found, fmt.Sprintf("chains %v", t.Chains))
	}
	if len(t.PolicyRules) > 0 {
		found = append(found, fmt.Sprintf("policy rules %v", t.PolicyRules))
	}
	if len(t.Routes) > 0 {
		found = append(found, fmt.Sprintf("routes %v", t.Routes))
	}
	return strings.Join(found, ", ")
}

// proxied returns the proxy's ports that are listened on.
func (t trace) proxied() []uint16 {
	return slices.DeleteFunc(slices.Clone(t.Listeners), func(port uint16) bool {
		return port != redirection.OutboundPort && port != redirection.InboundPort && port != redirection.HBONEPort
	})
}

// inspect reads the traces in a network namespace. It writes nothing there: reading
// legacy tables with their tool would register them, so that is done only where they are.
func inspect(ctx context.Context, netns *enclave.Netns, starter *enclave.Starter) (trace, error) {
	var t trace
	err := netns.Do(func() error {
		return errors.Join(t.readNFTables(), t.readLegacyNames(), t.readRouting(), t.readListeners())
	})
	if err != nil {
		return t, fmt.Errorf("inspecting %s: %w", netns.Path(), err)
	}
	if len(t.Legacy) > 0 {
		err = t.readLegacyRules(ctx, netns, starter)
	}
	return t, err
}

func (t *trace) readNFTables() error {
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("opening nf_tables: %w", err)
	}
	tables, err := conn.ListTables()
	if err != nil {
		return fmt.Errorf("listing tables: %w", err)
	}
	for _, table := range tables {
		t.Tables = append(t.Tables, fmt.Sprintf("%s %s", familyName(table.Family), table.Name))
	}
	chains, err := conn.ListChains()
	if err != nil {
		return fmt.Errorf("listing chains: %w", err)
	}
	if t.PacketRules, err = countRules(); err != nil {
		return fmt.Errorf("listing rules: %w", err)
	}
	for _, chain := range chains {
		if chain.Table.Name == redirection.NFTablesTable || ourIPTablesChain(chain.Name) {
			t.Chains = append(t.Chains, chain.Table.Name+" "+chain.Name)
		}
	}
	return nil
}

// countRules counts the rules of all tables. The library cannot read those of ours: it takes the direction of a
// connection's address for a number of four bytes.
func countRules() (count int, err error) {
	sockets, err := rawnetlink.New().Open(redirection.Runner(func(fn func() error) error { return fn() }), unix.NETLINK_NETFILTER)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, sockets[0].Close()) }()
	rest, err := sockets[0].Dump(rawnetlink.AppendMessage(nil, rawnetlink.Message{
		Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETRULE, Flags: unix.NLM_F_REQUEST | unix.NLM_F_DUMP,
		Payload: []byte{unix.NFPROTO_UNSPEC, unix.NFNETLINK_V0, 0, 0},
	}), 1<<20)
	for err == nil && len(rest) > 0 {
		_, rest, err = rawnetlink.Next(rest)
		count++
	}
	return count, err
}

func familyName(f nftables.TableFamily) string {
	switch f {
	case nftables.TableFamilyINet:
		return "inet"
	case nftables.TableFamilyIPv4:
		return "ip"
	case nftables.TableFamilyIPv6:
		return "ip6"
	}
	return fmt.Sprintf("family-%d", f)
}

func ourIPTablesChain(name string) bool {
	return name == redirection.IPTablesPrerouting || name == redirection.IPTablesOutput
}

// readLegacyNames reads which legacy tables are registered.
func (t *trace) readLegacyNames() error {
	for _, name := range []string{"ip_tables_names", "ip6_tables_names"} {
		text, err := os.ReadFile("/proc/thread-self/net/" + name)
		if errors.Is(err, os.ErrNotExist) {
			continue // the kernel has no legacy tables of this family
		}
		if err != nil {
			return fmt.Errorf("reading the legacy tables: %w", err)
		}
		for table := range strings.FieldsSeq(string(text)) {
			t.Legacy = append(t.Legacy, strings.TrimSuffix(name, "_names")+" "+table)
		}
	}
	return nil
}

// readLegacyRules counts the rules in legacy tables.
func (t *trace) readLegacyRules(ctx context.Context, netns *enclave.Netns, starter *enclave.Starter) error {
	for _, tool := range []string{"iptables-legacy-save", "ip6tables-legacy-save"} {
		p, err := starter.Start(enclave.Command{Name: tool, Path: tool, Netns: netns})
		if err != nil {
			return err
		}
		if err := p.Wait(ctx); err != nil {
			return fmt.Errorf("%w; it said:\n%s", err, p.Log().Tail(5))
		}
		for _, line := range p.Log().Find(0, func(enclave.Line) bool { return true }) {
			name, isChain := strings.CutPrefix(line.Text, ":")
			name, _, _ = strings.Cut(name, " ")
			switch {
			case strings.HasPrefix(line.Text, "-A"):
				t.PacketRules++
			case isChain && ourIPTablesChain(name):
				t.Chains = append(t.Chains, tool+" "+name)
			}
		}
	}
	return nil
}

func (t *trace) readRouting() error {
	rules, err := netlink.RuleList(netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("listing policy rules: %w", err)
	}
	for _, rule := range rules {
		// The kernel's own: local 0, main 32766, default 32767.
		if !slices.Contains([]int{0, 32766, 32767}, rule.Priority) {
			t.PolicyRules = append(t.PolicyRules, fmt.Sprintf("%d mark %#x table %d", rule.Priority, rule.Mark, rule.Table))
		}
	}
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: int(redirection.RouteTable)}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return fmt.Errorf("listing routes: %w", err)
	}
	for _, route := range routes {
		t.Routes = append(t.Routes, fmt.Sprintf("%v table %d", route.Dst, route.Table))
	}
	return nil
}

// readListeners reads /proc/net/tcp and tcp6: column 2 is the local address as
// HEX:PORT, column 4 the state, 0A for listening.
func (t *trace) readListeners() error {
	for _, path := range []string{"/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"} {
		f, err := os.Open(path)
		if errors.Is(err, os.ErrNotExist) {
			continue // no IPv6
		}
		if err != nil {
			return fmt.Errorf("reading the sockets: %w", err)
		}
		defer f.Close()
		for lines := bufio.NewScanner(f); lines.Scan(); {
			fields := strings.Fields(lines.Text())
			if len(fields) < 4 || fields[3] != "0A" {
				continue
			}
			_, hexPort, _ := strings.Cut(fields[1], ":")
			port, err := strconv.ParseUint(hexPort, 16, 16)
			if err != nil {
				return fmt.Errorf("reading %s: %w", path, err)
			}
			if !slices.Contains(t.Listeners, uint16(port)) {
				t.Listeners = append(t.Listeners, uint16(port))
			}
		}
	}
	slices.Sort(t.Listeners)
	return nil
}

// conntrackReplyPort returns the port that a connection's answers come from before NAT
// is undone: where it was redirected to, and the port dialled if it was not. It is read
// from the conntrack table of the namespace that redirects.
func conntrackReplyPort(netns *enclave.Netns, family netlink.InetFamily, match func(netlink.IPTuple) bool) (uint16, error) {
	var port uint16
	err := netns.Do(func() error {
		flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
		if err != nil {
			return fmt.Errorf("listing connections: %w", err)
		}
		for _, flow := range flows {
			if flow.Forward.Protocol == unix.IPPROTO_TCP && match(flow.Forward) {
				port = flow.Reverse.SrcPort
				return nil
			}
		}
		return fmt.Errorf("no such connection among %d in the conntrack table", len(flows))
	})
	return port, err
}

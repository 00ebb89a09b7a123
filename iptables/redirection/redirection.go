// SPDX-License-Identifier: Apache-2.0

// Package redirection owns the model of what a packet must see inside the network namespace of an enrolled pod: rows of
// matches and verdicts, the numbers that node proxies and control planes depend on, and the options that switch rows on
// and off. It also owns the model of the one rule that the host's namespace needs ([HostOptions]), and the names by which
// other agents' rules are known. All of it is plain data. The package refuses to know how a rule reaches the kernel: the
// packages nftables and iptables render it, policyroute adds the policy rule and the route that rows 2 and 6 rely on.
//
// # Rows
//
// Rows 1 to 13 are the contract with the node proxy, under the numbers that every ambient agent's documentation could
// give them. The others are ours: row 0 lets connections live on that were established before the pod was enrolled, rows
// 14 to 18 are what a pod's author may exclude, rows 19 and 20 keep IPv6 shut where it is not captured.
//
// # Whose numbers these are
//
// Ports, marks, routing table and rule priority are the contract that ztunnel, istiod and every other ambient agent
// share. A proxy that is already running finds its listeners and marks by them, so none of them is configurable.
//
// # How a packet travels
//
// The proxy listens inside the pod's namespace and marks every socket that it opens with [ProxyMark]. What an
// application sends goes to [OutboundPort], what arrives in plaintext to [InboundPort], what arrives at [HBONEPort] is
// the mesh's own mTLS and reaches its listener untouched. The proxy keeps the original source address when it dials the
// application, so the application's answer would leave the pod instead of returning to the proxy: row 2 marks such a
// connection in conntrack, row 6 copies that mark to the answer, and the policy rule sends packets with that mark to a
// table in which every address is local.
package redirection

import "net/netip"

// Ports of the node proxy inside the pod's network namespace.
const (
	OutboundPort uint16 = 15001 // listener for captured egress
	InboundPort  uint16 = 15006 // listener for captured plaintext ingress
	HBONEPort    uint16 = 15008 // listener for the mesh's mTLS; reached directly, never redirected
	ProxyDNSPort uint16 = 15053 // listener for captured DNS, UDP and TCP
	DNSPort      uint16 = 53    // what applications call, and what is captured
)

// Packet mark and connection mark. Both are compared and set under MarkMask only, so that the upper bits stay free for
// others (kube-proxy and CNI plugins use 0x4000, 0x8000 and above).
const (
	ProxyMark uint32 = 0x539 // what the proxy sets with SO_MARK on every socket that it opens in the pod
	ConnMark  uint32 = 0x111 // what row 2 writes to connections that the proxy opened
	MarkMask  uint32 = 0xfff
)

// Policy routing: packets marked [ConnMark] under [MarkMask] look up RouteTable, where the only route makes every destination local.
const (
	RouteTable   uint32 = 100
	RulePriority uint32 = 32764 // right before the kernel's own rules for main (32766) and default (32767)
)

// DNSZone is the conntrack zone of the proxy's own DNS queries. Without it, such a query may collide with the
// application's query that caused it: same source port range, same server, same protocol.
const DNSZone uint16 = 1

// Names under which our rules are found again; everything under them is ours, nothing else ever is.
const (
	NFTablesTable      = "ambientd"        // the table of family inet
	IPTablesPrerouting = "AMBIENTD_PRERT"  // our chain in each iptables table that is jumped to from PREROUTING
	IPTablesOutput     = "AMBIENTD_OUTPUT" // our chain in each iptables table that is jumped to from OUTPUT

	// Chains of the iptables table filter that are there only while rules are replaced.
	IPTablesGuardInput  = "AMBIENTD_GUARD_IN"
	IPTablesGuardOutput = "AMBIENTD_GUARD_OUT"
)

// Loopback is the name of the loopback device. The kernel gives every network namespace exactly one, at index 1.
const Loopback = "lo"

// Runner runs fn on a thread that is inside the pod's network namespace, waits for it and returns its error, or the
// reason why the namespace could not be entered or left. It decouples these packages from whoever may change a thread's
// namespace. Backends do as little as possible inside: a netlink socket belongs to the namespace that it was opened in,
// whichever thread uses it later.
type Runner func(fn func() error) error

// Do makes a Runner a [Netns].
func (r Runner) Do(fn func() error) error { return r(fn) }

// Netns is a network namespace to work in; Do is a [Runner]. Where its owner keeps sockets with it (rawnetlink.Keeper), a
// backend uses those.
type Netns interface {
	Do(fn func() error) error
}

// Mark is a value under a mask, of a packet or of a connection, in host byte order.
type Mark struct {
	Value, Mask uint32
}

// Table is one of the packet tables of x_tables. nf_tables knows them as priorities and chain types.
type Table string

// The tables that have rows in the model, in the order in which a packet passes them.
const (
	Raw    Table = "raw"
	Mangle Table = "mangle"
	NAT    Table = "nat"
)

// Hook is the place in the packet's path that a chain is attached to.
type Hook string

// The hooks that have rows in the model: a packet that came in by an interface, and one that was sent from here.
const (
	Prerouting Hook = "prerouting"
	Output     Hook = "output"
)

// Chain is the list of rules of one table at one hook. It is comparable.
type Chain struct {
	Table Table
	Hook  Hook
}

// Chains lists every chain that rows can be in, in the order in which a packet passes them. Renderers that create
// chains do so in this order; a chain without a rule is not created.
func Chains() []Chain {
	return []Chain{
		{Raw, Prerouting}, {Mangle, Prerouting}, {NAT, Prerouting},
		{Raw, Output}, {Mangle, Output}, {NAT, Output},
	}
}

// String returns the chain as "nat prerouting".
func (c Chain) String() string { return string(c.Table) + " " + string(c.Hook) }

// Protocol is a transport protocol by its IP protocol number. The zero value stands for any.
type Protocol uint8

// The protocols that rows match (IANA protocol numbers).
const (
	AnyProtocol Protocol = 0
	TCP         Protocol = 6
	UDP         Protocol = 17
	ICMPv6      Protocol = 58
)

// String returns the lower-case name, as nft spells it; iptables says "ipv6-icmp" for the last.
func (p Protocol) String() string {
	switch p {
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	case ICMPv6:
		return "icmpv6"
	default:
		return "any"
	}
}

// InterfaceMatch compares the name of an interface. An empty Name matches any packet.
type InterfaceMatch struct {
	Name string
	Not  bool
}

// AddressMatch compares an address with a prefix. An invalid (zero) Prefix matches any packet.
type AddressMatch struct {
	Prefix netip.Prefix
	Not    bool
}

// PortMatch compares a port of the rule's protocol with a range. The zero Ports match any packet.
type PortMatch struct {
	Ports PortRange
	Not   bool
}

// ICMPTypeMatch compares the type of an ICMPv6 message with a range, both ends included. First 0 matches any.
type ICMPTypeMatch struct {
	First, Last uint8
}

// MarkMatch compares a mark under its mask. A zero Mask matches any packet.
type MarkMatch struct {
	Mark Mark
	Not  bool
}

// Match is what must hold for a rule to apply: all of it. The zero value of each field matches any packet.
type Match struct {
	In, Out         InterfaceMatch
	Source          AddressMatch
	Destination     AddressMatch
	Protocol        Protocol
	SourcePort      PortMatch
	DestinationPort PortMatch
	WithoutSYN      bool          // of TCP: the SYN flag is not set, whatever the others are
	ICMPType        ICMPTypeMatch // of ICMPv6
	PacketMark      MarkMatch
	ConnMark        MarkMatch
}

// Action is what a rule does with a packet that it matches.
type Action uint8

// The actions of the model. Accept, Redirect and Drop end our chain, the others go on to its next rule.
const (
	// Accept leaves the packet as it is and skips the rest of our chain, not the chains of others.
	Accept Action = iota + 1
	// Redirect rewrites the destination to the local Verdict.Port. It ends the NAT hook in both renderings, so row 1
	// needs no further rule to leave the chain.
	Redirect
	// SetConnMark writes Verdict.Mark to the connection under its mask and keeps the other bits.
	SetConnMark
	// RestoreMark copies the whole connection mark to the packet, all 32 bits.
	RestoreMark
	// SetZone puts the packet in the conntrack zone Verdict.Zone, before conntrack sees it.
	SetZone
	// Drop discards the packet without an answer.
	Drop
)

// Verdict is an action with its argument. It is comparable.
type Verdict struct {
	Action Action
	Port   uint16 // of Redirect
	Mark   Mark   // of SetConnMark
	Zone   uint16 // of SetZone
}

// Rule is one rule of the model, ready to be rendered.
type Rule struct {
	Row      int      // number in the model's table; a row with addresses, or for a list of the options, makes several rules
	Families Families // the families that it is for; a rule without addresses covers all that were asked for
	Chain    Chain
	Match    Match
	Verdict  Verdict
	Why      string // for the reader of goldens and reports
}

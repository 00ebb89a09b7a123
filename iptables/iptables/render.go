// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"ambientd/iptables/redirection"
)

// tables lists the tables of the model in the order in which they are written.
// NAT comes last, so that nothing is captured before marks and zones are right.
// Mangle comes first, and is removed last: whatever the options, it has rules,
// so its chains are there whenever any of ours are, even if a restore was cut
// short between tables. That is what [creation] relies on. It also keeps IPv6 shut
// from before its capture ends.
func tables() []string {
	return []string{string(redirection.Mangle), string(redirection.Raw), string(redirection.NAT)}
}

// chain is one of our chains with its rules, each as iptables-save prints it
// after "-A CHAIN ".
type chain struct {
	name     string
	builtins []string // that jump to it
	rules    []string
}

// ruleset is what one family of a netns should hold.
type ruleset struct {
	tables map[string][]chain
	guard  []chain // in the filter table, while the others are replaced
}

// empty reports whether there should be no chain of ours.
func (r ruleset) empty() bool { return len(r.tables) == 0 }

// render returns the chains of one family that opts call for where those in
// captured can be captured.
func render(opts redirection.Options, captured, family redirection.Families) (ruleset, error) {
	set := ruleset{tables: map[string][]chain{}}
	rules := slices.DeleteFunc(redirection.Rules(opts, captured), func(r redirection.Rule) bool { return !r.Families.Has(family) })
	for _, rule := range rules {
		name, builtin, err := chainNames(rule.Chain.Hook)
		if err != nil {
			return ruleset{}, fmt.Errorf("rendering row %d: %w", rule.Row, err)
		}
		verdict, err := renderVerdict(rule.Verdict)
		if err != nil {
			return ruleset{}, fmt.Errorf("rendering row %d: %w", rule.Row, err)
		}
		table := string(rule.Chain.Table)
		i := slices.IndexFunc(set.tables[table], func(c chain) bool { return c.name == name })
		if i < 0 {
			i = len(set.tables[table])
			set.tables[table] = append(set.tables[table], chain{name: name, builtins: []string{builtin}})
		}
		for _, match := range renderMatch(rule.Match) {
			set.tables[table][i].rules = append(set.tables[table][i].rules, sentence(match, verdict))
		}
	}
	set.guard = renderGuard(rules)
	return set, nil
}

func chainNames(hook redirection.Hook) (name, builtin string, err error) {
	switch hook {
	case redirection.Prerouting:
		return redirection.IPTablesPrerouting, "PREROUTING", nil
	case redirection.Output:
		return redirection.IPTablesOutput, "OUTPUT", nil
	default:
		return "", "", fmt.Errorf("hook %q has no built-in chain", hook)
	}
}

// sentence joins the parts of a rule that are not empty.
func sentence(parts ...string) string {
	return strings.Join(slices.DeleteFunc(parts, func(s string) bool { return s == "" }), " ")
}

// renderMatch spells the conditions as iptables-save does, in its order of
// options. It takes several rules to say a range of ICMPv6 types.
func renderMatch(m redirection.Match) []string {
	var w words
	protocol := protocolName(m.Protocol)
	w.add(m.Source.Prefix.IsValid(), m.Source.Not, "-s", m.Source.Prefix.String())
	w.add(m.Destination.Prefix.IsValid(), m.Destination.Not, "-d", m.Destination.Prefix.String())
	w.add(m.In.Name != "", m.In.Not, "-i", m.In.Name)
	w.add(m.Out.Name != "", m.Out.Not, "-o", m.Out.Name)
	w.add(m.Protocol != redirection.AnyProtocol, false, "-p", protocol)
	source, destination := m.SourcePort.Ports != redirection.PortRange{}, m.DestinationPort.Ports != redirection.PortRange{}
	w.add(source || destination || m.WithoutSYN, false, "-m", protocol)
	w.add(source, m.SourcePort.Not, "--sport", portRange(m.SourcePort.Ports))
	w.add(destination, m.DestinationPort.Not, "--dport", portRange(m.DestinationPort.Ports))
	w.add(m.WithoutSYN, true, "--tcp-flags", "SYN SYN")
	w.add(m.PacketMark.Mark.Mask != 0, false, "-m", "mark")
	w.add(m.PacketMark.Mark.Mask != 0, m.PacketMark.Not, "--mark", m.PacketMark.Mark.String())
	w.add(m.ConnMark.Mark.Mask != 0, false, "-m", "connmark")
	w.add(m.ConnMark.Mark.Mask != 0, m.ConnMark.Not, "--mark", m.ConnMark.Mark.String())
	if m.ICMPType.First == 0 {
		return []string{w.String()}
	}
	var texts []string
	for kind := int(m.ICMPType.First); kind <= int(m.ICMPType.Last); kind++ {
		texts = append(texts, sentence(w.String(), "-m icmp6 --icmpv6-type", strconv.Itoa(kind)))
	}
	return texts
}

// words collects the options of a rule.
type words []string

func (w *words) add(set, not bool, option, value string) {
	if set && not {
		*w = append(*w, "!")
	}
	if set {
		*w = append(*w, option, value)
	}
}

// String joins the words by blanks.
func (w *words) String() string { return strings.Join(*w, " ") }

func protocolName(p redirection.Protocol) string {
	if p == redirection.ICMPv6 {
		return "ipv6-icmp"
	}
	return p.String()
}

// portRange spells ports as --sport and --dport do: "8000:8010".
func portRange(r redirection.PortRange) string {
	if r.First == r.Last {
		return strconv.Itoa(int(r.First))
	}
	return fmt.Sprintf("%d:%d", r.First, r.Last)
}

func renderVerdict(v redirection.Verdict) (string, error) {
	switch v.Action {
	case redirection.Accept:
		return "-j ACCEPT", nil
	case redirection.Drop:
		return "-j DROP", nil
	case redirection.Redirect:
		return fmt.Sprintf("-j REDIRECT --to-ports %d", v.Port), nil
	case redirection.SetConnMark:
		// xmark with equal value and mask bits writes the bits of the mask, no others.
		return fmt.Sprintf("-j CONNMARK --set-xmark %s", v.Mark), nil
	case redirection.RestoreMark:
		return "-j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff", nil
	case redirection.SetZone:
		return fmt.Sprintf("-j CT --zone %d", v.Zone), nil
	default:
		return "", fmt.Errorf("%s cannot be said in iptables", v)
	}
}

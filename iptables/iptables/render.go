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
	var words []string
	add := func(set, not bool, option, value string) {
		if set && not {
			words = append(words, "!")
		}
		if set {
			words = append(words, option, value)
		}
	}
	protocol := protocolName(m.Protocol)
	add(m.Source.Prefix.IsValid(), m.Source.Not, "-s", m.Source.Prefix.String())
	add(m.Destination.Prefix.IsValid(), m.Destination.Not, "-d", m.Destination.Prefix.String())
	add(m.In.Name != "", m.In.Not, "-i", m.In.Name)
	add(m.Out.Name != "", m.Out.Not, "-o", m.Out.Name)
	add(m.Protocol != redirection.AnyProtocol, false, "-p", protocol)
	source, destination := m.SourcePort.Ports != redirection.PortRange{}, m.DestinationPort.Ports != redirection.PortRange{}
	add(source || destination || m.WithoutSYN, false, "-m", protocol)
	add(source, m.SourcePort.Not, "--sport", portRange(m.SourcePort.Ports))
	add(destination, m.DestinationPort.Not, "--dport", portRange(m.DestinationPort.Ports))
	add(m.WithoutSYN, true, "--tcp-flags", "SYN SYN")
	add(m.PacketMark.Mark.Mask != 0, false, "-m", "mark")
	add(m.PacketMark.Mark.Mask != 0, m.PacketMark.Not, "--mark", m.PacketMark.Mark.String())
	add(m.ConnMark.Mark.Mask != 0, false, "-m", "connmark")
	add(m.ConnMark.Mark.Mask != 0, m.ConnMark.Not, "--mark", m.ConnMark.Mark.String())
	if m.ICMPType.First == 0 {
		return []string{sentence(words...)}
	}
	var texts []string
	for kind := int(m.ICMPType.First); kind <= int(m.ICMPType.Last); kind++ {
		texts = append(texts, sentence(sentence(words...), "-m icmp6 --icmpv6-type", strconv.Itoa(kind)))
	}
	return texts
}

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

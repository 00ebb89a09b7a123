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
// short between tables. That is what [creation] relies on.
func tables() []string {
	return []string{string(redirection.Mangle), string(redirection.Raw), string(redirection.NAT)}
}

// chain is one of our chains with its rules, each as iptables-save prints it
// after "-A CHAIN ".
type chain struct {
	name, builtin string
	rules         []string
}

// ruleset is what one family of a netns should hold: chains by table.
type ruleset map[string][]chain

// render returns the chains that opts call for in one family.
func render(opts redirection.Options, family redirection.Families) (ruleset, error) {
	set := ruleset{}
	for _, rule := range redirection.Rules(opts, family) {
		if !rule.Families.Has(family) {
			continue
		}
		name, builtin, err := chainNames(rule.Chain.Hook)
		if err != nil {
			return nil, fmt.Errorf("rendering row %d: %w", rule.Row, err)
		}
		text, err := renderRule(rule)
		if err != nil {
			return nil, fmt.Errorf("rendering row %d: %w", rule.Row, err)
		}
		table := string(rule.Chain.Table)
		i := slices.IndexFunc(set[table], func(c chain) bool { return c.name == name })
		if i < 0 {
			i = len(set[table])
			set[table] = append(set[table], chain{name: name, builtin: builtin})
		}
		set[table][i].rules = append(set[table][i].rules, text)
	}
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

// renderRule spells a rule as iptables-save does, in its order of options.
func renderRule(r redirection.Rule) (string, error) {
	var words []string
	add := func(set, not bool, option, value string) {
		if set && not {
			words = append(words, "!")
		}
		if set {
			words = append(words, option, value)
		}
	}
	m, protocol := r.Match, r.Match.Protocol.String()
	add(m.Source.Prefix.IsValid(), m.Source.Not, "-s", m.Source.Prefix.String())
	add(m.Destination.Prefix.IsValid(), m.Destination.Not, "-d", m.Destination.Prefix.String())
	add(m.In.Name != "", m.In.Not, "-i", m.In.Name)
	add(m.Out.Name != "", m.Out.Not, "-o", m.Out.Name)
	add(m.Protocol != redirection.AnyProtocol, false, "-p", protocol)
	add(m.SourcePort.Ports != (redirection.PortRange{}) || m.DestinationPort.Ports != (redirection.PortRange{}), false, "-m", protocol)
	add(m.SourcePort.Ports != (redirection.PortRange{}), m.SourcePort.Not, "--sport", portRange(m.SourcePort.Ports))
	add(m.DestinationPort.Ports != (redirection.PortRange{}), m.DestinationPort.Not, "--dport", portRange(m.DestinationPort.Ports))
	add(m.PacketMark.Mark.Mask != 0, false, "-m", "mark")
	add(m.PacketMark.Mark.Mask != 0, m.PacketMark.Not, "--mark", m.PacketMark.Mark.String())
	add(m.ConnMark.Mark.Mask != 0, false, "-m", "connmark")
	add(m.ConnMark.Mark.Mask != 0, m.ConnMark.Not, "--mark", m.ConnMark.Mark.String())
	verdict, err := renderVerdict(r.Verdict)
	if err != nil {
		return "", err
	}
	return strings.Join(append(words, verdict), " "), nil
}

func renderVerdict(v redirection.Verdict) (string, error) {
	switch v.Action {
	case redirection.Accept:
		return "-j ACCEPT", nil
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

// creation returns the restore script for a netns without chains of ours. There,
// -N fails where a chain exists already, and the table stays as it was.
func creation(want ruleset) string {
	var s script
	for _, table := range tables() {
		if len(want[table]) == 0 {
			continue
		}
		s.line("*%s", table)
		for _, c := range want[table] {
			s.line("-N %s", c.name)
			s.fill(c)
		}
		s.line("COMMIT")
	}
	return s.String()
}

// script builds the input of iptables-restore.
type script struct{ strings.Builder }

func (s *script) line(format string, args ...any) {
	fmt.Fprintf(s, format+"\n", args...)
}

// fill appends the rules to an empty chain and makes it the first in its hook.
func (s *script) fill(c chain) {
	for _, rule := range c.rules {
		s.line("-A %s %s", c.name, rule)
	}
	s.line("-I %s 1 -j %s", c.builtin, c.name)
}

// portRange spells ports as --sport and --dport do: "8000:8010".
func portRange(r redirection.PortRange) string {
	if r.First == r.Last {
		return strconv.Itoa(int(r.First))
	}
	return fmt.Sprintf("%d:%d", r.First, r.Last)
}

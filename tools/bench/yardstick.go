// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"ambientd/iptables/iptables"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/podnetns"
)

// yardstick is two runs of iptables-nft-restore with the rules of a pod, one a family.
// How long they take is R.
type yardstick struct {
	*namespaces
	dir      string
	families []family
}

// family is one of the two restore runs of the yardstick: its programs, and the
// script that makes the rules in a netns without any.
type family struct {
	restore, save string
	script        string
}

// newYardstick has the iptables backend write its rules once, and makes scripts for bare
// restore runs of what the kernel then has. dir takes them.
func newYardstick(ctx context.Context, dir string, backend *iptables.Backend) (*yardstick, error) {
	made, err := newNamespaces()
	if err != nil {
		return nil, err
	}
	y := &yardstick{namespaces: made, dir: dir, families: []family{
		{restore: "iptables-nft-restore", save: "iptables-nft-save"},
		{restore: "ip6tables-nft-restore", save: "ip6tables-nft-save"},
	}}
	return y, y.one(ctx, func(ns *podnetns.Netns) error {
		if _, err := backend.Apply(ctx, ns, redirection.DefaultOptions()); err != nil {
			return err
		}
		for i := range y.families {
			f := &y.families[i]
			cmd := exec.CommandContext(ctx, f.save)
			var saved []byte
			if err := ns.Do(func() (err error) { saved, err = cmd.Output(); return err }); err != nil {
				return fmt.Errorf("running %s: %w", f.save, err)
			}
			f.script = creation(string(saved))
			if !strings.Contains(f.script, "-N "+redirection.IPTablesOutput) {
				return fmt.Errorf("%s shows none of our chains", f.save)
			}
		}
		return nil
	})
}

// creation turns what iptables-save prints into the script that makes it where nothing
// is. Built-in chains are left out: naming them makes restore create and hook up all
// five of a table, which costs several times what the rules do and nobody needs.
func creation(saved string) string {
	var script strings.Builder
	for line := range strings.Lines(saved) {
		name, declared := strings.CutPrefix(line, ":")
		name, _, _ = strings.Cut(name, " ")
		switch {
		case strings.HasPrefix(line, "#"):
		case declared && strings.Contains(line, " - "): // a user's chain has no policy
			fmt.Fprintf(&script, "-N %s\n", name)
		case declared:
		default:
			script.WriteString(line)
		}
	}
	return script.String()
}

// sample takes one sample.
func (y *yardstick) sample(ctx context.Context, r *figure) error {
	var stdin []*os.File
	for _, f := range y.families {
		path := filepath.Join(y.dir, f.restore+".rules")
		if err := os.WriteFile(path, []byte(f.script), 0o600); err != nil {
			return fmt.Errorf("writing the yardstick's rules: %w", err)
		}
		in, err := os.Open(path)
		if err != nil {
			return fmt.Errorf("opening the yardstick's rules: %w", err)
		}
		defer in.Close()
		stdin = append(stdin, in)
	}
	return y.timeIn(ctx, r, func() error {
		for i, f := range y.families {
			cmd := exec.CommandContext(ctx, f.restore, "--noflush")
			cmd.Stdin = stdin[i]
			if err := cmd.Run(); err != nil {
				return fmt.Errorf("running %s: %w", f.restore, err)
			}
		}
		return nil
	})
}

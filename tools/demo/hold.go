// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"

	"ambientd/iptables/backend"
)

// hold makes the pods of the scene again, says how to look at them, and waits for
// the end of ctx.
func hold(ctx context.Context, st *stage, out io.Writer) error {
	if err := st.populate(ctx); err != nil {
		return err
	}
	status, err := st.status(ctx)
	if err != nil {
		return fmt.Errorf("asking the agent for its backend: %w", err)
	}
	exe, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding this program: %w", err)
	}
	fmt.Fprint(out, `
demo: everything goes on running; end it with ^C. To look inside, in another terminal:
`+advice([]hint{{"enter the namespaces", fmt.Sprintf("nsenter --preserve-credentials -t %d -U -m -n", os.Getpid())}})+`and there:
`+advice(st.hints(exe, status.Redirection.Backend)))
	<-ctx.Done()
	return nil
}

// hint is a command to look with, and what it shows.
type hint struct{ shows, command string }

// hints are the commands for inside; exe is this program.
func (st *stage) hints(exe, backendName string) []hint {
	hints := []hint{
		{"what is enrolled", st.cfg.bin + "/ambientd status"},
		{"logs", "tail -f " + st.path("ambientd.log") + " " + st.path("devproxy.log")},
	}
	for _, p := range []*pod{st.client, st.server, st.outside, st.optedOut} {
		hints = append(hints, hint{"rules of " + p.String(), inNetns(p) + listRules(backendName)})
	}
	return append(hints, hint{"a request", fmt.Sprintf("%s%s %s client --to=%s --word=hello",
		inNetns(st.client), exe, podCommand, st.server.endpoint(st.server.ips[0]))})
}

func inNetns(p *pod) string { return "nsenter --net=" + p.netns.Path() + " " }

// listRules is the command that shows the rules of a backend as that writes them.
func listRules(backendName string) string {
	if backendName == backend.IPTables {
		return "sh -c 'iptables-save; ip6tables-save'"
	}
	return "nft list ruleset"
}

// advice lists hints in two columns. It ends with a line break.
func advice(hints []hint) string {
	width := 0
	for _, h := range hints {
		width = max(width, len(h.shows))
	}
	var lines strings.Builder
	for _, h := range hints {
		fmt.Fprintf(&lines, "  %-*s  %s\n", width, h.shows, h.command)
	}
	return lines.String()
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"ambientd/nodeagent/admin"
)

// operationTimeout is how long commands wait that have the agent do something to pods,
// unless told otherwise: with iptables that takes 20 ms and more for each.
const operationTimeout = time.Minute

const verifyUsage = `Usage: ambientd verify [POD...] [FLAGS]

Compares enrolled pods with what was meant: network namespace, packet rules, policy rule and route, identity, and the node
proxy's set; and the host's rule and set for probes. What differs is put right and shown. A POD is NAMESPACE/NAME or a UID; without
any all enrolled pods are compared. Only root may ask. The exit code is 1 if anything differed or could not be compared.
`

// verify is the command verify.
func verify(ctx context.Context, args []string, stdout, _ io.Writer) error {
	c := newClient("verify", operationTimeout)
	probes, asJSON := boolean(false), boolean(false)
	c.flags.add(&probes, "probes", "connect from the host to each pod too, and see whose that seems to be in the pod")
	c.flags.add(&asJSON, "json", "print JSON, for programs")
	pods, err := parseNames(c.flags.set, args, stdout, c.help(verifyUsage))
	if err != nil {
		return err
	}
	if err := c.check(); err != nil {
		return err
	}
	ctx, cancel := c.bound(ctx)
	defer cancel()
	result, err := admin.Verify(ctx, c.socket(), admin.VerifyRequest{Pods: pods, Probes: bool(probes)})
	if err != nil {
		return c.advise(err)
	}
	show := admin.WriteFindings
	if asJSON {
		show = func(w io.Writer, r admin.VerifyResult) error { return writeJSON(w, r) }
	}
	if err := show(stdout, result); err != nil {
		return err
	}
	if !result.OK() {
		return errors.New("not everything was as it should be, see above")
	}
	return nil
}

const withdrawUsage = `Usage: ambientd withdraw --all | POD... [FLAGS]

Takes pods out of the mesh while they run, and leaves nothing of redirection in them, not of another agent's either. They stay
out until ` + "`ambientd enrol`" + `, or until the agent is started again. A POD is NAMESPACE/NAME or a UID. Only root may ask.
`

// withdraw is the command withdraw.
func withdraw(ctx context.Context, args []string, stdout, _ io.Writer) error {
	return operate(ctx, args, stdout, operation{
		name: "withdraw", usage: withdrawUsage, all: "all pods that are enrolled", done: "withdrawn", none: "no pod was enrolled", do: admin.Withdraw,
	})
}

const enrolUsage = `Usage: ambientd enrol --all | POD... [FLAGS]

Lets pods back into the mesh that ` + "`ambientd withdraw`" + ` keeps out. Those that belong there by their labels are enrolled soon after;
` + "`ambientd status`" + ` shows it. A POD is NAMESPACE/NAME or a UID. Only root may ask.
`

// enrol is the command enrol.
func enrol(ctx context.Context, args []string, stdout, _ io.Writer) error {
	return operate(ctx, args, stdout, operation{
		name: "enrol", usage: enrolUsage, all: "all pods that are kept out", done: "let back in", none: "no pod was kept out", do: admin.Enrol,
	})
}

// operation is a command that does something to pods.
type operation struct {
	name, usage string
	all         string // what --all stands for
	done, none  string // what is printed of each pod, or without any
	do          func(ctx context.Context, socket string, pods admin.Selection) (admin.Outcome, error)
}

func operate(ctx context.Context, args []string, stdout io.Writer, o operation) error {
	c := newClient(o.name, operationTimeout)
	all := boolean(false)
	c.flags.add(&all, "all", o.all)
	pods, err := parseNames(c.flags.set, args, stdout, c.help(o.usage))
	if err != nil {
		return err
	}
	selection := admin.Selection{All: bool(all), Pods: pods}
	if selection.Validate() != nil {
		return &usageError{err: errors.New("either name pods or give --all"), help: "ambientd " + o.name + " --help"}
	}
	if err := c.check(); err != nil {
		return err
	}
	ctx, cancel := c.bound(ctx)
	defer cancel()
	outcome, err := o.do(ctx, c.socket(), selection)
	if err != nil {
		return c.advise(err)
	}
	var report strings.Builder
	for _, pod := range outcome.Pods {
		fmt.Fprintf(&report, "%s: %s\n", pod, o.done)
	}
	if len(outcome.Pods) == 0 {
		report.WriteString(o.none + "\n")
	}
	return write(stdout, report.String())
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"path/filepath"
	"syscall"
	"time"

	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/agent"
)

// showStatus is the command status.
func showStatus(ctx context.Context, args []string, stdout, _ io.Writer) error {
	c := newClient("status", 5*time.Second)
	asJSON := boolean(false)
	c.flags.add(&asJSON, "json", "print JSON, for programs")
	err := parse(c.flags.set, args, stdout, c.help("Usage: ambientd status [FLAGS]\n\nShows what the agent on this machine has enrolled. Only root may ask.\n"))
	if err == nil {
		err = c.check()
	}
	if err != nil {
		return err
	}
	ctx, cancel := c.bound(ctx)
	defer cancel()
	status, err := admin.Fetch(ctx, c.socket())
	if err != nil {
		return c.advise(err)
	}
	if asJSON {
		return writeJSON(stdout, status)
	}
	return admin.WriteTable(stdout, status, time.Now())
}

// client is what commands have in common that ask the running agent.
type client struct {
	command string
	flags   *flags
	cfg     agent.Config // of which the socket's path counts
	timeout duration
}

func newClient(command string, timeout time.Duration) *client {
	c := &client{command: command, flags: newFlags(command), cfg: agent.Default(), timeout: duration(timeout)}
	c.flags.group("Flags")
	c.flags.add((*text)(&c.cfg.RunDir), "run-dir DIR", "what the agent was started with")
	c.flags.addDerived((*text)(&c.cfg.AdminSocket), "admin-socket PATH", "unix socket of the agent (default <run-dir>/private/admin.sock)")
	c.flags.add(&c.timeout, "timeout DURATION", "how long to wait for the agent")
	return c
}

func (c *client) help(usage string) func() string {
	return func() string { return usage + c.flags.help() }
}

func (c *client) socket() string { return c.cfg.AdminSocketPath() }

// advise adds to the error of an agent that is not there the flag by which it may be elsewhere:
// the one that was given.
func (c *client) advise(err error) error {
	if !errors.Is(err, syscall.ENOENT) && !errors.Is(err, syscall.ECONNREFUSED) {
		return err
	}
	given := map[string]bool{}
	c.flags.set.Visit(func(f *flag.Flag) { given[f.Name] = true })
	used := "--run-dir or --admin-socket"
	switch {
	case given["admin-socket"]: // it counts, whatever the directory
		used = "--admin-socket"
	case given["run-dir"]:
		used = "--run-dir"
	}
	return fmt.Errorf("%w if so, give the %s that it was started with", err, used)
}

// bound returns a context that ends with the time that the user gave.
func (c *client) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, time.Duration(c.timeout))
}

func writeJSON(stdout io.Writer, value any) error {
	encoder := json.NewEncoder(stdout)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(value); err != nil {
		return fmt.Errorf("printing the answer: %w", err)
	}
	return nil
}

// minTimeout leaves time for an answer at all.
const minTimeout = time.Millisecond

// check returns everything that is wrong with the values of the flags.
func (c *client) check() error {
	errs := absolute(given{"run-dir", c.cfg.RunDir})
	if c.cfg.AdminSocket != "" {
		errs = append(errs, absolute(given{"admin-socket", c.cfg.AdminSocket})...)
	}
	if timeout := time.Duration(c.timeout); timeout < minTimeout {
		errs = append(errs, fmt.Errorf("--timeout %s: must be at least %s", timeout, minTimeout))
	}
	if len(errs) > 0 {
		return &usageError{err: sentence(errs), help: "ambientd " + c.command + " --help"}
	}
	return nil
}

// given is the value of a flag.
type given struct{ flag, value string }

// absolute returns an error for each path that is not.
func absolute(paths ...given) (errs []error) {
	for _, path := range paths {
		if !filepath.IsAbs(path.value) {
			errs = append(errs, fmt.Errorf("--%s %s: must be an absolute path", path.flag, path.value))
		}
	}
	return errs
}

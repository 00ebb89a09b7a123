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
	"time"

	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/agent"
)

// showStatus is the command status.
func showStatus(ctx context.Context, args []string, stdout io.Writer) error {
	cfg := agent.Default()
	timeout := duration(5 * time.Second)
	asJSON := boolean(false)
	flags := newFlags("status")
	flags.group("Flags")
	flags.add((*text)(&cfg.RunDir), "run-dir DIR", "what the agent was started with")
	flags.addDerived((*text)(&cfg.AdminSocket), "admin-socket PATH", "unix socket of the agent (default <run-dir>/private/admin.sock)")
	flags.add(&timeout, "timeout DURATION", "how long to wait for the agent")
	flags.add(&asJSON, "json", "print JSON, for programs")
	err := parse(flags.set, args, stdout, func() string {
		return "Usage: ambientd status [FLAGS]\n\nShows what the agent on this machine has enrolled. Only root may ask.\n" + flags.help()
	})
	if errors.Is(err, flag.ErrHelp) {
		return nil
	}
	if err == nil {
		err = checkStatusFlags(cfg, time.Duration(timeout))
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(timeout))
	defer cancel()
	status, err := admin.Fetch(ctx, cfg.AdminSocketPath())
	if err != nil {
		return err
	}
	if !asJSON {
		return admin.WriteTable(stdout, status, time.Now())
	}
	encoder := json.NewEncoder(stdout)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(status); err != nil {
		return fmt.Errorf("printing the status: %w", err)
	}
	return nil
}

// minStatusTimeout leaves time for an answer at all.
const minStatusTimeout = time.Millisecond

// checkStatusFlags returns everything that is wrong with the values of status's flags.
func checkStatusFlags(cfg agent.Config, timeout time.Duration) error {
	var errs []error
	if !filepath.IsAbs(cfg.RunDir) {
		errs = append(errs, fmt.Errorf("--run-dir %s: must be an absolute path", cfg.RunDir))
	}
	if cfg.AdminSocket != "" && !filepath.IsAbs(cfg.AdminSocket) {
		errs = append(errs, fmt.Errorf("--admin-socket %s: must be an absolute path", cfg.AdminSocket))
	}
	if timeout < minStatusTimeout {
		errs = append(errs, fmt.Errorf("--timeout %s: must be at least %s", timeout, minStatusTimeout))
	}
	if len(errs) > 0 {
		return &usageError{err: sentence(errs), help: "ambientd status --help"}
	}
	return nil
}

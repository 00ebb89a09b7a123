// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"
)

// downDeadline bounds how long the kernel may take to end everything on a node.
const downDeadline = 30 * time.Second

// Down takes the cluster in dir down, whatever state it is in, and removes the directory. No
// cluster is no error.
func Down(ctx context.Context, dir string) error {
	state, err := Load(dir)
	if errors.Is(err, ErrNone) {
		return nil
	}
	if err != nil {
		return err
	}
	unlock, err := lockDir(state.Dir)
	if err != nil {
		return err
	}
	defer unlock()
	// Anew: it may have changed before the lock was taken.
	if state, err = Load(dir); errors.Is(err, ErrNone) {
		return nil
	}
	if err != nil {
		return err
	}
	return down(ctx, state)
}

// down ends what the state names. The directory goes last and only if all else did: it is
// what knows of the rest.
func down(ctx context.Context, state *State) error {
	ctx, cancel := context.WithTimeout(ctx, downDeadline)
	defer cancel()
	var errs []error
	for _, n := range state.Nodes {
		if n.Process.PID == 0 {
			continue // it was not started
		}
		if err := n.Process.Stop(ctx); err != nil {
			errs = append(errs, fmt.Errorf("ending %s: %w", n.Name, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := removeCgroups(ctx, state); err != nil {
		return err
	}
	if err := os.RemoveAll(state.Dir); err != nil {
		return fmt.Errorf("removing the cluster's directory: %w", err)
	}
	return nil
}

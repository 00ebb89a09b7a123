// SPDX-License-Identifier: Apache-2.0

// Package install puts the CNI plugin on a node, and takes it off again: the binary into
// the runtime's plugin directory, and one entry, the last, into the network configuration
// that the runtime loads.
//
// It owns those files of ours on the host, and the one entry in a file of somebody else's.
// Of that file it refuses to change any other byte, since its owner may compare; it never
// writes a file in place, since others read it meanwhile; and it refuses to guess: what it
// cannot read as a network configuration stays as it is, with an error.
//
// The plugin does not import it: it runs for each pod, this once a node.
package install

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// PluginName is the binary's file name and the entry's type.
const PluginName = "ambient-cni"

// retryPause is between two looks at a configuration that is not there yet, or not whole.
const retryPause = 200 * time.Millisecond

// Result says what there is now, and what had to be changed for it.
type Result struct {
	Binary, Conflist               string // paths
	BinaryWritten, ConflistWritten bool
	// Left are other network configurations from which our entry was taken.
	Left []string
}

// Install puts binary and entry in place, in this order: an entry without its binary keeps
// pods from starting. What is as it should be is not written. Until Wait is over it waits for
// a network configuration that can be used, which on a new node the primary plugin's own
// installer still has to write.
func Install(ctx context.Context, cfg Config) (Result, error) {
	if err := cfg.validate(); err != nil {
		return Result{}, err
	}
	entry, err := cfg.Entry.encode()
	if err != nil {
		return Result{}, err
	}
	if err := errors.Join(sweep(cfg.BinDir), sweep(cfg.ConfDir)); err != nil {
		return Result{}, fmt.Errorf("removing what an installation left that was killed: %w", err)
	}
	result := Result{Binary: filepath.Join(cfg.BinDir, PluginName)}
	if result.BinaryWritten, err = copyBinary(cfg.Plugin, result.Binary); err != nil {
		return result, fmt.Errorf("installing %s: %w", result.Binary, err)
	}
	deadline := time.Now().Add(cfg.Wait)
	for {
		err := chain(cfg.ConfDir, entry, &result)
		if !errors.Is(err, errNotYet) {
			return result, err
		}
		if time.Now().Add(retryPause).After(deadline) {
			return result, result.halfway(err)
		}
		if cfg.Waiting != nil {
			cfg.Waiting(err)
			cfg.Waiting = nil
		}
		select {
		case <-ctx.Done():
			return result, result.halfway(fmt.Errorf("%w; stopped waiting for it", err))
		case <-time.After(retryPause):
		}
	}
}

// halfway is the error of an installation that has to be repeated. The binary stays: it is needed
// then, and where an entry of an earlier installation is about to come back, before.
func (r Result) halfway(err error) error {
	return fmt.Errorf("%w; %s is in place already, and no runtime calls it before `ambientd install` is run again and puts its entry in", err, r.Binary)
}

// chain puts the entry where the runtime looks, and nowhere else.
func chain(dir string, entry []byte, result *Result) error {
	first, err := loaded(dir)
	if err != nil {
		return err
	}
	if result.Conflist, err = first.chain(entry, result); err != nil {
		return err
	}
	left, err := unchainAll(dir, result.Conflist)
	result.Left = append(result.Left, left...)
	if err != nil {
		return err
	}
	return verify(dir, result.Conflist)
}

// verify reads what is there now, as the runtime will.
func verify(dir, conflist string) error {
	first, err := loaded(dir)
	if err != nil {
		return err
	}
	if first.path != conflist {
		return fmt.Errorf("%w: %s has appeared before %s", errNotYet, first.path, conflist)
	}
	list, err := parseList(first.content)
	if err != nil {
		return fmt.Errorf("%w: %s: %w", errNotYet, conflist, err)
	}
	if !list.chained() {
		return fmt.Errorf("%w: %s has been written by somebody else meanwhile", errNotYet, conflist)
	}
	return nil
}

// Uninstall takes entries out first and the binary away last: an entry whose binary is
// missing keeps pods from starting. It returns what was changed or removed. Where one of the
// directories does not exist nothing is: it may be misspelt, and the entry be in another.
func Uninstall(cfg Config) ([]string, error) {
	if err := cfg.validateDirs(); err != nil {
		return nil, err
	}
	var missing []string
	for _, dir := range []string{cfg.ConfDir, cfg.BinDir} {
		if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
			missing = append(missing, dir)
		}
	}
	if len(missing) > 0 {
		return nil, fmt.Errorf("there is no directory %s: name the one that the runtime uses; nothing was changed", strings.Join(missing, ", nor "))
	}
	changed, err := unchainAll(cfg.ConfDir, "")
	if err != nil {
		return changed, fmt.Errorf("%w; the binary stays while a configuration may name it", err)
	}
	binary := filepath.Join(cfg.BinDir, PluginName)
	removed, err := remove(binary)
	if err != nil {
		return changed, fmt.Errorf("removing the plugin: %w", err)
	}
	if removed {
		changed = append(changed, binary)
	}
	return changed, nil
}

// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"ambientd/iptables/iptables"
	"ambientd/iptables/nftables"
	"ambientd/iptables/redirection"
)

// HostRule keeps the rule and the sets that the host's namespace has for probes.
type HostRule interface {
	EnsureHost(ctx context.Context, run redirection.Runner, opts redirection.HostOptions) error
	VerifyHost(ctx context.Context, run redirection.Runner, opts redirection.HostOptions, entries []redirection.HostEntry) ([]redirection.Difference, error)
	RemoveHost(ctx context.Context, run redirection.Runner) error
}

// HostEntries changes what those sets hold.
type HostEntries interface {
	SetEntries(ctx context.Context, run redirection.Runner, opts redirection.HostOptions, entries []redirection.HostEntry) error
	AddEntries(ctx context.Context, run redirection.Runner, opts redirection.HostOptions, entries ...redirection.HostEntry) error
	DelEntries(ctx context.Context, run redirection.Runner, opts redirection.HostOptions, entries ...redirection.HostEntry) error
}

// Host is the backend's work in the host's namespace.
type Host interface {
	HostRule
	HostEntries
}

// Request says which backend is asked for, and where the decision is kept.
type Request struct {
	Mode     string            // Auto, NFTables or IPTables
	OnRepair iptables.OnRepair // of the iptables backend; its own default if empty
	BootID   string            // of the running kernel: modules and programs may be others after the next boot
	File     string            // that keeps the decision, in a directory that only root can use
	Scratch  Scratch
	Logger   *slog.Logger
}

// Decision is the backend that this node uses until the next boot.
type Decision struct {
	Chosen

	Host         Host          // the same backend's work in the host's namespace
	Predecessors *Predecessors // what was there before that backend
	Variant      string        // of the iptables programs; empty for nftables
	Probed       time.Time     // when the probe found it to work
	Kept         bool          // by an earlier start of this boot
}

// Decide returns the backend that was decided on since the machine booted for the same mode, or else probes (see [Choose])
// and keeps what it found. So all starts of one boot use the same backend, whatever tables somebody else has made
// meanwhile. A decision that cannot be kept is only logged: the next start probes again.
func Decide(ctx context.Context, req Request) (Decision, error) {
	kept, err := readRecord(req.File)
	if err == nil && kept.answers(req) {
		d, renewErr := kept.renew(ctx, req)
		if renewErr == nil {
			return d, nil
		}
		err = renewErr
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		req.Logger.Warn("the decision on the redirection backend of an earlier start is of no use, it is probed again", "file", req.File, "err", err)
	}
	chosen, err := Choose(ctx, req.Mode, req.Scratch, req.Logger)
	if err != nil {
		return Decision{}, err
	}
	r := record{
		Version: recordVersion, BootID: req.BootID, Mode: req.Mode,
		Backend: chosen.Name, Reason: chosen.Reason, Probed: time.Now().UTC(),
	}
	if b, ok := chosen.Backend.(*iptables.Backend); ok {
		r.Variant = b.Variant()
	}
	d, err := r.renew(ctx, req)
	if err != nil {
		return Decision{}, err
	}
	d.Kept = false
	if err := r.write(req.File); err != nil {
		req.Logger.Warn("the decision on the redirection backend cannot be kept, the next start probes again", "file", req.File, "err", err)
	}
	return d, nil
}

// recordVersion is the version of the record that is written, and the only one that is read.
const recordVersion = 1

// maxRecord bounds the file. A reason that quotes what a program complained of takes 2 KiB.
const maxRecord = 64 << 10

// record is a decision as it is kept on disk.
type record struct {
	Version int              `json:"version"`
	BootID  string           `json:"bootID"`
	Mode    string           `json:"mode"`
	Backend string           `json:"backend"`
	Variant iptables.Variant `json:"variant,omitempty"`
	Reason  string           `json:"reason"`
	Probed  time.Time        `json:"probed"`
}

// answers reports whether the record is about what is asked for.
func (r record) answers(req Request) bool { return r.BootID == req.BootID && r.Mode == req.Mode }

// renew makes the backend that the record names, without probing.
func (r record) renew(ctx context.Context, req Request) (Decision, error) {
	d := Decision{Chosen: Chosen{Name: r.Backend, Reason: r.Reason}, Variant: string(r.Variant), Probed: r.Probed, Kept: true}
	switch r.Backend {
	case NFTables:
		b, err := nftables.New()
		if err != nil {
			return Decision{}, err
		}
		d.Backend, d.Host, d.Predecessors = b, b, predecessorsOf(b, b, req.Logger).lookingFirst(b.MayHoldOthers)
	case IPTables:
		b, err := iptables.New(ctx, iptables.Config{Variant: r.Variant, OnRepair: req.OnRepair})
		if err != nil {
			return Decision{}, fmt.Errorf("using the iptables programs (variant %s): %w", r.Variant, err)
		}
		d.Backend, d.Host, d.Predecessors = b, b, predecessorsOf(b, b, req.Logger)
	default:
		return Decision{}, fmt.Errorf("redirection backend %.32q is not known", r.Backend)
	}
	return d, nil
}

// readRecord returns an error that wraps [fs.ErrNotExist] if there is no file.
func readRecord(path string) (r record, err error) {
	// Without O_NONBLOCK, opening a named pipe waits for a writer.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return record{}, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	content, err := io.ReadAll(io.LimitReader(f, maxRecord))
	if err != nil {
		return record{}, err
	}
	if err := json.Unmarshal(content, &r); err != nil {
		return record{}, fmt.Errorf("reading it: %w", err)
	}
	if r.Version != recordVersion {
		return record{}, fmt.Errorf("it has version %d, this agent knows version %d only", r.Version, recordVersion)
	}
	return r, nil
}

// write makes the file hold the record, or leaves it as it is. It gets mode 0600.
func (r record) write(path string) error {
	content, err := json.Marshal(r)
	if err != nil {
		return err
	}
	temp, err := os.CreateTemp(filepath.Dir(path), ".new-") // with mode 0600
	if err != nil {
		return err
	}
	_, err = temp.Write(append(content, '\n'))
	if err == nil {
		err = temp.Sync()
	}
	err = errors.Join(err, temp.Close())
	if err == nil {
		err = os.Rename(temp.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temp.Name()))
	}
	return nil
}

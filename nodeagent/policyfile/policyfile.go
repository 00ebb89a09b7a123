// SPDX-License-Identifier: Apache-2.0

// Package policyfile keeps the file by which the CNI plugin decides of whole namespaces
// while no agent runs ([podevent.Policy]): it is written when what it would say has
// changed, whole or not at all.
//
// It owns the file and when it is written. It refuses to decide: which namespaces are out
// of the mesh it is told, and a namespace that it is not told of is left out, which the
// plugin takes for one in the mesh.
package policyfile

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"ambientd/cni-plugin/podevent"
)

// defaultPoll is how often namespaces are looked at. What changed since the last look the
// plugin does not know when the agent ends in between.
const defaultPoll = time.Second

// Namespaces lists namespaces with their labels. Of a list that is not complete, missing
// ones may exist.
type Namespaces interface {
	Namespaces() (labels map[string]map[string]string, complete bool)
}

// Config is what a [File] works with.
type Config struct {
	Path       string     // required; its directory must exist
	BootID     string     // required
	Namespaces Namespaces // required
	// Out tells whether a namespace with those labels puts no pod in the mesh. Required.
	Out func(name string, labels map[string]string) bool
	// Exclusions are those of the agent's configuration.
	Exclusions podevent.Exclusions
	Logger     *slog.Logger  // required
	Poll       time.Duration // zero means 1 s
}

// File is the file. Its methods are for one goroutine at a time.
type File struct {
	cfg  Config
	out  map[string]struct{} // what the file says, or would if it could be written
	said []byte              // the file as it was written last; nil if it is not known
}

// New returns a File that starts from what an earlier agent of this boot has left, so that
// nothing is forgotten before there is something better.
func New(cfg Config) (*File, error) {
	if cfg.Path == "" || cfg.BootID == "" || cfg.Namespaces == nil || cfg.Out == nil || cfg.Logger == nil {
		return nil, errors.New("policyfile: a path, a boot ID, namespaces, what is out and a logger are needed")
	}
	if cfg.Poll == 0 {
		cfg.Poll = defaultPoll
	}
	f := &File{cfg: cfg, out: map[string]struct{}{}}
	earlier, err := podevent.ReadPolicy(cfg.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		cfg.Logger.Warn("the policy of an earlier agent is not in use", "file", cfg.Path, "err", err)
	default:
		for _, name := range earlier.OutOfMesh {
			f.out[name] = struct{}{}
		}
	}
	return f, nil
}

// Run keeps the file up to date until ctx ends, and then returns nil. The file stays, and
// says what was so at the end.
func (f *File) Run(ctx context.Context) error {
	poll := time.NewTicker(f.cfg.Poll)
	defer poll.Stop()
	told := "" // of what does not work
	for ended := false; ; {
		switch err := f.Update(); {
		case err == nil:
			told = ""
		case err.Error() != told:
			told = err.Error()
			f.cfg.Logger.Error("the policy for when the agent is down cannot be written, it is tried again", "file", f.cfg.Path, "err", err)
		}
		if ended {
			return nil
		}
		select {
		case <-ctx.Done():
			ended = true
		case <-poll.C:
		}
	}
}

// Update looks at the namespaces and writes the file if it would say something else.
func (f *File) Update() error {
	f.look()
	content, err := podevent.Policy{
		BootID: f.cfg.BootID, Exclusions: f.cfg.Exclusions, OutOfMesh: slices.Collect(maps.Keys(f.out)),
	}.Encode()
	if err != nil {
		return errors.Join(err, f.drop())
	}
	if string(content) == string(f.said) {
		return nil
	}
	if err := replace(f.cfg.Path, content); err != nil {
		// What the file says may be wrong by now; without it all namespaces count as in the mesh.
		return errors.Join(fmt.Errorf("writing the policy: %w", err), f.drop())
	}
	f.said = content
	return nil
}

// look takes over what the list says. What is missing from one that is not complete stays
// as it was.
func (f *File) look() {
	labels, complete := f.cfg.Namespaces.Namespaces()
	if complete {
		clear(f.out)
	}
	for name, of := range labels {
		if f.cfg.Out(name, of) {
			f.out[name] = struct{}{}
		} else {
			delete(f.out, name)
		}
	}
}

func (f *File) drop() error {
	f.said = nil
	if err := os.Remove(f.cfg.Path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing the policy: %w", err)
	}
	return nil
}

// replace makes the file hold content, for root only.
func replace(path string, content []byte) error {
	dir := filepath.Dir(path)
	temp, err := os.CreateTemp(dir, ".policy-new-") // with mode 0600
	if err != nil {
		return err
	}
	_, err = temp.Write(content)
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
	return flush(dir)
}

// flush makes the directory's entries last.
func flush(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

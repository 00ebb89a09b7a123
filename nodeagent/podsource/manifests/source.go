// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sync/singleflight"

	"ambientd/nodeagent/podsource"
	"ambientd/nodeagent/workload"
)

const (
	// defaultPoll is how often the directory is read whatever the kernel tells:
	// changes behind a symbolic link and on network file systems make no event.
	defaultPoll = 10 * time.Second
)

// Config says which directory a Source reads.
type Config struct {
	Dir    string        // required; it must exist when New is called
	Poll   time.Duration // zero means 10 s
	Logger *slog.Logger  // required; gets what is wrong with a file, once per change of it
}

// Source answers for the pods of a directory. It is safe for concurrent use.
type Source struct {
	cfg Config

	reading sync.Mutex         // held while the directory is read
	shared  singleflight.Group // of the Lookups that wait for a reading
	current atomic.Pointer[reading]
	changed chan struct{} // holds a token when a reading differed from the one before
}

// reading is a snapshot with the time at which it was begun.
type reading struct {
	began    time.Time
	snapshot *snapshot
	err      error // of the last attempt; the snapshot is then an older one
}

// New reads the directory. Without it there is no Source; files in it that
// cannot be read are logged.
func New(cfg Config) (*Source, error) {
	if cfg.Logger == nil {
		return nil, errors.New("manifests: no logger given")
	}
	if cfg.Poll == 0 {
		cfg.Poll = defaultPoll
	}
	s := &Source{cfg: cfg, changed: make(chan struct{}, 1)}
	s.current.Store(&reading{snapshot: &snapshot{}})
	err := s.reload(time.Now())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("manifest directory %s does not exist; create it, or name another one", cfg.Dir)
	case err != nil:
		return nil, err
	}
	return s, nil
}

// Run follows changes of the directory until ctx ends, and then returns nil. It
// goes on without the directory, with what was read last, until it is there again.
func (s *Source) Run(ctx context.Context) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		s.cfg.Logger.Warn("changes of manifests are noticed late, by polling", "dir", s.cfg.Dir, "poll", s.cfg.Poll, "err", err)
		watcher = &fsnotify.Watcher{} // its nil channels never deliver
	} else {
		defer closeWatcher(watcher, s.cfg.Logger)
		s.watch(watcher)
	}
	poll := time.NewTicker(s.cfg.Poll)
	defer poll.Stop()
	pace := newPace() // fires at once, for what changed between New and the watch
	defer pace.stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-poll.C:
			if err == nil {
				s.watch(watcher) // again, in case the directory was replaced
			}
			s.refresh()
		case e := <-watcher.Events:
			pace.note(e, time.Now())
		case err := <-watcher.Errors:
			// An overflow of the kernel's queue, as a rule: events were lost.
			s.cfg.Logger.Debug("watching manifests", "dir", s.cfg.Dir, "err", err)
			pace.quiet.Reset(quietTime)
		case <-pace.quiet.C:
			s.refresh()
		case <-pace.soon.C:
			s.refresh()
		}
	}
}

func closeWatcher(watcher *fsnotify.Watcher, logger *slog.Logger) {
	if err := watcher.Close(); err != nil {
		logger.Debug("closing the watch of manifests", "err", err)
	}
}

// watch is idempotent. If the directory is away, refresh reports it.
func (s *Source) watch(watcher *fsnotify.Watcher) {
	if err := watcher.Add(s.cfg.Dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.cfg.Logger.Debug("watching manifests", "dir", s.cfg.Dir, "err", err)
	}
}

// refresh reads the directory for Run, where nobody waits for an error: the first
// of a kind is logged.
func (s *Source) refresh() {
	before := s.current.Load().err
	err := s.reload(time.Now())
	if err != nil && (before == nil || before.Error() != err.Error()) {
		s.cfg.Logger.Error("manifests cannot be read, the last ones stay in use", "dir", s.cfg.Dir, "err", err)
	}
}

// Lookup returns the pod of that name. The UID may be empty; if it is not, it
// must be the pod's, or the error wraps [podsource.ErrUIDMismatch]. An unknown pod is
// [podsource.ErrNotFound], which names the files that could not be read, as the pod may be
// in one of them. So may its namespace: a pod that is left out of List is an error here.
//
// A manifest that was written before the call counts: the directory's and the
// file's stamps are compared with the snapshot's, and what differs is read again.
func (s *Source) Lookup(ctx context.Context, namespace, name, uid string) (workload.Pod, error) {
	began := time.Now()
	for {
		r := s.current.Load()
		e, found := r.snapshot.pods[podName{namespace, name}]
		if found && !e.unknown && (uid == "" || uid == e.pod.UID) && r.snapshot.current(s.cfg.Dir, e) {
			return e.pod, nil
		}
		if r.began.After(began) { // it cannot get any newer
			return s.settle(r, e, found, podName{namespace, name}, uid)
		}
		if err := s.await(ctx); err != nil {
			return workload.Pod{}, fmt.Errorf("looking for pod %s/%s: %w", namespace, name, err)
		}
	}
}

// List returns all pods, in no order, as they were read last. It is not complete
// while the directory or a file in it cannot be read: a pod that is missing may
// then be in there.
//
// A pod is left out while its namespace has no manifest but may have one in a file of which
// there is no good version: nobody could tell whether the pod belongs in the mesh.
func (s *Source) List() (pods []workload.Pod, complete bool) {
	r := s.current.Load()
	pods = make([]workload.Pod, 0, len(r.snapshot.pods))
	for _, e := range r.snapshot.pods {
		if !e.unknown {
			pods = append(pods, e.pod)
		}
	}
	return pods, r.err == nil && r.snapshot.unreadable() == ""
}

// Namespaces returns the namespaces with their labels, as they were read last: those
// that have a manifest, and of a complete list also those that pods are in without. The
// labels are shared: nobody may change them.
func (s *Source) Namespaces() (labels map[string]map[string]string, complete bool) {
	r := s.current.Load()
	complete = r.err == nil && r.snapshot.unreadable() == ""
	labels = maps.Clone(r.snapshot.labels)
	if labels == nil {
		labels = map[string]map[string]string{}
	}
	if !complete {
		return labels, false // what has no manifest may have one in a file that cannot be read
	}
	for name := range r.snapshot.pods {
		if _, ok := labels[name.namespace]; !ok {
			labels[name.namespace] = nil
		}
	}
	return labels, true
}

// Changed receives after the directory's content has changed, once for any number
// of changes. It is meant for one receiver.
func (s *Source) Changed() <-chan struct{} { return s.changed }

// await returns when somebody has read the directory, or at the end of ctx: a file
// system that hangs costs one goroutine, and nobody waits for it for ever.
func (s *Source) await(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	read := s.shared.DoChan("", func() (any, error) { return nil, s.reload(time.Now()) })
	select {
	case r := <-read:
		return r.Err
	case <-ctx.Done():
		return fmt.Errorf("reading the manifest directory %s: %w", s.cfg.Dir, ctx.Err())
	}
}

// settle answers from a reading that was begun after the question.
func (s *Source) settle(r *reading, e entry, found bool, name podName, uid string) (workload.Pod, error) {
	hint := ""
	if files := r.snapshot.unreadable(); files != "" {
		hint = "; files that cannot be read: " + files
	}
	switch {
	case found && uid != "" && uid != e.pod.UID:
		return workload.Pod{}, fmt.Errorf("pod %s: %w: %s in manifest %s, %s from the runtime; if the manifest is right, "+
			"whatever starts the pod has to pass its UID%s", e.pod, podsource.ErrUIDMismatch, e.pod.UID, e.files[0].name, uid, hint)
	case found && e.unknown:
		return workload.Pod{}, fmt.Errorf("pod %s in %s: its namespace has no manifest that can be read, so whether it belongs "+
			"in the mesh is not known%s", e.pod, s.cfg.Dir, hint)
	case found:
		return e.pod, nil
	}
	return workload.Pod{}, fmt.Errorf("pod %s/%s in %s: %w%s", name.namespace, name.name, s.cfg.Dir, podsource.ErrNotFound, hint)
}

// reload reads the directory, unless somebody has begun to do so after since and
// is done. Problems that are new are logged.
func (s *Source) reload(since time.Time) error {
	s.reading.Lock()
	defer s.reading.Unlock()
	last := s.current.Load()
	if last.began.After(since) {
		return last.err
	}
	next := &reading{began: time.Now()}
	var err error
	if next.snapshot, err = load(s.cfg.Dir, last.snapshot); err != nil {
		next.snapshot, next.err = last.snapshot, fmt.Errorf("reading the manifest directory: %w", err)
	}
	s.current.Store(next)
	if !next.snapshot.same(last.snapshot) {
		select {
		case s.changed <- struct{}{}:
		default: // one is waiting already
		}
	}
	for _, p := range next.snapshot.problems {
		if !slices.Contains(last.snapshot.problems, p) {
			s.logProblem(p)
		}
	}
	return next.err
}

// maxProblems bounds what Problems returns.
const maxProblems = 20

// Problems returns what an operator has to put right in the directory, a line each that
// begins with the file's path; of very many the first, and how many more there are.
func (s *Source) Problems() []string {
	current := s.current.Load()
	var lines []string
	if current.err != nil {
		lines = append(lines, current.err.Error()+"; the last ones stay in use")
	}
	for i, p := range current.snapshot.problems {
		if i == maxProblems {
			return append(lines, fmt.Sprintf("and %d more", len(current.snapshot.problems)-i))
		}
		lines = append(lines, filepath.Join(s.cfg.Dir, p.file)+": "+p.text)
	}
	return lines
}

// logProblem tells a file that cannot be read from one of which a document does not
// count, while its others do.
func (s *Source) logProblem(p problem) {
	path := filepath.Join(s.cfg.Dir, p.file)
	if p.whole {
		s.cfg.Logger.Warn("manifest is not in use", "file", path, "err", p.text)
		return
	}
	s.cfg.Logger.Warn("document is ignored", "file", path, "reason", p.text)
}

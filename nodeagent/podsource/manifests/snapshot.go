// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"ambientd/nodeagent/workload"
)

// file is one manifest file as it was read.
type file struct {
	name    string
	stamp   stamp
	settled bool
	objects objects           // of its last good version
	good    bool              // it has had one since it is there
	digest  [sha256.Size]byte // of what it holds
	err     error             // why that is not its last good version
}

// emptyError is no state to leave a file in: who writes one empties it first, a command
// that fails leaves it so, and so may a machine that loses its power.
type emptyError struct{}

func (emptyError) Error() string { return "empty; a file whose objects are to go has to be removed" }

// podName names a pod to people. A UID names it to the runtime.
type podName struct{ namespace, name string }

// entry is a pod with the files that say something of it.
type entry struct {
	pod     workload.Pod
	files   []*file // the pod's, and its namespace's if that has one
	unknown bool    // whether its namespace has labels: see snapshot.index
}

// problem is something in the directory that an operator has to put right. The
// stamp makes the same text new after the file was changed.
type problem struct {
	file  string
	stamp stamp
	text  string
	whole bool // with the file, not with one document of it
}

// snapshot is the directory at one time. It is not changed once it is made.
type snapshot struct {
	stamp    stamp // of the directory
	settled  bool
	files    map[string]*file
	pods     map[podName]entry
	labels   map[string]map[string]string // of the namespaces that have a manifest
	problems []problem
}

// load reads the directory. Files that have not changed since old are not read
// again.
func load(dir string, old *snapshot) (*snapshot, error) {
	s := &snapshot{files: map[string]*file{}, pods: map[podName]entry{}}
	var err error
	if s.stamp, s.settled, _, err = stat(dir); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir) // sorted by name
	if err != nil {
		return nil, err
	}
	var files []*file
	for _, e := range entries {
		if !isManifest(e.Name()) {
			continue
		}
		f := loadFile(dir, e.Name(), old.files[e.Name()])
		if errors.Is(f.err, fs.ErrNotExist) && e.Type()&fs.ModeSymlink == 0 {
			continue // removed since the directory was listed
		}
		_, empty := errors.AsType[emptyError](f.err)
		if empty && old.pods != nil && old.files[f.name] == nil {
			continue // just created: its writer comes to it
		}
		s.files[f.name] = f
		files = append(files, f)
	}
	if maps.Equal(s.files, old.files) && old.pods != nil {
		// As when a file was read again that is too young to be believed.
		s.pods, s.labels, s.problems = old.pods, old.labels, old.problems
		return s, nil
	}
	s.index(files)
	return s, nil
}

// loadFile reads a file. What it held when it was read as old stays its content while it
// cannot be read: a slip in it, or half of it written, must not change what is known.
func loadFile(dir, name string, old *file) *file {
	if old == nil {
		old = &file{}
	}
	path := filepath.Join(dir, name)
	stamp, settled, mode, err := stat(path)
	f := &file{name: name, stamp: stamp, settled: settled, err: err}
	switch {
	case err != nil:
	case old.settled && old.stamp == stamp:
		return old
	case !mode.IsRegular():
		f.err = errors.New("not a regular file")
	default:
		f.read(path, old)
	}
	if f.err == nil && old.err == nil && f.digest == old.digest && f.stamp == old.stamp && f.settled == old.settled {
		return old
	}
	f.good = f.err == nil || old.good
	if f.err != nil {
		f.objects = old.objects
	}
	if _, ok := errors.AsType[*fs.PathError](f.err); ok {
		f.settled = false // not what it holds is wrong: it is read again, changed or not
	}
	return f
}

// read reads the file at path. What it holds is not decoded if old held the same.
func (f *file) read(path string, old *file) {
	content, err := readBounded(path)
	if err != nil {
		f.err = err
		return
	}
	f.digest = sha256.Sum256(content)
	switch {
	case len(content) == 0:
		f.err = emptyError{}
	case old.err == nil && old.digest == f.digest:
		f.objects = old.objects
	default:
		f.objects, f.err = decode(content)
	}
}

// same tells whether both were made of the same files with the same content. A file that
// cannot be read may be told of with another cause each time.
func (s *snapshot) same(other *snapshot) bool {
	return maps.EqualFunc(s.files, other.files, func(a, b *file) bool {
		return a == b || a.err == nil && b.err == nil && a.digest == b.digest
	})
}

// index fills the maps from files, which are sorted by name. Of two manifests of
// the same object the first is taken, whichever was written last.
func (s *snapshot) index(files []*file) {
	labels := map[string]map[string]string{}
	s.labels = labels
	namespaceFiles := map[string]*file{}
	blind := false // a Namespace may be in a file of which nothing is known
	for _, f := range files {
		blind = blind || !f.good
		s.reportFile(f)
		for _, ns := range f.objects.namespaces {
			if first, taken := namespaceFiles[ns.name]; taken {
				s.report(f, fmt.Sprintf("namespace %s: %s has it too", ns.name, first.name))
				continue
			}
			namespaceFiles[ns.name] = f
			labels[ns.name] = ns.labels
		}
	}
	byUID := map[string]podName{}
	for _, f := range files {
		for _, pod := range f.objects.pods {
			name := podName{pod.Namespace, pod.Name}
			if first, taken := s.pods[name]; taken {
				s.report(f, fmt.Sprintf("pod %s: %s has it too", pod, first.files[0].name))
				continue
			}
			if first, taken := byUID[pod.UID]; taken {
				s.report(f, fmt.Sprintf("pod %s: pod %s has the same UID %s", pod, s.pods[first].pod, pod.UID))
				continue
			}
			byUID[pod.UID] = name
			pod.NamespaceLabels = labels[pod.Namespace]
			nsFile := namespaceFiles[pod.Namespace]
			e := entry{pod: pod, files: []*file{f}, unknown: blind && nsFile == nil}
			if nsFile != nil && nsFile != f {
				e.files = append(e.files, nsFile)
			}
			s.pods[name] = e
		}
	}
	slices.SortFunc(s.problems, func(a, b problem) int {
		return cmp.Or(strings.Compare(a.file, b.file), strings.Compare(a.text, b.text))
	})
}

func (s *snapshot) report(f *file, text string) {
	s.problems = append(s.problems, problem{file: f.name, stamp: f.stamp, text: text})
}

func (s *snapshot) reportFile(f *file) {
	if f.err == nil {
		return
	}
	text := strings.ReplaceAll(f.err.Error(), "\n", "; ")
	if f.good {
		text += "; its last good version is in use"
	}
	s.problems = append(s.problems, problem{file: f.name, stamp: f.stamp, text: text, whole: true})
}

// maxNamed is how many files an error names.
const maxNamed = 5

// unreadable names the first files that cannot be read, with the cause, or is "".
func (s *snapshot) unreadable() string {
	var texts []string
	for _, p := range s.problems {
		if p.whole {
			texts = append(texts, fmt.Sprintf("%s (%s)", p.file, p.text))
		}
	}
	if more := len(texts) - maxNamed; more > 0 {
		return fmt.Sprintf("%s and %d more, see the log", strings.Join(texts[:maxNamed], ", "), more)
	}
	return strings.Join(texts, ", ")
}

// current says whether everything that s says of e is still so.
func (s *snapshot) current(dir string, e entry) bool {
	if !s.settled || !s.stamp.unchanged(dir) {
		return false
	}
	for _, f := range e.files {
		if !f.settled || !f.stamp.unchanged(filepath.Join(dir, f.name)) {
			return false
		}
	}
	return true
}

// SPDX-License-Identifier: Apache-2.0

package records

import (
	"os"
	"path/filepath"
	"sync"
)

// known is what is in the files, as far as this process has seen to it. Most of what a
// new agent would write is there from the one before.
type known struct {
	mu    sync.Mutex
	files map[string]*knownFile // by name
}

type knownFile struct {
	content string // "" if it is not certain
	writers int    // at work
	several bool   // have been at work at the same time: nobody knows who was last
}

// holds tells whether the file is sure to hold the content: it did, and there is still one of that size.
func (s *Store) holds(name string, content []byte) bool {
	s.known.mu.Lock()
	f := s.known.files[name]
	same := f != nil && f.writers == 0 && f.content == string(content)
	s.known.mu.Unlock()
	if !same {
		return false
	}
	info, err := os.Lstat(filepath.Join(s.dir, name))
	return err == nil && info.Mode().IsRegular() && info.Size() == int64(len(content))
}

// begin says that the file is about to be changed.
func (k *known) begin(name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f := k.files[name]
	if f == nil {
		f = &knownFile{}
		k.files[name] = f
	}
	f.content = ""
	f.writers++
	f.several = f.several || f.writers > 1
}

// end says what it holds now; "" for no file, or if that is not certain.
func (k *known) end(name, content string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f := k.files[name]
	f.writers--
	switch {
	case f.writers > 0:
	case f.several || content == "":
		delete(k.files, name)
	default:
		f.content = content
	}
}

// saw notes what was read.
func (k *known) saw(name, content string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.files[name] == nil {
		k.files[name] = &knownFile{content: content}
	}
}

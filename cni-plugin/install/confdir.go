// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// errNotYet is wrapped by errors that waiting may cure: the owner of a network
// configuration has not written it yet, or not wholly.
var errNotYet = errors.New("no network configuration that can be used yet")

// errNoFile is wrapped by errors about what cannot be a configuration of which another is made.
var errNoFile = errors.New("it is a symbolic link, or no file, and cannot be replaced for its owner; make it a file")

// errTooLong is wrapped by errors about what no program writes.
var errTooLong = fmt.Errorf("it has more than %d bytes", maxConf)

const (
	extList = ".conflist"
	// savedSuffix is behind the name of a single plugin's configuration of which a list was
	// made. No runtime loads it.
	savedSuffix = ".ambientd-saved"
)

// file is a network configuration.
type file struct {
	path    string
	content []byte
	info    fs.FileInfo
}

// candidates are the names that runtimes look at, in their order (libcni's ConfFiles,
// sorted), of which they load the first.
func candidates(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir) // sorted
	if err != nil {
		return nil, err
	}
	var names []string
	for _, entry := range entries {
		switch filepath.Ext(entry.Name()) {
		case ".conf", extList, ".json":
			if !entry.IsDir() {
				names = append(names, entry.Name())
			}
		}
	}
	return names, nil
}

// loaded is the configuration that the runtime loads.
func loaded(dir string) (file, error) {
	names, err := candidates(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return file{}, fmt.Errorf("%w: there is no directory %s; is it the runtime's? If so, the primary CNI plugin has to be installed first", errNotYet, dir)
	}
	if err != nil {
		return file{}, fmt.Errorf("reading the runtime's network configurations: %w", err)
	}
	if len(names) == 0 {
		return file{}, fmt.Errorf("%w: %s has none; the primary CNI plugin has to be installed first", errNotYet, dir)
	}
	f, err := open(filepath.Join(dir, names[0]))
	if errors.Is(err, fs.ErrNotExist) {
		return file{}, fmt.Errorf("%w: %s has just been removed", errNotYet, names[0])
	}
	return f, err
}

// maxConf bounds a configuration's size.
const maxConf = 1 << 20

func open(path string) (file, error) {
	// Without O_NONBLOCK, opening a named pipe waits for a writer.
	opened, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if errors.Is(err, syscall.ELOOP) || errors.Is(err, syscall.ENXIO) { // a link, a socket
		return file{}, fmt.Errorf("network configuration %s: %w", path, errNoFile)
	}
	if err != nil {
		return file{}, fmt.Errorf("reading a network configuration: %w", err)
	}
	defer opened.Close()
	info, err := opened.Stat()
	if err != nil {
		return file{}, fmt.Errorf("reading a network configuration: %w", err)
	}
	if !info.Mode().IsRegular() {
		return file{}, fmt.Errorf("network configuration %s: %w", path, errNoFile)
	}
	content, err := io.ReadAll(io.LimitReader(opened, maxConf+1))
	if err != nil {
		return file{}, fmt.Errorf("reading a network configuration: %w", err)
	}
	if len(content) > maxConf {
		return file{}, fmt.Errorf("network configuration %s: %w", path, errTooLong)
	}
	return file{path: path, content: content, info: info}, nil
}

// isStill tells whether the file at the path holds this.
func isStill(path string, content []byte) bool {
	now, err := open(path)
	return err == nil && bytes.Equal(now.content, content)
}

// chain puts our entry into f, and returns the path of the list in which it is then.
func (f file) chain(entry []byte, result *Result) (string, error) {
	if filepath.Ext(f.path) != extList {
		path, err := f.convert(entry)
		result.ConflistWritten = result.ConflistWritten || err == nil
		return path, err
	}
	list, err := parseList(f.content)
	if err != nil {
		return "", fmt.Errorf("%w: %s: %w", errNotYet, f.path, err)
	}
	content, err := list.with(entry)
	if err != nil {
		return "", fmt.Errorf("network configuration %s: %w", f.path, err)
	}
	if bytes.Equal(content, f.content) {
		return f.path, nil
	}
	if err := f.replace(content); err != nil {
		return "", err
	}
	result.ConflistWritten = true
	return f.path, nil
}

// replace writes f anew, unless somebody else has since it was read.
func (f file) replace(content []byte) error {
	temp, err := stage(f.path, content, f.info)
	if err != nil {
		return fmt.Errorf("writing network configuration %s: %w", f.path, err)
	}
	// Only now: to have the new one on disk may take long.
	if !isStill(f.path, f.content) {
		return errors.Join(fmt.Errorf("%w: %s is being changed by its owner", errNotYet, f.path), os.Remove(temp))
	}
	if err := commit(temp, f.path); err != nil {
		return fmt.Errorf("writing network configuration %s: %w", f.path, err)
	}
	return nil
}

// convert makes a list of f, which is a single plugin's configuration, and puts f away. The
// list is there before: until f has gone the runtime loads that, since a list's name sorts
// behind it.
func (f file) convert(entry []byte) (string, error) {
	content, err := listOf(f.content, entry)
	if err != nil {
		return "", fmt.Errorf("%w: %s: %w", errNotYet, f.path, err)
	}
	path, saved := f.listPath(content), f.path+savedSuffix
	if err := write(path, content, f.info); err != nil {
		return "", fmt.Errorf("writing network configuration %s: %w", path, err)
	}
	if err := os.Rename(f.path, saved); err != nil {
		return "", errors.Join(fmt.Errorf("putting %s away, in place of which %s is: %w", f.path, path, err), os.Remove(path))
	}
	if !isStill(saved, f.content) {
		return "", errors.Join(fmt.Errorf("%w: %s is being changed by its owner", errNotYet, f.path), os.Rename(saved, f.path), os.Remove(path))
	}
	return path, flush(filepath.Dir(path))
}

// listPath is where the list goes that is made of f. One that is there already is ours to
// replace if an earlier installation, finished or not, made it; else it is its owner's.
func (f file) listPath(content []byte) string {
	names := listNames(f.path)
	if _, err := os.Lstat(names[0]); errors.Is(err, fs.ErrNotExist) || isStill(names[0], content) {
		return names[0]
	}
	if _, err := os.Lstat(f.path + savedSuffix); err == nil {
		return names[0]
	}
	return names[1]
}

// listNames are the lists that can stand for a single plugin's configuration.
func listNames(conf string) [2]string {
	return [2]string{strings.TrimSuffix(conf, filepath.Ext(conf)) + extList, conf + extList}
}

// unchainAll takes our entry out of every configuration but one. What cannot be read, and
// does not name our plugin, is not ours to worry about.
func unchainAll(dir, except string) (changed []string, err error) {
	names, err := candidates(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the runtime's network configurations: %w", err)
	}
	var errs []error
	for _, name := range names {
		path := filepath.Join(dir, name)
		if path == except || filepath.Ext(name) != extList {
			continue
		}
		done, err := unchain(path)
		if done {
			changed = append(changed, path)
		}
		errs = append(errs, err)
	}
	return changed, errors.Join(errs...)
}

func unchain(path string) (done bool, err error) {
	f, err := open(path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, errTooLong) || err == nil && !bytes.Contains(f.content, []byte(PluginName)) {
		return false, nil
	}
	if errors.Is(err, errNoFile) {
		return false, unchainable(path)
	}
	if err != nil {
		return false, err
	}
	list, err := parseList(f.content)
	if err != nil {
		return false, fmt.Errorf("network configuration %s, which names %s: %w", path, PluginName, err)
	}
	if len(list.foreign()) == len(list.plugins) {
		return false, nil
	}
	if saved, ok := f.savedBy(list); ok {
		return true, f.revert(saved)
	}
	return true, f.replace(list.without())
}

// unchainable is the error of a list that is no file, if it leads to one that names our plugin.
func unchainable(path string) error {
	target, err := filepath.EvalSymlinks(path)
	if err != nil {
		return nil //nolint:nilerr // it leads nowhere
	}
	f, err := open(target)
	if err != nil || !bytes.Contains(f.content, []byte(PluginName)) {
		return nil //nolint:nilerr // not ours to worry about
	}
	return fmt.Errorf("network configuration %s, which names %s: %w", path, PluginName, errNoFile)
}

// savedBy finds the configuration of which the list was made, if nothing but our entry has
// been added to it since.
func (f file) savedBy(list conflist) (saved string, ok bool) {
	foreign := list.foreign()
	names, err := filepath.Glob(filepath.Join(filepath.Dir(f.path), "*"+savedSuffix))
	if err != nil || len(foreign) != 1 {
		return "", false
	}
	for _, name := range names {
		lists := listNames(strings.TrimSuffix(name, savedSuffix))
		if !slices.Contains(lists[:], f.path) {
			continue
		}
		was, err := open(name)
		if err == nil && bytes.Equal(bytes.TrimSpace(was.content), f.content[foreign[0].start:foreign[0].end]) {
			return name, true
		}
	}
	return "", false
}

// revert puts the configuration back of which the list was made, and removes the list. One
// that its owner has written meanwhile stays.
func (f file) revert(saved string) error {
	original := strings.TrimSuffix(saved, savedSuffix)
	put := func() error { return os.Rename(saved, original) }
	if _, err := os.Lstat(original); err == nil {
		put = func() error { return os.Remove(saved) }
	}
	if err := put(); err != nil {
		return fmt.Errorf("putting %s back: %w", original, err)
	}
	if err := os.Remove(f.path); err != nil {
		return fmt.Errorf("removing the list that stood for %s: %w", original, err)
	}
	return flush(filepath.Dir(f.path))
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"debug/elf"
	"fmt"
	"os"
	"path/filepath"
	"slices"
)

// libraryDirs are where Debian keeps the C library of an architecture, and where its
// loader looks by itself.
func libraryDirs(arch string) []string {
	triple := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[arch]
	return []string{filepath.Join("/lib", triple), filepath.Join("/usr/lib", triple)}
}

// libraries returns the files of this machine, which have the same path in an image, that a
// dynamic program needs to start: its loader, and every library. None if it is static.
func libraries(program []byte, arch string) ([]string, error) {
	var found []string
	wanted, loader, err := needs(program)
	if err != nil || loader == "" {
		return nil, err
	}
	found = append(found, loader)
	for len(wanted) > 0 {
		name := wanted[0]
		wanted = wanted[1:]
		dirs := libraryDirs(arch)
		i := slices.IndexFunc(dirs, func(dir string) bool {
			_, err := os.Stat(filepath.Join(dir, name))
			return err == nil
		})
		if i < 0 {
			return nil, fmt.Errorf("it needs %s, which is not in %v: install the C library for %s, such as Debian's libc6", name, dirs, arch)
		}
		path := filepath.Join(dirs[i], name)
		if slices.Contains(found, path) {
			continue
		}
		found = append(found, path)
		content, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("reading a library: %w", err)
		}
		more, _, err := needs(content)
		if err != nil {
			return nil, fmt.Errorf("library %s: %w", path, err)
		}
		wanted = append(wanted, more...)
	}
	return found, nil
}

// needs returns the names of the libraries that an ELF file asks for, and its loader.
func needs(content []byte) (names []string, loader string, err error) {
	file, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		return nil, "", fmt.Errorf("reading it as a Linux program: %w", err)
	}
	defer func() { _ = file.Close() }() // it was only read
	for _, p := range file.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		raw := make([]byte, p.Filesz)
		if _, err := p.ReadAt(raw, 0); err != nil {
			return nil, "", fmt.Errorf("reading its loader's name: %w", err)
		}
		loader = string(bytes.TrimRight(raw, "\x00"))
	}
	names, err = file.ImportedLibraries()
	if err != nil {
		return nil, "", fmt.Errorf("reading which libraries it needs: %w", err)
	}
	return names, loader, nil
}

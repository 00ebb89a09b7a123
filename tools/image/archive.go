// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// machines are the architectures that images are made for.
func machines() map[string]elf.Machine {
	return map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}
}

// write makes the image as a docker-archive at path, by rename: who imports it meanwhile
// gets a whole one.
func (c config) write(img image, path string) error {
	made, err := c.assemble(img)
	if err != nil {
		return err
	}
	tag, err := name.NewTag("localhost/"+img.name+":"+c.tag, name.StrictValidation)
	if err != nil {
		return err
	}
	fresh := path + ".new"
	if err := tarball.WriteToFile(fresh, tag, made); err != nil {
		return errors.Join(err, os.Remove(fresh))
	}
	return os.Rename(fresh, path)
}

// assemble makes an image of one layer.
func (c config) assemble(img image) (v1.Image, error) {
	content, err := c.layer(img.programs)
	if err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(content)), nil
	})
	if err != nil {
		return nil, fmt.Errorf("making the layer: %w", err)
	}
	made, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		return nil, fmt.Errorf("adding the layer: %w", err)
	}
	described, err := made.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("reading the image's configuration: %w", err)
	}
	described = described.DeepCopy()
	described.OS, described.Architecture = "linux", c.arch
	described.Config = v1.Config{
		Entrypoint: []string{"/" + path.Join(programsDir, img.programs[0])},
		Env:        []string{"PATH=/" + programsDir},
	}
	return mutate.ConfigFile(made, described)
}

// layer is a tar file of the programs, the same for the same programs.
func (c config) layer(programs []string) ([]byte, error) {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for dir := range parents(programsDir) {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755, ModTime: time.Unix(0, 0)}); err != nil {
			return nil, err
		}
	}
	files := map[string][]byte{}
	for _, program := range programs {
		if err := c.add(files, program); err != nil {
			return nil, fmt.Errorf("program %s: %w", filepath.Join(c.bin, program), err)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		header := &tar.Header{
			Typeflag: tar.TypeReg, Name: name, Mode: 0o755,
			Size: int64(len(files[name])), ModTime: time.Unix(0, 0),
		}
		if err := w.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := w.Write(files[name]); err != nil {
			return nil, err
		}
	}
	return out.Bytes(), w.Close()
}

// add reads a program, and for one that others built, and that may thus be dynamic, what it
// needs to start.
func (c config) add(files map[string][]byte, program string) error {
	content, err := os.ReadFile(filepath.Join(c.bin, program))
	if err != nil {
		return fmt.Errorf("reading it: %w; run make build first", err)
	}
	files[path.Join(programsDir, program)] = content
	if program != ztunnel {
		return checkStatic(content, c.arch)
	}
	if err := checkMachine(content, c.arch); err != nil {
		return err
	}
	needed, err := libraries(content, c.arch)
	if err != nil {
		return err
	}
	for _, name := range needed {
		library, err := os.ReadFile(name)
		if err != nil {
			return fmt.Errorf("reading a library that it needs: %w", err)
		}
		files[strings.TrimPrefix(name, "/")] = library
	}
	return nil
}

// parents yields "a", "a/b", "a/b/c" of the last.
func parents(dir string) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		parts := strings.Split(dir, "/")
		for i := range parts {
			if !yield(strings.Join(parts[:i+1], "/")) {
				return
			}
		}
	}
}

// checkStatic says why a program would not start in an image without libraries.
func checkStatic(content []byte, arch string) error {
	if err := checkMachine(content, arch); err != nil {
		return err
	}
	file, err := elf.NewFile(bytes.NewReader(content)) // nothing to close: it is in memory
	if err != nil {
		return err
	}
	for _, p := range file.Progs {
		if p.Type == elf.PT_INTERP {
			return errors.New("it is linked dynamically, and there are no libraries in the image: build it with CGO_ENABLED=0")
		}
	}
	return nil
}

// checkMachine says why a program would not start on the image's architecture.
func checkMachine(content []byte, arch string) error {
	file, err := elf.NewFile(bytes.NewReader(content)) // nothing to close: it is in memory
	if err != nil {
		return fmt.Errorf("reading it as a Linux program: %w", err)
	}
	machine, known := machines()[arch]
	if !known {
		return fmt.Errorf("no images are made for architecture %q", arch)
	}
	if file.Machine != machine {
		return fmt.Errorf("it is for %s, not for %s", file.Machine, arch)
	}
	return nil
}

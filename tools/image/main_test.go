// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// program returns an ELF file with one program header, and content to tell it by.
func program(t *testing.T, machine elf.Machine, header elf.ProgType, content string) []byte {
	t.Helper()
	var out bytes.Buffer
	ident := [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)}
	for _, part := range []any{
		elf.Header64{
			Ident: ident, Type: uint16(elf.ET_EXEC), Machine: uint16(machine), Version: uint32(elf.EV_CURRENT),
			Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: 1,
		},
		elf.Prog64{Type: uint32(header)},
		[]byte(content),
	} {
		if err := binary.Write(&out, binary.LittleEndian, part); err != nil {
			t.Fatal(err)
		}
	}
	return out.Bytes()
}

// programs makes a directory with all programs of all images, of the given age.
func programs(t *testing.T, machine elf.Machine, written time.Time) string {
	t.Helper()
	dir := t.TempDir()
	for _, img := range (config{nodeProxy: "devproxy"}).images() {
		for _, p := range img.programs {
			path := filepath.Join(dir, p)
			if err := os.WriteFile(path, program(t, machine, elf.PT_LOAD, p), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.Chtimes(path, written, written); err != nil {
				t.Fatal(err)
			}
		}
	}
	return dir
}

// makeImages runs the program and returns the directory of what it made.
func makeImages(t *testing.T, args ...string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "image")
	if err := run(append([]string{"--out=" + out}, args...), io.Discard, io.Discard); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestImages(t *testing.T) {
	for arch, machine := range machines() {
		out := makeImages(t, "--bin="+programs(t, machine, time.Now()), "--arch="+arch)
		for _, want := range (config{nodeProxy: "devproxy"}).images() {
			if want.onDemand {
				continue
			}
			t.Run(arch+"/"+want.name, func(t *testing.T) {
				// The name has to be the one by which kubelet asks.
				tag, err := name.NewTag("localhost/" + want.name + ":dev")
				if err != nil {
					t.Fatal(err)
				}
				got, err := tarball.ImageFromPath(filepath.Join(out, want.name+".tar"), &tag)
				if err != nil {
					t.Fatal(err)
				}
				cfg, err := got.ConfigFile()
				if err != nil {
					t.Fatal(err)
				}
				if cfg.OS != "linux" || cfg.Architecture != arch || !slices.Equal(cfg.Config.Entrypoint, []string{"/usr/local/bin/" + want.programs[0]}) {
					t.Errorf("configuration %+v", cfg)
				}
				layers, err := got.Layers()
				if err != nil || len(layers) != 1 {
					t.Fatalf("%d layers, %v", len(layers), err)
				}
				content, err := layers[0].Uncompressed()
				if err != nil {
					t.Fatal(err)
				}
				defer content.Close()
				checkLayer(t, content, want.programs)
			})
		}
	}
}

// checkLayer looks for the programs, owned by root, executable, and without a date.
func checkLayer(t *testing.T, content io.Reader, wanted []string) {
	t.Helper()
	found := map[string]string{}
	for r := tar.NewReader(content); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 0 || h.Gid != 0 || h.Mode != 0o755 || h.ModTime.Unix() != 0 {
			t.Errorf("%s: owner %d:%d, mode %o, date %s", h.Name, h.Uid, h.Gid, h.Mode, h.ModTime)
		}
		if h.Typeflag == tar.TypeReg {
			text, err := io.ReadAll(r)
			if err != nil {
				t.Fatal(err)
			}
			found[h.Name] = string(text[64+56:])
		}
	}
	for _, p := range wanted {
		if found["usr/local/bin/"+p] != p {
			t.Errorf("program %s is not in the layer, which has %q", p, found)
		}
	}
	if len(found) != len(wanted) {
		t.Errorf("the layer has %q, wanted only %q", found, wanted)
	}
}

// The bytes depend neither on when the programs were written, nor on by whom, nor where.
func TestReproducible(t *testing.T) {
	first := makeImages(t, "--arch=amd64", "--bin="+programs(t, elf.EM_X86_64, time.Unix(1, 0)))
	second := makeImages(t, "--arch=amd64", "--bin="+programs(t, elf.EM_X86_64, time.Now()))
	for _, img := range (config{nodeProxy: "devproxy"}).images() {
		if img.onDemand {
			continue
		}
		a, errA := os.ReadFile(filepath.Join(first, img.name+".tar"))
		b, errB := os.ReadFile(filepath.Join(second, img.name+".tar"))
		if err := errors.Join(errA, errB); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(a, b) {
			t.Errorf("image %s differs between two runs", img.name)
		}
	}
}

func TestOnlyWhatIsAskedFor(t *testing.T) {
	out := makeImages(t, "--arch=amd64", "--bin="+programs(t, elf.EM_X86_64, time.Now()), "devproxy")
	got, err := filepath.Glob(filepath.Join(out, "*"))
	if err != nil || len(got) != 1 || filepath.Base(got[0]) != "devproxy.tar" {
		t.Errorf("made %q (%v), wanted devproxy.tar and nothing half made", got, err)
	}
}

func TestRefused(t *testing.T) {
	dir := programs(t, elf.EM_X86_64, time.Now())
	dynamic := programs(t, elf.EM_X86_64, time.Now())
	if err := os.WriteFile(filepath.Join(dynamic, "ambientd"), program(t, elf.EM_X86_64, elf.PT_INTERP, ""), 0o600); err != nil {
		t.Fatal(err)
	}
	script := programs(t, elf.EM_X86_64, time.Now())
	if err := os.WriteFile(filepath.Join(script, "ambientd"), []byte("#!/bin/sh\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, refused := range []struct {
		args []string
		want string
	}{
		{[]string{"--bin=" + dir}, "--arch is required"},
		{[]string{"--arch=mips", "--bin=" + dir}, `no images are made for architecture "mips"`},
		{[]string{"--arch=arm64", "--bin=" + dir}, "it is for EM_X86_64, not for arm64"},
		{[]string{"--arch=amd64", "--bin=" + dynamic}, "build it with CGO_ENABLED=0"},
		{[]string{"--arch=amd64", "--bin=" + script}, "as a Linux program"},
		{[]string{"--arch=amd64", "--bin=" + t.TempDir()}, "run make build first"},
		{[]string{"--arch=amd64", "--bin=" + dir, "--tag=a b"}, "tag"},
		{[]string{"--arch=amd64", "--bin=" + dir, "ztunnel"}, `no image "ztunnel", only ambientd, devproxy, testapp`},
	} {
		out := t.TempDir()
		err := run(append([]string{"--out=" + out}, refused.args...), io.Discard, io.Discard)
		if err == nil || !strings.Contains(err.Error(), refused.want) {
			t.Errorf("%q: %v, wanted an error with %q", refused.args, err, refused.want)
		}
		if left, err := fs.Glob(os.DirFS(out), "*"); err != nil || len(left) > 0 {
			t.Errorf("%q left %q (%v)", refused.args, left, err)
		}
	}
}

// Who cannot write is told so.
func TestUnwritable(t *testing.T) {
	dir := programs(t, elf.EM_X86_64, time.Now())
	occupied := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(occupied, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	err := run([]string{"--arch=amd64", "--bin=" + dir, "--out=" + occupied}, io.Discard, io.Discard)
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("mkdir %s", occupied)) {
		t.Errorf("got %v", err)
	}
}

// TestNodeProxy makes ambientd-dev with each proxy; a dynamic ztunnel brings its libraries, and
// nothing else may be dynamic. A program of this machine stands in for ztunnel.
func TestNodeProxy(t *testing.T) {
	program, err := os.ReadFile("/bin/sh")
	if err != nil {
		t.Fatal(err)
	}
	cfg := config{bin: t.TempDir(), arch: runtime.GOARCH}
	if err := os.WriteFile(filepath.Join(cfg.bin, "ztunnel"), program, 0o600); err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{}
	if err := cfg.add(files, "ztunnel"); err != nil {
		t.Fatalf("adding a dynamic ztunnel: %v", err)
	}
	wanted, loader, err := needs(program)
	if err != nil || loader == "" {
		t.Fatalf("/bin/sh here is no dynamic program: loader %q, %v", loader, err)
	}
	if files[strings.TrimPrefix(loader, "/")] == nil || files["usr/local/bin/ztunnel"] == nil {
		t.Errorf("the layer has %v, without ztunnel or its loader %s", slices.Sorted(maps.Keys(files)), loader)
	}
	for _, library := range wanted {
		if !slices.ContainsFunc(slices.Collect(maps.Keys(files)), func(f string) bool { return filepath.Base(f) == library }) {
			t.Errorf("the layer has %v, without %s", slices.Sorted(maps.Keys(files)), library)
		}
	}
	if err := os.Rename(filepath.Join(cfg.bin, "ztunnel"), filepath.Join(cfg.bin, "devproxy")); err != nil {
		t.Fatal(err)
	}
	if err := cfg.add(files, "devproxy"); err == nil || !strings.Contains(err.Error(), "linked dynamically") {
		t.Errorf("adding a dynamic devproxy: %v, want a refusal", err)
	}
	for _, proxy := range []string{"devproxy", "ztunnel"} {
		c, err := parse([]string{"--arch=amd64", "--node-proxy=" + proxy, "ambientd-dev"}, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		for _, img := range c.images() {
			if want := img.name == "ambientd-dev"; c.wants(img) != want {
				t.Errorf("asked for ambientd-dev: image %s is made: %t", img.name, !want)
			}
			if img.name == "ambientd-dev" && !slices.Equal(img.programs, []string{"ambientd", "ambient-cni", proxy}) {
				t.Errorf("with --node-proxy=%s it has %v", proxy, img.programs)
			}
		}
	}
}

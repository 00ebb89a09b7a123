// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"ambientd/tools/devcluster/image"
)

// writeImages writes the images that every cluster has into its directory and returns their
// files.
func writeImages(ctx context.Context, state *State, bin binaries) ([]string, error) {
	dir := filepath.Join(state.Dir, "images")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the directory of images: %w", err)
	}
	pause, err := os.ReadFile(bin.pause)
	if err != nil {
		return nil, fmt.Errorf("reading the program of the pause image: %w", err)
	}
	busybox, err := busyboxImage(ctx, bin.busybox)
	if err != nil {
		return nil, err
	}
	var files []string
	for _, img := range []image.Image{
		{Name: PauseImage, Entrypoint: []string{"/pause"}, Entries: []image.Entry{{Path: "/pause", Mode: 0o755, Content: pause}}},
		busybox,
	} {
		name, _, _ := strings.Cut(filepath.Base(img.Name), ":")
		path := filepath.Join(dir, name+".tar")
		file, err := os.Create(path)
		if err != nil {
			return nil, fmt.Errorf("writing the image %s: %w", img.Name, err)
		}
		if err := errors.Join(img.Write(file), file.Close()); err != nil {
			return nil, err
		}
		files = append(files, path)
	}
	return files, nil
}

// busyboxImage is a userland for test pods: the machine's busybox, with a link for each of its
// commands.
func busyboxImage(ctx context.Context, path string) (image.Image, error) {
	program, err := os.ReadFile(path)
	if err != nil {
		return image.Image{}, fmt.Errorf("reading busybox: %w", err)
	}
	list, err := exec.CommandContext(ctx, path, "--list").Output()
	if err != nil {
		return image.Image{}, fmt.Errorf("asking busybox for its commands: %w", err)
	}
	img := image.Image{Name: BusyboxImage, Cmd: []string{"/bin/sh"}, Entries: []image.Entry{
		{Path: "/tmp", Mode: os.ModeDir | os.ModeSticky | 0o777},
		{Path: "/etc", Mode: os.ModeDir | 0o755},
		{Path: "/etc/passwd", Mode: 0o644, Content: []byte("root:x:0:0:root:/:/bin/sh\n")},
		{Path: "/bin", Mode: os.ModeDir | 0o755},
		{Path: "/bin/busybox", Mode: 0o755, Content: program},
	}}
	for name := range strings.FieldsSeq(string(list)) {
		if name != "busybox" {
			img.Entries = append(img.Entries, image.Entry{Path: "/bin/" + name, Mode: os.ModeSymlink | 0o777, Content: []byte("busybox")})
		}
	}
	return img, nil
}

// ctr runs containerd's own client against the socket of a node.
func ctr(ctx context.Context, bin binaries, socket string, args ...string) error {
	cmd := exec.CommandContext(ctx, bin.ctr, append([]string{"--address", socket, "--namespace", "k8s.io"}, args...)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("ctr %s: %w: %s", args[0], err, strings.TrimSpace(string(out)))
	}
	return nil
}

// installPlugins copies the reference CNI plugins to where node i has its own.
func (s *State) installPlugins(i int, from string) error {
	for _, name := range []string{"bridge", "host-local", "loopback"} {
		content, err := os.ReadFile(filepath.Join(from, name))
		if err != nil {
			return fmt.Errorf("reading the CNI plugin %s: %w", name, err)
		}
		if err := os.WriteFile(filepath.Join(s.NodeDir(i), "cni-bin", name), content, 0o755); err != nil {
			return fmt.Errorf("installing the CNI plugin %s: %w", name, err)
		}
	}
	return nil
}

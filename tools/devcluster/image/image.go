// SPDX-License-Identifier: Apache-2.0

// Package image writes container images of one layer as docker-archive tar files, which
// container runtimes import without a registry. The same content gives the same bytes. It
// refuses to run anything, and to read images.
package image

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path"
	"runtime"
	"time"
)

// Entry is a file, directory or symbolic link of an image.
type Entry struct {
	// Path is absolute.
	Path string
	// Mode is the permissions, and os.ModeDir or os.ModeSymlink.
	Mode os.FileMode
	// Content is a file's content or a link's target.
	Content []byte
}

// Image is what an archive holds.
type Image struct {
	// Name is the reference that pods use, with a tag.
	Name       string
	Entrypoint []string
	Cmd        []string
	// Entries are in order: directories before what is in them.
	Entries []Entry
}

// Write writes the image.
func (i Image) Write(w io.Writer) error {
	layer, err := i.layer()
	if err != nil {
		return err
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH,
		"os":           "linux",
		"config":       map[string]any{"Env": []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, "Entrypoint": i.Entrypoint, "Cmd": i.Cmd},
		"rootfs":       map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + digest(layer)}},
	})
	if err != nil {
		return fmt.Errorf("encoding the configuration of %s: %w", i.Name, err)
	}
	configName := digest(config) + ".json"
	const layerName = "layer.tar"
	manifest, err := json.Marshal([]map[string]any{{"Config": configName, "RepoTags": []string{i.Name}, "Layers": []string{layerName}}})
	if err != nil {
		return fmt.Errorf("encoding the manifest of %s: %w", i.Name, err)
	}
	archive := tar.NewWriter(w)
	for _, e := range []Entry{{"manifest.json", 0o644, manifest}, {configName, 0o644, config}, {layerName, 0o644, layer}} {
		if err := write(archive, e); err != nil {
			return err
		}
	}
	if err := archive.Close(); err != nil {
		return fmt.Errorf("writing the image %s: %w", i.Name, err)
	}
	return nil
}

func (i Image) layer() ([]byte, error) {
	var buffer bytes.Buffer
	layer := tar.NewWriter(&buffer)
	for _, e := range i.Entries {
		if !path.IsAbs(e.Path) {
			return nil, fmt.Errorf("writing the image %s: the path %q is not absolute", i.Name, e.Path)
		}
		e.Path = e.Path[1:]
		if err := write(layer, e); err != nil {
			return nil, err
		}
	}
	if err := layer.Close(); err != nil {
		return nil, fmt.Errorf("writing the layer of %s: %w", i.Name, err)
	}
	return buffer.Bytes(), nil
}

func write(archive *tar.Writer, e Entry) error {
	header := &tar.Header{Name: e.Path, Mode: int64(e.Mode.Perm()), ModTime: time.Unix(0, 0), Typeflag: tar.TypeReg, Size: int64(len(e.Content))}
	if e.Mode&os.ModeSticky != 0 {
		header.Mode |= 0o1000
	}
	switch {
	case e.Mode.IsDir():
		header.Typeflag, header.Name, header.Size = tar.TypeDir, e.Path+"/", 0
	case e.Mode&os.ModeSymlink != 0:
		header.Typeflag, header.Linkname, header.Size = tar.TypeSymlink, string(e.Content), 0
	}
	if err := archive.WriteHeader(header); err != nil {
		return fmt.Errorf("writing %s: %w", e.Path, err)
	}
	if header.Typeflag != tar.TypeReg {
		return nil
	}
	if _, err := archive.Write(e.Content); err != nil {
		return fmt.Errorf("writing %s: %w", e.Path, err)
	}
	return nil
}

func digest(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

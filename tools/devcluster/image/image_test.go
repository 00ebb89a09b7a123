// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
)

// read returns the entries of an archive.
func read(t *testing.T, data []byte) (headers map[string]*tar.Header, content map[string][]byte) {
	t.Helper()
	headers, content = map[string]*tar.Header{}, map[string][]byte{}
	reader := tar.NewReader(bytes.NewReader(data))
	for {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return headers, content
		}
		if err != nil {
			t.Fatal(err)
		}
		headers[header.Name] = header
		if content[header.Name], err = io.ReadAll(reader); err != nil {
			t.Fatal(err)
		}
	}
}

func TestWrite(t *testing.T) {
	img := Image{
		Name: "localhost/greeting:1", Entrypoint: []string{"/bin/hello"}, Cmd: []string{"world"},
		Entries: []Entry{
			{Path: "/tmp", Mode: os.ModeDir | os.ModeSticky | 0o777},
			{Path: "/bin", Mode: os.ModeDir | 0o755},
			{Path: "/bin/hello", Mode: 0o755, Content: []byte("a program")},
			{Path: "/bin/hi", Mode: os.ModeSymlink | 0o777, Content: []byte("hello")},
		},
	}
	var first, second bytes.Buffer
	if err := errors.Join(img.Write(&first), img.Write(&second)); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(first.Bytes(), second.Bytes()) {
		t.Error("twice the same image gives two archives")
	}
	_, files := read(t, first.Bytes())
	var manifest []struct {
		Config           string
		RepoTags, Layers []string
	}
	if err := json.Unmarshal(files["manifest.json"], &manifest); err != nil || len(manifest) != 1 || manifest[0].RepoTags[0] != img.Name {
		t.Fatalf("manifest %s, %v", files["manifest.json"], err)
	}
	var config struct {
		Config struct{ Entrypoint, Cmd []string }
		Rootfs struct {
			DiffIDs []string `json:"diff_ids"`
		}
	}
	if err := json.Unmarshal(files[manifest[0].Config], &config); err != nil || strings.Join(config.Config.Entrypoint, " ") != "/bin/hello" {
		t.Fatalf("config %s, %v", files[manifest[0].Config], err)
	}
	layer := files[manifest[0].Layers[0]]
	if got, want := config.Rootfs.DiffIDs[0], "sha256:"+digest(layer); got != want {
		t.Errorf("the configuration names the layer %s, it is %s", got, want)
	}
	headers, content := read(t, layer)
	if h := headers["bin/hello"]; h == nil || h.Mode != 0o755 || string(content["bin/hello"]) != "a program" {
		t.Errorf("the program is %+v", h)
	}
	if h := headers["bin/hi"]; h == nil || h.Typeflag != tar.TypeSymlink || h.Linkname != "hello" {
		t.Errorf("the link is %+v", h)
	}
	if h := headers["tmp/"]; h == nil || h.Typeflag != tar.TypeDir || h.Mode != 0o1777 {
		t.Errorf("/tmp is %+v", h)
	}
}

func TestWriteRefusesRelativePaths(t *testing.T) {
	img := Image{Name: "localhost/x:1", Entries: []Entry{{Path: "bin", Mode: os.ModeDir}}}
	if err := img.Write(io.Discard); err == nil {
		t.Error("a relative path was written")
	}
}

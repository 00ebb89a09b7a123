// SPDX-License-Identifier: Apache-2.0

package cri

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The files have what the runtimes answer, shortened; identifiers are made up.
func TestRuntimesAnswers(t *testing.T) {
	for file, want := range map[string][]string{
		"containerd-1.6.json":         {"/var/run/netns/cni-a57f1ad5-ae2b-6b55-4a78-f6c5b2e9d1e0", "/proc/9475/ns/net"},
		"containerd-2.json":           {"/var/run/netns/cni-24ed6a19-7b0b-10c4-dff0-a1ce8a2f3c2d", "/proc/48095/ns/net"},
		"containerd-hostnetwork.json": nil,
		"crio.json":                   {"/var/run/netns/7ad27bb1-5e3c-4f0e-8c4d-0c0d0c0f7a11", "/proc/31337/ns/net"},
		"crio-no-infra.json":          {"/var/run/netns/0c5a8f43-5b0d-4d0b-9f7c-cb6a3e3a7d10"},
	} {
		text, err := os.ReadFile(filepath.Join("testdata", file))
		if err != nil {
			t.Fatal(err)
		}
		got, err := netnsPaths(map[string]string{"info": string(text)})
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %q, %v; want %q", file, got, err, want)
		}
	}
}

func TestOddAnswers(t *testing.T) {
	for text, want := range map[string]struct {
		paths []string
		err   string
	}{
		`{"pid":7,"runtimeSpec":{"linux":{"namespaces":[{"type":"network"}]}}}`:              {paths: []string{"/proc/7/ns/net"}},
		`{"pid":1,"runtimeSpec":{"linux":{"namespaces":[{"type":"network","path":"/a"}]}}}`:  {paths: []string{"/a"}},
		`{"pid":-7,"runtimeSpec":{"linux":{"namespaces":[{"type":"network","path":"/a"}]}}}`: {paths: []string{"/a"}},
		`{"runtimeSpec":{}}`: {},
		`{"pid":7}`:          {err: "no runtimeSpec"},
		`null`:               {err: "no runtimeSpec"},
		`{"pid":7,"runtimeSpec":{"linux":{"namespaces":[{"type":"network","path":"../../etc"}]}}}`: {err: "no absolute path"},
		`{"pid":"7"}`:                       {err: "cannot unmarshal"},
		`{"runtimeSpec":`:                   {err: "unexpected end"},
		strings.Repeat(`[`, 20000):          {err: "exceeded max depth"},
		`{"runtimeSpec":{"linux":[]}} more`: {err: "invalid character"},
	} {
		got, err := netnsPaths(map[string]string{"info": text})
		if !slices.Equal(got, want.paths) || (err == nil) != (want.err == "") || (err != nil && !strings.Contains(err.Error(), want.err)) {
			t.Errorf("%.80s: %q, %v; want %q, %q", text, got, err, want.paths, want.err)
		}
	}
	if _, err := netnsPaths(nil); err == nil || !strings.Contains(err.Error(), "nothing beyond the standard's status") {
		t.Errorf("no info: %v", err)
	}
}

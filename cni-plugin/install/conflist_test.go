// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
)

const plainEntry = `{"type":"ambient-cni"}`

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func readFile(tb testing.TB, path string) []byte {
	tb.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		tb.Fatal(err)
	}
	return content
}

// golden are lists as others write them, and what they are with our entry.
func golden(tb testing.TB) map[string][2][]byte {
	tb.Helper()
	paths, err := filepath.Glob("testdata/*.before")
	if err != nil || len(paths) == 0 {
		tb.Fatalf("no golden files: %v", err)
	}
	found := map[string][2][]byte{}
	for _, path := range paths {
		name := strings.TrimSuffix(path, ".before")
		found[filepath.Base(name)] = [2][]byte{readFile(tb, path), readFile(tb, name+".after")}
	}
	return found
}

// TestGolden: in and out again, every byte of others' as they wrote it, and twice is once.
func TestGolden(t *testing.T) {
	for name, texts := range golden(t) {
		t.Run(name, func(t *testing.T) {
			before, after := texts[0], texts[1]
			check := func(what string, of func(conflist) []byte, from, want []byte) {
				t.Helper()
				list, err := parseList(from)
				if err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				if got := of(list); !bytes.Equal(got, want) {
					t.Errorf("%s: got\n%s\nwant\n%s", what, got, want)
				}
			}
			with := func(l conflist) []byte {
				content, err := l.with([]byte(plainEntry))
				must(t, err)
				return content
			}
			check("in", with, before, after)
			check("in again", with, after, after)
			check("out", conflist.without, after, before)
			check("out again", conflist.without, before, before)
			// What the runtime makes of it.
			list, err := libcni.ConfListFromBytes(after)
			must(t, err)
			if last := list.Plugins[len(list.Plugins)-1]; last.Network.Type != PluginName {
				t.Errorf("the last plugin is %s", last.Network.Type)
			}
		})
	}
}

// TestWhereOursIs: wherever ours is, and however often, it is once and last afterwards; the same
// in another spelling is left alone.
func TestWhereOursIs(t *testing.T) {
	const ours, other = `{"type":"ambient-cni","runDir":"/other"}`, `{ "type" : "ambient-cni" }`
	for _, c := range []struct{ plugins, with, without string }{
		{`[{"type":"a"}]`, `[{"type":"a"},` + plainEntry + `]`, `[{"type":"a"}]`},
		{`[ {"type":"a"} ]`, `[ {"type":"a"}, ` + plainEntry + ` ]`, `[ {"type":"a"} ]`},
		{`[` + ours + `,{"type":"a"}]`, `[{"type":"a"},` + plainEntry + `]`, `[{"type":"a"}]`},
		{`[{"type":"a"}, ` + ours + `, {"type":"b"}]`, `[{"type":"a"}, {"type":"b"}, ` + plainEntry + `]`, `[{"type":"a"}, {"type":"b"}]`},
		{`[{"type":"a"},` + ours + `]`, `[{"type":"a"},` + plainEntry + `]`, `[{"type":"a"}]`},
		{`[{"type":"a"},` + other + `,` + other + `]`, `[{"type":"a"},` + plainEntry + `]`, `[{"type":"a"}]`},
		{`[` + ours + `,{"type":"a"},` + ours + `,{"type":"b"},` + ours + `]`, `[{"type":"a"},{"type":"b"},` + plainEntry + `]`, `[{"type":"a"},{"type":"b"}]`},
		{`[{"type":"a"},  ` + other + `]`, `[{"type":"a"},  ` + other + `]`, `[{"type":"a"}]`},
		{`[{"type":"ambient-cni2"}]`, `[{"type":"ambient-cni2"},` + plainEntry + `]`, `[{"type":"ambient-cni2"}]`},
	} {
		list, err := parseList(fmt.Appendf(nil, `{"cniVersion":"1.0.0","plugins":%s}`, c.plugins))
		must(t, err)
		got, err := list.with([]byte(plainEntry))
		must(t, err)
		if want := fmt.Sprintf(`{"cniVersion":"1.0.0","plugins":%s}`, c.with); string(got) != want {
			t.Errorf("%s with ours: %s, want %s", c.plugins, got, want)
		}
		if got, want := list.without(), fmt.Sprintf(`{"cniVersion":"1.0.0","plugins":%s}`, c.without); string(got) != want {
			t.Errorf("%s without ours: %s, want %s", c.plugins, got, want)
		}
	}
}

// TestParseListRefuses what a runtime would refuse too, or what would not work with us in it.
func TestParseListRefuses(t *testing.T) {
	for _, c := range []struct{ content, text string }{
		{``, "unexpected end"},
		{`{"cniVersion":"1.0.0","plugins":[{"type":"a"}`, "unexpected end"},
		{`{"cniVersion":"1.0.0","plugins":[{"type":"a"}]} x`, "after top-level"},
		{`[]`, "no JSON object"},
		{`{"cniVersion":"1.0.0","type":"a"}`, `no key "plugins"`},
		{`{"cniVersion":"1.0.0","plugins":{}}`, "no list"},
		{`{"cniVersion":"1.0.0","plugins":["a"]}`, "plugin 1"},
		{`{"cniVersion":"1.0.0","plugins":[],"plugins":[]}`, "twice"},
		{`{"plugins":[{"type":"a"}]}`, `cniVersion ""`},
		{`{"cniVersion":"0.2.0","plugins":[{"type":"a"}]}`, `cniVersion "0.2.0"`},
		{`{"cniVersion":1,"plugins":[{"type":"a"}]}`, "cniVersion"},
	} {
		if _, err := parseList([]byte(c.content)); err == nil || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v, want %q", c.content, err, c.text)
		}
	}
	for _, plugins := range []string{`[]`, `[` + plainEntry + `]`} {
		list, err := parseList(fmt.Appendf(nil, `{"cniVersion":"1.0.0","plugins":%s}`, plugins))
		must(t, err)
		if _, err := list.with([]byte(plainEntry)); err == nil || !strings.Contains(err.Error(), "no plugin behind which") {
			t.Errorf("%s: %v", plugins, err)
		}
	}
}

// FuzzConflist: of whatever can be read as a list, ours goes in once and out again; every other
// byte is as before.
func FuzzConflist(f *testing.F) {
	for _, texts := range golden(f) {
		f.Add(texts[0])
		f.Add(texts[1])
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		list, err := parseList(content)
		if err != nil {
			return
		}
		bare := list.without()
		if !json.Valid(bare) {
			t.Fatalf("without ours: %s", bare)
		}
		with, err := list.with([]byte(plainEntry))
		if err != nil {
			return // nothing to chain it behind
		}
		again, err := parseList(with)
		if err != nil {
			t.Fatalf("with ours: %v: %s", err, with)
		}
		if !again.chained() || len(again.foreign()) != len(list.foreign()) {
			t.Errorf("with ours: %s", with)
		}
		if len(list.foreign()) == len(list.plugins) && !bytes.Equal(again.without(), content) {
			t.Errorf("in and out: %s", again.without())
		}
		if twice, err := again.with([]byte(plainEntry)); err != nil || !bytes.Equal(twice, with) {
			t.Errorf("twice: %s, %v", twice, err)
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package fences

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// enterer is the one package of the agent that may change a thread's namespace.
const enterer = module + "/nodeagent/podnetns"

// changers are the functions and constants, by package, that change the namespace of a
// thread. Of vishvananda/netns every use is one, since it is for nothing else.
var changers = map[string][]string{
	"golang.org/x/sys/unix":        {"Setns", "Unshare", "SYS_SETNS", "SYS_UNSHARE"},
	"syscall":                      {"Unshare", "SYS_SETNS", "SYS_UNSHARE"},
	"github.com/vishvananda/netns": nil,
}

const whyOneEnterer = "a thread that cannot return to the host's netns must die locked, or another pod's work runs in the wrong one; " +
	"only " + enterer + " knows how, hand it a closure"

func TestOnlyPodnetnsEntersNamespaces(t *testing.T) {
	closure := load(t, []string{"./nodeagent"})
	entered := false
	for _, path := range closure.paths() {
		if !strings.HasPrefix(path, module+"/") {
			continue // a library may do so for the moment of opening a socket
		}
		p := closure.packages[path]
		for _, name := range p.GoFiles {
			uses, err := namespaceChanges(filepath.Join(p.Dir, name), nil)
			if err != nil {
				t.Error(err)
			}
			if path == enterer {
				entered = entered || len(uses) > 0
				continue
			}
			for _, use := range uses {
				t.Errorf("%s: %s", use, whyOneEnterer)
			}
		}
	}
	if !entered {
		t.Errorf("%s changes no namespace: either it moved, or this test looks for the wrong thing", enterer)
	}
}

// namespaceChanges returns the places, "file:line: what", where a Go file changes a
// thread's namespace. src is the file's text; nil reads it.
func namespaceChanges(path string, src any) ([]string, error) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, path, src, parser.SkipObjectResolution)
	if err != nil {
		return nil, fmt.Errorf("parsing: %w", err)
	}
	var uses []string
	note := func(at token.Pos, what string) {
		pos := files.Position(at)
		uses = append(uses, fmt.Sprintf("%s:%d: %s", pos.Filename, pos.Line, what))
	}
	imported := map[string]string{} // local name → import path
	for _, spec := range file.Imports {
		of, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			return nil, fmt.Errorf("reading an import: %w", err)
		}
		names, watched := changers[of]
		if !watched {
			continue
		}
		local := filepath.Base(of)
		if spec.Name != nil {
			local = spec.Name.Name
		}
		// Without a name in front nothing could be told apart.
		if names == nil || local == "." {
			note(spec.Pos(), "import of "+of)
			continue
		}
		imported[local] = of
	}
	ast.Inspect(file, func(n ast.Node) bool {
		selector, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		local, ok := selector.X.(*ast.Ident)
		if !ok {
			return true
		}
		if of, ok := imported[local.Name]; ok && slices.Contains(changers[of], selector.Sel.Name) {
			note(selector.Pos(), of+"."+selector.Sel.Name)
		}
		return true
	})
	return uses, nil
}

func TestNamespaceChangesAreFound(t *testing.T) {
	for _, c := range []struct {
		name, source string
		want         int
	}{
		{"none", `package p; import "golang.org/x/sys/unix"; var _ = unix.Getpid`, 0},
		{"a namesake", `package p; type q struct{}; func (q) Setns() {}; var unix q; var _ = unix.Setns`, 0},
		{"setns", `package p; import "golang.org/x/sys/unix"; var _ = unix.Setns`, 1},
		{"renamed", `package p; import x "golang.org/x/sys/unix"; var _, _ = x.Setns, x.Unshare`, 2},
		{"by number", `package p; import "syscall"; var _ = syscall.SYS_UNSHARE`, 1},
		{"dot import", `package p; import . "golang.org/x/sys/unix"; var _ = Setns`, 1},
		{"library", `package p; import "github.com/vishvananda/netns"; var _ = netns.None`, 1},
	} {
		got, err := namespaceChanges(c.name+".go", c.source)
		if err != nil || len(got) != c.want {
			t.Errorf("%s: found %q (%v), want %d", c.name, got, err, c.want)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package fences

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// module is the module path of the product, a prefix of its packages.
const module = "ambientd"

// fence forbids packages in the import closure of others.
type fence struct {
	name string
	// of are the patterns whose closure is looked at.
	of []string
	// flags for go list: withTests where what is tested with a package counts too, since
	// the one cannot live without the other.
	flags []string
	// forbidden are packages and all below them, with the reason.
	forbidden map[string]string
}

var withTests = []string{"-test"}

var fences = []fence{
	{
		name: "plugin",
		of:   []string{"./cni-plugin"},
		forbidden: map[string]string{
			"net/http":                    "it costs the plugin 13 ms of CPU on every pod start; the plugin speaks podevent over a unix socket",
			"google.golang.org/grpc":      "it costs the plugin 21 ms of CPU on every pod start; the plugin speaks podevent over a unix socket",
			"google.golang.org/protobuf":  "its start-up registers types on every pod start; podevent is JSON",
			"k8s.io":                      "the plugin has no credentials and knows no Kubernetes: it asks the agent",
			"sigs.k8s.io":                 "the plugin has no credentials and knows no Kubernetes: it asks the agent",
			"ambientd/nodeagent":          "plugin and agent share podevent and spelling of cni-plugin, and nothing else",
			"ambientd/certfetch":          "no key and no identity may ever be within the plugin's reach",
			"ambientd/iptables":           "rules are the agent's work; the plugin's process start is what each pod waits for",
			"ambientd/cni-plugin/install": "installing is done once a node, the plugin runs for each pod",
		},
	},
	{
		name:  "agent as it is built",
		of:    []string{"./nodeagent"},
		flags: []string{"-tags=grpcnotrace"}, // as the Makefile does
		forbidden: map[string]string{
			"text/template": "templates call methods by name, so that the linker keeps all: 4 MB more in memory on every node",
			"html/template": "templates call methods by name, so that the linker keeps all: 4 MB more in memory on every node",
		},
	},
	{
		name: "podevent",
		of:   []string{"./cni-plugin/podevent"},
		forbidden: map[string]string{
			"github.com":        "the message is for both sides and for whoever debugs them: standard library only",
			"golang.org":        "the message is for both sides and for whoever debugs them: standard library only",
			"google.golang.org": "the message is for both sides and for whoever debugs them: standard library only",
			"k8s.io":            "the message is for both sides and for whoever debugs them: standard library only",
			"net/http":          "the plugin links this package, and net/http costs it 13 ms on every pod start",
		},
	},
	{
		name:  "certfetch",
		of:    []string{"./certfetch/..."},
		flags: withTests,
		forbidden: map[string]string{
			"ambientd/nodeagent":  "certificates are fetched for registered identities, whoever registers them: a CA or another agent must be able to use this",
			"ambientd/iptables":   "certificates have nothing to do with packets",
			"ambientd/cni-plugin": "certificates have nothing to do with CNI",
		},
	},
	{
		name:  "iptables",
		of:    []string{"./iptables/..."},
		flags: withTests,
		forbidden: map[string]string{
			"ambientd/nodeagent":  "rules get a runner injected that is inside the pod's netns, and know no agent",
			"ambientd/certfetch":  "packets have nothing to do with certificates",
			"ambientd/cni-plugin": "packets have nothing to do with CNI",
		},
	},
	{
		name: "agent",
		of:   []string{"./nodeagent"},
		forbidden: map[string]string{
			"testing":                        "the product is no test",
			"ambientd/tools":                 "tools are for development and tests",
			"github.com/containernetworking": "the agent gets podevent messages; CNI is the plugin's language",
			"github.com/stretchr/testify":    "the product is no test",
		},
	},
	{
		name: "devproxy",
		of:   []string{"./tools/devproxy"},
		forbidden: map[string]string{
			"ambientd/nodeagent/enroll":   "the proxy is another process: it learns what it must know from ZDS, SDS and the status",
			"ambientd/nodeagent/podnetns": "the proxy is another process: it learns what it must know from ZDS, SDS and the status",
			"ambientd/certfetch/ca":       "the proxy never issues certificates",
		},
	},
}

func TestFences(t *testing.T) {
	for _, f := range fences {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			closure := load(t, f.of, f.flags...)
			for _, path := range closure.paths() {
				for forbidden, why := range f.forbidden {
					if path == forbidden || strings.HasPrefix(path, forbidden+"/") {
						t.Errorf("%s must not import %s: %s\n\tit does by %s",
							f.name, forbidden, why, strings.Join(closure.chain(path), " -> "))
					}
				}
			}
		})
	}
}

// TestPluginImportsOnlyWhatItNeeds names the modules that the plugin may link: a
// forbidden list would let the next heavy one through.
func TestPluginImportsOnlyWhatItNeeds(t *testing.T) {
	allowed := []string{
		"github.com/containernetworking/cni/pkg", // the skeleton
		"ambientd/cni-plugin",
		// What the skeleton itself needs, to check CNI_NETNS.
		"github.com/vishvananda/netns", "golang.org/x/sys/unix",
	}
	closure := load(t, []string{"./cni-plugin"})
	for _, path := range closure.paths() {
		if closure.packages[path].Standard {
			continue
		}
		if !slices.ContainsFunc(allowed, func(a string) bool { return path == a || strings.HasPrefix(path, a+"/") }) {
			t.Errorf("the plugin may link the CNI skeleton, podevent and the standard library, because it runs on every pod start; not %s\n\tit does by %s",
				path, strings.Join(closure.chain(path), " -> "))
		}
	}
}

// TestNoPackageOfTheProductImportsTools: netnstest and the like in a product's package
// would link the testing package into it.
func TestNoPackageOfTheProductImportsTools(t *testing.T) {
	closure := load(t, []string{"./cni-plugin/...", "./certfetch/...", "./iptables/...", "./nodeagent/..."})
	for _, path := range closure.paths() {
		// zdstest is a peer for tests, bench and nothing else.
		if !strings.HasPrefix(path, module+"/") || strings.HasPrefix(path, module+"/tools/") || strings.HasSuffix(path, "test") {
			continue
		}
		for _, imported := range closure.packages[path].Imports {
			if imported == "testing" || strings.HasPrefix(imported, module+"/tools/") || strings.HasSuffix(imported, "/zdstest") {
				t.Errorf("%s imports %s: tools and test peers are not for the product", path, imported)
			}
		}
	}
}

// goPackage is what `go list -json` says of a package, as far as it is used.
type goPackage struct {
	ImportPath string
	Dir        string
	Standard   bool
	DepOnly    bool
	GoFiles    []string
	Imports    []string
	Error      *struct{ Err string }
}

// closure is a set of packages with all that they import.
type closure struct {
	roots    []string
	packages map[string]goPackage
}

// load lists the closure of the patterns, which are relative to the module's root.
func load(t *testing.T, patterns []string, flags ...string) closure {
	t.Helper()
	args := append([]string{"list", "-deps", "-e", "-json=ImportPath,Dir,Standard,DepOnly,GoFiles,Imports,Error"}, flags...)
	cmd := exec.CommandContext(t.Context(), "go", append(args, patterns...)...)
	cmd.Dir = "../.."
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list %v: %v\n%s", patterns, err, stderr.String())
	}
	c := closure{packages: map[string]goPackage{}}
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var p goPackage
		err := decoder.Decode(&p)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("reading the output of go list: %v", err)
		}
		// Variants for a test are "path [path.test]".
		p.ImportPath, _, _ = strings.Cut(p.ImportPath, " ")
		if p.Error != nil && !p.DepOnly {
			t.Fatalf("go list %v: %s", patterns, p.Error.Err)
		}
		for i := range p.Imports {
			p.Imports[i], _, _ = strings.Cut(p.Imports[i], " ")
		}
		if other, ok := c.packages[p.ImportPath]; ok {
			p.Imports = append(p.Imports, other.Imports...)
		}
		c.packages[p.ImportPath] = p
		if !p.DepOnly {
			c.roots = append(c.roots, p.ImportPath)
		}
	}
	if len(c.roots) == 0 {
		t.Fatalf("go list %v: no package", patterns)
	}
	return c
}

// paths returns the import paths of all packages, sorted.
func (c closure) paths() []string {
	var paths []string
	for path := range c.packages {
		paths = append(paths, path)
	}
	slices.Sort(paths)
	return paths
}

// chain returns a shortest chain of imports from a root to the package.
func (c closure) chain(to string) []string {
	from := map[string]string{}
	queue := slices.Clone(c.roots)
	for _, root := range queue {
		from[root] = ""
	}
	for len(queue) > 0 {
		path := queue[0]
		queue = queue[1:]
		if path == to {
			break
		}
		for _, next := range c.packages[path].Imports {
			if _, seen := from[next]; !seen {
				from[next] = path
				queue = append(queue, next)
			}
		}
	}
	var chain []string
	for path := to; path != ""; path = from[path] {
		chain = append(chain, path)
	}
	slices.Reverse(chain)
	return chain
}

// TestChain: a message without the way that led there helps nobody.
func TestChain(t *testing.T) {
	c := closure{roots: []string{"a"}, packages: map[string]goPackage{
		"a": {Imports: []string{"b", "c"}}, "b": {Imports: []string{"d"}}, "c": {Imports: []string{"b", "e"}}, "d": {Imports: []string{"e"}},
	}}
	for to, want := range map[string]string{"a": "a", "d": "a b d", "e": "a c e"} {
		if got := strings.Join(c.chain(to), " "); got != want {
			t.Errorf("the chain to %s is %q, want %q", to, got, want)
		}
	}
}

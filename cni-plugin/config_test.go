// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"ambientd/cni-plugin/podevent"
)

// othersKeys are those of the specification, what runtimes and meta-plugins put in, and what other
// plugins of a chain read.
const othersKeys = `{"cniVersion":"1.1.0","cniVersions":["1.0.0"],"name":"n","type":"ambient-cni","disableCheck":true,"disableGC":true,"loadOnlyInlinedPlugins":false,
	"args":{"cni":{"labels":[]}},"ipMasq":true,"ipam":{"type":"host-local"},"dns":{"nameservers":[]},"capabilities":{"portMappings":true},
	"runtimeConfig":{"portMappings":[]},"prevResult":{},"cni.dev/valid-attachments":[],"cni.dev/attachments":[],"io.kubernetes.cri.sandbox-id":"c1",
	"deviceID":"0000:03:02.0","pciBusID":"0000:03:02.0","resourceName":"x/y","namespaceIsolation":true,"delegate":{},"daemonSocketDir":"/d",
	"mtu":1500,"bridge":"cni0","master":"eth0","mode":"l2","policy":{"type":"k8s"},"kubernetes":{"kubeconfig":"/k"},"logFile":"/l",
	"sysctl":{},"snat":true,"datastore_type":"kubernetes","//":"a comment","_comment":"another","_timeout":"1s","socket_":"/s"}`

func TestParseConfig(t *testing.T) {
	with := func(change func(*config)) config {
		c := defaults()
		c.name = "n"
		change(&c)
		return c
	}
	for _, c := range []struct {
		name, stdin string
		want        config
		errs        []string // parts of the error; none means no error
	}{
		{"defaults", `{"name":"n"}`, with(func(*config) {}), nil},
		{
			"everything", `{"name":"n","socket":"/s","runDir":"/r","excludeNamespaces":["a","b"],"agentNamespace":"m","ownPods":["x","y-?"],
			 "agentDownPolicy":"strict","strictStatus":true,"timeout":"1m30s","logLevel":"debug","prevResult":{"a":1},"cni.dev/valid-attachments":[]}`,
			config{
				name: "n", socket: "/s", runDir: "/r",
				never:           podevent.Exclusions{ExcludeNamespaces: []string{"a", "b"}, AgentNamespace: "m", OwnPods: []string{"x", "y-?"}},
				agentDownPolicy: downStrict, strictStatus: true, timeout: 90 * time.Second, logLevel: slog.LevelDebug,
				prevResult: json.RawMessage(`{"a":1}`), validAttachments: json.RawMessage(`[]`),
			}, nil,
		},
		{"run directory", `{"name":"n","runDir":"/r/"}`, with(func(c *config) { c.runDir, c.socket = "/r", "/r/private/cni.sock" }), nil},
		{"nothing excluded", `{"name":"n","excludeNamespaces":[],"ownPods":[]}`, with(func(c *config) {
			c.never.ExcludeNamespaces, c.never.OwnPods = []string{}, []string{}
		}), nil},
		{"null is absent", `{"name":"n","socket":null,"ownPods":null,"strictStatus":null,"timeout":null}`, with(func(*config) {}), nil},
		{"a bad value does not spoil the others", `{"name":"n","timeout":"soon","agentNamespace":"m"}`,
			with(func(c *config) { c.never.AgentNamespace = "m" }), []string{`key "timeout": value "soon": expected a duration such as "20s"`}},
		{"every bad value is named", `{"name":"n","socket":"s","runDir":7,"strictStatus":"yes","logLevel":"loud"}`, with(func(*config) {}), []string{
			`key "socket": value "s": expected an absolute path`, `key "runDir": value 7: expected a string`,
			`key "strictStatus": value "yes": expected a bool`, `key "logLevel": value "loud": expected one of ["debug" "info" "warn" "error"]`,
		}},
		{"empty names", `{"name":"n","excludeNamespaces":["a",""],"agentNamespace":"","ownPods":[""]}`, with(func(*config) {}), []string{
			`key "excludeNamespaces": item "": it must not be empty`, `key "agentNamespace": value ""`, `key "ownPods": item ""`,
		}},
		{"lists that are none", `{"name":"n","excludeNamespaces":"a","ownPods":[1]}`, with(func(*config) {}), []string{
			`key "excludeNamespaces": value "a": expected a list of strings`, `key "ownPods": value [1]: expected a list of strings`,
		}},
		{"policy", `{"name":"n","agentDownPolicy":"open"}`, with(func(*config) {}),
			[]string{`key "agentDownPolicy": value "open": expected one of ["namespace" "strict"]`}},
		{"no time", `{"name":"n","timeout":"0s"}`, with(func(*config) {}), []string{`key "timeout"`, "more than 0 and at most 10m0s"}},
		{"negative time", `{"name":"n","timeout":"-1s"}`, with(func(*config) {}), []string{`key "timeout"`}},
		{"too much time", `{"name":"n","timeout":"1h"}`, with(func(*config) {}), []string{`key "timeout"`}},
		{"time without a unit", `{"name":"n","timeout":20}`, with(func(*config) {}), []string{`key "timeout": value 20: expected a string such as "20s"`}},
		{"long path", `{"name":"n","runDir":"/` + strings.Repeat("x", 100) + `"}`, with(func(c *config) { c.runDir = "/" + strings.Repeat("x", 100) }), []string{"at most 107 bytes, this one 118"}},
		{"spelling", `{"name":"n","ownpods":[]}`, with(func(*config) {}), []string{`key "ownpods": it is spelled "ownPods"`}},
		{"another style", `{"name":"n","exclude_namespaces":[]}`, with(func(*config) {}), []string{`key "exclude_namespaces": it is spelled "excludeNamespaces"`}},
		{"slips", `{"name":"n","excludeNamespace":["a"],"stirctStatus":true,"log-levl":"debug"}`, with(func(*config) {}), []string{
			`key "excludeNamespace": it is spelled "excludeNamespaces"`, `key "stirctStatus": it is spelled "strictStatus"`, `key "log-levl": it is spelled "logLevel"`,
		}},
		{"others' keys", othersKeys, with(func(c *config) { c.prevResult, c.validAttachments = json.RawMessage(`{}`), json.RawMessage(`[]`) }), nil},
		{"no configuration", `[]`, defaults(), []string{"network configuration: json"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := parseConfig([]byte(c.stdin))
			if diff := cmp.Diff(c.want, got, cmp.AllowUnexported(config{})); diff != "" {
				t.Error(diff)
			}
			if (err != nil) != (c.errs != nil) {
				t.Fatalf("error: %v, want %q", err, c.errs)
			}
			if err != nil && strings.Contains(err.Error(), "\n") {
				t.Errorf("error in several lines: %q", err)
			}
			for _, part := range c.errs {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("error: %v, want one with %q", err, part)
				}
			}
		})
	}
}

// TestOutside: which pods start without the agent (case: own pods, excluded namespaces, others).
func TestOutside(t *testing.T) {
	conf := defaults()
	for _, c := range []struct {
		namespace, name, want string
	}{
		{"ambientd-system", "ambientd-x7k2p", "own pod (ambientd-* in namespace ambientd-system)"},
		{"ambientd-system", "ztunnel-x7k2p", "own pod (ztunnel-* in namespace ambientd-system)"},
		{"ambientd-system", "ambient-ca-0", "own pod (ambient-ca-* in namespace ambientd-system)"},
		{"ambientd-system", "curl", ""},
		{"ambientd-system", "my-ztunnel-x", ""},
		{"shop", "ambientd-x7k2p", ""},
		{"kube-system", "coredns-1", "excluded namespace kube-system"},
		{"kube-system2", "coredns-1", ""},
		{"shop", "cart-0", ""},
		{"", "", ""},
	} {
		got, outside := conf.never.Match(podevent.Pod{Namespace: c.namespace, Name: c.name})
		if got != c.want || outside != (c.want != "") {
			t.Errorf("%s/%s: %q, %v, want %q", c.namespace, c.name, got, outside, c.want)
		}
	}
}

// FuzzStdin: whatever a runtime writes, parsing does not panic, and what comes out of it is fit for
// use: with an error too, since DEL goes on.
func FuzzStdin(f *testing.F) {
	for _, sample := range samples(f) {
		f.Add(sample)
	}
	f.Fuzz(func(t *testing.T, stdin []byte) {
		conf, _ := parseConfig(stdin)
		if conf.timeout <= 0 || conf.timeout > maxTimeout {
			t.Errorf("timeout %s", conf.timeout)
		}
		if !strings.HasPrefix(conf.socket, "/") || len(conf.socket) > maxSocketPath {
			t.Errorf("socket %q", conf.socket)
		}
		if conf.never.AgentNamespace == "" || conf.agentDownPolicy != downByNamespace && conf.agentDownPolicy != downStrict {
			t.Errorf("policy %+v", conf)
		}
		conf.never.Match(podevent.Pod{Namespace: conf.never.AgentNamespace, Name: "p"})
		if addrs, err := parseAddresses(conf.prevResult); err == nil {
			if !json.Valid(conf.prevResult) || !strings.Contains(string(stdin), string(conf.prevResult)) {
				t.Errorf("prevResult is not the bytes that came: %q", conf.prevResult)
			}
			for _, addr := range addrs {
				if !addr.IsValid() || addr.Is4In6() || addr.Zone() != "" {
					t.Errorf("address %v", addr)
				}
			}
		}
		valid, err := parseAttachments(conf.validAttachments)
		if err != nil && valid != nil {
			t.Errorf("a list along with an error: %v", valid)
		}
		for _, a := range valid {
			if a.ContainerID == "" || a.IfName == "" {
				t.Errorf("half an attachment: %+v", a)
			}
		}
	})
}

// FuzzArgs is the same for CNI_ARGS: a pod that is accepted is the one that is written there.
func FuzzArgs(f *testing.F) {
	f.Add("K8S_POD_UID=u1;IgnoreUnknown=1;K8S_POD_NAME=cart-0;K8S_POD_INFRA_CONTAINER_ID=c1;K8S_POD_NAMESPACE=shop")
	f.Add("K8S_POD_NAME=a;K8S_POD_NAME=b;K8S_POD_NAMESPACE=shop")
	f.Add("K8S_POD_NAME=a=b;;K8S_POD_NAMESPACE")
	f.Fuzz(func(t *testing.T, args string) {
		pod, err := needPod(args)
		if err != nil {
			return
		}
		for key, value := range map[string]string{"K8S_POD_NAMESPACE": pod.Namespace, "K8S_POD_NAME": pod.Name} {
			if value == "" || !strings.Contains(";"+args+";", fmt.Sprintf(";%s=%s;", key, value)) {
				t.Errorf("%s is %q", key, value)
			}
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/google/go-cmp/cmp"

	"ambientd/cni-plugin/install"
	"ambientd/cni-plugin/podevent"
)

// TestInstalledEntryIsUnderstood: the plugin reads what the installer writes.
func TestInstalledEntryIsUnderstood(t *testing.T) {
	for _, c := range []struct {
		name  string
		entry install.Entry
		want  func(*config)
	}{
		{"nothing set", install.Entry{}, func(*config) {}},
		{
			"everything set", install.Entry{
				Socket: "/s", RunDir: "/r", ExcludeNamespaces: []string{}, AgentNamespace: "m", OwnPods: []string{"x-*"},
				AgentDownPolicy: "strict", StrictStatus: true, Timeout: "1m30s", LogLevel: "debug",
			}, func(c *config) {
				*c = config{
					socket: "/s", runDir: "/r", never: podevent.Exclusions{ExcludeNamespaces: []string{}, AgentNamespace: "m", OwnPods: []string{"x-*"}},
					agentDownPolicy: downStrict, strictStatus: true, timeout: 90 * time.Second, logLevel: slog.LevelDebug,
				}
			},
		},
	} {
		dir := t.TempDir()
		file := filepath.Join(dir, "10-a.conflist")
		if err := os.WriteFile(file, []byte(`{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"a"}]}`), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := install.Install(t.Context(), install.Config{BinDir: dir, ConfDir: dir, Plugin: "/proc/self/cmdline", Entry: c.entry}); err != nil {
			t.Fatal(err)
		}
		list, err := libcni.ConfListFromFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var keys map[string]any // as the runtime passes them: with the list's name
		if err := json.Unmarshal(list.Plugins[1].Bytes, &keys); err != nil {
			t.Fatal(err)
		}
		keys["name"] = list.Name
		stdin, err := json.Marshal(keys)
		if err != nil {
			t.Fatal(err)
		}
		want := defaults()
		c.want(&want)
		want.name = "n"
		got, err := parseConfig(stdin)
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(config{})); err != nil || diff != "" {
			t.Errorf("%s: %v\n%s", c.name, err, diff)
		}
	}
}

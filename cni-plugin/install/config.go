// SPDX-License-Identifier: Apache-2.0

package install

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"time"
)

// Where runtimes have plugins and network configurations unless told otherwise.
const (
	DefaultBinDir  = "/opt/cni/bin"
	DefaultConfDir = "/etc/cni/net.d"
)

// Config says what is installed, and where.
type Config struct {
	BinDir  string          // the runtime's, of plugins; required, and must exist
	ConfDir string          // the runtime's, of network configurations; required, and must exist
	Plugin  string          // the binary to copy; required by Install
	Entry   Entry           // what the network configuration gets
	Wait    time.Duration   // for a network configuration to appear
	Waiting func(why error) // told once, when it begins to wait; may be nil
}

// Entry is our plugin's part of a network configuration. What is zero is left out, and so
// has the plugin's default; a list that is empty and not nil is written.
type Entry struct {
	Socket            string   `json:"socket,omitzero"`
	RunDir            string   `json:"runDir,omitzero"`
	ExcludeNamespaces []string `json:"excludeNamespaces,omitzero"`
	AgentNamespace    string   `json:"agentNamespace,omitzero"`
	OwnPods           []string `json:"ownPods,omitzero"`
	AgentDownPolicy   string   `json:"agentDownPolicy,omitzero"`
	StrictStatus      bool     `json:"strictStatus,omitzero"`
	Timeout           string   `json:"timeout,omitzero"`
	LogLevel          string   `json:"logLevel,omitzero"`
}

func (e Entry) encode() ([]byte, error) {
	entry, err := json.Marshal(struct {
		Type string `json:"type"`
		Entry
	}{PluginName, e})
	if err != nil {
		return nil, fmt.Errorf("encoding the plugin's entry: %w", err)
	}
	return entry, nil
}

func (c Config) validate() error {
	if !filepath.IsAbs(c.Plugin) {
		return fmt.Errorf("the plugin's binary %q: must be an absolute path", c.Plugin)
	}
	if c.Wait < 0 {
		return errors.New("the time to wait for a network configuration must not be negative")
	}
	return c.validateDirs()
}

func (c Config) validateDirs() error {
	for _, dir := range []string{c.BinDir, c.ConfDir} {
		if !filepath.IsAbs(dir) {
			return fmt.Errorf("the runtime's directory %q: must be an absolute path", dir)
		}
	}
	return nil
}

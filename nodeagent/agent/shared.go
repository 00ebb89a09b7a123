// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"time"
)

// maxPluginTimeout is the most that the plugin takes.
const maxPluginTimeout = 10 * time.Minute

// CheckPlugin is [Config.Validate] for what the plugin has to share with the agent.
func (c Config) CheckPlugin() error {
	runDirErr := absolute(c.RunDir)
	errs := []error{setting("run-dir", c.RunDir, runDirErr), c.checkPods()}
	if path := c.CNISocketPath(); c.CNISocket != "" || runDirErr == nil {
		err := absolute(path)
		if len(path) > maxSocketPath {
			err = fmt.Errorf("a socket's path has at most %d bytes, this one has %d", maxSocketPath, len(path))
		}
		errs = append(errs, setting("cni-socket", path, err))
	}
	if c.PluginTimeout <= 0 || c.PluginTimeout > maxPluginTimeout {
		errs = append(errs, setting("plugin-timeout", c.PluginTimeout, fmt.Errorf("must be more than 0 and at most %s", maxPluginTimeout)))
	}
	return errors.Join(errs...)
}

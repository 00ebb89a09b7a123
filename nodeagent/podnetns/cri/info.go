// SPDX-License-Identifier: Apache-2.0

package cri

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
)

// info is what is read of the verbose answer. Its form is no part of the interface;
// containerd (since 1.0) and CRI-O both use this one, under the key "info".
type info struct {
	// PID is that of the sandbox's process as the host sees it; 0 where it has none, as
	// CRI-O's without infra container.
	PID         int `json:"pid"`
	RuntimeSpec *struct {
		Linux struct {
			Namespaces []struct {
				Type string `json:"type"`
				Path string `json:"path"`
			} `json:"namespaces"`
		} `json:"linux"`
	} `json:"runtimeSpec"`
}

// infoKey is where both runtimes put it.
const infoKey = "info"

// netnsPaths returns where the sandbox's netns is; nothing for a sandbox that has none of
// its own, but the host's.
func netnsPaths(answer map[string]string) ([]string, error) {
	text, ok := answer[infoKey]
	if !ok {
		return nil, errors.New("the runtime tells nothing beyond the standard's status, which has no netns")
	}
	var read info
	if err := json.Unmarshal([]byte(text), &read); err != nil {
		return nil, fmt.Errorf("reading what the runtime tells of it: %w", err)
	}
	if read.RuntimeSpec == nil {
		return nil, errors.New("the runtime tells no runtimeSpec of it, which would have the netns")
	}
	for _, namespace := range read.RuntimeSpec.Linux.Namespaces {
		if namespace.Type != "network" {
			continue
		}
		var paths []string
		if namespace.Path != "" {
			if !filepath.IsAbs(namespace.Path) {
				return nil, fmt.Errorf("its netns is at %.256q, which is no absolute path", namespace.Path)
			}
			paths = append(paths, namespace.Path)
		}
		// PID 1 is in the host's netns, whatever a runtime says.
		if read.PID > 1 {
			paths = append(paths, fmt.Sprintf("/proc/%d/ns/net", read.PID))
		}
		return paths, nil
	}
	return nil, nil
}

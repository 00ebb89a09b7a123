// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path"
	"slices"
	"strings"
	"time"

	"ambientd/cni-plugin/podevent"
	"ambientd/cni-plugin/spelling"
)

// downPolicy is what becomes of pods of other namespaces than the excluded ones while the agent is down.
type downPolicy string

const (
	// downByNamespace lets pods of namespaces pass that the agent's last policy snapshot shows to be
	// out of the mesh. Without one every namespace is unknown: it then behaves as downStrict.
	downByNamespace downPolicy = "namespace"
	// downStrict lets only own pods and those of excluded namespaces pass.
	downStrict downPolicy = "strict"
)

// config is the plugin's part of the network configuration.
type config struct {
	// name is the network's.
	name string
	// socket is the agent's, an absolute path: that of key socket, or else the one in the directory of
	// key runDir.
	socket string
	// runDir is the agent's, where it keeps what the plugin needs while it is away.
	runDir string
	// never are the pods that never are in the mesh.
	never podevent.Exclusions
	// agentDownPolicy is for pods that neither names.
	agentDownPolicy downPolicy
	// strictStatus makes STATUS fail while the agent cannot be reached.
	strictStatus bool
	// timeout bounds ADD, CHECK and GC.
	timeout time.Duration
	// logLevel is for standard error; everything the plugin logs is of level debug.
	logLevel slog.Level

	// prevResult is the value as it came, byte for byte; nil if there was none.
	prevResult json.RawMessage
	// validAttachments is the undecoded list of GC; nil if the key was absent.
	validAttachments json.RawMessage
}

// defaults are what the agent's flags have as defaults too.
func defaults() config {
	return config{
		socket: podevent.DefaultSocket,
		runDir: podevent.DefaultRunDir,
		never: podevent.Exclusions{
			AgentNamespace:    podevent.DefaultAgentNamespace,
			OwnPods:           podevent.DefaultOwnPods(),
			ExcludeNamespaces: podevent.DefaultExcludeNamespaces(),
		},
		agentDownPolicy: downByNamespace,
		timeout:         20 * time.Second, // more than the agent's 15 s, so that its error is seen rather than ours
		logLevel:        slog.LevelWarn,
	}
}

// maxTimeout is more than any runtime waits for a plugin.
const maxTimeout = 10 * time.Minute

// maxSocketPath is what fits into sockaddr_un, in bytes (unix(7)).
const maxSocketPath = 107

// parseConfig reads the network configuration. An error names every key with a bad value; those
// keys have their defaults in the config that is returned along with it, which DEL goes on with.
//
// Unknown keys are tolerated, although the specification lets a plugin refuse them: runtimes and
// meta-plugins add keys of their own (runtimeConfig, prevResult, args, cni.dev/…, deviceID), new ones
// with any release, and whoever writes the conflist may annotate it. But a key that is ours save for
// a slip is a mistake for sure, which tolerance would hide.
func parseConfig(stdin []byte) (config, error) {
	conf := defaults()
	var raw map[string]json.RawMessage
	if err := json.Unmarshal(stdin, &raw); err != nil {
		return conf, fmt.Errorf("network configuration: %w", err)
	}
	socket := ""
	keys := []struct {
		name  string
		parse func(json.RawMessage) error
	}{
		{"name", text(&conf.name, notEmpty)},
		{"runDir", text(&conf.runDir, absolute)},
		{"socket", text(&socket, absolute)},
		{"excludeNamespaces", list(&conf.never.ExcludeNamespaces, notEmpty)},
		{"agentNamespace", text(&conf.never.AgentNamespace, notEmpty)},
		{"ownPods", list(&conf.never.OwnPods, pattern)},
		{"agentDownPolicy", text(&conf.agentDownPolicy, oneOf(downByNamespace, downStrict))},
		{"strictStatus", value(&conf.strictStatus)},
		{"timeout", duration(&conf.timeout)},
		{"logLevel", level(&conf.logLevel)},
	}
	var errs []error
	for _, key := range keys {
		if err := misspelled(raw, key.name); err != nil {
			errs = append(errs, err)
		}
		given, ok := raw[key.name]
		if !ok || string(given) == "null" {
			continue
		}
		if err := key.parse(given); err != nil {
			errs = append(errs, fmt.Errorf("key %q: %w", key.name, err))
		}
	}
	conf.runDir = path.Clean(conf.runDir)
	if socket == "" {
		socket = conf.runDir + podevent.SocketInRunDir
	}
	if len(socket) > maxSocketPath {
		errs = append(errs, fmt.Errorf("key \"socket\" or \"runDir\": a socket's path has at most %d bytes, this one %d", maxSocketPath, len(socket)))
	} else {
		conf.socket = socket
	}
	conf.prevResult = raw["prevResult"]
	conf.validAttachments = raw["cni.dev/valid-attachments"]
	return conf, joined(errs...)
}

// misspelled looks for a key that was meant to be name. An underscore at either end is how a key is
// taken out of use.
func misspelled(raw map[string]json.RawMessage, name string) error {
	for given := range raw {
		if given != name && strings.Trim(given, "_") == given && spelling.Near(given, name) {
			return fmt.Errorf("key %q: it is spelled %q", given, name)
		}
	}
	return nil
}

// The functions below make parsers, which leave their target alone on an error.

func value[T any](target *T) func(json.RawMessage) error {
	return func(raw json.RawMessage) error {
		var v T
		if err := json.Unmarshal(raw, &v); err != nil {
			return fmt.Errorf("value %.64s: expected a %T", raw, v)
		}
		*target = v
		return nil
	}
}

func text[T ~string](target *T, check func(string) error) func(json.RawMessage) error {
	return func(raw json.RawMessage) error {
		var s string
		if err := value(&s)(raw); err != nil {
			return err
		}
		if err := check(s); err != nil {
			return fmt.Errorf("value %.64q: %w", s, err)
		}
		*target = T(s)
		return nil
	}
}

func list(target *[]string, check func(string) error) func(json.RawMessage) error {
	return func(raw json.RawMessage) error {
		var items []string
		if err := json.Unmarshal(raw, &items); err != nil {
			return fmt.Errorf("value %.64s: expected a list of strings", raw)
		}
		for _, item := range items {
			if err := check(item); err != nil {
				return fmt.Errorf("item %.64q: %w", item, err)
			}
		}
		*target = items
		return nil
	}
}

func duration(target *time.Duration) func(json.RawMessage) error {
	return func(raw json.RawMessage) error {
		var s string
		if err := json.Unmarshal(raw, &s); err != nil {
			return fmt.Errorf("value %.64s: expected a string such as \"20s\"", raw)
		}
		d, err := time.ParseDuration(s)
		if err != nil || d <= 0 || d > maxTimeout {
			return fmt.Errorf("value %.64q: expected a duration such as \"20s\", more than 0 and at most %s", s, maxTimeout)
		}
		*target = d
		return nil
	}
}

func level(target *slog.Level) func(json.RawMessage) error {
	levels := map[string]slog.Level{
		"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError,
	}
	return func(raw json.RawMessage) error {
		var s string
		if err := text(&s, oneOf("debug", "info", "warn", "error"))(raw); err != nil {
			return err
		}
		*target = levels[s]
		return nil
	}
}

func notEmpty(s string) error {
	if s == "" {
		return errors.New("it must not be empty")
	}
	return nil
}

func absolute(s string) error {
	if !path.IsAbs(s) {
		return errors.New("expected an absolute path")
	}
	return nil
}

func pattern(s string) error {
	if _, err := path.Match(s, ""); err != nil || s == "" {
		return errors.New("expected a pattern of a pod's name, such as \"ztunnel-*\"")
	}
	return nil
}

func oneOf[T ~string](allowed ...T) func(string) error {
	return func(s string) error {
		if !slices.Contains(allowed, T(s)) {
			return fmt.Errorf("expected one of %q", allowed)
		}
		return nil
	}
}

// passesWithoutAgent tells whether a pod that the configuration does not keep outside starts while the
// agent is away: by what that has left behind. Without that, every namespace may be in the mesh.
func (c config) passesWithoutAgent(pod podevent.Pod) (reason string, err error) {
	policy, err := podevent.ReadPolicy(c.runDir + podevent.PolicyInRunDir)
	if err != nil {
		return "", err
	}
	if reason, ok := policy.Match(pod); ok {
		return reason, nil
	}
	if _, out := slices.BinarySearch(policy.OutOfMesh, pod.Namespace); out && c.agentDownPolicy == downByNamespace {
		return "namespace " + pod.Namespace + " was out of the mesh when the agent last ran", nil
	}
	return "", nil
}

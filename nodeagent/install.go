// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"ambientd/cni-plugin/install"
	"ambientd/nodeagent/agent"
)

const installUsage = `Usage: ambientd install [FLAGS]

Installs the CNI plugin on this machine: its binary, then its entry, the last, in the network configuration that the runtime
loads, which is lexically the first. Everything else in that file stays as it is, byte for byte. What is in place already is not written.
It is meant to run before the agent, as an init container with the runtime's two directories mounted.

The configuration file of the agent, with --config, gives the settings that both have to share; flags win.
`

const uninstallUsage = `Usage: ambientd uninstall [FLAGS]

Takes off what ` + "`ambientd install`" + ` put on this machine: first the entry, from every network configuration, then the plugin's binary.
Pods that are enrolled stay so.
`

// pluginFile is where an image or a release has the plugin: beside ambientd.
func pluginFile() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("looking for the plugin's binary: %w", err)
	}
	return filepath.Join(filepath.Dir(self), install.PluginName), nil
}

// installation are the settings of install and uninstall.
type installation struct {
	flags  *flags
	file   string // --config
	agent  *settings
	target install.Config

	agentDownPolicy, logLevel string
	strictStatus              bool
}

func newInstallation(command string) (*installation, error) {
	shared, err := newSettings()
	if err != nil {
		return nil, err
	}
	i := &installation{
		flags: newFlags(command), agent: shared,
		target:          install.Config{BinDir: install.DefaultBinDir, ConfDir: install.DefaultConfDir, Wait: 2 * time.Minute},
		agentDownPolicy: "namespace", logLevel: "warn",
	}
	i.flags.group("Files")
	i.flags.add((*text)(&i.target.BinDir), "cni-bin-dir DIR", "the runtime's directory of plugins")
	i.flags.add((*text)(&i.target.ConfDir), "cni-conf-dir DIR", "the runtime's directory of network configurations")
	return i, nil
}

// addInstall adds what uninstall has no use for.
func (i *installation) addInstall() error {
	var err error
	if i.target.Plugin, err = pluginFile(); err != nil {
		return err
	}
	f, c := i.flags, &i.agent.cfg
	f.addDerived((*text)(&i.target.Plugin), "plugin PATH", "the binary to install (default: ambient-cni beside ambientd)")
	f.add((*duration)(&i.target.Wait), "wait DURATION", "how long to wait for a network configuration, which on a new node another plugin's installer has yet to write")
	f.group("Settings that the agent has too")
	f.add((*text)(&i.file), "config PATH", "the agent's configuration file; may be relative")
	f.add((*text)(&c.RunDir), "run-dir DIR", "as of the host")
	f.addDerived((*text)(&c.CNISocket), "cni-socket PATH", "the agent's (default <run-dir>/private/cni.sock)")
	f.add((*list)(&c.ExcludeNamespaces), "exclude-namespaces LIST", "pods there start also while the agent is down")
	f.add((*text)(&c.AgentNamespace), "agent-namespace NAME", "namespace of the agent, the node proxy and the CA")
	f.add((*list)(&c.OwnPods), "own-pods LIST", "name patterns of those pods, which start also while the agent is down")
	f.add((*duration)(&c.PluginTimeout), "plugin-timeout DURATION", "for ADD, CHECK and GC; more than the agent's --add-timeout")
	f.group("Settings of the plugin alone")
	f.add((*text)(&i.agentDownPolicy), "agent-down-policy POLICY", "which pods start while the agent is down: namespace (also those of namespaces that were out of the mesh) or strict")
	f.add((*boolean)(&i.strictStatus), "strict-status", "report the node's network as broken while the agent is down")
	f.add((*text)(&i.logLevel), "plugin-log-level LEVEL", "of the plugin, on standard error: debug, info, warn or error")
	return nil
}

// config is what is to be installed. Settings that are the plugin's defaults are left out.
func (i *installation) config() (install.Config, error) {
	c, deflt := i.agent.cfg, agent.Default()
	var wait error
	if i.target.Wait < 0 {
		wait = fmt.Errorf("--wait %s: must not be negative", i.target.Wait)
	}
	if err := errors.Join(
		i.checkDirs(),
		errors.Join(absolute(given{"plugin", i.target.Plugin})...),
		wait,
		c.CheckPlugin(),
		oneOf("agent-down-policy", i.agentDownPolicy, "namespace", "strict"),
		oneOf("plugin-log-level", i.logLevel, "debug", "info", "warn", "error"),
	); err != nil {
		return install.Config{}, &usageError{err: &configError{file: i.file, err: err}}
	}
	target := i.target
	e := &target.Entry
	e.Socket, e.StrictStatus = c.CNISocket, i.strictStatus
	for _, setting := range []struct {
		target       *string
		value, deflt string
	}{
		{&e.RunDir, c.RunDir, deflt.RunDir},
		{&e.AgentNamespace, c.AgentNamespace, deflt.AgentNamespace},
		{&e.AgentDownPolicy, i.agentDownPolicy, "namespace"},
		{&e.Timeout, c.PluginTimeout.String(), deflt.PluginTimeout.String()},
		{&e.LogLevel, i.logLevel, "warn"},
	} {
		if setting.value != setting.deflt {
			*setting.target = setting.value
		}
	}
	for _, setting := range []struct {
		target       *[]string
		value, deflt []string
	}{
		{&e.ExcludeNamespaces, c.ExcludeNamespaces, deflt.ExcludeNamespaces},
		{&e.OwnPods, c.OwnPods, deflt.OwnPods},
	} {
		if !slices.Equal(setting.value, setting.deflt) {
			*setting.target = append([]string{}, setting.value...) // [] is not absent
		}
	}
	return target, nil
}

// checkDirs checks what install and uninstall have in common.
func (i *installation) checkDirs() error {
	return errors.Join(absolute(given{"cni-bin-dir", i.target.BinDir}, given{"cni-conf-dir", i.target.ConfDir})...)
}

func oneOf(flag, value string, allowed ...string) error {
	if slices.Contains(allowed, value) {
		return nil
	}
	return fmt.Errorf("--%s %q: must be one of %s", flag, value, strings.Join(allowed, ", "))
}

// parseInstall parses args, over the file that they may name.
func parseInstall(args []string, stdout io.Writer) (*installation, error) {
	file := ""
	for {
		i, err := newInstallation("install")
		if err == nil {
			err = i.addInstall()
		}
		if err == nil && file != "" {
			if err := i.agent.readFile(file); err != nil {
				return nil, &usageError{err: err}
			}
		}
		if err == nil {
			err = parse(i.flags.set, args, stdout, func() string { return installUsage + i.flags.help() })
		}
		if err != nil || i.file == file {
			return i, err
		}
		file = i.file
	}
}

// installPlugin is the command install.
func installPlugin(ctx context.Context, args []string, stdout, _ io.Writer) error {
	i, err := parseInstall(args, stdout)
	if err != nil {
		return err
	}
	cfg, err := i.config()
	if err != nil {
		return err
	}
	cfg.Waiting = func(why error) {
		// Nothing depends on whether it is seen.
		_, _ = fmt.Fprintf(stdout, "waiting, up to %s: %v\n", cfg.Wait, why)
	}
	result, err := install.Install(ctx, cfg)
	var report strings.Builder
	for _, file := range []struct {
		path    string
		written bool
	}{{result.Binary, result.BinaryWritten}, {result.Conflist, result.ConflistWritten}} {
		switch {
		case file.written:
			fmt.Fprintf(&report, "%s: written\n", file.path)
		case err == nil:
			fmt.Fprintf(&report, "%s: is as it should be\n", file.path)
		}
	}
	for _, path := range result.Left {
		fmt.Fprintf(&report, "%s: entry taken out, the runtime does not load it\n", path)
	}
	return errors.Join(err, write(stdout, report.String()))
}

// uninstallPlugin is the command uninstall.
func uninstallPlugin(_ context.Context, args []string, stdout, _ io.Writer) error {
	i, err := newInstallation("uninstall")
	if err == nil {
		err = parse(i.flags.set, args, stdout, func() string { return uninstallUsage + i.flags.help() })
	}
	if err != nil {
		return err
	}
	if err := i.checkDirs(); err != nil {
		return &usageError{err: &configError{err: err}}
	}
	changed, err := install.Uninstall(i.target)
	var report strings.Builder
	for _, path := range changed {
		what := "entry taken out"
		if filepath.Base(path) == install.PluginName {
			what = "removed"
		}
		fmt.Fprintf(&report, "%s: %s\n", path, what)
	}
	if len(changed) == 0 && err == nil {
		report.WriteString("nothing is installed\n")
	}
	return errors.Join(err, write(stdout, report.String()))
}

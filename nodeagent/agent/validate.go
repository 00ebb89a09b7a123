// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"ambientd/certfetch"
	"ambientd/certfetch/ca"
	"ambientd/certfetch/spiffeid"
	"ambientd/cni-plugin/podevent"
	"ambientd/iptables/backend"
	"ambientd/iptables/iptables"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/enroll"
	"ambientd/nodeagent/workload"
)

const (
	// maxSocketPath is what fits in sockaddr_un with its terminating NUL (unix(7)).
	maxSocketPath = 107

	// pluginDelTimeout is when the plugin gives a DEL up and exits 0.
	pluginDelTimeout = 900 * time.Millisecond

	// minAuditInterval keeps audits from being all that a node does, maxAuditInterval
	// damage that makes no notification (rules of x_tables) from staying unnoticed.
	minAuditInterval = time.Second
	maxAuditInterval = time.Hour
)

// Validate returns everything that is wrong with c, one line each, by the name
// of the flag.
func (c Config) Validate() error {
	_, trustErr := spiffeid.ParseTrustDomain(c.TrustDomain)
	return errors.Join(
		c.checkNode(),
		c.checkPaths(),
		c.checkChoices(),
		setting("trust-domain", c.TrustDomain, trustErr),
		c.checkPods(),
		c.checkProbeSources(),
		c.checkRedirection(),
		c.checkCertificates(),
		c.checkTimeouts(),
	)
}

// setting puts the flag's name and value before err, if there is one.
func setting(flag string, value any, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("--%s %v: %w", flag, value, err)
}

// named is setting for an error that has the value in it.
func named(flag string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("--%s: %w", flag, err)
}

func (c Config) checkNode() error {
	if len(validation.IsDNS1123Subdomain(c.NodeName)) > 0 {
		return setting("node-name", strconv.Quote(c.NodeName), errors.New("must be a DNS name in lower case, as Kubernetes names nodes"))
	}
	return nil
}

func (c Config) checkPaths() error {
	runDirErr := absolute(c.RunDir)
	errs := []error{setting("run-dir", c.RunDir, runDirErr)}
	paths := map[string]string{}
	for _, socket := range []struct{ flag, path, given string }{
		{"cni-socket", c.CNISocketPath(), c.CNISocket},
		{"admin-socket", c.AdminSocketPath(), c.AdminSocket},
		{"sds-socket", c.SDSSocketPath(), c.SDSSocket},
		{"zds-socket", c.ZDSSocket, c.ZDSSocket},
	} {
		if socket.given == "" && runDirErr != nil {
			continue // below the run directory, which is reported already
		}
		err := absolute(socket.path)
		if len(socket.path) > maxSocketPath {
			err = fmt.Errorf("a socket's path has at most %d bytes, this one has %d", maxSocketPath, len(socket.path))
		}
		if other, taken := paths[filepath.Clean(socket.path)]; taken && err == nil {
			err = fmt.Errorf("--%s is the same", other)
		}
		paths[filepath.Clean(socket.path)] = socket.flag
		errs = append(errs, setting(socket.flag, socket.path, err))
	}
	errs = append(errs, c.checkPodsFrom(), setting("proc-root", c.ProcRoot, absolute(c.ProcRoot)))
	if c.CRISocket != "" {
		errs = append(errs, setting("cri-socket", c.CRISocket, absolute(c.CRISocket)))
	}
	if c.HTTPAddr != "" {
		errs = append(errs, setting("http-addr", c.HTTPAddr, hostPort(c.HTTPAddr)))
	}
	return errors.Join(errs...)
}

func absolute(path string) error {
	if !filepath.IsAbs(path) {
		return errors.New("must be an absolute path")
	}
	return nil
}

func hostPort(addr string) error {
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return err
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return fmt.Errorf("port %q must be a number up to 65535", port)
	}
	return nil
}

func (c Config) checkPodsFrom() error {
	dir, ofManifests := c.manifestDir()
	switch {
	case c.PodsFrom == "":
		return errors.New("--pods-from is required: say where pods are described, kubernetes or manifests=DIR")
	case !ofManifests && c.PodsFrom != podsFromKubernetes:
		return setting("pods-from", c.PodsFrom, errors.New("must be kubernetes or manifests=DIR"))
	case ofManifests && !filepath.IsAbs(dir):
		return setting("pods-from", c.PodsFrom, errors.New("DIR must be an absolute path"))
	case c.Kubeconfig == "":
		return nil
	case ofManifests:
		return setting("kubeconfig", c.Kubeconfig, errors.New("is for --pods-from kubernetes"))
	}
	return setting("kubeconfig", c.Kubeconfig, absolute(c.Kubeconfig))
}

// manifestDir is the directory that PodsFrom names, if it is one.
func (c Config) manifestDir() (string, bool) {
	kind, dir, ok := strings.Cut(c.PodsFrom, "=")
	return dir, ok && kind == podsFromManifests
}

func (c Config) checkChoices() error {
	return errors.Join(
		oneOf("redirection", c.Redirection, backend.Auto, backend.NFTables, backend.IPTables),
		oneOf("ipv6-uncaptured", c.IPv6Uncaptured, string(redirection.UncapturedDrop), string(redirection.UncapturedAllow)),
		oneOf("probe-scope", c.ProbeScope, string(redirection.ProbeScopePod), string(redirection.ProbeScopeDeclared)),
		oneOf("on-repair", c.OnRepair, string(iptables.RepairDrop), string(iptables.RepairAllow)),
		oneOf("existing-connections", c.ExistingConnections, string(enroll.KeepConnections), string(enroll.ResetConnections)),
		oneOf("ca", c.CA, CABuiltin),
		oneOf("cert-holder", c.CertHolder, CertHolderAgent),
		oneOf("log-level", c.LogLevel, "debug", "info", "warn", "error"),
		oneOf("log-format", c.LogFormat, LogText, LogJSON),
	)
}

func oneOf(flag, value string, supported ...string) error {
	if slices.Contains(supported, value) {
		return nil
	}
	return fmt.Errorf("--%s %q is not supported; supported: %s", flag, value, strings.Join(supported, ", "))
}

// checkRedirection leaves out what checkChoices and checkProbeSources report.
func (c Config) checkRedirection() error {
	var errs []error
	for _, name := range c.AllowedPodOptions {
		errs = append(errs, oneOf("allowed-pod-options", name, workload.AllowableOptions()...))
	}
	if c.AuditInterval < minAuditInterval || c.AuditInterval > maxAuditInterval {
		errs = append(errs, setting("audit-interval", c.AuditInterval, fmt.Errorf("must be %s to %s", minAuditInterval, maxAuditInterval)))
	}
	return errors.Join(errs...)
}

// Level returns the log level that LogLevel names, or info.
func (c Config) Level() slog.Level {
	var level slog.Level
	if err := level.UnmarshalText([]byte(c.LogLevel)); err != nil {
		return slog.LevelInfo // Validate reports it
	}
	return level
}

func (c Config) checkCertificates() error {
	var errs []error
	switch {
	case c.CertTTL < certfetch.MinTTL:
		errs = append(errs, setting("cert-ttl", c.CertTTL, fmt.Errorf("must be at least %s", certfetch.MinTTL)))
	case c.CertTTL > ca.MaxLeafTTL:
		errs = append(errs, setting("cert-ttl", c.CertTTL, fmt.Errorf("the built-in CA grants at most %s", ca.MaxLeafTTL)))
	}
	if c.CertWorkers < 1 || c.CertWorkers > certfetch.MaxWorkers {
		errs = append(errs, setting("cert-workers", c.CertWorkers, fmt.Errorf("must be 1 to %d", certfetch.MaxWorkers)))
	}
	if c.CertLinger < 0 || c.CertLinger > certfetch.MaxLinger {
		errs = append(errs, setting("cert-linger", c.CertLinger, fmt.Errorf("must be 0s to %s", certfetch.MaxLinger)))
	}
	return errors.Join(errs...)
}

// checkTimeouts sees that who waits for somebody waits longer than that one
// does: otherwise the inner error, which says what was missing, is never seen.
func (c Config) checkTimeouts() error {
	var errs []error
	for _, wait := range []struct {
		flag    string
		value   time.Duration
		minimum time.Duration
	}{
		{"plugin-timeout", c.PluginTimeout, time.Millisecond},
		{"add-timeout", c.AddTimeout, time.Millisecond},
		{"lookup-timeout", c.LookupTimeout, time.Millisecond},
		{"proxy-timeout", c.ProxyTimeout, time.Millisecond},
		{"cert-wait", c.CertWait, 0},
		{"del-proxy-wait", c.DelProxyWait, time.Millisecond},
	} {
		if wait.value < wait.minimum {
			errs = append(errs, setting(wait.flag, wait.value, fmt.Errorf("must be at least %s", wait.minimum)))
		}
	}
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	if c.AddTimeout >= c.PluginTimeout {
		errs = append(errs, fmt.Errorf("--add-timeout %s must be less than --plugin-timeout %s, "+
			"or the plugin gives up before it is told why", c.AddTimeout, c.PluginTimeout))
	}
	if c.LookupTimeout+c.ProxyTimeout+c.CertWait >= c.AddTimeout {
		errs = append(errs, fmt.Errorf("--lookup-timeout %s, --proxy-timeout %s and --cert-wait %s, which an ADD may wait one after the other, "+
			"must add up to less than --add-timeout %s", c.LookupTimeout, c.ProxyTimeout, c.CertWait, c.AddTimeout))
	}
	if c.DelProxyWait >= pluginDelTimeout {
		errs = append(errs, setting("del-proxy-wait", c.DelProxyWait,
			fmt.Errorf("must be less than %s, when the plugin gives a DEL up", pluginDelTimeout)))
	}
	return errors.Join(errs...)
}

// checkPods checks what the policy is made of, part by part, so that each error
// names where the part is from.
func (c Config) checkPods() error {
	var together error
	if len(c.OwnPods) > 0 && c.AgentNamespace == "" {
		together = errors.New("--own-pods needs --agent-namespace, in which the patterns hold")
	}
	_, selectorsErr := c.selectors()
	return errors.Join(
		named("exclude-namespaces", workload.Policy{ExcludeNamespaces: c.ExcludeNamespaces}.Validate()),
		named("agent-namespace", workload.Policy{AgentNamespace: c.AgentNamespace}.Validate()),
		named("own-pods", workload.Policy{OwnPods: c.OwnPods, AgentNamespace: podevent.DefaultAgentNamespace}.Validate()),
		together,
		selectorsErr,
	)
}

// selectors are those of the key of that name, which has no flag.
func (c Config) selectors() ([]workload.Selector, error) {
	selectors, err := workload.ParseSelectors(c.Selectors)
	if err != nil {
		return nil, fmt.Errorf("key selectors: %w", err)
	}
	if len(selectors) == 0 {
		return nil, errors.New("key selectors: none is given, so that no pod would ever be in the mesh")
	}
	return selectors, nil
}

// policy says which pods belong in the mesh.
func (c Config) policy() (workload.Policy, error) {
	selectors, err := c.selectors()
	if err != nil {
		return workload.Policy{}, err
	}
	p := workload.Policy{
		ExcludeNamespaces: c.ExcludeNamespaces,
		OwnPods:           c.OwnPods,
		AgentNamespace:    c.AgentNamespace,
		Selectors:         selectors,
	}
	return p, p.Validate()
}

// checkProbeSources checks each by itself, so that the error names its flag. The
// other options cannot be wrong.
func (c Config) checkProbeSources() error {
	only4, only6 := redirection.DefaultOptions(), redirection.DefaultOptions()
	only4.ProbeSourceIPv4 = c.ProbeSourceIPv4
	only6.ProbeSourceIPv6, only6.IPv6 = c.ProbeSourceIPv6, c.IPv6
	return errors.Join(named("probe-source-ipv4", only4.Validate()), named("probe-source-ipv6", only6.Validate()))
}

// redirectionOptions are those of a pod that sets none itself.
func (c Config) redirectionOptions() redirection.Options {
	opts := redirection.DefaultOptions()
	opts.DNSCapture = c.DNSCapture
	opts.IPv6 = c.IPv6
	opts.IPv6Uncaptured = redirection.Uncaptured(c.IPv6Uncaptured)
	opts.ProbeSourceIPv4 = c.ProbeSourceIPv4
	opts.ProbeSourceIPv6 = c.ProbeSourceIPv6
	return opts
}

// hostOptions are those of the host's rule for probes.
func (c Config) hostOptions() redirection.HostOptions {
	return redirection.HostOptions{
		ProbeSourceIPv4: c.ProbeSourceIPv4, ProbeSourceIPv6: c.ProbeSourceIPv6,
		IPv6: c.IPv6, Scope: redirection.ProbeScope(c.ProbeScope),
	}
}
